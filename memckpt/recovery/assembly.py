"""Puts one rank's snapshot together out of several shards. Pure, but for memory.

That is needed where another number of ranks saved them, and where ranks have divided what they have in common. A chunk
of a global tensor (that is what a DTensor's local part is) is made of the stored chunks that it overlaps. What
is no chunk belongs to each rank by itself, so it can be given to another number of ranks only where all that saved it
saved the same: then each new rank gets that. Generators of random numbers are the exception: a rank that there was
before goes on with its own, a new one keeps the one it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from memckpt import _native
from memckpt.errors import LayoutMismatch
from memckpt.format.dtypes import ITEMSIZE
from memckpt.format.header import Entry, View
from memckpt.format.layout import Layout
from memckpt.format.strided import contiguous_stride, raw
from memckpt.state.restore import objects_of
from memckpt.state.tree import escape

RNG = "rng"
"""The one object that may differ between ranks."""

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first element in the global tensor, and sizes
Chunk = Callable[[str, tuple[int, ...]], "tuple[tuple[int, ...], tuple[int, ...]] | None"]


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one shard's file."""

    shard: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class _Piece:
    """Bytes `begin` to `end` of a stored tensor lie in an entry of a shard."""

    begin: int
    end: int
    shard: int
    entry: Entry


@dataclass(frozen=True)
class _Stored:
    """One stored tensor, or chunk of one: in one entry, or in parts with those who have it in common (`whole`)."""

    whole: str
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True)
class _Box:
    """What of a stored chunk goes where in the assembled one; both strided, in elements of `itemsize` bytes."""

    stage: int
    itemsize: int
    sizes: tuple[int, ...]
    source: int
    source_stride: tuple[int, ...]
    target: int
    target_stride: tuple[int, ...]


@dataclass
class Assembly:
    """One rank's snapshot in the making: `put` every range, then `finish`.

    Attributes
    ----------
    layout : Layout
        Of the assembled file, whose data begins at byte 0: it has no header.
    ranges : list of Range
        What it is made of.
    file : uint8[n]
        Where it is put together.
    """

    layout: Layout
    ranges: list[Range] = field(default_factory=list)
    file: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    _targets: list[tuple[int, int]] = field(default_factory=list)  # stage, or -1 for the file, and first byte there
    _stages: list[npt.NDArray[np.uint8]] = field(default_factory=list)  # stored chunks of which boxes are cut
    _boxes: list[_Box] = field(default_factory=list)

    def put(self, index: int, data: memoryview) -> None:
        """Put the bytes of ``ranges[index]`` where they belong. Local."""
        if not len(self.file):
            self.file = np.empty(self.layout.file_nbytes, np.uint8)
        stage, at = self._targets[index]
        target = self.file if stage < 0 else self._stages[stage]
        target[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def finish(self) -> None:
        """Every range is there: cut what is no piece of memory. Local."""
        for box in self._boxes:
            source = raw(self._stages[box.stage].ctypes.data + box.source, box.sizes, box.source_stride, box.itemsize)
            target = raw(self.file.ctypes.data + box.target, box.sizes, box.target_stride, box.itemsize)
            np.copyto(target, source)
        self._stages, self._boxes = [], []

    def take(self, stored: _Stored, begin: int, nbytes: int, target: int, *, stage: int = -1) -> None:
        """Plan to get bytes of a stored tensor, from the parts that they lie in."""
        for piece in stored.pieces:
            low, high = max(begin, piece.begin), min(begin + nbytes, piece.end)
            if low < high:
                self.ranges.append(Range(piece.shard, piece.entry.offset + low - piece.begin, high - low))
                self._targets.append((stage, target + low - begin))

    def cut(self, stored: _Stored, nbytes: int, box: Callable[[int], _Box]) -> None:
        """Plan to get all of a stored tensor, and to cut a box of it."""
        self._stages.append(np.empty(nbytes, np.uint8))
        stage = len(self._stages) - 1
        self.take(stored, 0, nbytes, 0, stage=stage)
        self._boxes.append(box(stage))


def digests(layout: Layout, data: memoryview) -> list[int]:
    """CRC-32C of every entry that belongs to its rank alone, in the order of the file; 0 for the others. Local."""
    found = []
    for entry in layout.entries:
        crc = 0
        if entry.global_shape is None and entry.part is None:
            with data[entry.offset : entry.offset + entry.nbytes] as octets:
                crc = _native.crc32c(octets)
        found.append(crc)
    return found


def differences(
    layouts: Sequence[Layout], crcs: Sequence[Sequence[int]], *, ranks: int, leave: frozenset[str] = frozenset()
) -> list[tuple[str, str, str]]:
    """What differs between the ranks that saved, though it is no chunk of a global tensor; rows of a mismatch. Local.

    Parameters
    ----------
    layouts : sequence of Layout
        Of every shard.
    crcs : sequence of sequence of int
        What `digests` says of each.
    ranks : int
        Number of ranks that want it.
    leave : frozenset of str
        Names of objects that are not restored.
    """
    passed = {RNG, *leave}
    keys = {escape(name) for name in passed}
    first: dict[str, object] = {}
    differing: dict[str, None] = {}
    for shard, (layout, sums) in enumerate(zip(layouts, crcs, strict=True)):
        said: dict[str, object] = {
            name: msgspec.json.encode(o) for name, o in objects_of(layout.plain).items() if name not in passed
        }
        for entry, crc in zip(layout.entries, sums, strict=True):
            for view in entry.names():
                if view.key.partition("/")[0] not in keys:
                    said[view.key] = _claim(layout, entry, view, crc)
        if not shard:
            first = said
        differing |= {key: None for key in first.keys() | said.keys() if first.get(key) != said.get(key)}
    return [
        (key, f"differs between the {len(layouts)} ranks that saved it", f"the same for {ranks}")
        for key in sorted(differing)
    ]


def _claim(layout: Layout, entry: Entry, view: View, crc: int) -> object:
    """What has to be the same on all ranks about one tensor."""
    if entry.global_shape is not None:
        return "chunk", view.dtype, entry.global_shape
    return (view, layout.whole) if entry.part is not None else (view, crc)


def assemble(layouts: Sequence[Layout], rank: int, world: int, chunk: Chunk) -> Assembly:
    """Plan the snapshot of `rank` of `world` out of all shards. Local.

    Parameters
    ----------
    layouts : sequence of Layout
        Of every shard, in order; where they are not `world`, without `differences`.
    chunk : callable
        Shape and offsets of the chunk of a global tensor that this rank wants, by key and global shape, or None.

    Raises
    ------
    LayoutMismatch
        The shards do not cover a tensor that is wanted.
    """
    own = rank % len(layouts)
    mine = layouts[own]
    stored = _stored(layouts)
    wanted: list[tuple[Entry, Entry]] = []
    at = 0
    for entry in mine.entries:
        made = entry if entry.part is None else msgspec.structs.replace(entry, part=None, nbytes=entry.part[1])
        if entry.global_shape is not None and (place := chunk(entry.key, entry.global_shape)) is not None:
            made = _cut(entry, *place)
        made = msgspec.structs.replace(made, offset=at)
        wanted.append((entry, made))
        at += made.nbytes
    layout = Layout(
        run=mine.run,
        shard=rank,
        world=world,
        entries=tuple(made for _, made in wanted),
        classes=mine.classes,
        hash=mine.hash,
        data_offset=0,
        plain=mine.plain,
        step=mine.step,
    )
    assembly = Assembly(layout)
    for entry, made in wanted:
        if made.offsets is None and entry.part is None:
            assembly.take(_Stored("", (_Piece(0, entry.nbytes, own, entry),)), 0, entry.nbytes, made.offset)
        elif made.offsets is None:
            there = stored.get(entry.key, {}).get(None, [])
            parts = next((s for s in there if s.whole == mine.whole), None)
            if parts is None:
                raise _not_covered(made, "not all parts")
            assembly.take(parts, 0, made.nbytes, made.offset)
        else:
            _overlap(assembly, made, stored.get(entry.key, {}), rank, mine.whole)
    return assembly


def _stored(layouts: Sequence[Layout]) -> dict[str, dict[Box | None, list[_Stored]]]:
    """Chunks, and tensors that are divided, by key and place."""
    found: dict[str, dict[Box | None, list[_Stored]]] = {}
    parts: dict[tuple[str, Box | None, str], list[_Piece]] = {}
    for shard, layout in enumerate(layouts):
        for entry in layout.entries:
            box = None if entry.offsets is None else (entry.offsets, entry.shape)
            if entry.part is not None:
                begin = entry.part[0]
                piece = _Piece(begin, begin + entry.nbytes, shard, entry)
                parts.setdefault((entry.key, box, layout.whole), []).append(piece)
            elif box is not None:
                undivided = _Stored("", (_Piece(0, entry.nbytes, shard, entry),))
                found.setdefault(entry.key, {}).setdefault(box, []).append(undivided)
    for (key, box, whole), pieces in parts.items():
        pieces.sort(key=attrgetter("begin", "end"))
        ends = [0, *(piece.end for piece in pieces)]
        total = pieces[0].entry.part[1] if pieces[0].entry.part is not None else 0
        if [piece.begin for piece in pieces] == ends[:-1] and ends[-1] == total:
            found.setdefault(key, {}).setdefault(box, []).append(_Stored(whole, tuple(pieces)))
    return found


def _cut(entry: Entry, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Entry:
    """The entry of another chunk of the same global tensor, undivided."""
    nbytes = math.prod(shape) * ITEMSIZE[entry.dtype]
    stride = entry.stride if shape == entry.shape else contiguous_stride(shape)
    return msgspec.structs.replace(
        entry, shape=shape, stride=stride, stored_shape=shape, offsets=offsets, nbytes=nbytes, part=None
    )


def _not_covered(made: Entry, what: str) -> LayoutMismatch:
    rows = [(made.key, what, f"{math.prod(made.shape)} elements")]
    return LayoutMismatch(f"the shards do not cover {made.key} once", rows)


def _overlap(assembly: Assembly, made: Entry, stored: dict[Box | None, list[_Stored]], rank: int, whole: str) -> None:
    assert made.offsets is not None
    covered = 0
    for box, there in stored.items():
        if box is None:
            continue
        offsets, shape = box
        low = tuple(map(max, offsets, made.offsets))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(offsets, shape, made.offsets, made.shape, strict=True))
        sizes = tuple(h - o for o, h in zip(low, high, strict=True))
        if any(n <= 0 for n in sizes):
            continue
        covered += math.prod(sizes)
        # Copies of one chunk share the work.
        chosen = next((s for s in there if whole and s.whole == whole), there[rank % len(there)])
        _take_box(assembly, made, chosen, low, sizes)
    if covered != math.prod(made.shape):
        raise _not_covered(made, f"{covered} elements of this chunk")


def _take_box(assembly: Assembly, made: Entry, stored: _Stored, low: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    entry = stored.pieces[0].entry
    assert made.offsets is not None
    assert entry.offsets is not None
    itemsize = ITEMSIZE[made.dtype]
    source = sum((o - f) * s for o, f, s in zip(low, entry.offsets, entry.stride, strict=True)) * itemsize
    target = sum((o - f) * s for o, f, s in zip(low, made.offsets, made.stride, strict=True)) * itemsize
    if sizes == entry.shape == made.shape and entry.stride == made.stride:
        assembly.take(stored, 0, made.nbytes, made.offset)
        return
    # Whole rows of both lie in one piece, so that nothing else has to be sent.
    rows = sizes[1:] == entry.shape[1:] == made.shape[1:]
    if rows and entry.stride == contiguous_stride(entry.shape) and made.stride == contiguous_stride(made.shape):
        assembly.take(stored, source, math.prod(sizes) * itemsize, made.offset + target)
        return
    nbytes = entry.nbytes if entry.part is None else entry.part[1]
    assembly.cut(
        stored,
        nbytes,
        lambda stage: _Box(stage, itemsize, sizes, source, entry.stride, made.offset + target, made.stride),
    )
