"""Real signals to real jobs: one agreed step, complete in memory and in storage, and an exit with status 0."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memckpt.storage import checkpoints, open
from tests.mpi import harness
from tests.mpi.harness import Result, needs_mpi

pytestmark = [pytest.mark.mpi, needs_mpi, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).parent / "programs" / "preempted.py"
_serial = itertools.count()


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    base = Path("/dev/shm") / f"memckpt-test-{os.getpid()}-{next(_serial)}"
    base.mkdir()
    yield {"MEMCKPT_SHM": str(base)}
    shutil.rmtree(base)


def words(result: Result, first: str) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines() if line.startswith(first + " ")]


def complete(ckpts: Path) -> list[int]:
    return [s.step for s in checkpoints.scan(open(str(ckpts)), "stops") if s.complete]


def check(result: Result, ckpts: Path) -> int:
    """Both ranks left after the same step, which is committed, and complete in storage; that step."""
    result.check()
    left = words(result, "left")
    assert len(left) == len(words(result, "done")) == 2
    [step] = {int(line[2]) for line in left}
    assert all(line[3] == "True" and int(line[5]) == step for line in left)
    assert complete(ckpts)[-1] == step
    return step


@pytest.mark.parametrize(
    ("mode", "ranks", "numbers"),
    [
        ("plain", [1], [signal.SIGTERM]),
        ("plain", [0, 1], [signal.SIGTERM, signal.SIGTERM]),
        ("evaluate", [1], [signal.SIGUSR1]),
    ],
    ids=["rank-1-only", "all-and-twice", "evaluation-USR1"],
)
def test_one_agreed_step_is_saved_and_training_goes_on_from_it(
    env: dict[str, str], tmp_path: Path, mode: str, ranks: list[int], numbers: list[signal.Signals]
) -> None:
    job = harness.start(2, PROGRAM, str(tmp_path), mode, env=env)
    job.wait_for("running", count=2)
    for number in numbers:
        for rank in ranks:
            job.signal(rank, number)
        time.sleep(0.003)
    result = job.finish(40)
    step = check(result, tmp_path)
    saved = {line[1]: line[4] for line in words(result, "left")}
    again = harness.start(2, PROGRAM, str(tmp_path), "plain", env=env)
    again.wait_for("running", count=2)
    again.signal(0, signal.SIGTERM)
    result = again.finish(40)
    assert check(result, tmp_path) > step
    for _, rank, restored, digest in words(result, "restored"):
        assert int(restored) == step and digest == saved[rank]


def test_the_users_handlers_still_run(env: dict[str, str], tmp_path: Path) -> None:
    job = harness.start(2, PROGRAM, str(tmp_path), "handlers", env=env)
    job.wait_for("running", count=2)
    job.signal(0, signal.SIGTERM)
    job.signal(1, signal.SIGUSR1)
    result = job.finish(40)
    check(result, tmp_path)
    assert sorted(words(result, "handler")) == [["handler", "after", "1"], ["handler", "before", "0"]]


def test_workers_do_not_save_and_what_kills_them_costs_no_checkpoint(env: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM to everything of the job: torch's workers die of it, and their loss fails the training before its step.
    What was committed last is in storage all the same.
    """
    job = harness.start(2, PROGRAM, str(tmp_path), "workers", env=env)
    job.wait_for("running", count=2, timeout_s=60)
    for pid, variables in list(job._members()):
        if "OMPI_COMM_WORLD_RANK" in variables:
            os.kill(pid, signal.SIGTERM)
    result = job.finish(60)
    assert not result.timed_out
    [step] = complete(tmp_path)
    assert step >= 19


def test_past_the_grace_time_a_rank_that_is_stuck_ends(env: dict[str, str], tmp_path: Path) -> None:
    job = harness.start(2, PROGRAM, str(tmp_path), "stuck", "2", env=env)
    job.wait_for("running", count=2)
    job.signal(0, signal.SIGTERM)
    result = job.finish(40)
    assert not result.timed_out and result.rc != 0
    assert "2 s of grace after SIGTERM are over" in result.stderr
