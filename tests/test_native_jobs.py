"""Gather, scatter and audit: bytes, checksums, watermark, lifetimes, and refusal of whatever would be unsafe."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt import _native
from memckpt._native import CHUNK_BYTES, SharedMemory

FEATURES: dict[str, Any] = _native.cpu_features()
PATHS: list[str] = FEATURES["paths"]
NOISE = np.random.default_rng(1).integers(0, 256, 16 << 20, dtype=np.uint8)
Bytes = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class Pieces(NamedTuple):
    blocks: list[Bytes]
    address: U64
    nbytes: U64
    offset: U64


def pieces(blocks: list[Bytes], offsets: list[int]) -> Pieces:
    return Pieces(
        blocks,
        np.array([b.ctypes.data for b in blocks], np.uint64),
        np.array([b.nbytes for b in blocks], np.uint64),
        np.array(offsets, np.uint64),
    )


def chunk_crcs(data: Bytes) -> list[int]:
    return [_native.crc32c(data[i : i + CHUNK_BYTES]) for i in range(0, data.size, CHUNK_BYTES)]


def view(memory: SharedMemory) -> Bytes:
    return np.frombuffer(memoryview(memory), np.uint8)


@pytest.fixture(autouse=True)
def _restore_path() -> Iterator[None]:
    yield
    _native.select_cpu_path(FEATURES["path"])


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> SharedMemory:
    return SharedMemory.create(str(tmp_path_factory.mktemp("jobs") / "memory"), 12 << 20)


@st.composite
def piece_lists(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A file size, and (place in the noise, bytes, offset) of pieces that do not overlap."""
    size = st.one_of(
        st.integers(0, 70),
        st.sampled_from([1024, 4096, 8191, 8192, 8193]),
        st.integers(0, 40_000),
        st.integers(0, 3 << 20),
    )
    gap = st.sampled_from([0, 0, 0, 1, 13, 64, 4096, 20_000])
    at, found = draw(st.sampled_from([0, 1, 63, 4096])), []
    for _ in range(draw(st.integers(0, 60))):
        n = draw(size)
        found.append((draw(st.integers(0, 4096)), n, at))
        at += n + draw(gap)
    at = min(at + draw(gap), 12 << 20)
    return at, [(s, n, o) for s, n, o in found if o + n <= at]


@settings(deadline=None, max_examples=40)
@given(case=piece_lists(), threads=st.integers(1, 3), crc=st.booleans(), stay=st.integers(1, 5))
def test_gather_and_scatter(
    memory: SharedMemory, case: tuple[int, list[tuple[int, int, int]]], threads: int, crc: bool, stay: int
) -> None:
    """On every path the same bytes and checksums as NumPy slices give; every `stay`-th piece lies in place already."""
    file_nbytes, spec = case
    target = view(memory)
    p = pieces([NOISE[s : s + n] for s, n, _ in spec], [o for _, _, o in spec])
    before = NOISE[7 : 7 + memory.nbytes]
    expected = before.copy()
    for block, offset in zip(p.blocks, p.offset.tolist(), strict=True):
        expected[offset : offset + block.size] = block
    address = p.address.copy()
    address[stay::stay] = memory.address + p.offset[stay::stay]
    for path in PATHS:
        _native.select_cpu_path(path)
        target[:] = before
        for i in range(stay, len(spec), stay):
            target[spec[i][2] : spec[i][2] + spec[i][1]] = p.blocks[i]
        job = _native.gather(address, p.nbytes, p.offset, memory, file_nbytes, crc=crc, threads=threads, keep=p)
        assert job.wait(60)
        assert np.array_equal(target, expected)
        want = chunk_crcs(expected[:file_nbytes])
        assert job.watermark == len(want)
        if crc:
            assert job.crcs().tolist() == want
        else:
            with pytest.raises(RuntimeError):
                job.crcs()
        assert _native.audit(p.address, p.nbytes, p.offset, memory, file_nbytes).size == 0
        assert _native.crc_sources(p.address, p.nbytes, p.offset, memory, file_nbytes).tolist() == want

        # Out again, each piece twice (an alias that ends one byte earlier), between guards.
        outs = [np.full(b.size + 2, 0x5A, np.uint8) for b in p.blocks for _ in range(2)]
        order = [o for o in p.offset.tolist() for _ in range(2)]
        q = pieces([o[1 : o.size - 1 - (k % 2 and o.size > 2)] for k, o in enumerate(outs)], order)
        back = _native.scatter(
            memory, file_nbytes, q.address, q.nbytes, q.offset, crcs=np.array(want, np.uint32), threads=threads
        )
        assert back.wait(60)
        assert back.bad_chunks().size == 0
        assert back.crcs().tolist() == want
        for block, offset, out in zip(q.blocks, order, outs, strict=True):
            assert np.array_equal(block, expected[offset : offset + block.size])
            assert out[0] == 0x5A
            assert (out[1 + block.size :] == 0x5A).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5 << 20), st.integers(0, 200_000)), max_size=30))
def test_scatter_of_overlapping_pieces(memory: SharedMemory, spec: list[tuple[int, int]]) -> None:
    file_nbytes = 5 << 20
    data = view(memory)
    data[:file_nbytes] = NOISE[:file_nbytes]
    spec = sorted((o, min(n, file_nbytes - o)) for o, n in spec)
    q = pieces([np.zeros(n, np.uint8) for _, n in spec], [o for o, _ in spec])
    job = _native.scatter(memory, file_nbytes, q.address, q.nbytes, q.offset, crcs=None, keep=q)
    assert job.wait()
    assert job.crcs().tolist() == chunk_crcs(NOISE[:file_nbytes])
    for block, (offset, n) in zip(q.blocks, spec, strict=True):
        assert np.array_equal(block, NOISE[offset : offset + n])


def test_bad_chunk_is_named(memory: SharedMemory) -> None:
    file_nbytes = 2 * CHUNK_BYTES + 5
    data = view(memory)
    data[:file_nbytes] = NOISE[:file_nbytes]
    crcs = np.array(chunk_crcs(data[:file_nbytes]), np.uint32)
    none = np.zeros(0, np.uint64)
    for spoilt, chunk in [(0, 0), (CHUNK_BYTES - 1, 0), (CHUNK_BYTES, 1), (file_nbytes - 1, 2)]:
        data[spoilt] ^= 0x10
        job = _native.scatter(memory, file_nbytes, none, none, none, crcs=crcs)
        assert job.wait()
        assert job.bad_chunks().tolist() == [chunk]
        assert job.bad_chunks().dtype == np.int64
        data[spoilt] ^= 0x10


def test_audit_names_the_piece(memory: SharedMemory) -> None:
    blocks = [NOISE[i * 300_000 : i * 300_000 + 299_999].copy() for i in range(20)]
    p = pieces(blocks, [i * 300_000 for i in range(20)])
    assert _native.gather(p.address, p.nbytes, p.offset, memory, 6 << 20).wait()
    blocks[3][0] ^= 1
    blocks[17][-1] ^= 1  # lies in chunk 1
    audit = _native.audit(p.address, p.nbytes, p.offset, memory, 6 << 20)
    assert audit.tolist() == [3, 17]
    assert audit.dtype == np.int64
    for chunks, found in [([0], [3]), ([1], [17]), ([1, 0], [3, 17]), ([], [])]:
        some = np.array(chunks, np.int64)
        assert _native.audit(p.address, p.nbytes, p.offset, memory, 6 << 20, some).tolist() == found
    for chunks in ([2], [-1]):
        with pytest.raises(ValueError):
            _native.audit(p.address, p.nbytes, p.offset, memory, 6 << 20, np.array(chunks, np.int64))


def test_every_nan_pattern_survives(memory: SharedMemory) -> None:
    """Signalling NaNs, quiet NaNs with a payload, -0.0 and denormals, as 16, 32 and 64 bits."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    words = np.array([0x7F800001, 0x7FC00001, 0xFFFFFFFF, 0x80000000, 1, 0x7FBFFFFF], np.uint32).repeat(1000)
    doubles = np.array([0x7FF0000000000001, 0xFFF8000000000001, 1 << 63, 1], np.uint64).repeat(3000)
    blocks = [a.view(np.uint8) for a in (doubles, words, halves)]
    offsets = np.cumsum([0, *(b.size for b in blocks)]).tolist()
    p = pieces(blocks, offsets[:-1])
    for path in PATHS:
        _native.select_cpu_path(path)
        view(memory)[: offsets[-1]] = 0
        assert _native.gather(p.address, p.nbytes, p.offset, memory, offsets[-1]).wait()
        out = [np.zeros_like(b) for b in blocks]
        q = pieces(out, offsets[:-1])
        assert _native.scatter(memory, offsets[-1], q.address, q.nbytes, q.offset, crcs=None).wait()
        assert [o.tobytes() for o in out] == [b.tobytes() for b in blocks]


def test_watermark_never_goes_back_and_covers_only_what_is_there(tmp_path: Path) -> None:
    nbytes = 40 << 20
    source = np.random.default_rng(2).integers(0, 256, nbytes, dtype=np.uint8)
    memory = SharedMemory.create(str(tmp_path / "memory"), nbytes)
    data = view(memory)
    data[:] = ~source
    p = pieces([source], [0])
    _native.select_cpu_path("scalar")  # slow enough to be watched
    job = _native.gather(p.address, p.nbytes, p.offset, memory, nbytes, threads=2)
    seen, looks = 0, 0
    while True:
        last = job.done()
        mark = job.watermark
        assert mark >= seen
        part = slice(seen * CHUNK_BYTES, mark * CHUNK_BYTES)
        assert np.array_equal(data[part], source[part])
        seen, looks = mark, looks + (mark > seen)
        if last:
            break
        time.sleep(0.001)
    assert seen == 10
    assert job.crcs().tolist() == chunk_crcs(source)


def test_job_keeps_its_sources_and_memory_alive(tmp_path: Path) -> None:
    nbytes = 96 << 20  # a tenth of a second on the scalar path
    _native.select_cpu_path("scalar")
    for attempt in range(10):  # on a busy machine the copy may be over before we look
        source = np.full(nbytes, attempt + 1, np.uint8)
        memory = SharedMemory.create(str(tmp_path / str(attempt)), nbytes)
        p = pieces([source], [0])
        ref = weakref.ref(source)
        job = _native.gather(p.address, p.nbytes, p.offset, memory, nbytes, threads=1, keep=source)
        del source, p
        assert ref() is not None  # not asked whether it is done, the handle still has it
        with contextlib.suppress(BufferError):
            memory.close()
        if memory.closed:
            continue
        del job  # waits, then lets go
        assert ref() is None
        assert (view(memory) == attempt + 1).all()
        memory.close()
        return
    pytest.fail("the memory of a running job could be closed")


def test_keep_is_dropped_once_the_end_is_known(memory: SharedMemory) -> None:
    class Keep:
        pass

    keep = Keep()
    ref = weakref.ref(keep)
    none = np.zeros(0, np.uint64)
    job = _native.gather(none, none, none, memory, 5, keep=keep)
    del keep
    assert job.wait()
    assert ref() is None


def test_a_job_begins_when_it_is_told_to(memory: SharedMemory) -> None:
    data = view(memory)
    data[:] = 0
    p = pieces([NOISE[: 12 << 20]], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 12 << 20, start=False)
    time.sleep(0.05)
    assert not job.done() and job.watermark == 0 and not data.any()
    job.start()
    job.start()
    assert job.wait(60)
    assert job.crcs().tolist() == chunk_crcs(p.blocks[0])
    data[:] = 0
    job.start()  # over is over
    assert not data.any()


def test_waiting_begins_a_job(memory: SharedMemory) -> None:
    p = pieces([NOISE[: 12 << 20]], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 12 << 20, start=False)
    assert job.wait(60)
    assert job.crcs().tolist() == chunk_crcs(p.blocks[0])


def test_a_job_that_never_began_is_dropped_at_once(memory: SharedMemory) -> None:
    source = NOISE[: 12 << 20].copy()
    ref = weakref.ref(source)
    p = pieces([source], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 12 << 20, keep=source, start=False)
    del source, p, job
    assert ref() is None


def test_a_forked_child_does_not_begin_its_parents_job(memory: SharedMemory) -> None:
    p = pieces([NOISE[: 12 << 20]], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 12 << 20, start=False)
    child = os.fork()
    if child == 0:
        try:
            job.start()
        except RuntimeError as error:
            os._exit(0 if "parent" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert job.wait(60)


def test_wait_with_a_time_limit(memory: SharedMemory) -> None:
    _native.select_cpu_path("scalar")
    p = pieces([NOISE[: 12 << 20]], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 12 << 20, threads=1)
    job.wait(0)
    with pytest.raises(ValueError):
        job.wait(-1)
    with pytest.raises(ValueError):
        job.wait(float("nan"))
    assert job.wait(float("inf"))
    assert job.wait(0)
    assert job.done()


def test_results_before_the_end_are_refused(memory: SharedMemory) -> None:
    _native.select_cpu_path("scalar")
    p = pieces([NOISE[: 12 << 20]], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 12 << 20)
    if not job.done():
        with pytest.raises(RuntimeError):
            job.crcs()
    job.wait()


def test_many_jobs_at_once(tmp_path: Path) -> None:
    memories = [SharedMemory.create(str(tmp_path / str(i)), 3 << 20) for i in range(8)]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            p = pieces([NOISE[i : i + (3 << 20)]], [0])
            for _ in range(3):
                job = _native.gather(p.address, p.nbytes, p.offset, memories[i], 3 << 20, threads=1 + i % 3)
                assert job.wait(60)
                assert job.crcs().tolist() == chunk_crcs(p.blocks[0])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_pool_stops_and_starts_again(memory: SharedMemory) -> None:
    p = pieces([NOISE[:5_000_000]], [0])
    for _ in range(3):
        assert _native.gather(p.address, p.nbytes, p.offset, memory, 5_000_000, threads=2).wait()
        assert _native.pool_threads() >= 2
        names = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
        assert "memckpt-copy" in names
        _native.shutdown_pool()
        assert _native.pool_threads() == 0


GOOD = NOISE[:100]
A = GOOD.ctypes.data


@pytest.mark.parametrize(
    ("address", "nbytes", "offset", "file_nbytes"),
    [
        pytest.param([0], [1], [0], 100, id="null"),
        pytest.param([A], [101], [0], 100, id="too long"),
        pytest.param([A], [1], [100], 100, id="behind the end"),
        pytest.param([A], [2**64 - 1], [1], 100, id="sum wraps"),
        pytest.param([2**64 - 5], [10], [0], 100, id="address wraps"),
        pytest.param([A, A], [1, 1], [1, 0], 100, id="not sorted"),
        pytest.param([A, A], [1], [0, 1], 100, id="lengths differ"),
        pytest.param([A], [1], [0], 1 << 40, id="file larger than memory"),
    ],
)
def test_unsafe_pieces_are_refused(
    memory: SharedMemory, address: list[int], nbytes: list[int], offset: list[int], file_nbytes: int
) -> None:
    a, n, o = (np.array(x, np.uint64) for x in (address, nbytes, offset))
    with pytest.raises(ValueError):
        _native.gather(a, n, o, memory, file_nbytes)
    with pytest.raises(ValueError):
        _native.audit(a, n, o, memory, file_nbytes)
    with pytest.raises(ValueError):
        _native.crc_sources(a, n, o, memory, file_nbytes)
    with pytest.raises(ValueError):
        _native.scatter(memory, file_nbytes, a, n, o, crcs=None)


def test_unsafe_arrays_are_refused(memory: SharedMemory) -> None:
    one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint64)
    a = np.array([A], np.uint64)
    for bad in (a.astype(np.int64), a.astype(np.float64), a.reshape(1, 1), np.array([A, 0, A, 0], np.uint64)[::2]):
        with pytest.raises(ValueError):
            _native.gather(bad, one, zero, memory, 100)  # type: ignore[arg-type]
    for wrong in ([A], None, b"12345678"):
        with pytest.raises(TypeError):
            _native.gather(wrong, one, zero, memory, 100)  # type: ignore[arg-type]
    for threads in (0, -1, 257):
        with pytest.raises(ValueError):
            _native.gather(a, one, zero, memory, 100, threads=threads)
    with pytest.raises(TypeError):
        _native.gather(a, one, zero, memory, -1)
    with pytest.raises(TypeError):
        _native.gather(a, one, zero, None, 100)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        _native.scatter(memory, 100, a, one, zero, crcs=np.zeros(2, np.uint32))
    with pytest.raises(ValueError):
        _native.scatter(memory, 100, a, one, zero, crcs=np.zeros(1, np.uint64))
    two = np.array([A, A], np.uint64)
    with pytest.raises(ValueError):  # overlap: in a gather nobody could say which bytes win
        _native.gather(two, np.array([2, 2], np.uint64), np.array([0, 1], np.uint64), memory, 100)


def test_source_inside_the_target_is_refused_unless_in_place(memory: SharedMemory) -> None:
    one, off = np.array([10], np.uint64), np.array([20], np.uint64)
    with pytest.raises(ValueError):
        _native.gather(np.array([memory.address + 25], np.uint64), one, off, memory, 100)
    assert _native.gather(np.array([memory.address + 20], np.uint64), one, off, memory, 100).wait()
    with pytest.raises(ValueError):
        _native.scatter(memory, 100, np.array([memory.address + 50], np.uint64), one, off, crcs=None)


def test_arrays_may_change_after_the_start(memory: SharedMemory) -> None:
    p = pieces([NOISE[: 8 << 20]], [0])
    job = _native.gather(p.address, p.nbytes, p.offset, memory, 8 << 20)
    p.address[:] = 1
    p.nbytes[:] = 2**60
    assert job.wait()
    assert np.array_equal(view(memory)[: 8 << 20], p.blocks[0])


def test_first_change() -> None:
    tensors = [torch.zeros(i % 7) for i in range(500)]
    pointers, sizes = [t.data_ptr for t in tensors], [t.numel for t in tensors]
    a = np.array([t.data_ptr() for t in tensors], np.uint64)
    s = np.array([t.numel() for t in tensors], np.uint64)
    assert _native.first_change(pointers, sizes, a, s) == -1
    assert _native.first_change([], [], a[:0], s[:0]) == -1
    tensors[400].data = torch.zeros(int(s[400]))
    assert _native.first_change(pointers, sizes, a, s) == 400
    tensors[33].resize_(1 + int(s[33]) - 2)
    assert _native.first_change(pointers, sizes, a, s) == 33
    with pytest.raises(ValueError):
        _native.first_change(pointers, sizes[1:], a, s)
    with pytest.raises(TypeError):
        _native.first_change(tuple(pointers), sizes, a, s)  # type: ignore[arg-type]


def test_first_change_survives_methods_that_misbehave() -> None:
    one = np.zeros(100, np.uint64)

    def shrink() -> int:
        methods.clear()
        return 0

    methods = [shrink] * 100
    with pytest.raises(ValueError):
        _native.first_change(methods, [lambda: 0] * 100, one, one)

    def fail() -> int:
        raise KeyError("from inside")

    with pytest.raises(KeyError):
        _native.first_change([fail], [fail], one[:1], one[:1])
    for value in (-1, 2**64, "text"):
        with pytest.raises((OverflowError, TypeError)):
            _native.first_change([lambda v=value: v], [int], one[:1], one[:1])  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["memcpy", "stream", "string"])
def test_plain_copy(memory: SharedMemory, mode: str) -> None:
    for n in (0, 1, 4095, 100_001, 5_000_000):
        view(memory)[:] = 0
        _native.plain_copy(memory, 3, NOISE[:n], mode, threads=3)
        assert np.array_equal(view(memory)[3 : 3 + n], NOISE[:n])
        assert not view(memory)[3 + n :].any()
