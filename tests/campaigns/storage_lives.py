"""Lives of a run whose memory is lost after each: forked from a process that has loaded everything, killed by SIGKILL.

Reads one JSON object for each life from standard input, forks, waits, and prints how the child ended. The child runs
two ranks as threads, restores, trains with ``keep=1``, and writes what it did to the log, a line at a time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import memckpt
from memckpt import faults
from memckpt.comm.local import LocalComm
from tests.ranks import fake_nodes, run_ranks
from tests.training import Training, make


class Life:
    """One child: restore, train, die where it was told to, or end."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()
        self._passed = 0

    def run(self) -> None:
        faults.arm(self._die)
        with fake_nodes(self._task["memory"]):
            errors = [e for e in run_ranks(2, self._rank, nodes=["a", "b"], timeout_s=60) if e is not None]
        if errors:
            raise errors[0]

    def _die(self, point: str, rank: int, step: int) -> None:
        with self._lock:
            if point == self._task["point"]:
                self._passed += 1
                if self._passed == self._task["nth"]:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, **words: object) -> None:
        os.write(self._log, (json.dumps(words) + "\n").encode())

    def _rank(self, comm: LocalComm) -> None:
        training = Training(seed=100 + comm.rank)
        persist = memckpt.Persist(self._task["storage"], every=1, keep=1, stagger=0)
        ckpt = make(training, comm=comm, persist=persist, name="lives")
        report = ckpt.restore()
        self._say(restored=report.step, rank=comm.rank, digest=training.digest(rng=False) if report.step else "")
        for step in range(report.step + 1, report.step + 1 + self._task["steps"]):
            training.step()
            training.progress["life"] = self._task["number"]  # so that no two histories are alike
            self._say(took=step, rank=comm.rank, digest=training.digest(rng=False))
            ckpt.step(step)
            ckpt.wait(persisted=True)
            self._say(persisted=ckpt.stats().persisted_step, rank=comm.rank)
        ckpt.abandon()


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                Life(json.loads(line)).run()
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
