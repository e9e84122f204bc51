"""The run's memory on a node: identity, what is refused, slots and seals, what a killed process leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memckpt.errors import BudgetError, Closed, ForeignMemory, RunInUse, UsageError
from memckpt.format.seal import Generation, Seal
from memckpt.memory.arena import Arena

GENERATION = Generation(1, "0123456789abcdef")
LAYOUT = "ab" * 16


def header(run: str = "r", shard: int = 0, layout: str = LAYOUT, step: int = 1) -> bytes:
    says = json.dumps({"format": 1, "run": run, "shard": shard, "world": 1, "layout": layout})
    metadata = {"memckpt": says, "memckpt.step": str(step), "memckpt.plain": "{}"}
    text = json.dumps({"__metadata__": metadata}).encode().ljust(4096 - 8)
    return len(text).to_bytes(8, "little") + text


def seal_of(nbytes: int, *, run: str = "r", job: str = "", shard: int = 0, step: int = 1) -> Seal:
    return Seal(
        run=run, job=job, shard=shard, world=1, generation=GENERATION, base=None, step=step, layout=LAYOUT,
        nbytes=nbytes, chunk_nbytes=4 << 20, crcs=[0] * (-(-nbytes // (4 << 20))), created=1.0,
    )  # fmt: skip


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMCKPT_SHM", str(tmp_path))
    monkeypatch.setenv("MEMCKPT_NODE", "node0")
    monkeypatch.delenv("MEMCKPT_JOB", raising=False)
    return tmp_path


@pytest.fixture
def arena(base: Path) -> Iterator[Arena]:
    opened = Arena.open("r")
    held = opened.lock()
    yield opened
    held.release()


def fill(arena: Arena, nbytes: int = 10000, *, step: int = 1, **seal: object) -> str:
    with arena.create_slot(nbytes, populate=False) as slot:
        head = header(step=step)
        memoryview(slot.memory)[: len(head)] = head
        slot.seal(seal_of(nbytes, step=step, **seal))  # type: ignore[arg-type]
    return slot.name


# --- where it lies, and whose it is -----------------------------------------------------------------------------------


def test_directory_is_ours_alone(base: Path) -> None:
    old = os.umask(0)
    try:
        arena = Arena.open("gpt")
    finally:
        os.umask(old)
    assert arena.path == base / f"memckpt-{os.getuid()}" / "node0" / "gpt"
    for path in (arena.path, arena.path.parent, arena.path.parent.parent, arena.path / "procs"):
        assert path.stat().st_mode & 0o7777 == 0o700
    assert (arena.path / "run.json").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\0b", "a@b", "a\nb", "x" * 101, "ü" * 51])
def test_names_that_cannot_be_a_directory_are_refused(base: Path, name: str) -> None:
    with pytest.raises(UsageError):
        Arena.open(name)
    with pytest.raises(UsageError):
        Arena.open("r", node=name.replace("@", "/") or "/")
    assert os.listdir(base) == []


def test_base_that_is_no_directory_or_open_to_others(base: Path) -> None:
    with pytest.raises(UsageError, match="MEMCKPT_SHM"):
        Arena.open("r", base=str(base / "none"))
    shared = base / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ForeignMemory, match="sticky"):
        Arena.open("r", base=str(shared))
    shared.chmod(0o1777)
    Arena.open("r", base=str(shared))


def test_another_job_sees_nothing_and_the_same_job_finds_its_copy(base: Path) -> None:  # C07 a, b, d
    first, second = Arena.open("r", job="1"), Arena.open("r", job="2")
    with pytest.raises(FileNotFoundError):
        Arena.open("r", job="3", create=False)
    held = [first.lock(), second.lock()]  # both live at once
    slot = fill(first, job="1")
    assert second.inventory() == []
    assert Arena.open("r").inventory() == []
    (found,) = Arena.open("r", job="1", create=False).inventory()
    assert found.slot == slot
    assert found.reason is None
    assert found.seal is not None
    assert found.seal.job == "1"
    for lock in held:
        lock.release()


def test_job_comes_from_the_environment(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_JOB", "77")
    assert Arena.open("r").path.name == "r@77"


def test_ranks_that_start_together_agree_on_one_directory(base: Path) -> None:
    code = "from memckpt.memory.arena import Arena; a = Arena.open('r'); a.lock().release(); print(a.path)"
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({child.communicate()[0] for child in children}) == 1
    assert [child.returncode for child in children] == [0] * 4


# --- foreign memory (C07 e) -------------------------------------------------------------------------------------------


def snapshot_of(path: Path) -> list[tuple[str, int, int, int]]:
    return sorted((str(p), p.lstat().st_mode, p.lstat().st_uid, p.lstat().st_size) for p in path.rglob("*"))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["mode", "uid", "link", "file"])
def test_a_component_that_is_not_ours_is_refused_and_left(base: Path, depth: int, what: str) -> None:
    if what == "uid" and os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    path = base / f"memckpt-{os.getuid()}" / "node0" / "r" / "procs"
    target = [path.parent.parent.parent, path.parent.parent, path.parent, path][depth]
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if what == "file":
        target.touch(mode=0o600)
    elif what == "link":
        (base / "elsewhere").mkdir(mode=0o700)
        target.symlink_to(base / "elsewhere")
    else:
        target.mkdir(mode=0o700)
        if what == "uid":
            os.chown(target, 12345, 0)
        else:
            target.chmod(0o750)
    for parent in target.parents:
        if parent == base:
            break
        parent.chmod(0o700)
    before = snapshot_of(base)
    with pytest.raises(ForeignMemory) as caught:
        Arena.open("r")
    assert caught.value.path == str(target)
    after = [row for row in snapshot_of(base) if not row[0].endswith("run.json")]
    assert [row for row in before if row in after] == before


def test_identity_of_another_run_or_uid_is_refused(base: Path) -> None:
    path = Arena.open("r").path / "run.json"
    good = json.loads(path.read_bytes())
    for change in ({"uid": 12345}, {"run": "s"}, {"job": "9"}, {"node": "node1"}):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(ForeignMemory, match=r"run\.json"):
            Arena.open("r")
    for text in ("", "{", "[]", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ForeignMemory, match=r"run\.json"):
            Arena.open("r")
        assert path.read_bytes() == text.encode("latin-1")
    path.chmod(0)
    with pytest.raises(ForeignMemory, match="0000"):
        Arena.open("r")


@pytest.mark.parametrize("what", ["mode", "uid", "link"])
def test_a_foreign_slot_is_told_not_used_and_not_removed(arena: Arena, what: str) -> None:
    name = fill(arena)
    path = arena.path / f"{name}.safetensors"
    if what == "mode":
        path.chmod(0)
    elif what == "uid":
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, 12345)
    else:
        path.rename(arena.path.parent / "moved")
        path.symlink_to(arena.path.parent / "moved")
    (found,) = arena.inventory()
    assert found.seal is None
    assert found.reason is not None
    assert found.reason.startswith("foreign")
    for writable in (False, True):
        with pytest.raises(ForeignMemory):
            arena.open_slot(name, writable=writable)
    with pytest.raises(ForeignMemory):
        arena.remove_slot(name)
    with pytest.raises(ForeignMemory):
        arena.remove_all()
    assert os.path.lexists(path)
    assert (arena.path / "run.json").exists()


def test_slots_without_an_identity_are_refused(arena: Arena) -> None:
    fill(arena)
    (arena.path / "run.json").unlink()
    with pytest.raises(ForeignMemory, match=r"run\.json"):
        Arena.open("r")
    assert len(list(arena.path.glob("s-*"))) == 2


# --- slots and seals --------------------------------------------------------------------------------------------------


def test_a_slot_is_no_snapshot_before_it_is_sealed_and_after_it_is_unsealed(arena: Arena) -> None:
    with arena.create_slot(5000) as slot:
        assert slot.nbytes == 5000
        assert slot.populate_s > 0
        memoryview(slot.memory)[: len(header())] = header(step=7)
        assert [f.reason for f in arena.inventory()] == ["no seal"]
        assert slot.read_seal() is None
        slot.seal(seal_of(5000, step=7))
        (found,) = arena.inventory()
        assert found.seal == slot.read_seal()
        assert found.seal is not None
        assert found.seal.step == 7
        slot.unseal()
        slot.unseal()
        assert arena.inventory()[0].seal is None
    assert sorted(p.name for p in arena.path.iterdir()) == ["procs", "run.json", f"{slot.name}.safetensors"]
    with pytest.raises(Closed):
        slot.seal(seal_of(5000))
    assert (arena.path / f"{slot.name}.safetensors").stat().st_mode & 0o7777 == 0o600


def test_bytes_are_found_again(arena: Arena) -> None:
    with arena.create_slot(3 << 20) as slot:
        memoryview(slot.memory)[:] = bytes(range(256)) * (3 << 12)
    with arena.open_slot(slot.name, writable=False) as again:
        assert bytes(memoryview(again.memory)) == bytes(range(256)) * (3 << 12)
        with pytest.raises(UsageError):
            again.unseal()


def test_nothing_is_written_without_the_lock(base: Path) -> None:
    arena = Arena.open("r")
    held = arena.lock()
    slot = arena.create_slot(4096)
    held.release()
    for write in (
        lambda: arena.create_slot(4096),
        lambda: arena.open_slot(slot.name, writable=True),
        lambda: arena.remove_slot(slot.name),
        lambda: slot.seal(seal_of(4096)),
        slot.unseal,
        arena.mark_finished,
    ):
        with pytest.raises(UsageError, match="lock"):
            write()
    arena.open_slot(slot.name, writable=False).close()
    slot.close()


@pytest.mark.parametrize(
    "name", ["", "x", "s-123", "../s-0123456789abcdef", "s-0123456789abcdeg", "s-0123456789ABCDEF"]
)
def test_only_a_slots_name_is_one(arena: Arena, name: str) -> None:
    with pytest.raises(UsageError):
        arena.open_slot(name, writable=False)


def test_remove_is_seal_first_and_idempotent(arena: Arena) -> None:
    name = fill(arena)
    arena.remove_slot(name)
    arena.remove_slot(name)
    assert arena.inventory() == []
    assert arena.find(name) is None
    with pytest.raises(FileNotFoundError):
        arena.open_slot(name, writable=False)


def test_hostile_and_broken_files_are_reported_never_believed(arena: Arena) -> None:
    def broken(change: object, *, file: str = "seal.json") -> str | None:
        name = fill(arena)
        path = arena.path / f"{name}.{file}"
        path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
        found = arena.find(name)
        arena.remove_slot(name)
        assert found is not None
        assert found.seal is None
        return found.reason

    for change in (
        lambda b: b"",
        lambda b: b[:-5],
        lambda b: b"[" * 100000,
        lambda b: b"null",
        lambda b: bytes(1000),
        lambda b: b.replace(b'"step":1', b'"step":2'),
        lambda b: b.replace(b'"shard":0', b'"shard":1'),
    ):
        assert broken(change)
    for change in (
        lambda b: b[:9000],
        lambda b: b"",
        lambda b: b"\xff" * len(b),
        lambda b: bytes(len(b)),
        lambda b: (1 << 40).to_bytes(8, "little") + b[8:],
        lambda b: b.replace(b'shard\\": 0', b'shard\\": 1'),
        lambda b: b.replace(b'run\\": \\"r', b'run\\": \\"x'),
        lambda b: b.replace(b'world\\": 1', b'world\\": 2'),
        lambda b: b.replace(b'step": "1', b'step": "2'),
        lambda b: b.replace(b'step": "1', b'step": "-'),
        lambda b: b.replace(b"abab", b"baba"),
        lambda b: b.replace(b'{"__', b'["__'),
    ):
        assert broken(change, file="safetensors")


def test_a_seal_of_another_run_or_job_is_no_snapshot_here(arena: Arena) -> None:
    for other in ({"run": "s"}, {"job": "9"}):
        name = fill(arena, **other)
        found = arena.find(name)
        assert found is not None
        assert found.seal is None
        assert "its seal is of run" in (found.reason or "")


def test_a_seal_without_its_slot_is_reported_and_removable(arena: Arena) -> None:
    name = fill(arena)
    (arena.path / f"{name}.safetensors").unlink()
    (found,) = arena.inventory()
    assert found.reason == "a seal without a slot"
    assert found.nbytes == 0
    arena.remove_slot(name)
    assert arena.inventory() == []


def test_reading_survives_slots_that_come_and_go(arena: Arena) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            arena.remove_slot(fill(arena))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            for found in arena.inventory():
                assert found.reason is None or found.seal is None
    finally:
        stop.set()
        thread.join()


# --- too little room (C39) --------------------------------------------------------------------------------------------


def test_too_small_a_file_system_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir(mode=0o700)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        arena = Arena.open("r", base=str(mount), node="n")
        held = arena.lock()
        before = sorted(p.name for p in arena.path.iterdir())
        with pytest.raises(BudgetError, match="remount,size=") as caught:
            arena.create_slot(16 << 20)
        assert caught.value.needed == 16 << 20
        assert 0 < caught.value.free <= 8 << 20
        assert sorted(p.name for p in arena.path.iterdir()) == before
        # What fits, fits; the state grown by one tensor gets the same error, and the first slot is untouched.
        name = fill(arena, 4 << 20)
        with pytest.raises(BudgetError):
            arena.create_slot(5 << 20)
        assert [f.slot for f in arena.inventory() if f.reason is None] == [name]
        arena.remove_all()
        held.release()
        arena.tidy()
        assert os.listdir(mount) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# --- processes that die -----------------------------------------------------------------------------------------------

VICTIM = """
import os, signal, sys
from memckpt.memory.arena import Arena
sys.path.insert(0, sys.argv[1])
from test_arena import fill, header, seal_of
arena = Arena.open("r")
arena.lock()
fill(arena, step=5)
torn = arena.create_slot(20000)
if sys.argv[2] == "seal":
    os.rename = lambda *a: os.kill(os.getpid(), signal.SIGKILL)  # dies with the seal half written
    torn.seal(seal_of(20000, step=6))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["copy", "seal"])
def test_memory_of_a_killed_process_is_found_whole_or_unsealed(base: Path, when: str) -> None:
    here = str(Path(__file__).parent)
    child = subprocess.run([sys.executable, "-c", VICTIM, here, when], check=False)
    assert child.returncode == -signal.SIGKILL
    arena = Arena.open("r", create=False)
    held = arena.lock(Generation(2, "f" * 16))
    assert arena.fence_past((), Generation(2, "f" * 16), 5.0) == []
    assert [i.pid for i in arena.processes()] == [os.getpid()] == arena.live_pids()
    found = arena.inventory()
    assert sorted(f.reason or "whole" for f in found) == ["no seal", "whole"]
    assert [f.seal.step for f in found if f.seal is not None] == [5]
    assert not list(arena.path.glob(".tmp-*"))
    arena.remove_all()
    held.release()
    arena.tidy()
    assert os.listdir(base) == []


HOLDER = """
import sys, time
from memckpt.memory.arena import Arena
arena = Arena.open("r")
held = arena.lock()
print(flush=True)
while True:
    held.beat()
    time.sleep(0.02)
"""


@pytest.fixture
def holder(base: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_live_run_is_not_removed_nor_taken_over(holder: subprocess.Popen[bytes]) -> None:
    arena = Arena.open("r")
    with pytest.raises(RunInUse) as caught:
        arena.remove_all()
    assert caught.value.pid == holder.pid
    held = arena.lock()
    with pytest.raises(RunInUse) as caught:
        arena.fence_past((), Generation(5, "0" * 16), 0.3)
    assert caught.value.pid == holder.pid
    assert holder.poll() is None
    held.release()


def test_members_may_remove_together_and_the_last_one_out_leaves_nothing(
    base: Path, holder: subprocess.Popen[bytes]
) -> None:
    arena = Arena.open("r")
    held = arena.lock()
    fill(arena)
    (other,) = [i for i in arena.processes() if i.pid == holder.pid]
    arena.remove_all({other.identity})
    held.release()
    arena.tidy()
    assert [p.suffix for p in base.rglob("*") if p.is_file()] == [".lock"]
    # A new job may start in that moment; it finds an empty run.
    assert Arena.open("r").inventory() == []


def test_a_stopped_process_is_frozen_and_can_be_ended(arena: Arena, holder: subprocess.Popen[bytes]) -> None:
    (mine,) = [i for i in arena.processes() if i.pid == os.getpid()]
    from memckpt.memory import lock

    (held,) = lock.own_locks(str(arena.path / "procs"))
    assert mine == held.info
    held.beat()
    assert arena.frozen(0.4) == []
    os.kill(holder.pid, signal.SIGSTOP)
    frozen: list[int] = []
    for _ in range(200):
        held.beat()
        if frozen := [i.pid for i in arena.frozen(0.4)]:
            break
        threading.Event().wait(0.02)
    assert frozen == [holder.pid]
    assert arena.kill(arena.frozen(0.4)[0], 5.0)
    held.beat()
    assert arena.frozen(0.4) == []
    assert holder.wait() == -signal.SIGKILL


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_finished_is_remembered(arena: Arena) -> None:
    assert not arena.finished
    arena.mark_finished()
    assert arena.finished
    assert Arena.open("r").finished
    arena.mark_finished(False)
    assert not Arena.open("r").finished


def test_remove_all_leaves_what_is_not_ours(arena: Arena) -> None:
    fill(arena)
    (arena.path / "notes.txt").write_text("of the user")
    arena.remove_all()
    assert sorted(p.name for p in arena.path.iterdir()) == ["notes.txt", "procs"]
