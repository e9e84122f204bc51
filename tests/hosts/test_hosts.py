"""The loss of a host: its processes, its memory and its daemon go at once, and the job is started again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaigns.campaign import WORKER, events, judge
from tests.mpi.harness import REPO, find_mpirun, needs_mpi
from tests.protocol.oracle import Oracle

from .harness import Hosts, why_not

PATIENCE_S = 90.0
_REASON = why_not()
pytestmark = [pytest.mark.skipif(_REASON is not None, reason=str(_REASON)), pytest.mark.timeout(400)]


def test_each_host_has_memory_of_its_own() -> None:
    with Hosts(2, shm="8m") as hosts:
        assert [hosts.run(host, "hostname").strip() for host in hosts.names] == hosts.names
        hosts.run("h2", "touch", "/dev/shm/mine")
        assert hosts.run("h1", "ls", "/dev/shm") == ""
        assert hosts.run("h2", "ls", "/dev/shm") == "mine\n"
        hosts.kill("h2")
        hosts.boot("h2")
        assert hosts.run("h2", "ls", "/dev/shm") == "", "its memory went with it"


class Runs:
    """Launches of one run over hosts, and what their ranks say."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self.number = 0

    def start(self, order: list[str]) -> subprocess.Popen[bytes]:
        """One rank on each host, in that order."""
        mpirun = find_mpirun()
        assert mpirun is not None
        self.number += 1
        env = {
            "CAMPAIGN_LOGS": str(self._folder),
            "CAMPAIGN_LAUNCH": str(self.number),
            "CAMPAIGN_ACTIVE": str(len(order)),
            "CAMPAIGN_STEPS": "400",
            "CAMPAIGN_PATIENT": "1",
            "MEMCKPT_RESTART_COUNT": str(self.number - 1),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPO),
            "PYTHONFAULTHANDLER": "1",
        }
        return self._hosts.mpirun(
            mpirun, dict.fromkeys(order, 1), [sys.executable, str(WORKER)], env=env, output=self.output
        )

    @property
    def output(self) -> Path:
        """What the last launch printed."""
        return self._folder / f"{self.number}.out"

    def count(self, event: str) -> int:
        """How often the last launch's ranks said so."""
        return sum(line["event"] == event for line in events(self._folder, self.number))

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Fail the test if that does not come true."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"launch {self.number}: not {what}\n{self.output.read_text(errors='replace')[-6000:]}")
            time.sleep(0.02)

    def end(self, job: subprocess.Popen[bytes]) -> None:
        """Kill the job on every host that is left."""
        job.kill()
        job.wait()
        self._hosts.end_programs()


@needs_mpi
def test_a_lost_host_is_replaced_by_an_empty_one(tmp_path: Path) -> None:
    oracle = Oracle(3)
    with Hosts(3) as hosts:
        runs = Runs(hosts, tmp_path)
        job = runs.start(["h1", "h2", "h3"])
        runs.wait_for("committed", lambda: runs.count("committed") >= 9)
        hosts.kill("h2")
        lost = [(time.monotonic_ns(), ["h2"])]
        runs.wait_for("ended without the lost host", lambda: job.poll() is not None)
        runs.end(job)
        hosts.boot("h2")
        judge(oracle, events(tmp_path, 1), lost)
        assert oracle.expected().floor, "something was committed"

        job = runs.start(
            ["h1", "h3", "h2"]
        )  # the rank that was on h2 is on h3 now, and the one of h3 on the empty host
        runs.wait_for("back and committed again", lambda: runs.count("committed") >= 6)
        runs.end(job)
        judge(oracle, events(tmp_path, 2), [])
        back = [line for line in events(tmp_path, 2) if line["event"] == "returned"]
        assert len(back) == 3
        assert "peer" in back[0]["sources"], "the host that came back empty had to ask"
