"""How a run ends: what stays, what the last step costs, and what is said where something is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memckpt
from memckpt.comm.local import LocalComm
from memckpt.memory.arena import Arena
from memckpt.storage import checkpoints, open
from tests.ranks import fake_nodes, raise_errors, run_ranks
from tests.training import Training, make, train


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shm").mkdir(mode=0o700)
    with fake_nodes(str(tmp_path / "shm")):
        yield tmp_path


def files(base: Path) -> list[Path]:
    return [f for f in (base / "shm").rglob("*") if f.is_file()]


def stored(base: Path) -> list[int]:
    return [s.step for s in checkpoints.scan(open(str(base / "ckpts")), "run") if s.complete]


# --- told to stop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("iterating", [True, False], ids=["steps", "break"])
def test_a_run_that_is_told_to_stop_goes_on_from_memory(
    base: Path, number: signal.Signals, iterating: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, lambda *_: None)  # the user's own, which still runs
    try:
        torch.manual_seed(1)
        first = Training()
        with make(first, every=1000, quiet=False) as ckpt:
            if iterating:
                for index in ckpt.steps(10):
                    first.step()
                    if index == 3:
                        os.kill(os.getpid(), number)
            else:
                ckpt.restore()
                for n in range(1, 11):
                    first.step()
                    if n == 4:
                        os.kill(os.getpid(), number)
                    ckpt.step(n)
                    if ckpt.preempted:
                        break
            assert ckpt.preempted
            stopped_at = ckpt.stats().committed_step
    finally:
        signal.signal(number, before)
    assert 4 <= stopped_at <= 6
    assert f"told to stop: step {stopped_at} of run 'run' stays in memory" in capfd.readouterr().err
    assert files(base) and not list(base.rglob("finished"))

    torch.manual_seed(77)
    second = Training(seed=5)
    with make(second) as ckpt:
        indices = []
        for index in ckpt.steps(10):
            indices.append(index)
            second.step()
    assert indices == list(range(stopped_at, 10))
    assert second.digest() == train(10)
    assert not files(base)


def test_memory_of_a_stopped_run_goes_where_that_is_wanted(base: Path) -> None:
    training = Training()
    ckpt = make(training)
    for index in ckpt.steps(10):
        training.step()
        if index == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
    assert ckpt.preempted
    ckpt.close(keep=False)
    assert not files(base)


# --- the last step ----------------------------------------------------------------------------------------------------


def test_steps_saves_and_persists_the_last_step_whatever_the_policy_says(base: Path) -> None:
    torch.manual_seed(1)
    first = Training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(first, every=1000, persist=memckpt.Persist(base / "ckpts", every="15min")) as ckpt:
            for _ in ckpt.steps(5):
                first.step()
    assert stored(base) == [1, 5]
    second = Training(seed=5)
    with make(second, persist=str(base / "ckpts")) as ckpt:
        assert ckpt.restore().step == 5
    assert second.digest(rng=False) == first.digest(rng=False)


def test_a_step_that_the_user_wants_is_saved_and_persisted(base: Path) -> None:
    training = Training()
    with make(training, every=1000, persist=memckpt.Persist(base / "ckpts", every=1000)) as ckpt:
        ckpt.restore()
        for n in range(1, 8):
            training.step()
            ckpt.step(n, {"loss": float(n)}, save=n in (2, 3, 7))
            ckpt.wait()
            assert ckpt.stats().committed_step == {1: -1, 2: 2, 7: 7}.get(n, 3)
    assert stored(base) == [2, 3, 7]
    assert ckpt.stats().persist_failed == 0
    newest = next(s for s in checkpoints.scan(open(str(base / "ckpts")), "run") if s.step == 7)
    assert newest.marker is not None and newest.marker.metrics == {"loss": 7.0}


@pytest.mark.parametrize("wanting", [{0}, {1}, {0, 1}])
def test_ranks_that_disagree_on_a_save_are_told_and_none_hangs(wanting: set[int]) -> None:
    def life(comm: LocalComm) -> str:
        training = Training(seed=comm.rank)
        ckpt = make(training, comm=comm, every=1000, deadline=20.0)
        ckpt.restore()
        try:
            for n in range(1, 4):
                training.step()
                ckpt.step(n, save=n == 2 and comm.rank in wanting)
            ckpt.close()
        except memckpt.MemckptError as error:
            ckpt.abandon()
            return str(error)
        return f"{ckpt.stats().committed_step}"

    began = time.monotonic()
    results = raise_errors(run_ranks(2, life, nodes=["a", "b"]))
    if wanting == {0, 1}:
        assert results == ["2", "2"]
    else:
        assert all("some ranks called step(2) with save=True, others without" in said for said in results), results
        assert time.monotonic() - began < 15


def test_what_is_not_in_storage_at_the_end_is_said(base: Path) -> None:
    training = Training()
    ckpt = make(training, persist=memckpt.Persist(base / "ckpts", every=2))
    ckpt.restore()
    for n in range(1, 4):
        training.step()
        ckpt.step(n)
    with pytest.warns(RuntimeWarning, match=r"ends at step 3, but the newest snapshot in .*ckpts is step 2.*save=True"):
        ckpt.close()


def test_what_is_not_in_the_memory_that_is_kept_is_said(base: Path) -> None:
    training = Training()
    ckpt = make(training, every=2)
    ckpt.restore()
    for n in range(1, 4):
        training.step()
        ckpt.step(n)
    with pytest.warns(RuntimeWarning, match="ends at step 3, but the newest snapshot in memory is step 2"):
        ckpt.close(keep=True)


def test_a_plain_end_says_nothing(base: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(Training(), every=2) as ckpt:
            ckpt.restore()
            for n in range(1, 4):
                ckpt.step(n)
    assert not files(base)


# --- somebody waits ---------------------------------------------------------------------------------------------------

WAITING = """
import sys, warnings, torch, memckpt
warnings.simplefilter("always")
memory = {"w": torch.zeros(10)}
with memckpt.Checkpointer(memory, name="run", every=1, comm=memckpt.comm.LocalComm(), deadline=60.0) as ckpt:
    print("began at", ckpt.restore().step, flush=True)
    ckpt.step(1, save=True)
    ckpt.wait()
    # Found by whoever comes next, as any run is.
    print([f.seal.step for f in memckpt.memory.arena.Arena.open("run", create=False).inventory() if f.seal])
"""


def test_a_second_job_of_that_name_says_for_whom_it_waits_and_does_not_fail_the_first(base: Path) -> None:
    environ = {**os.environ, "MEMCKPT_SHM": str(base / "shm"), "MEMCKPT_NODE": "node0"}
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    training.step()
    ckpt.step(1)
    second = subprocess.Popen(
        [sys.executable, "-c", WAITING], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    assert second.stderr is not None and second.stdout is not None
    reader = threading.Thread(target=lambda: said.extend(iter(second.stderr.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        end = time.monotonic() + 40.0
        while not any(f"held by pid {os.getpid()}" in line for line in said):
            assert second.poll() is None and time.monotonic() < end, said
            time.sleep(0.05)
        ckpt.close()
        assert second.wait(40.0) == 0, said
    finally:
        second.kill()
        second.wait()
        reader.join(10.0)
        out = second.stdout.read()
        second.stdout.close()
        second.stderr.close()
    assert out == "began at 0\n[1]\n"
    assert any("waiting, for up to 60 s" in line for line in said)
    assert not files(base)


HOLDING = """
import sys
from memckpt.format.seal import Generation
from memckpt.memory.arena import Arena
held = Arena.open("run", base=sys.argv[1], node="node0").lock(Generation(1, "ab" * 8))
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_has_entered_a_generation_is_no_one_who_waits(base: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable, "-c",
            HOLDING, str(base / "shm"),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            arena = Arena.open("run")
            held = arena.lock()
            with pytest.raises(memckpt.RunInUse) as caught:
                arena.remove_all()
            assert caught.value.pid == holder.pid
            held.release()
        finally:
            holder.kill()


# --- nothing whole is left --------------------------------------------------------------------------------------------


def spoil(paths: list[Path]) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def expect_refusal(**options: Any) -> None:
    for require in (False, True):
        ckpt = make(Training(seed=3), **options)
        with pytest.raises(
            memckpt.NothingToRestore, match=r"(?s)damaged or incomplete; fresh=True starts over.*step.*2"
        ):
            ckpt.restore(require=require)
        ckpt.abandon()
    with make(Training(seed=3), fresh=True, **options) as ckpt:
        assert ckpt.restore().step == 0


def test_damaged_memory_is_no_reason_to_start_over(base: Path) -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    for n in (1, 2):
        training.step()
        ckpt.step(n)
    ckpt.close(keep=True)
    spoil(list((base / "shm").rglob("*.safetensors")))
    expect_refusal()


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_damaged_storage_is_no_reason_to_start_over(base: Path, how: str) -> None:
    training = Training()
    with make(training, persist=memckpt.Persist(base / "ckpts", every=2)) as ckpt:
        for _ in ckpt.steps(2):
            training.step()
    shutil.rmtree(base / "shm")
    (base / "shm").mkdir(mode=0o700)
    shards = list((base / "ckpts").rglob("*.safetensors"))
    if how == "flipped":
        spoil(shards)
    else:
        for shard in shards:
            os.truncate(shard, shard.stat().st_size // 2)
    expect_refusal(persist=str(base / "ckpts"))


def test_a_save_that_never_ended_is_no_damage(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    training = Training()
    with make(training, persist=memckpt.Persist(base / "ckpts", every=2)) as ckpt:
        for _ in ckpt.steps(2):
            training.step()
    shutil.rmtree(base / "shm")
    (base / "shm").mkdir(mode=0o700)
    for marker in (base / "ckpts").rglob("checkpoint.json"):
        marker.unlink()
    with make(Training(), persist=str(base / "ckpts"), quiet=False) as ckpt:
        assert ckpt.restore().step == 0
    assert "not restored: " in (said := capfd.readouterr().err) and "no marker" in said, said
