"""Shards of one number of ranks put together for another: whatever the cuts, the same bytes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import CorruptSnapshot, LayoutMismatch
from memckpt.format.dtypes import ITEMSIZE
from memckpt.format.layout import Division, Layout
from memckpt.recovery.assembly import assemble, differences, digests
from memckpt.state.leaves import Collected, Place

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
PLAIN = b'{"version":1,"objects":{"m":{"kind":"module","data":{}}}}'


class File:
    """One shard as a save would write it: tensors by key, each whole or a chunk of a global one."""

    def __init__(
        self,
        rank: int,
        world: int,
        chunks: dict[str, tuple[torch.Tensor, Place | None]],
        plain: bytes = PLAIN,
        division: Division | None = None,
    ) -> None:
        tensors = [t for t, _ in chunks.values()]
        places = {i: place for i, (_, place) in enumerate(chunks.values()) if place is not None}
        collected = Collected(tensors, list(chunks), [None] * len(tensors), plain, places)
        self.layout = Layout.build(collected, run="r", shard=rank, world=world, division=division)
        self.data = bytearray(self.layout.file_nbytes)
        header = self.layout.header(plain, 7)
        self.data[: len(header)] = header
        pieces = self.layout.pieces(collected)
        pieces.refresh()
        for source, nbytes, offset in zip(pieces.sources, pieces.nbytes, pieces.offsets, strict=True):
            self.data[int(offset) : int(offset + nbytes)] = ctypes.string_at(int(source), int(nbytes))

    @property
    def digests(self) -> list[int]:
        return digests(self.layout, memoryview(self.data))


def divided(files: list[dict[str, tuple[torch.Tensor, Place | None]]], common: set[str]) -> list[File]:
    """The shards of ranks that have the tensors of these keys in common."""
    made = []
    for rank, chunks in enumerate(files):
        tensors, keys = [t for t, _ in chunks.values()], list(chunks)
        places = {i: place for i, (_, place) in enumerate(chunks.values()) if place is not None}
        bare = Layout.build(Collected(tensors, keys, [None] * len(keys), PLAIN, places), run="r", shard=0, world=1)
        alike = [
            r
            for r, other in enumerate(files)
            if all(other[k][0].shape == chunks[k][0].shape and other[k][1] == chunks[k][1] for k in chunks)
        ]
        division = Division(bare.hash, tuple(e.key in common for e in bare.entries), alike.index(rank), len(alike))
        made.append(File(rank, len(files), chunks, division=division))
    return made


def put_together(files: Sequence[File], rank: int, world: int, boxes: dict[str, Box]) -> dict[str, bytes]:
    """Bytes by key, row-major, of what `rank` of `world` gets."""
    made = assemble(
        [f.layout for f in files],
        rank,
        world,
        lambda key, shape: (boxes[key][1], boxes[key][0]) if key in boxes else None,
    )
    for i, r in enumerate(made.ranges):
        made.put(i, memoryview(files[r.shard].data)[r.begin : r.begin + r.nbytes])
    made.finish()
    got = {}
    for e in made.layout.entries:
        data = torch.frombuffer(
            bytearray(made.file[e.offset : e.offset + e.nbytes].tobytes() or b"x"), dtype=torch.uint8
        )
        size = ITEMSIZE[e.dtype]
        items = data[: e.nbytes].reshape(-1, size).as_strided((*e.shape, size), (*(s * size for s in e.stride), 1))
        got[e.key] = raw(items)
    return got


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], most: int = 4) -> list[Box]:
    """A cut of a tensor into boxes by some places along each dimension, some boxes maybe empty."""
    axes = []
    for n in shape:
        at = sorted(draw(st.lists(st.integers(0, n), max_size=most - 1)))
        ends = [0, *at, n]
        axes.append([(a, b - a) for a, b in itertools.pairwise(ends)])
    boxes: list[Box] = [((), ())]
    for axis in axes:
        boxes = [((*o, a), (*s, n)) for o, s in boxes for a, n in axis]
    return boxes


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_into_any_other(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3), label="shape"))
    count = int(np.prod(shape)) * dtype.itemsize
    whole = torch.frombuffer(bytearray(data.draw(st.binary(min_size=count, max_size=count))), dtype=dtype).reshape(
        shape
    )
    old, new = data.draw(grids(shape), label="old"), data.draw(grids(shape), label="new")
    copies = data.draw(st.integers(1, 2), label="copies")  # HSDP: each chunk more than once
    turned = data.draw(st.booleans(), label="turned") and len(shape) > 1
    private = torch.arange(5, dtype=torch.int16)
    files = []
    for rank, box in enumerate(old * copies):
        chunk = cut(whole, box).clone()
        if turned:  # dense, but in another order than row-major
            chunk = chunk.transpose(0, 1).contiguous().transpose(0, 1)
        files.append(File(rank, len(old) * copies, {"m/w": (chunk, Place(shape, box[0])), "m/p": (private, None)}))
    assert differences([f.layout for f in files], [f.digests for f in files], ranks=len(new)) == []
    for rank, box in enumerate(new):
        got = put_together(files, rank, len(new), {"m/w": box})
        assert got == {"m/w": raw(cut(whole, box)), "m/p": raw(private)}


def rows(files: Sequence[File], leave: frozenset[str] = frozenset()) -> list[str]:
    return [r[0] for r in differences([f.layout for f in files], [f.digests for f in files], ranks=5, leave=leave)]


def test_what_is_private_and_differs_is_named() -> None:
    one, two = torch.arange(4), torch.arange(4) + 1
    plain = b'{"version":1,"objects":{"m":{"kind":"module","data":{}},"n":{"kind":"object","data":%d}}}'
    files = [
        File(r, 2, {"m/same": (one, None), "m/expert": (t, None), "rng/x": (t, None), "o~1k/x": (t, None)}, plain % r)
        for r, t in enumerate((one, two))
    ]
    assert rows(files) == ["m/expert", "n", "o~1k/x"]
    assert rows(files, frozenset({"m", "o/k"})) == ["n"]
    assert rows([files[0]]) == []


def test_what_only_some_ranks_have_is_named() -> None:
    one = torch.arange(4)
    assert rows([File(0, 2, {"m/a": (one, None)}), File(1, 2, {"m/a": (one, None), "m/b": (one, None)})]) == ["m/b"]
    place = Place((8,), (4,))
    assert rows([File(0, 2, {"m/a": (one, None)}), File(1, 2, {"m/a": (one, place)})]) == ["m/a"]


def test_shards_that_do_not_cover_a_tensor_are_refused() -> None:
    one = torch.arange(4)
    for offsets in ((0, 5), (0, 3)):
        files = [File(r, 2, {"m/w": (one, Place((9,), (o,)))}) for r, o in enumerate(offsets)]
        with pytest.raises(LayoutMismatch, match="do not cover m/w once"):
            put_together(files, 0, 1, {"m/w": ((0,), (9,))})


def test_whole_rows_are_all_that_is_asked_for() -> None:
    whole = torch.arange(64, dtype=torch.int32).reshape(16, 4)
    files = [File(r, 2, {"m/w": (whole[8 * r : 8 * r + 8].clone(), Place((16, 4), (8 * r, 0)))}) for r in range(2)]
    made = assemble([f.layout for f in files], 1, 4, lambda key, shape: ((4, 4), (4, 0)))
    (asked,) = made.ranges
    assert (asked.shard, asked.nbytes) == (0, 64)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_ranks_have_in_common_is_there_once_and_comes_back_to_each(world: int) -> None:
    random = torch.Generator().manual_seed(1)
    big = torch.randint(0, 255, (40_001,), dtype=torch.uint8, generator=random)
    turned = torch.randn(60, 70, generator=random).t()
    small = torch.arange(9)
    chunks = [
        {"m/big": (big.clone(), None), "m/turned": (turned.clone(), None), "m/small": (small.clone(), None),
         "m/own": (torch.full((3000,), float(r)), None)}
        for r in range(world)
    ]  # fmt: skip
    files = divided(chunks, {"m/big", "m/turned", "m/small"})
    total = sum(e.nbytes for f in files for e in f.layout.entries if e.key in ("m/big", "m/turned"))
    assert total == big.nbytes + turned.nbytes
    assert all(f.layout.whole for f in files)
    for rank in range(world):
        assert put_together(files, rank, world, {}) == {k: raw(t) for k, (t, _) in chunks[rank].items()}
    if world > 1:
        assert rows(files) == ["m/own"]
        for other in (1, world + 1):  # where nothing is a rank's own, any number of ranks gets it
            common = divided([{k: v for k, v in c.items() if k != "m/own"} for c in chunks], {"m/big", "m/turned"})
            assert rows(common) == []
            for rank in range(other):
                got = put_together(common, rank, other, {})
                assert got == {k: raw(t) for k, (t, _) in chunks[0].items() if k != "m/own"}
        with pytest.raises(LayoutMismatch, match="do not cover m/"):
            put_together(files[1:], 0, world, {})
        with pytest.raises(LayoutMismatch, match="do not cover m/"):
            put_together(files[:-1], 0, world, {})


def test_groups_that_have_the_same_names_are_kept_apart() -> None:
    """Two pipeline stages of different size, two ranks each."""
    weights = [torch.full((5000 + 1000 * (r // 2),), r // 2, dtype=torch.uint8) for r in range(4)]
    files = divided([{"m/w": (w, None)} for w in weights], {"m/w"})
    assert len({f.layout.whole for f in files}) == 2
    assert [f.layout.entries[0].nbytes for f in files] == [2496, 2504, 2944, 3056]
    for rank in range(4):
        assert put_together(files, rank, 4, {}) == {"m/w": raw(weights[rank])}
    assert rows(files) == ["m/w"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_divided_chunks_cut_anew(data: st.DataObject) -> None:
    """HSDP: each chunk is on several ranks, which divide its bytes."""
    shape = (data.draw(st.integers(1, 40), label="rows"), data.draw(st.integers(1, 90), label="columns"))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    old, new = data.draw(grids(shape, 3), label="old"), data.draw(grids(shape, 3), label="new")
    copies = data.draw(st.integers(1, 3), label="copies")
    files = divided([{"m/w": (cut(whole, box).clone(), Place(shape, box[0]))} for box in old * copies], {"m/w"})
    assert rows(files) == []
    for rank, box in enumerate(new):
        assert put_together(files, rank, len(new), {"m/w": box}) == {"m/w": raw(cut(whole, box))}


def test_a_header_that_lies_about_a_part_is_refused() -> None:
    files = divided([{"m/w": (torch.arange(4000), None)}] * 2, {"m/w"})
    (entry,) = files[1].layout.entries
    assert entry.part == (16000, 32000)
    header = bytes(files[1].data[: files[1].layout.data_offset])
    for wrong in (b"[16001,32000]", b"[16000,31999]", b"[-1000,32000]"):
        damaged = header.replace(b"[16000,32000]", wrong)
        assert damaged != header
        with pytest.raises(CorruptSnapshot):
            Layout.parse(damaged)
