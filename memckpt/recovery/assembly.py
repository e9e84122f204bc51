"""Puts one rank's snapshot together out of the shards that another number of ranks saved. Pure, but for memory.

A chunk of a global tensor (that is what a DTensor's local part is) is made of the stored chunks that it overlaps. What
is no chunk belongs to each rank by itself, so it can be given to another number of ranks only where all that saved it
saved the same: then each new rank gets that. Generators of random numbers are the exception: a rank that there was
before goes on with its own, a new one keeps the one it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from memckpt import _native
from memckpt.errors import LayoutMismatch
from memckpt.format.dtypes import ITEMSIZE
from memckpt.format.header import Entry
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
class _Box:
    """What of a stored chunk goes where in the assembled one; both strided, in elements of `itemsize` bytes."""

    itemsize: int
    sizes: tuple[int, ...]
    source: int
    source_stride: tuple[int, ...]
    target: int
    target_stride: tuple[int, ...]


@dataclass
class Assembly:
    """One rank's snapshot in the making.

    Attributes
    ----------
    layout : Layout
        Of the assembled file, whose data begins at byte 0: it has no header.
    ranges : list of Range
        What it is made of.
    """

    layout: Layout
    ranges: list[Range] = field(default_factory=list)
    _targets: list[int | _Box] = field(default_factory=list)

    def put(self, index: int, data: memoryview, file: npt.NDArray[np.uint8]) -> None:
        """Put the bytes of ``ranges[index]`` into the assembled file. Local."""
        target = self._targets[index]
        if isinstance(target, int):
            file[target : target + len(data)] = np.frombuffer(data, np.uint8)
            return
        octets = np.frombuffer(data, np.uint8)
        source = raw(octets.ctypes.data + target.source, target.sizes, target.source_stride, target.itemsize)
        made = raw(file.ctypes.data + target.target, target.sizes, target.target_stride, target.itemsize)
        np.copyto(made, source)

    def _take(self, range_: Range, target: int | _Box) -> None:
        if range_.nbytes:
            self.ranges.append(range_)
            self._targets.append(target)


def digests(layout: Layout, data: memoryview) -> list[int]:
    """CRC-32C of every entry that is no chunk of a global tensor, in the order of the file; 0 for chunks. Local."""
    found = []
    for entry in layout.entries:
        crc = 0
        if entry.global_shape is None:
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
                    chunk = entry.global_shape is not None
                    said[view.key] = ("chunk", view.dtype, entry.global_shape) if chunk else (view, crc)
        if not shard:
            first = said
        differing |= {key: None for key in first.keys() | said.keys() if first.get(key) != said.get(key)}
    return [
        (key, f"differs between the {len(layouts)} ranks that saved it", f"the same for {ranks}")
        for key in sorted(differing)
    ]


def assemble(layouts: Sequence[Layout], rank: int, world: int, chunk: Chunk) -> Assembly:
    """Plan the snapshot of `rank` of `world` out of all shards. Local.

    Parameters
    ----------
    layouts : sequence of Layout
        Of every shard, in order; without `differences`.
    chunk : callable
        Shape and offsets of the chunk of a global tensor that this rank wants, by key and global shape, or None.

    Raises
    ------
    LayoutMismatch
        The shards do not cover a chunk that is wanted.
    """
    mine = layouts[rank % len(layouts)]
    stored: dict[str, dict[Box, list[tuple[int, Entry]]]] = {}
    for shard, layout in enumerate(layouts):
        for entry in layout.entries:
            if entry.offsets is not None:
                stored.setdefault(entry.key, {}).setdefault((entry.offsets, entry.shape), []).append((shard, entry))
    wanted: list[tuple[Entry, Entry]] = []
    at = 0
    for entry in mine.entries:
        made = entry
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
        if made.offsets is None:
            assembly._take(Range(rank % len(layouts), entry.offset, entry.nbytes), made.offset)
        else:
            _overlap(assembly, made, stored[entry.key], rank)
    return assembly


def _cut(entry: Entry, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Entry:
    """The entry of another chunk of the same global tensor."""
    nbytes = math.prod(shape) * ITEMSIZE[entry.dtype]
    return msgspec.structs.replace(
        entry, shape=shape, stride=contiguous_stride(shape), stored_shape=shape, offsets=offsets, nbytes=nbytes
    )


def _overlap(assembly: Assembly, made: Entry, stored: dict[Box, list[tuple[int, Entry]]], rank: int) -> None:
    assert made.offsets is not None
    covered = 0
    for (offsets, shape), there in stored.items():
        low = tuple(map(max, offsets, made.offsets))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(offsets, shape, made.offsets, made.shape, strict=True))
        sizes = tuple(h - o for o, h in zip(low, high, strict=True))
        if any(n <= 0 for n in sizes):
            continue
        covered += math.prod(sizes)
        shard, entry = there[rank % len(there)]  # copies of one chunk share the work
        _take_box(assembly, made, shard, entry, low, sizes)
    if covered != math.prod(made.shape):
        rows = [(made.key, f"{covered} elements of this chunk", f"{math.prod(made.shape)}")]
        raise LayoutMismatch(f"the shards do not cover {made.key} once", rows)


def _take_box(
    assembly: Assembly, made: Entry, shard: int, entry: Entry, low: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert made.offsets is not None
    assert entry.offsets is not None
    itemsize = ITEMSIZE[made.dtype]
    source = sum((o - f) * s for o, f, s in zip(low, entry.offsets, entry.stride, strict=True)) * itemsize
    target = sum((o - f) * s for o, f, s in zip(low, made.offsets, made.stride, strict=True)) * itemsize
    nbytes = math.prod(sizes) * itemsize
    # Whole rows of both lie in one piece, so that nothing else has to be sent.
    rows = sizes[1:] == entry.shape[1:] == made.shape[1:]
    if rows and entry.stride == contiguous_stride(entry.shape):
        assembly._take(Range(shard, entry.offset + source, nbytes), made.offset + target)
        return
    box = _Box(itemsize, sizes, source, entry.stride, made.offset + target, made.stride)
    assembly._take(Range(shard, entry.offset, entry.nbytes), box)
