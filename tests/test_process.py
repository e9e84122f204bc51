"""Identity, lock files, fencing and killing, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from memckpt.errors import ForeignMemory, RunInUse
from memckpt.format.seal import Generation
from memckpt.memory import fence, lock, process

OLD, NEW = Generation(1, "0" * 16), Generation(2, "1" * 16)

HOLDER = """
import os, sys, time
from memckpt.memory import lock, process
from memckpt.format.seal import Generation
directory, counter, beats, fork = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4] == "1"
held = lock.take(directory, process.describe(run="r", job="", node="n", generation=Generation(counter, "0" * 16)))
child = os.fork() if fork else -1
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
while True:
    if beats:
        held.beat()
    time.sleep(0.02)
"""

Start = Callable[..., tuple["subprocess.Popen[str]", int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[str]] = []
    forked: list[int] = []

    def begin(
        *, counter: int = 1, beats: bool = True, fork: bool = False, env: dict[str, str] | None = None
    ) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), str(counter), str(int(beats)), str(int(fork))]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
        children.append(child)
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        if pid > 0:
            forked.append(pid)
        return child, pid

    yield begin
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    for pid in forked:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def own(rank: int = -1, generation: Generation | None = None) -> process.ProcessInfo:
    return process.describe(run="r", job="", node="n", rank=rank, generation=generation)


def test_identity_is_pid_and_start_time() -> None:
    pid, started = process.identity()
    assert pid == os.getpid()
    assert process.alive(pid, started)
    assert not process.alive(pid, started + 1)
    assert process.start_time(2**22 + 1) is None


def test_a_corpse_that_nobody_reaped_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while process.start_time(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.start_time(child.pid) is None
    child.wait()


def test_lock_says_who_holds_it(tmp_path: Path) -> None:
    held = lock.take(str(tmp_path), own(rank=3, generation=OLD))
    pid, started = process.identity()
    assert os.path.basename(held.path) == f"{pid}-{started}-3.lock"
    status = os.stat(held.path)
    assert status.st_mode & 0o7777 == 0o600
    assert status.st_size == lock.LOCK_NBYTES
    says = json.loads(Path(held.path).read_bytes()[:-8])
    # (That read dropped the record lock of this process: exactly why the module never does it.)
    assert (says["run"], says["pid"], says["start_time"], says["rank"], says["generation"]) == ("r", pid, started, 3, 1)
    held.update(NEW)
    assert lock.holders(str(tmp_path))[0].info == msgspec.structs.replace(
        own(rank=3), generation=2, generation_id="1" * 16
    )
    held.release()
    held.release()
    held.beat()
    assert os.listdir(tmp_path) == []
    assert not held.held


def test_one_lock_for_each_rank_of_a_process(tmp_path: Path) -> None:
    locks = [lock.take(str(tmp_path), own(rank=rank)) for rank in range(3)]
    with pytest.raises(RunInUse) as caught:
        lock.take(str(tmp_path), own(rank=1))
    assert caught.value.pid == os.getpid()
    assert lock.holds(str(tmp_path))
    assert len(lock.own_locks(str(tmp_path))) == 3
    for held in locks:
        held.release()
    assert not lock.holds(str(tmp_path))


def test_lock_is_seen_by_another_process_and_gone_with_its_holder(tmp_path: Path, start: Start) -> None:
    child, _ = start()
    (holder,) = lock.holders(str(tmp_path))
    assert holder.held
    assert holder.pid == child.pid
    assert holder.info is not None
    assert holder.info.identity == (child.pid, process.start_time(child.pid))
    assert holder.info.generation == 1
    child.kill()
    child.wait()
    (holder,) = lock.holders(str(tmp_path))
    assert not holder.held
    assert holder.pid == 0
    lock.remove_dead(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_live_forked_child_does_not_keep_the_lock(tmp_path: Path, start: Start) -> None:
    child, forked = start(fork=True)
    assert not [fd for fd in Path(f"/proc/{forked}/fd").iterdir() if str(os.readlink(fd)).endswith(".lock")]
    child.kill()
    child.wait()
    assert process.start_time(forked) is not None
    assert [h.held for h in lock.holders(str(tmp_path))] == [False]


def test_fork_leaves_the_parent_its_lock(tmp_path: Path) -> None:
    held = lock.take(str(tmp_path), own())
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not lock.holds(str(tmp_path)) and not held.held else 1)
    assert os.waitpid(pid, 0)[1] == 0
    code = "import sys; from memckpt.memory import lock; sys.exit(not lock.holders(sys.argv[1])[0].held)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
    held.release()


def test_threads_may_take_and_look_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            for _ in range(20):
                held = lock.take(str(tmp_path), own(rank=rank))
                lock.remove_dead(str(tmp_path))
                assert any(h.held and h.info is not None and h.info.rank == rank for h in lock.holders(str(tmp_path)))
                assert os.path.exists(held.path)
                held.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["mode", "link", "directory"])
def test_a_lock_file_that_is_not_ours_is_refused_and_left(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "1-2.lock"
    if damage == "directory":
        path.mkdir()
    elif damage == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.touch()
        path.chmod(0o644)
    with pytest.raises(ForeignMemory):
        lock.holders(str(tmp_path))
    assert os.path.lexists(path)


def test_lock_file_with_nonsense_in_it_is_dead_or_unknown_never_trusted(tmp_path: Path) -> None:
    path = tmp_path / "77-88.lock"
    for text in (b"", b"{}", b"\xff" * 4096, b"x" * 10000):
        path.write_bytes(text)
        path.chmod(0o600)
        (holder,) = lock.holders(str(tmp_path))
        assert holder.info is None
        assert not holder.held
    assert fence.fence_past(str(tmp_path), own(), (), NEW, 1.0) == []
    assert not path.exists()


# --- beats ------------------------------------------------------------------------------------------------------------


def test_beats_are_seen_and_stop_with_sigstop(tmp_path: Path, start: Start) -> None:
    child, _ = start()
    first = lock.holders(str(tmp_path))[0].beat_ns
    time.sleep(0.2)
    assert lock.holders(str(tmp_path))[0].beat_ns > first
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.1)
    stopped = lock.holders(str(tmp_path))[0]
    time.sleep(0.1)
    assert lock.holders(str(tmp_path))[0].beat_ns == stopped.beat_ns
    assert stopped.held
    assert process.stopped(child.pid)


def test_own_standstill_is_noticed(tmp_path: Path) -> None:
    held = lock.take(str(tmp_path), own())
    held.beat()
    assert not held.was_paused(1.0)
    held._last_ns -= 3_000_000_000
    assert held.was_paused(1.0)
    held.beat()
    held.beat()
    assert held.was_paused(1.0)
    assert not held.was_paused(10.0)
    held.release()


# --- killing ----------------------------------------------------------------------------------------------------------


def info_of(directory: Path) -> process.ProcessInfo:
    (holder,) = lock.holders(str(directory))
    assert holder.info is not None
    return holder.info


@pytest.mark.parametrize(
    "other", [{"run": "s"}, {"job": "j"}, {"uid": 12345}, {"pidns": 1}, {"start_time": 1}], ids=lambda d: next(iter(d))
)
def test_kill_refuses_what_is_not_ours(tmp_path: Path, start: Start, other: dict[str, object]) -> None:
    child, _ = start()
    info = msgspec.structs.replace(info_of(tmp_path), **other)
    gone = process.kill_if_ours(info, run="r", job="", deadline_s=1.0)
    # Another start time means that the process meant is gone and its pid is somebody else's now.
    assert gone is ("start_time" in other)
    assert child.poll() is None


def test_kill_ends_a_stopped_process_and_its_lock(tmp_path: Path, start: Start) -> None:
    child, _ = start()
    info = info_of(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    assert process.kill_if_ours(info, run="r", job="", deadline_s=5.0)
    assert [h.held for h in lock.holders(str(tmp_path))] == [False]
    assert child.wait() == -signal.SIGKILL
    assert process.kill_if_ours(info, run="r", job="", deadline_s=5.0)


def test_kill_spares_itself() -> None:
    assert not process.kill_if_ours(own(), run="r", job="", deadline_s=0.1)


# --- fencing ----------------------------------------------------------------------------------------------------------


def test_members_and_the_dead_do_not_stop_anybody(tmp_path: Path, start: Start) -> None:
    dead, _ = start()
    dead.kill()
    dead.wait()
    member, _ = start()
    identity = (member.pid, process.start_time(member.pid) or 0)
    assert fence.fence_past(str(tmp_path), own(), {identity}, NEW, 1.0) == []
    assert [h.pid for h in lock.holders(str(tmp_path))] == [member.pid]


def test_a_live_job_of_the_same_name_is_an_error_with_its_pid(tmp_path: Path, start: Start) -> None:
    child, _ = start()
    with pytest.raises(RunInUse, match="alive") as caught:
        fence.fence_past(str(tmp_path), own(), (), NEW, 0.4)
    assert caught.value.pid == child.pid
    assert child.poll() is None


def test_a_silent_holder_of_an_older_generation_is_ended(tmp_path: Path, start: Start) -> None:
    child, _ = start(beats=False)
    ended = fence.fence_past(str(tmp_path), own(), (), NEW, 1.0)
    assert [i.pid for i in ended] == [child.pid]
    assert child.wait() == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_what_this_launch_left_behind_is_ended_even_while_it_beats(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, _ = start(env={"PMIX_NAMESPACE": "job-1", "PMIX_RANK": "0"})
    monkeypatch.setenv("PMIX_NAMESPACE", "job-1")
    monkeypatch.setenv("PMIX_RANK", "1")
    began = time.monotonic()
    assert [i.pid for i in fence.fence_past(str(tmp_path), own(), (), NEW, 60.0)] == [child.pid]
    assert time.monotonic() - began < 50, "it was waited for"


def test_a_stopped_one_of_this_launch_is_ended_at_once(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, _ = start(env={"PMIX_NAMESPACE": "job-1", "PMIX_RANK": "0"})
    monkeypatch.setenv("PMIX_NAMESPACE", "job-1")
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert [i.pid for i in fence.fence_past(str(tmp_path), own(), (), NEW, 60.0)] == [child.pid]
    assert time.monotonic() - began < 50, "it was waited for"


def test_one_whose_launcher_is_gone_is_ended(tmp_path: Path, start: Start) -> None:
    child, _ = start()
    info = msgspec.structs.replace(info_of(tmp_path), launch="job-1", launcher_pid=2**22 + 1, launcher_start=5)
    text = msgspec.json.encode(info)
    with open(lock.holders(str(tmp_path))[0].path, "r+b") as file:
        file.write(text.ljust(len(text) + 1))
    assert [i.pid for i in fence.fence_past(str(tmp_path), own(), (), NEW, 1.0)] == [child.pid]


def test_a_later_generation_is_never_ended(tmp_path: Path, start: Start) -> None:
    child, _ = start(counter=9, beats=False)
    with pytest.raises(RunInUse, match="later generation"):
        fence.fence_past(str(tmp_path), own(), (), NEW, 0.3)
    assert child.poll() is None
    assert [i.pid for i in fence.fence_past(str(tmp_path), own(), (), None, 0.5)] == [child.pid]


def test_a_holder_that_leaves_in_time_is_waited_for(tmp_path: Path, start: Start) -> None:
    child, _ = start()
    threading.Timer(0.3, child.kill).start()
    assert fence.fence_past(str(tmp_path), own(), (), NEW, 10.0) == []


def test_scratch_files_of_the_dead_are_removed_and_of_the_living_kept(tmp_path: Path) -> None:
    dead, mine = tmp_path / ".tmp-4194305-7-aa-x", tmp_path / process.scratch_name("x")
    odd = tmp_path / ".tmp-odd"
    for path in (dead, mine, odd):
        path.touch()
    process.remove_scratch(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([mine.name, odd.name])


def test_launcher_is_the_parent_or_an_ancestor_of_that_name() -> None:
    assert process.find_launcher({}) == (0, 0)
    pid, started = process.find_launcher({"TORCHELASTIC_RUN_ID": "x"})
    assert pid > 0
    assert process.start_time(pid) == started
