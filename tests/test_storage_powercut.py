"""A power cut after any system call, with any part of what was not flushed lost: a complete checkpoint is left."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from memckpt import _native
from memckpt.errors import CorruptSnapshot
from memckpt.storage import posix
from memckpt.storage.base import Part
from memckpt.storage.checkpoints import prune, scan, shards_there, write_marker, write_shard
from memckpt.storage.marker import make
from memckpt.storage.posix import PosixStorage
from memckpt.storage.reading import verify
from tests.powercut import Disk, lay_out
from tests.test_storage_checkpoints import FIRST, NBYTES, content, save, seal_of, write


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    (tmp_path / "disk").mkdir()
    made = Disk(tmp_path / "disk")
    monkeypatch.setattr(posix, "os", made)
    return made


class Judge:
    """Looks at everything that a power cut could leave at this moment, once each."""

    def __init__(self, disk: Disk, target: Path) -> None:
        self.disk, self.target = disk, target
        self.seen: set[tuple[tuple[str, bytes | None], ...]] = set()
        self.wanted = self.judged = 0
        self.problems: list[str] = []

    def __call__(self) -> None:
        self.disk.after = lambda: None
        for tree in self.disk.leftovers():
            key = tuple(sorted(tree.items()))
            if key in self.seen:
                continue
            self.seen.add(key)
            self.judged += 1
            lay_out(tree, self.target)
            left = PosixStorage(str(self.target / "ckpts"))
            complete = [s for s in scan(left, "gpt") if s.complete]
            damaged = [s.step for s in complete if verify(left, s, threads=1)]
            steps = [s.step for s in complete]
            if damaged:
                self.problems.append(f"after {self.disk.calls[-1]}: {damaged} are called complete and are not")
            elif max(steps, default=0) < self.wanted:
                self.problems.append(f"after {self.disk.calls[-1]}: only {steps} of {self.wanted} are left")
            shutil.rmtree(self.target)
        self.disk.after = self


def train(disk: Disk, judge: Judge) -> None:
    """Three saves, the newest one kept; after each of them it is what must be found."""
    storage = PosixStorage(f"{disk.base}/ckpts")
    disk.after = judge
    for step in (1, 2, 3):
        save(storage, step)
        judge.seen.clear()  # what was good enough before need not be now
        judge.wanted = step
        judge()
        if judge.problems:
            return
        prune(storage, [s for s in scan(storage, "gpt") if s.step < step], running=FIRST.id)


def test_a_power_cut_at_any_moment_leaves_a_complete_checkpoint(disk: Disk, tmp_path: Path) -> None:
    judge = Judge(disk, tmp_path / "left")
    train(disk, judge)
    assert judge.problems == []
    assert len(disk.calls) > 80
    assert judge.judged > 100, "different states of the disk"
    assert [s.step for s in scan(PosixStorage(f"{disk.base}/ckpts"), "gpt")] == [3]


@pytest.mark.parametrize("lazy", ["file", "directory"])
def test_a_disk_that_does_not_flush_is_caught(disk: Disk, tmp_path: Path, lazy: str) -> None:
    """The proof that the test above can fail."""
    disk.lazy = {lazy}
    judge = Judge(disk, tmp_path / "left")
    train(disk, judge)
    assert judge.problems


def test_pruning_before_the_marker_is_durable_is_caught(disk: Disk, tmp_path: Path) -> None:
    judge = Judge(disk, tmp_path / "left")
    storage = PosixStorage(f"{disk.base}/ckpts")
    disk.after = judge
    save(storage, 1)
    judge.wanted = 1
    marker = write(storage, 2)
    prune(storage, scan(storage, "gpt")[:1])
    write_marker(storage, "gpt", marker)
    assert any("only [] of 1" in problem for problem in judge.problems)


def test_a_rank_that_died_before_its_last_flush_is_covered_by_the_marker(disk: Disk, tmp_path: Path) -> None:
    """Rank 0 sees names that their writer has not made durable; flushing their directory is the marker's affair too."""
    judge = Judge(disk, tmp_path / "left")
    storage = PosixStorage(f"{disk.base}/ckpts")
    save(storage, 1)
    seals = [seal_of(content(shard, 2), shard, 2) for shard in (0, 1)]
    write_shard(storage, "gpt", seals[0], content(0, 2))

    def die(number: int, call: str, path: str) -> None:
        if call == "fsync" and Path(path).is_dir():
            raise InterruptedError

    disk.before = die
    with pytest.raises(InterruptedError):
        write_shard(storage, "gpt", seals[1], content(1, 2))
    disk.before = lambda number, call, path: None
    disk.after, judge.wanted = judge, 1
    found = shards_there(storage, seals[0])
    write_marker(storage, "gpt", make(seals[0], [found[0], found[1]]))
    judge.wanted = 2
    judge.seen.clear()
    judge()
    prune(storage, scan(storage, "gpt")[:1])
    assert judge.problems == []
    assert judge.judged > 20


def test_the_order_of_one_checkpoint(disk: Disk) -> None:
    storage = PosixStorage(f"{disk.base}/ckpts")
    marker = write(storage, 1, world=1)
    directory = f"step-000000001-{FIRST.id}"
    shown = [
        (call, name.partition("rank-00000.")[2] if name.startswith(".tmp-") else name) for call, name in disk.calls
    ]
    assert shown == [
        ("mkdir", "ckpts"), ("mkdir", "gpt"), ("mkdir", directory),
        ("create", "safetensors"), ("write", "safetensors"), ("fsync", "safetensors"),
        ("create", "seal.json"), ("write", "seal.json"), ("fsync", "seal.json"),
        ("rename", "rank-00000.safetensors"), ("rename", "rank-00000.seal.json"),
        ("fsync", directory), ("fsync", "gpt"), ("fsync", "ckpts"), ("fsync", "disk"),
    ]  # fmt: skip
    disk.calls.clear()
    write_marker(storage, "gpt", marker)
    assert [call for call, _ in disk.calls] == ["create", "write", "fsync", "rename", "fsync", "fsync", "fsync"]
    assert [name for call, name in disk.calls[3:]] == ["checkpoint.json", directory, "gpt", "ckpts"]
    disk.calls.clear()
    prune(storage, scan(storage, "gpt"))
    first, second = sorted(["rank-00000.safetensors", "rank-00000.seal.json"])
    assert disk.calls == [
        ("unlink", "checkpoint.json"), ("fsync", directory),
        ("unlink", first), ("unlink", second), ("fsync", directory), ("rmdir", directory),
    ]  # fmt: skip


def test_one_pass_over_the_bytes(disk: Disk) -> None:
    sizes: list[int] = []
    real = disk.write

    def write_(fd: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(fd, data)

    disk.write = write_  # type: ignore[method-assign]
    write(PosixStorage(f"{disk.base}/ckpts"), 1, world=1)
    assert sizes[0] == NBYTES
    assert len(sizes) == 2, "the data in one piece, and the seal"


def test_a_write_that_comes_up_short_goes_on(disk: Disk) -> None:
    real = disk.write
    disk.write = lambda fd, data: real(fd, data[: max(1, len(data) // 3)])  # type: ignore[method-assign]
    storage = PosixStorage(f"{disk.base}/ckpts")
    save(storage, 1)
    assert verify(storage, scan(storage, "gpt")[0]) == []


CODES = [errno.ENOSPC, errno.EDQUOT, errno.EIO]


@pytest.mark.parametrize("code", CODES, ids=[errno.errorcode[code] for code in CODES])
def test_any_call_may_fail(disk: Disk, code: int) -> None:
    """Each system call of a save in turn: the error is told, nothing half written stays, and the next save works."""
    storage = PosixStorage(f"{disk.base}/ckpts")
    save(storage, 1)
    step = 2
    while True:
        begin = len(disk.calls)
        hit: list[str] = []

        def fail(number: int, call: str, path: str, at: int = begin + step - 2, hit: list[str] = hit) -> None:
            if number == at and not hit:
                hit.append(path)
                raise OSError(code, "injected") if call in ("write", "fsync") else OSError(code, "injected", path)

        disk.before = fail
        try:
            save(storage, step)
        except OSError as raised:
            told = (raised.errno, raised.filename)
        else:
            break
        finally:
            disk.before = lambda number, call, path: None
        assert told == (code, hit[0])
        assert not [e for e in storage.entries() if "/.tmp-" in e.path], disk.calls[begin:]
        older = scan(storage, "gpt")[-2 if scan(storage, "gpt")[-1].step == step else -1]
        assert older.step == step - 1
        assert verify(storage, older) == []
        try:
            save(storage, step)  # the same step again
        except FileExistsError:
            # Only the flush of a directory failed, after the marker had its name: it is there, though not for sure.
            assert hit[0].rpartition("/")[2] in (f"step-{step:09d}-{FIRST.id}", "gpt", "ckpts")
        newest = scan(storage, "gpt")[-1]
        assert (newest.step, newest.complete) == (step, True)
        assert verify(storage, newest) == []
        prune(storage, scan(storage, "gpt")[:-1])
        step += 1
    assert not hit
    assert step > 24, "one save for every call that one makes"


def test_an_error_lets_go_of_the_memory(disk: Disk, tmp_path: Path) -> None:
    slot = _native.SharedMemory.create(str(tmp_path / "slot"), NBYTES)
    memoryview(slot)[:] = content(0, 1)

    def fail(number: int, call: str, path: str) -> None:
        if call == "write":
            raise OSError(errno.ENOSPC, "injected")

    disk.before = fail
    with pytest.raises(OSError) as caught:
        write_shard(PosixStorage(f"{disk.base}/ckpts"), "gpt", seal_of(content(0, 1), 0, 1), slot)
    slot.close()  # BufferError if a frame of the traceback still had a view of it
    assert caught.traceback


def test_flushing_a_directory_may_be_unknown(disk: Disk) -> None:
    def refuse(number: int, call: str, path: str) -> None:
        if call == "fsync" and Path(path).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    disk.before = refuse
    storage = PosixStorage(f"{disk.base}/ckpts")
    save(storage, 1)
    assert verify(storage, scan(storage, "gpt")[0]) == []


def test_what_pieces_raise_passes_through_and_leaves_nothing(disk: Disk) -> None:
    storage = PosixStorage(f"{disk.base}/ckpts")

    def pieces() -> object:
        yield b"12345"
        raise CorruptSnapshot("found on the way")

    with pytest.raises(CorruptSnapshot, match="on the way"):
        storage.put([Part("a/x", 3, [b"abc"]), Part("a/y", 10, pieces())])  # type: ignore[arg-type]
    assert storage.entries() == [("a/", 0)]
