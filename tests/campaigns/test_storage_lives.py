"""SIGKILL between any two steps of a checkpoint's way to storage, keep=1: a fresh process always finds a whole one.

A few lives by default, ``--campaign=N`` for N.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memckpt.storage import checkpoints, open

LIVES = Path(__file__).with_name("storage_lives.py")
SEED = int(os.environ.get("CAMPAIGN_SEED", "1"))


class Lives:
    """The lives of one run, one after the other, over one directory of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, str(LIVES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(LIVES.parents[2]), "OMP_NUM_THREADS": "1"},
        )
        self._digests: dict[tuple[int, int], set[str]] = {}
        self.newest = 0  # known to be persisted
        self.number = 0

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        assert self._server.wait(30) == 0

    def live(self, point: str, nth: int, steps: int) -> bool:
        """One life; whether it was killed. What it restored is compared with what was saved."""
        self.number += 1
        log, memory = self._folder / f"{self.number}.jsonl", self._folder / "memory"
        shutil.rmtree(memory, ignore_errors=True)
        memory.mkdir(mode=0o700)
        task = {
            "log": str(log), "memory": str(memory), "storage": str(self._folder / "storage"), "point": point,
            "nth": nth, "steps": steps, "number": self.number,
        }  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(task) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        assert ended in (0, -signal.SIGKILL), f"life {task} ended with {ended}"
        for line in log.read_text().splitlines():
            self._judge(json.loads(line))
        whole = [s.step for s in checkpoints.scan(open(task["storage"]), "lives") if s.complete]
        assert whole or self.newest == 0, f"after {task} no checkpoint is complete"
        return ended != 0

    def _judge(self, said: dict[str, Any]) -> None:
        if "restored" in said:
            step = said["restored"]
            assert step >= self.newest, f"step {self.newest} was persisted, {step} came back"
            if step:
                assert said["digest"] in self._digests[step, said["rank"]]
        elif "took" in said:
            self._digests.setdefault((said["took"], said["rank"]), set()).add(said["digest"])
        else:
            self.newest = max(self.newest, said["persisted"])


@pytest.mark.timeout(3600)
def test_a_fresh_process_always_finds_a_whole_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    wanted = request.config.getoption("--campaign") or len(checkpoints.POINTS)
    rng = random.Random(SEED)
    lives, killed = Lives(tmp_path), Counter[str]()
    try:
        for number in range(10 * wanted):
            if killed.total() >= wanted:
                break
            point = checkpoints.POINTS[number % len(checkpoints.POINTS)]
            if lives.live(point, rng.randrange(1, 5), rng.randrange(4, 8)):
                killed[point] += 1
        lives.live("", 0, 2)
    finally:
        lives.close()
    print(f"\n{killed.total()} kills in {lives.number} lives: {dict(killed)}")
    assert killed.total() >= wanted
    assert set(killed) == set(checkpoints.POINTS), f"never died at {set(checkpoints.POINTS) - set(killed)}"
