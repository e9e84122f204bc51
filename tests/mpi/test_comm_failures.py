"""A rank dies or stops with every kind of operation under way: nobody waits for it for ever."""

from __future__ import annotations

import json
import signal

import pytest

from tests.mpi.harness import REPO, mpirun, needs_mpi, start

pytestmark = [needs_mpi, pytest.mark.mpi, pytest.mark.timeout(180)]
JOB = REPO / "tests" / "mpi" / "job_failures.py"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_every_request_of_every_survivor_ends(number: signal.Signals) -> None:
    job = start(4, JOB, str(int(number)), ulfm=True)
    job.wait_for("REPORT", timeout_s=90, count=3)
    result = job.finish(60 if number == signal.SIGKILL else 2)  # a stopped rank keeps mpirun waiting
    reports = [json.loads(line[7:]) for line in result.stdout.splitlines() if line.startswith("REPORT")]
    assert [report["rank"] for report in sorted(reports, key=lambda report: report["rank"])] == [0, 2, 3]
    for report in reports:
        assert len(report["outcomes"]) == 10
        assert "open" not in report["outcomes"].values()
        assert report["outcomes"]["receive nothing from 1"].startswith("lost")
        assert report["dup"] in ("lost", "late")
    if number == signal.SIGKILL:
        assert all(report["seen"] != "nothing" for report in reports)
        assert not result.timed_out, "MPI_Finalize hangs"
        assert result.rc == 0


def test_without_ulfm_the_job_ends(tmp_path: object) -> None:
    result = mpirun(3, JOB, str(int(signal.SIGKILL)), timeout_s=60)
    assert not result.timed_out
    assert result.rc not in (0, None)


def test_an_exception_on_one_rank_frees_the_others_by_their_deadline() -> None:
    code = """
import sys
from memckpt.comm import detect, barrier
from memckpt.errors import PeerLost
world = detect()
if world.rank == 1:
    raise SystemExit(3)
try:
    barrier(world, 2.0)
except PeerLost as error:
    print("freed", type(error).__name__, flush=True)
    sys.exit(4)
"""
    result = mpirun(2, code, timeout_s=60)
    assert not result.timed_out
    assert result.rc not in (0, None)
