"""The demonstration itself: real training, real signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from memckpt.demo.history import Comparison, History
from memckpt.demo.job import Job
from memckpt.demo.log import Follower

from .harness import needs_mpi

pytestmark = [needs_mpi, pytest.mark.mpi, pytest.mark.timeout(340)]


def demo(*words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "memckpt", "demo", "--json", *words], capture_output=True, text=True, timeout=320
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def check(result: dict[str, object], *, source: str = "peer", most_lost_steps: int = 2) -> None:
    assert result["proved"] is True
    assert result["bitwise_equal"] is True
    assert result["source"] == source
    assert isinstance(result["lost_steps"], int)
    assert 0 <= result["lost_steps"] <= most_lost_steps
    seconds = result["seconds"]
    assert isinstance(seconds, dict)
    assert {"detect", "regroup", "inventory", "fetch", "verify", "load", "total"} <= set(seconds)
    assert all(value >= 0 for value in seconds.values())
    base = Path(os.environ.get("MEMCKPT_SHM") or "/dev/shm") / f"memckpt-{os.getuid()}"
    assert not list(base.glob(f"{result['run']}*")), "memory was left behind"


def plain(tmp_path: Path, name: str) -> tuple[History, Path]:
    log = tmp_path / name
    log.mkdir()
    program = [sys.executable, "-m", "memckpt.demo.train", "--run", "x", "--log", str(log), "--steps", "4", "--plain"]
    job = Job(["--oversubscribe", "-n", "2", *program, "--active", "2"], tmp_path, tmp_path / f"{name}.out")
    try:
        job._mpirun.wait(120)
    finally:
        job.kill()
    follower = Follower(log)
    follower.poll()
    history = History.of(follower.events)
    assert history.finished(2), job.tail()
    return history, log


def test_training_alone_is_the_same_twice(tmp_path: Path) -> None:
    """Without this, the comparison after a failure would mean nothing."""
    (first, first_log), (second, second_log) = plain(tmp_path, "a"), plain(tmp_path, "b")
    comparison = Comparison()
    comparison.steps(first.lives, second.lives, 2, 4)
    comparison.finals(first, first_log, second, second_log, 2)
    assert comparison.differences == []
    assert comparison.losses == 8


def test_a_killed_rank_comes_back_in_the_job() -> None:
    result = demo("--seed", "1")
    check(result)
    assert result["signal"] == "SIGKILL"


def test_a_stopped_rank_is_replaced() -> None:
    check(demo("--seed", "2", "--signal", "STOP", "--active", "2", "--steps", "12"))


def test_a_killed_job_comes_back_with_its_ranks_permuted() -> None:
    check(demo("--seed", "3", "--scenario", "relaunch", "--steps", "12"))


def test_a_job_that_lost_all_its_memory_comes_back_from_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="m-") as directory:  # pytest's own are too long for Open MPI's sockets
        monkeypatch.setenv("TMPDIR", directory)
        result = demo("--seed", "4", "--scenario", "storage", "--steps", "12")
        assert os.listdir(directory) == [], "logs or checkpoints were left behind"
    check(result, source="storage", most_lost_steps=12)
    assert result["sources"] == ["storage"] * 4
    recovered, killed = result["recovered_step"], result["killed_at_step"]
    assert isinstance(recovered, int)
    assert isinstance(killed, int)
    assert 0 < recovered == result["persisted_step"] <= killed <= 12
