"""Real jobs that lose a rank, without ULFM: the job ends, memory is whole, and a relaunch goes on bit for bit."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mpi import harness
from tests.mpi.harness import Result, needs_mpi

pytestmark = [pytest.mark.mpi, needs_mpi, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).parent / "programs" / "train.py"
TOTAL = 6
_serial = itertools.count()

# The first ones always; each of the others is also a death of a rank thread in test_protocol_threads.
SAVE_POINTS = ["capture.begun", "capture.fenced", "after_seal", "replicate.landed", "commit.vote", "commit.known"]
MORE_SAVE_POINTS = [
    "capture.slot",
    "capture.copied",
    "commit.seal",
    "before_seal",
    "commit.sealed",
    "replicate.slot",
    "replicate.chunk",
    "replicate.received",
    "replicate.sealed",
    "commit.counted",
    "commit.pinned",
]
RECOVERY_POINTS = ["recover.planned", "recover.loaded"]
MORE_RECOVERY_POINTS = ["recover.inventoried", "recover.checked", "recover.agreed"]


def points(always: list[str], more: list[str]) -> list[Any]:
    return [*always, *(pytest.param(point, marks=pytest.mark.long) for point in more)]


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    base = Path("/dev/shm") / f"memckpt-test-{os.getpid()}-{next(_serial)}"
    base.mkdir()
    yield {"MEMCKPT_SHM": str(base), "TEST_DEADLINE": "5"}
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Digest of each rank after each step of a run that nothing interrupts."""
    env = {"MEMCKPT_SHM": str(tmp_path_factory.mktemp("reference"))}
    result = harness.start(2, PROGRAM, str(TOTAL), env=env).finish(90).check()
    return {(rank, n): digest for _, rank, n, digest in words(result, "took")}


def words(result: Result, first: str) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines() if line.startswith(first + " ")]


def told(result: Result) -> int:
    """Newest step that any rank was told is committed."""
    return max((int(step) for _, _, step in words(result, "committed")), default=-1)


def relaunch_and_check(reference: dict[tuple[str, str], str], env: dict[str, str], known: int, taken: int) -> int:
    """Start again without a fault: the right step, its very bytes on both ranks, and the very end. The step."""
    second = harness.start(2, PROGRAM, str(TOTAL), env=env).finish(90).check()
    restored = words(second, "restored")
    steps = {int(step) for _, _, step, _, _ in restored}
    assert len(restored) == 2
    assert len(steps) == 1
    step = steps.pop()
    assert max(known, 0) <= step <= taken
    if step:
        assert {(rank, digest) for _, rank, _, digest, _ in restored} == {(r, reference[r, str(step)]) for r in "01"}
    final = {(rank, digest) for _, rank, digest in words(second, "final")}
    assert final == {(r, reference[r, str(TOTAL)]) for r in "01"}
    return step


@pytest.mark.parametrize("point", points(SAVE_POINTS, MORE_SAVE_POINTS))
def test_death_at_each_point_of_a_save(reference: dict[tuple[str, str], str], env: dict[str, str], point: str) -> None:
    first = harness.start(2, PROGRAM, str(TOTAL), env={**env, "MEMCKPT_FAULT": f"{point}:1:3=kill"}).finish(60)
    assert not first.timed_out
    assert not words(first, "final")
    step = relaunch_and_check(reference, env, told(first), 4)
    assert step >= 2  # step 2 was committed, or this rank could not have begun with step 3


@pytest.mark.parametrize("point", points(RECOVERY_POINTS, MORE_RECOVERY_POINTS))
def test_death_in_a_recovery_leaves_it_possible(
    reference: dict[tuple[str, str], str], env: dict[str, str], point: str
) -> None:
    first = harness.start(2, PROGRAM, str(TOTAL), "kill", "4", "0", env=env).finish(60)
    harness.start(2, PROGRAM, str(TOTAL), env={**env, "MEMCKPT_FAULT": f"{point}:1=kill"}).finish(60)
    relaunch_and_check(reference, env, told(first), 4)


@pytest.mark.parametrize("mode", ["raise", "exit", "kill", "stop"])
def test_a_rank_that_fails_ends_the_job_and_commits_nothing(
    reference: dict[tuple[str, str], str], env: dict[str, str], mode: str
) -> None:
    """C36, without ULFM: an exception, os._exit, SIGKILL and SIGSTOP on rank 1, with the background busy."""
    job = harness.start(2, PROGRAM, str(TOTAL), mode, "4", "1", env=env)
    if mode == "stop":
        job.wait_for("took 0 4", timeout_s=60)
        result = job.finish(15)  # rank 0 gives up at its deadline; the stopped one is the launcher's to end
        assert "DeadlineExceeded" in result.stderr
    else:
        result = job.finish(60)
        assert not result.timed_out
        assert result.rc != 0
    assert told(result) <= 3
    assert relaunch_and_check(reference, env, told(result), 4) in (2, 3)


def test_a_stopped_rank_of_the_past_is_fenced(reference: dict[tuple[str, str], str], env: dict[str, str]) -> None:
    """DESIGN: nobody of an earlier life may write when the next begins; it is ours and stopped, so it is killed."""
    job = harness.start(2, PROGRAM, str(TOTAL), "stop", "4", "1", env=env)
    try:
        job.wait_for("took 0 4", timeout_s=60)
        zombie = job.ranks()[1]
        job.signal(0, signal.SIGKILL)
        relaunch_and_check(reference, env, told_by(job.output()), 4)
        assert not Path(f"/proc/{zombie}/fd").exists() or not list(Path(f"/proc/{zombie}/fd").iterdir())
    finally:
        job.finish(10)


def told_by(output: str) -> int:
    return max((int(line.split()[2]) for line in output.splitlines() if line.startswith("committed ")), default=-1)
