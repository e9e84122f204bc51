"""Which byte of the state goes where in a snapshot; computed once, reused as long as the structure stays the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memckpt.errors import StateError
from memckpt.format.dtypes import PACKED_F4, SAFETENSORS
from memckpt.format.header import (
    MAX_HEADER_NBYTES,
    PAGE,
    Entry,
    View,
    encode_static,
    encode_variable,
    parse,
    structure_hash,
)
from memckpt.format.overlap import Seen, look, shared
from memckpt.format.strided import Copy, contiguous_stride, raw
from memckpt.state.leaves import Collected

Words = npt.NDArray[np.uint64]
_LEAST_DIVIDED_NBYTES = 1024  # for each rank; smaller tensors are not worth their place in a header
_GRAIN_NBYTES = 64


class Mismatch(NamedTuple):
    """One difference between a snapshot and the live state."""

    key: str
    saved: str
    wanted: str


@dataclass(slots=True)
class Pieces:
    """The live memory behind every entry, in the order of the file.

    Attributes
    ----------
    sources, nbytes, offsets : uint64[n]
        Address, size, and first byte in the file.
    lazy : bool[n]
        May be copied until its optimizer steps; else it must be copied at once.
    owners : int32[n]
        Index into `optimizers` of that optimizer, -1 where not lazy.
    optimizers : list
        The optimizers that own lazy pieces.
    staged : list of Copy
        Views that are no one piece of memory: `refresh` copies them into the memory that `sources` points to.
    keys : list of str
        Key of each piece's entry.
    address_methods, size_methods, addresses, sizes
        Bound ``data_ptr`` and ``numel`` of every tensor, and what they must still return: for `_native.first_change`.
    keep : object
        Owner of all memory pointed to.
    """

    sources: Words
    nbytes: Words
    offsets: Words
    lazy: npt.NDArray[np.bool_]
    owners: npt.NDArray[np.int32]
    optimizers: list[Any]
    staged: list[Copy]
    keys: list[str]
    address_methods: list[Any]
    size_methods: list[Any]
    addresses: Words
    sizes: Words
    keep: Any
    geometry: list[tuple[Any, Any, Any]] = field(default_factory=list)
    _turn: int = 0

    def refresh(self) -> None:
        """Copy every staged view anew; before the eager copy. Local."""
        for copy in self.staged:
            copy.run()

    def reshaped(self, count: int = 256) -> bool:
        """Whether, among the next `count` tensors in turn, one has another shape, stride or dtype. Local.

        A second look: assigning to ``.data`` nearly always changes address or size, which `first_change` sees at once.
        """
        tensors: list[torch.Tensor] = self.keep[0]
        begin = self._turn if self._turn < len(tensors) else 0
        self._turn = begin + count
        now = [(t.shape, t.stride(), t.dtype) for t in tensors[begin : begin + count]]
        return now != self.geometry[begin : begin + count]


class Layout:
    """Entries of a snapshot, its header, and the bytes' places. Made by `build` or `parse`.

    Attributes
    ----------
    run : str
        Name of the run.
    shard, world : int
        Logical rank and number of ranks.
    entries : tuple of Entry
        In the order of the file.
    classes : dict of str to str
        Structure of tensor subclasses.
    hash : str
        Digest of the structure alone: neither values nor addresses nor run, shard and world.
    data_offset, file_nbytes : int
        First byte of the data area, and size of the whole file.
    whole : str
        Where tensors that ranks have in common are divided between them: the hash of the structure as it is undivided,
        the same on all these ranks; else empty.
    plain : bytes
        Plain values (`parse`: of the file; `build`: as collected).
    step : int
        Step of the file (`parse` only; else -1).
    """

    def __init__(
        self,
        *,
        run: str,
        shard: int,
        world: int,
        entries: tuple[Entry, ...],
        classes: dict[str, str],
        hash: str,
        data_offset: int,
        plain: bytes,
        step: int = -1,
        whole: str = "",
    ) -> None:
        self.run = run
        self.shard = shard
        self.world = world
        self.entries = entries
        self.classes = classes
        self.hash = hash
        self.data_offset = data_offset
        self.file_nbytes = data_offset + sum(e.nbytes for e in entries)
        self.plain = plain
        self.step = step
        self.whole = whole
        self._static = b""
        self._pieces: Pieces | None = None
        self._token: object = None

    @classmethod
    def build(
        cls,
        collected: Collected,
        *,
        run: str,
        shard: int,
        world: int,
        plain_nbytes: int | None = None,
        division: Division | None = None,
    ) -> Layout:
        """The layout of what was collected. Local.

        Parameters
        ----------
        collected : Collected
            From `State.collect`.
        run, shard, world
            Identity, written into the header.
        plain_nbytes : int, optional
            Bytes of plain values for which to leave room; default is a quarter more than there are now.
        division : Division, optional
            Which tensors this rank has in common with others, that save the other parts of them; ignored where the
            structure is not that which they agreed on.

        Raises
        ------
        StateError
            The header would be longer than the safetensors library reads (100 MB).
        """
        drafts = _drafts(collected)
        entries = tuple(d.entry for d in drafts)
        digest = structure_hash(entries, collected.classes)
        whole = ""
        if division is not None and division.structure == digest:
            whole = digest
            entries = tuple(division.cut(i, e) for i, e in enumerate(entries))
            digest = structure_hash(entries, collected.classes)
        static = encode_static(entries, collected.classes, digest, run, shard, world, whole)
        variable = len(encode_variable(collected.plain, 1 << 62))
        room = variable + variable // 4 + 256 if plain_nbytes is None else max(variable, plain_nbytes)
        data_offset = -(-(8 + len(static) + room) // PAGE) * PAGE
        if data_offset - 8 > MAX_HEADER_NBYTES:
            raise StateError(
                f"names and plain values need {data_offset} bytes, more than the {MAX_HEADER_NBYTES} of a safetensors "
                "header; save large plain data as tensors or NumPy arrays"
            )
        placed = []
        at = data_offset
        for e in entries:
            placed.append(msgspec.structs.replace(e, offset=at))
            at += e.nbytes
        self = cls(
            run=run,
            shard=shard,
            world=world,
            entries=tuple(placed),
            classes=dict(collected.classes),
            hash=digest,
            data_offset=data_offset,
            plain=collected.plain,
            whole=whole,
        )
        self._static = static
        self._pieces = _pieces(collected, drafts, self.entries)
        self._token = collected.token
        return self

    @classmethod
    def parse(cls, buffer: Any, *, file_nbytes: int | None = None) -> Layout:
        """The layout of a file. Local.

        Parameters
        ----------
        buffer : buffer
            The file, or at least its header.
        file_nbytes : int, optional
            Size that the file must have.

        Raises
        ------
        CorruptSnapshot, ProtocolError
            The bytes are no header of a snapshot, or one of another format.
        """
        with memoryview(buffer) as view, view.cast("B") as octets:
            found = parse(octets, file_nbytes)
        return cls(
            run=found.run,
            shard=found.shard,
            world=found.world,
            entries=found.entries,
            classes=found.classes,
            hash=found.layout,
            data_offset=found.data_offset,
            plain=found.plain,
            step=found.step,
            whole=found.whole,
        )

    def header(self, plain: bytes, step: int) -> bytes:
        """The first `data_offset` bytes of a file. Local.

        Raises
        ------
        StateError
            `plain` outgrew the room left for it: build a new layout.
        """
        _, tail = self.header_tail(plain, step)
        return b"".join(((self.data_offset - 8).to_bytes(8, "little"), self._static, tail))

    def header_tail(self, plain: bytes, step: int) -> tuple[int, bytes]:
        """Where the part of the header begins that varies from save to save, and its bytes up to the data. Local.

        The bytes before are the same in every file of this layout, run and shard. Raises like `header`.
        """
        offset = 8 + len(self._static)
        tail = encode_variable(plain, step)
        room = self.data_offset - offset
        if len(tail) > room:
            raise StateError(f"plain values need {len(tail)} bytes in the header, room is for {room}")
        return offset, tail.ljust(room)

    def fits(self, plain: bytes) -> bool:
        """Whether these plain values fit into the header. Local."""
        room = self.data_offset - 8 - len(self._static)
        return 2 * len(plain) + 64 <= room or len(encode_variable(plain, 1 << 62)) <= room

    def pieces(self, collected: Collected) -> Pieces:
        """The live memory of what this layout was built from. Local.

        Raises
        ------
        StateError
            `collected` has another structure, or other tensors, than what this layout was built from.
        """
        if self._pieces is None or collected.token is not self._token:
            raise StateError("the state's tensors are not those that this layout was built from; build it again")
        return self._pieces

    @cached_property
    def names(self) -> dict[str, tuple[Entry, View]]:
        """Every named tensor: its entry, and where in the entry it lies."""
        return {view.key: (entry, view) for entry in self.entries for view in entry.names()}

    def check(self, wanted: Layout) -> list[Mismatch]:
        """Strict comparison by name; every key that differs, in the order of its first sight. Local."""
        rows = []
        for key in [*self.names, *(k for k in wanted.names if k not in self.names)]:
            saved, want = self.describe(key), wanted.describe(key)
            if saved != want:
                rows.append(Mismatch(key, saved, want))
        for key in sorted({*self.classes, *wanted.classes}):
            saved, want = self.classes.get(key, "-"), wanted.classes.get(key, "-")
            if saved != want:
                rows.append(Mismatch(key, saved, want))
        return rows

    def describe(self, key: str) -> str:
        """Shape, dtype and place of a name, as mismatches show them; ``-`` if there is none."""
        if key not in self.names:
            return "-"
        entry, view = self.names[key]
        return describe(view.dtype, view.shape, entry.global_shape, entry.offsets, view.conj, view.neg)


@dataclass(frozen=True)
class Division:
    """Which entries some ranks have in common, and this rank's place among them.

    Attributes
    ----------
    structure : str
        Hash of the undivided layout that this is about.
    common : tuple of bool
        By entry.
    member, members : int
        This rank's number among those ranks, and how many they are.
    """

    structure: str
    common: tuple[bool, ...]
    member: int
    members: int

    def cut(self, index: int, entry: Entry) -> Entry:
        """This rank's part of an entry. Whole what is not in common, is small, or is a span of views. Local."""
        if not self.common[index] or entry.views or entry.nbytes < _LEAST_DIVIDED_NBYTES * self.members:
            return entry
        begin, end = self._bound(entry.nbytes, self.member), self._bound(entry.nbytes, self.member + 1)
        nbytes = end - begin
        return msgspec.structs.replace(
            entry, st_dtype="U8", stored_shape=(nbytes,), nbytes=nbytes, part=(begin, entry.nbytes)
        )

    def _bound(self, nbytes: int, member: int) -> int:
        at = nbytes * member // self.members
        return nbytes if member == self.members else at // _GRAIN_NBYTES * _GRAIN_NBYTES


def describe(
    dtype: str,
    shape: tuple[int, ...],
    global_shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    conj: bool = False,
    neg: bool = False,
) -> str:
    """A tensor in words: ``float32[4, 4]``."""
    text = f"{dtype}{list(shape)}"
    if global_shape is not None and offsets is not None:
        text += f" at {list(offsets)} of {list(global_shape)}"
    return text + (" conj" if conj else "") + (" neg" if neg else "")


@dataclass(slots=True)
class _Draft:
    """An entry to be, and where its bytes are."""

    entry: Entry
    align: int
    address: int
    members: list[Seen]
    copy: Copy | None = None


def _drafts(collected: Collected) -> list[_Draft]:
    seen = [
        look(i, k, t, collected.places.get(i))
        for i, (k, t) in enumerate(zip(collected.keys, collected.tensors, strict=False))
    ]
    drafts = [_span(group) if overlapping else _single(group) for group, overlapping in shared(seen)]
    drafts.sort(key=lambda d: (-d.align, d.members[0].index))
    return drafts


def _single(same: list[Seen]) -> _Draft:
    s = same[0]
    memory = s.memory
    stride = s.stride
    address = memory.address
    copy = None
    if not memory.dense:
        # Not one piece of memory: its elements are gathered, as opaque integers, into memory of our own.
        sizes = tuple(n if st else 1 for n, st in zip(s.shape, s.stride, strict=False))
        rows = contiguous_stride(sizes)
        stride = tuple(r if st else 0 for r, st in zip(rows, s.stride, strict=False))
        staging = torch.empty(memory.nbytes, dtype=torch.uint8)
        address = staging.data_ptr()
        source = raw(memory.address, sizes, s.stride, s.itemsize)
        copy = Copy(raw(address, sizes, rows, s.itemsize), source, (staging, s.tensor))
    stored = memory.stored
    st_dtype = SAFETENSORS.get(s.dtype)
    if s.dtype == PACKED_F4 and stored:
        st_dtype = "F4"
        stored = (*stored[:-1], 2 * stored[-1])
    elif st_dtype is None:
        st_dtype = "U8"
        stored = (memory.nbytes,)
    entry = Entry(
        s.key,
        s.dtype,
        st_dtype,
        s.shape,
        stride,
        stored,
        memory.nbytes,
        0,
        s.place.global_shape if s.place else None,
        s.place.offsets if s.place else None,
        tuple(t.key for t in same[1:]),
        (),
        s.conj,
        s.neg,
    )
    return _Draft(entry, s.itemsize, address, same, copy)


def _span(group: list[Seen]) -> _Draft:
    low = min(s.memory.address for s in group)
    nbytes = max(s.memory.address + s.memory.extent for s in group) - low
    for s in group:
        if s.place is not None:
            raise StateError("a chunk of a DTensor that overlaps another tensor's memory cannot be saved", path=s.key)
    views = tuple(View(s.key, s.dtype, s.shape, s.stride, s.memory.address - low, s.conj, s.neg) for s in group)
    key = "~span/" + group[0].key
    entry = Entry(key, "uint8", "U8", (nbytes,), (1,), (nbytes,), nbytes, views=views)
    # What follows must stay aligned, whatever the length of the span.
    align = min(nbytes & -nbytes, max(s.itemsize for s in group))
    return _Draft(entry, align, low, group)


def _pieces(collected: Collected, drafts: list[_Draft], entries: tuple[Entry, ...]) -> Pieces:
    optimizers: list[Any] = []
    owners = np.full(len(drafts), -1, np.int32)
    for i, d in enumerate(drafts):
        owner = collected.lazy[d.members[0].index]
        if owner is None or d.copy is not None or any(collected.lazy[m.index] is not owner for m in d.members):
            continue
        for at, known in enumerate(optimizers):
            if known is owner:
                owners[i] = at
                break
        else:
            owners[i] = len(optimizers)
            optimizers.append(owner)
    tensors = collected.tensors
    return Pieces(
        sources=np.fromiter(
            (d.address + (e.part[0] if e.part else 0) for d, e in zip(drafts, entries, strict=True)),
            np.uint64,
            len(drafts),
        ),
        nbytes=np.fromiter((e.nbytes for e in entries), np.uint64, len(entries)),
        offsets=np.fromiter((e.offset for e in entries), np.uint64, len(entries)),
        lazy=owners >= 0,
        owners=owners,
        optimizers=optimizers,
        staged=[d.copy for d in drafts if d.copy is not None],
        keys=[e.key for e in entries],
        address_methods=[t.data_ptr for t in tensors],
        size_methods=[t.numel for t in tensors],
        addresses=np.fromiter((t.data_ptr() for t in tensors), np.uint64, len(tensors)),
        sizes=np.fromiter((t.numel() for t in tensors), np.uint64, len(tensors)),
        keep=(tensors, [d.copy for d in drafts]),
        geometry=[(t.shape, t.stride(), t.dtype) for t in tensors],
    )


__all__ = ["Division", "Entry", "Layout", "Mismatch", "Pieces", "View", "describe"]
