"""SharedMemory: reserved space, modes, refusals, exports, and what a forked child gets."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from memckpt import _native
from memckpt._native import SharedMemory


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("not permitted to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def in_child(work: Callable[[], bool]) -> None:
    """Run `work` in a forked child; it must return True."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12: forking with threads, which is the point here
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_create_open_close(tmp_path: Path) -> None:
    path = str(tmp_path / "memory")
    made = SharedMemory.create(path, 10_000)
    assert (made.nbytes, len(made), made.path, made.writable, made.closed) == (10_000, 10_000, path, True, False)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.stat(path).st_blocks * 512 >= 10_000
    view = memoryview(made)
    assert (view.nbytes, view.format, view.readonly) == (10_000, "B", False)
    view[5:8] = b"abc"
    other = SharedMemory.open(path, writable=False)
    assert bytes(other)[5:8] == b"abc"
    assert memoryview(other).readonly
    with pytest.raises(ValueError):
        np.frombuffer(memoryview(other), np.uint8)[0] = 1
    view.release()
    made.close()
    assert made.closed
    made.close()  # again is fine
    for use in (lambda: made.address, lambda: made.populate(), lambda: made.lock()):
        with pytest.raises(RuntimeError):
            use()
    with pytest.raises(BufferError):
        memoryview(made)
    none = np.zeros(0, np.uint64)
    with pytest.raises(RuntimeError):
        _native.gather(none, none, none, made, 0)
    assert bytes(SharedMemory.open(path, writable=True))[5:8] == b"abc"


def test_mode_ignores_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        SharedMemory.create(str(tmp_path / "memory"), 10, mode=0o640)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "memory").stat().st_mode) == 0o640


def test_close_is_refused_while_exported(tmp_path: Path) -> None:
    memory = SharedMemory.create(str(tmp_path / "memory"), 100)
    array = np.frombuffer(memoryview(memory), np.uint8)
    part = array[3:5]
    del array
    with pytest.raises(BufferError):
        memory.close()
    del part
    memory.close()


def test_a_view_outlives_its_handle(tmp_path: Path) -> None:
    array = np.frombuffer(memoryview(SharedMemory.create(str(tmp_path / "memory"), 1 << 20)), np.uint8)
    array[:] = 7
    assert array.sum() == 7 << 20


def test_read_only_cannot_be_a_target(tmp_path: Path) -> None:
    path = str(tmp_path / "memory")
    SharedMemory.create(path, 100)
    memory = SharedMemory.open(path, writable=False)
    none = np.zeros(0, np.uint64)
    with pytest.raises(ValueError):
        _native.gather(none, none, none, memory, 100)
    with pytest.raises(ValueError):
        _native.copy_crc(memory, 0, b"a")
    with pytest.raises(ValueError):
        _native.plain_copy(memory, 0, b"a", "memcpy")


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    for nbytes in (0, -1):
        with pytest.raises(ValueError):
            SharedMemory.create(str(path), nbytes)
    with pytest.raises(ValueError):
        SharedMemory.create(str(path) + "\0x", 1)
    assert not path.exists()
    SharedMemory.create(str(path), 10)
    with pytest.raises(FileExistsError) as exists:
        SharedMemory.create(str(path), 10)
    assert exists.value.filename == str(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError) as link:
        SharedMemory.open(str(tmp_path / "link"), writable=True)
    assert link.value.errno == errno.ELOOP
    with pytest.raises(FileExistsError):
        SharedMemory.create(str(tmp_path / "link"), 10)
    with pytest.raises(OSError):
        SharedMemory.open(str(tmp_path), writable=False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):  # and does not hang
        SharedMemory.open(str(tmp_path / "pipe"), writable=False)
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(str(tmp_path / "absent"), writable=False)
    (tmp_path / "empty").touch()
    empty = SharedMemory.open(str(tmp_path / "empty"), writable=True)
    assert (empty.nbytes, bytes(empty)) == (0, b"")
    empty.populate()


def test_no_space_is_an_error_that_leaves_nothing(small_tmpfs: Path) -> None:
    path = small_tmpfs / "memory"
    with pytest.raises(OSError) as full:
        SharedMemory.create(str(path), 16 << 20)
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
    assert os.listdir(small_tmpfs) == []
    SharedMemory.create(str(path), 7 << 20).populate()  # the space is free again
    with pytest.raises(OSError) as full:
        SharedMemory.create(str(small_tmpfs / "second"), 2 << 20)
    assert full.value.errno == errno.ENOSPC
    assert os.listdir(small_tmpfs) == ["memory"]


def test_holes_are_found_on_opening(small_tmpfs: Path) -> None:
    """A sparse file on a full tmpfs must not end in SIGBUS when it is read or written."""
    (small_tmpfs / "sparse").touch()
    os.truncate(small_tmpfs / "sparse", 6 << 20)
    SharedMemory.create(str(small_tmpfs / "ballast"), 6 << 20)
    for writable in (True, False):
        with pytest.raises(OSError) as full:
            SharedMemory.open(str(small_tmpfs / "sparse"), writable=writable)
        assert full.value.errno == errno.ENOSPC


def test_populate_changes_nothing(tmp_path: Path) -> None:
    memory = SharedMemory.create(str(tmp_path / "memory"), (40 << 20) + 5)
    data = np.frombuffer(memoryview(memory), np.uint8)
    data[:] = 9
    memory.populate(threads=3)
    assert (data == 9).all()
    with pytest.raises(ValueError):
        memory.populate(threads=0)
    assert memory.lock() in (True, False)


def test_forked_child_holds_nothing_of_ours(tmp_path: Path) -> None:
    memory = SharedMemory.create(str(tmp_path / "memory"), 8 << 20)
    source = np.arange(8 << 20, dtype=np.uint8)
    address, nbytes, offset = (np.array([x], np.uint64) for x in (source.ctypes.data, source.size, 0))
    features = _native.cpu_features()
    _native.select_cpu_path("scalar")
    jobs = [_native.gather(address, nbytes, offset, memory, source.size)]  # in flight while we fork
    assert _native.pool_threads() > 0

    def refused(use: Callable[[], object]) -> bool:
        try:
            use()
        except (RuntimeError, BufferError):
            return True
        return False

    def child() -> bool:
        if _native.pool_threads() != 0 or len(os.listdir("/proc/self/task")) != 1:
            return False
        if str(tmp_path / "memory") in Path("/proc/self/maps").read_text():
            return False
        if not refused(lambda: memory.address) or not refused(lambda: bytes(memory)):
            return False
        if not jobs[0].done() and not refused(lambda: jobs[0].wait(60)):
            return False
        jobs.clear()  # must not wait for threads that are not here
        own = SharedMemory.open(str(tmp_path / "memory"), writable=True)
        mine = _native.gather(address, nbytes, offset, own, source.size)
        return mine.wait(60) and _native.crc32c(own) == _native.crc32c(source)

    try:
        in_child(child)
    finally:
        _native.select_cpu_path(str(features["path"]))
    assert jobs[0].wait(60)
    assert bytes(memory) == source.tobytes()


def test_exit_with_a_job_in_flight(tmp_path: Path) -> None:
    """An interpreter that ends while a copy runs ends cleanly."""
    code = """
import sys, numpy as np
from memckpt import _native
memory = _native.SharedMemory.create(sys.argv[1], 64 << 20)
source = np.zeros(64 << 20, np.uint8)
one = lambda x: np.array([x], np.uint64)
job = _native.gather(one(source.ctypes.data), one(source.size), one(0), memory, source.size, keep=source)
"""
    env = {**os.environ, "MEMCKPT_CPU": "scalar"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "memory")], env=env, check=True, timeout=60)
