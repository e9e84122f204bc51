"""The first bytes of a snapshot: a safetensors header that also says what the format has no words for.

Written so that what varies from save to save (step, plain values) comes last: the rest is made once for a layout.
``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from memckpt.errors import CorruptSnapshot, MemckptError, ProtocolError
from memckpt.format.dtypes import ITEMSIZE, LOGICAL, PACKED_F4, ST_ITEMSIZE
from memckpt.format.strided import Memory, contiguous_stride, memory_of

FORMAT = 1
PAGE = 4096
#: The safetensors library reads no longer header.
MAX_HEADER_NBYTES = 100_000_000
MAX_DIMS = 64
_MAX = (1 << 63) - 1

Shape = tuple[int, ...]


class View(msgspec.Struct, frozen=True, array_like=True):
    """A named tensor within an entry: `offset` in bytes from the entry's first, `stride` in elements."""

    key: str
    dtype: str
    shape: Shape
    stride: Shape
    offset: int = 0
    conj: bool = False
    neg: bool = False


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One piece of bytes in the data area, and the tensors that lie in it.

    Attributes
    ----------
    key : str
        Name in the safetensors header.
    dtype, st_dtype : str
        Logical dtype (torch's name) and the one that the safetensors header says.
    shape, stride : tuple of int
        Logical shape of the chunk, and strides in elements by which it lies in the piece.
    stored_shape : tuple of int
        Shape in the safetensors header.
    nbytes, offset : int
        Size, and first byte in the file.
    global_shape, offsets : tuple of int or None
        Place of the chunk in its global tensor, if it is one.
    aliases : tuple of str
        Other names of the very same tensor.
    views : tuple of View
        The tensors in a span of shared storage (then `dtype` is ``uint8`` and `key` names no tensor).
    conj, neg : bool
        The bytes are to be read with that bit of torch set.
    part : tuple of (int, int), or None
        Only `nbytes` bytes of the tensor are here, which ranks have in common: the first of them, and the size of the
        whole. Shape and strides are those of the whole.
    """

    key: str
    dtype: str
    st_dtype: str
    shape: Shape
    stride: Shape
    stored_shape: Shape
    nbytes: int
    offset: int = 0
    global_shape: Shape | None = None
    offsets: Shape | None = None
    aliases: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    conj: bool = False
    neg: bool = False
    part: tuple[int, int] | None = None

    def names(self) -> Iterator[View]:
        """Every named tensor in this entry."""
        if self.views:
            yield from self.views
            return
        for key in (self.key, *self.aliases):
            yield View(key, self.dtype, self.shape, self.stride, 0, self.conj, self.neg)


class _Info(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[int, int]


class _Note(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the format cannot say of an entry; only what differs from the obvious is written."""

    dtype: str | None = None
    shape: Shape | None = None
    stride: Shape | None = None
    global_shape: Shape | None = None
    offsets: Shape | None = None
    aliases: tuple[str, ...] = ()
    views: tuple[View, ...] = ()
    conj: bool = False
    neg: bool = False
    part: tuple[int, int] | None = None


class _Meta(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    run: str
    shard: int
    world: int
    layout: str
    classes: dict[str, str] = {}
    entries: dict[str, _Note] = {}
    whole: str | msgspec.UnsetType = msgspec.UNSET


class _Format(msgspec.Struct):
    format: int


class Parsed(msgspec.Struct):
    """What a header says; see `memckpt.format.layout.Layout`."""

    run: str
    shard: int
    world: int
    layout: str
    classes: dict[str, str]
    entries: tuple[Entry, ...]
    step: int
    plain: bytes
    data_offset: int
    file_nbytes: int
    whole: str = ""


def structure_hash(entries: tuple[Entry, ...], classes: dict[str, str]) -> str:
    """Digest of keys, shapes, dtypes, strides, places, aliases and parts: 32 hex digits. Local."""
    plain = [msgspec.structs.replace(e, offset=0) if e.offset else e for e in entries]
    bare = [msgspec.structs.astuple(e)[: None if e.part else -1] for e in plain]
    text = msgspec.json.encode([bare, sorted(classes.items())])
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def encode_static(
    entries: tuple[Entry, ...],
    classes: dict[str, str],
    layout: str,
    run: str,
    shard: int,
    world: int,
    whole: str = "",
) -> bytes:
    """The part of the header's JSON that is the same for every save of a layout. Local."""
    infos: dict[str, Any] = {}
    notes: dict[str, _Note] = {}
    at = 0
    for e in entries:
        infos[e.key] = _Info(e.st_dtype, e.stored_shape, (at, at + e.nbytes))
        at += e.nbytes
        note = _note(e)
        if note is not None:
            notes[e.key] = note
    meta = msgspec.json.encode(
        _Meta(FORMAT, run, shard, world, layout, classes, notes, whole or msgspec.UNSET)
    ).decode()
    tensors = msgspec.json.encode(infos)[:-1]
    fixed = msgspec.json.encode({"format": "pt", "memckpt": meta})[:-1]
    return b'%b%b"__metadata__":%b' % (tensors, b"," if infos else b"", fixed)


def encode_variable(plain: bytes, step: int) -> bytes:
    """The rest of the JSON: step and plain values. Local."""
    return b',"memckpt.step":"%d","memckpt.plain":%b}}' % (step, msgspec.json.encode(plain.decode()))


def _note(e: Entry) -> _Note | None:
    dtype = None if LOGICAL.get(e.st_dtype) == e.dtype else e.dtype
    shape = None if e.stored_shape == e.shape else e.shape
    stride = None if e.stride == contiguous_stride(e.shape) else e.stride
    plain = dtype is None and shape is None and stride is None and e.global_shape is None
    if plain and not (e.aliases or e.views or e.conj or e.neg or e.part):
        return None
    return _Note(dtype, shape, stride, e.global_shape, e.offsets, e.aliases, e.views, e.conj, e.neg, e.part)


def parse(buffer: memoryview, file_nbytes: int | None = None) -> Parsed:
    """Read and check a header. Everything in it is taken as hostile. Local.

    Parameters
    ----------
    buffer : memoryview
        The file, or at least its header, as bytes.
    file_nbytes : int, optional
        Size that the file must have.

    Raises
    ------
    CorruptSnapshot
        The bytes are no header of a snapshot.
    ProtocolError
        They are one of another format version.
    """
    try:
        return _parse(buffer, file_nbytes)
    except MemckptError:
        raise
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptSnapshot(f"header: {error}") from error


def _parse(buffer: memoryview, file_nbytes: int | None) -> Parsed:
    if len(buffer) < 8:
        raise CorruptSnapshot("header: shorter than 8 bytes")
    length = int.from_bytes(buffer[:8], "little")
    if not 2 <= length <= MAX_HEADER_NBYTES or 8 + length > len(buffer):
        raise CorruptSnapshot(f"header: {length} bytes long, in {len(buffer)}")
    data_offset = 8 + length
    if data_offset % PAGE:
        raise CorruptSnapshot(f"header: the data begins at byte {data_offset}, not at a multiple of {PAGE}")
    text = bytes(buffer[8:data_offset])  # a copy: nobody changes it while it is checked, and no view of the file stays
    raws = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if "__metadata__" not in raws:
        raise CorruptSnapshot("header: no __metadata__")
    metadata = msgspec.json.decode(raws.pop("__metadata__"), type=dict[str, str])
    if not {"memckpt", "memckpt.step", "memckpt.plain"} <= {*metadata}:
        raise CorruptSnapshot("header: a safetensors file, but not one of memckpt")
    version = msgspec.json.decode(metadata["memckpt"], type=_Format).format
    if version != FORMAT:
        raise ProtocolError(f"snapshot of format {version}; this memckpt reads {FORMAT}")
    meta = msgspec.json.decode(metadata["memckpt"], type=_Meta)
    if not 0 <= meta.shard < meta.world:
        raise CorruptSnapshot(f"header: shard {meta.shard} of {meta.world}")
    infos = [(key, msgspec.json.decode(value, type=_Info)) for key, value in raws.items()]
    entries = _entries(infos, meta, data_offset)
    end = data_offset + sum(e.nbytes for e in entries)
    if file_nbytes is not None and end != file_nbytes:
        raise CorruptSnapshot(f"header: describes {end} bytes, the file has {file_nbytes}")
    if structure_hash(entries, meta.classes) != meta.layout:
        raise CorruptSnapshot("header: the layout hash does not belong to these entries")
    step = metadata["memckpt.step"]
    if not (step.isascii() and step.isdigit() and len(step) <= 19):
        raise CorruptSnapshot("header: the step is no number")
    return Parsed(
        run=meta.run,
        shard=meta.shard,
        world=meta.world,
        layout=meta.layout,
        classes=meta.classes,
        entries=entries,
        step=int(step),
        plain=metadata["memckpt.plain"].encode(),
        data_offset=data_offset,
        file_nbytes=end,
        whole="" if meta.whole is msgspec.UNSET else meta.whole,
    )


def _entries(infos: list[tuple[str, _Info]], meta: _Meta, data_offset: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    names: set[str] = set()
    at = 0
    for key, info in infos:
        begin, end = info.data_offsets
        if begin != at or end < begin or end > _MAX - data_offset:
            raise CorruptSnapshot("header: hole or overlap in the data", path=key)
        note = meta.entries.get(key) or _Note()
        dtype = note.dtype or (PACKED_F4 if info.dtype == "F4" else LOGICAL.get(info.dtype, ""))
        shape = info.shape if note.shape is None else note.shape
        stride = contiguous_stride(shape) if note.stride is None else note.stride
        entry = Entry(
            key,
            dtype,
            info.dtype,
            shape,
            stride,
            info.shape,
            end - begin,
            data_offset + begin,
            note.global_shape,
            note.offsets,
            note.aliases,
            note.views,
            note.conj,
            note.neg,
            note.part,
        )
        _check_entry(entry)
        for view in entry.names():
            if view.key in names:
                raise CorruptSnapshot("header: a name twice", path=view.key)
            names.add(view.key)
        entries.append(entry)
        at = end
    if unknown := meta.entries.keys() - {key for key, _ in infos}:
        raise CorruptSnapshot("header: a note on no entry", path=min(unknown))
    return tuple(entries)


def _check_entry(e: Entry) -> None:
    def fail(why: str) -> CorruptSnapshot:
        return CorruptSnapshot(f"header: {why}", path=e.key)

    if stored_nbytes(e.st_dtype, e.stored_shape) != e.nbytes:
        raise fail("size, shape and dtype do not belong together")
    if e.views and (e.aliases or e.st_dtype != "U8" or e.dtype != "uint8" or e.global_shape is not None):
        raise fail("a span of the wrong form")
    if (e.global_shape is None) != (e.offsets is None):
        raise fail("a chunk of the wrong form")
    if e.global_shape is not None and e.offsets is not None and not _inside(e.shape, e.offsets, e.global_shape):
        raise fail("a chunk outside its tensor")
    if e.part is not None and (
        e.views or e.st_dtype != "U8" or not 0 <= e.part[0] <= e.part[0] + e.nbytes <= e.part[1]
    ):
        raise fail("a part of the wrong form")
    for v in e.names():
        itemsize = ITEMSIZE.get(v.dtype)
        if itemsize is None:
            raise fail(f"unknown dtype {v.dtype[:40]!r}")
        _check_shape(v.shape, e.key)
        if len(v.stride) != len(v.shape) or (v.stride and not 0 <= min(v.stride) <= max(v.stride) <= _MAX):
            raise fail("strides of the wrong form")
        memory = _memory(v, itemsize)
        if e.views:
            if not 0 <= v.offset <= v.offset + memory.extent <= e.nbytes:
                raise fail("a view outside its span")
        elif not memory.dense or memory.nbytes != (e.part[1] if e.part else e.nbytes):
            raise fail("size, shape, strides and dtype do not belong together")


def _inside(shape: Shape, offsets: Shape, whole: Shape) -> bool:
    if not len(whole) == len(offsets) == len(shape):
        return False
    return all(0 <= o <= o + n <= g <= _MAX for o, n, g in zip(offsets, shape, whole, strict=True))


def _memory(view: View, itemsize: int) -> Memory:
    if view.stride == contiguous_stride(view.shape):
        nbytes = math.prod(view.shape) * itemsize
        return Memory(0, nbytes, nbytes, True, view.shape)
    return memory_of(0, view.shape, view.stride, itemsize)


def _check_shape(shape: Shape, key: str) -> None:
    if len(shape) > MAX_DIMS or (shape and not 0 <= min(shape) <= max(shape) <= _MAX) or math.prod(shape) > _MAX:
        raise CorruptSnapshot("header: a shape out of bounds", path=key)


def stored_nbytes(st_dtype: str, shape: Shape) -> int:
    """Bytes of a safetensors entry, -1 if the dtype is unknown or the shape out of bounds. Local."""
    if len(shape) > MAX_DIMS or (shape and not 0 <= min(shape) <= max(shape) <= _MAX):
        return -1
    if st_dtype == "F4":
        return math.prod(shape) // 2 if shape and shape[-1] % 2 == 0 else -1
    return math.prod(shape) * ST_ITEMSIZE[st_dtype] if st_dtype in ST_ITEMSIZE else -1
