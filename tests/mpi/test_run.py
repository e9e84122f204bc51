"""`memckpt.resilient.run` with real processes and real signals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.harness import REPO, Result, mpirun, needs_mpi, start

pytestmark = [needs_mpi, pytest.mark.mpi]

TOY = Path(__file__).parent / "programs" / "run_toy.py"


def lines(result: Result) -> list[dict[str, Any]]:
    """What the ranks said, one dictionary each."""
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def toy(
    n: int, *args: str, ulfm: bool = True, timeout_s: float = 90.0, **env: str
) -> tuple[Result, list[dict[str, Any]]]:
    result = mpirun(n, TOY, *args, ulfm=ulfm, timeout_s=timeout_s, env=env)
    assert not result.timed_out, f"{result}\n{result.stdout}\n{result.stderr}"
    return result, lines(result)


def done(said: list[dict[str, Any]], active: int, spares: int) -> None:
    """Every living process returned from `run` with the right value."""
    values = [line["value"] for line in said if "value" in line]
    assert sorted(map(str, values)) == sorted(["done"] * active + ["None"] * spares), said


def begins(said: list[dict[str, Any]], generation: int) -> dict[int, dict[str, Any]]:
    """Logical rank -> its line, for one generation."""
    return {line["rank"]: line for line in said if line.get("begin") == generation}


def test_a_spare_takes_the_rank_of_a_killed_process() -> None:
    _, said = toy(6, "4", "60", "1:1:20:kill")
    done(said, 4, 1)
    second = begins(said, 2)
    assert {rank: line["world_rank"] for rank, line in second.items()} == {0: 0, 1: 4, 2: 2, 3: 3}
    for line in second.values():
        assert [failure[:1] + failure[1] for failure in line["failures"]] == [[1, [1, line["failures"][0][1][0][1]]]]
        assert 0 < line["timeline"]["regroup"] < 1
    assert not any(line["alive"] for line in said if "alive" in line), "a dead generation's frames hold its state"


def test_rank_0_is_a_rank_like_any_other() -> None:
    _, said = toy(4, "3", "40", "1:0:20:kill")
    done(said, 3, 0)
    assert {rank: line["world_rank"] for rank, line in begins(said, 2).items()} == {0: 3, 1: 1, 2: 2}


def test_two_at_once_then_another_and_a_successor() -> None:
    _, said = toy(7, "3", "40", "1:1:20:kill", "1:2:20:kill", "2:0:20:kill", "3:1:10:kill")
    done(said, 3, 0)
    assert begins(said, max(line.get("begin", 0) for line in said)).keys() == {0, 1, 2}


@pytest.mark.parametrize("point", ["run.revoked", "run.shrunk", "run.assigned", "run.split", "run.agreed"])
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_survivor_dies_or_stands_still_during_the_recovery(point: str, what: str) -> None:
    _, said = toy(5, "3", "40", "1:1:20:kill", TOY_FAULTS=f"2:{point}:{what}")
    done(said, 3, 0)
    last = begins(said, max(line.get("begin", 0) for line in said))
    assert {rank: line["world_rank"] for rank, line in last.items()} in ({0: 0, 1: 3, 2: 4}, {0: 0, 1: 4, 2: 3})


@pytest.mark.parametrize("point", ["run.shrunk", "run.split", "run.agreed"])
def test_the_successor_dies_during_the_recovery(point: str) -> None:
    _, said = toy(5, "3", "40", "1:1:20:kill", TOY_FAULTS=f"3:{point}:kill")
    done(said, 3, 0)
    last = begins(said, max(line.get("begin", 0) for line in said))
    assert {rank: line["world_rank"] for rank, line in last.items()} == {0: 0, 1: 4, 2: 2}


def test_a_stopped_process_is_killed_by_its_neighbours_and_replaced() -> None:
    _, said = toy(4, "3", "40", "1:1:20:stop")
    done(said, 3, 0)
    (stop,) = [line for line in said if line.get("event") == "stop"]
    seen = min(line["timeline"]["seen"] for line in begins(said, 2).values())
    assert 0.9 < seen - stop["time"] < 10  # frozen_s is one second; the rest is a busy machine's


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_a_spare_does_not_disturb(number: signal.Signals) -> None:
    job = start(4, TOY, "2", "300", ulfm=True, env={"TOY_PAUSE": "0.01"})
    job.wait_for('"begin": 1', count=2)
    job.signal(3, number)
    result = job.finish(60)
    assert not result.timed_out, result.stderr
    done(lines(result), 2, 1)
    assert not begins(lines(result), 2)


def test_a_rank_that_has_finished_is_called_back() -> None:
    _, said = toy(4, "3", "100", "1:1:5:return", "1:2:50:kill", TOY="check", TOY_PAUSE="0.01")
    done(said, 3, 0)
    assert begins(said, 2)[1]["world_rank"] == 1


def test_a_rank_that_has_finished_is_replaced_when_it_dies() -> None:
    job = start(4, TOY, "3", "300", "1:1:5:return", ulfm=True, env={"TOY": "check", "TOY_PAUSE": "0.01"})
    job.wait_for('"event": "return"')
    job.signal(1, signal.SIGKILL)
    result = job.finish(60)
    assert not result.timed_out, result.stderr
    done(lines(result), 3, 0)
    assert begins(lines(result), 2)[1]["world_rank"] == 3


def test_an_error_of_one_rank_ends_all_of_them_and_names_it() -> None:
    result, said = toy(4, "3", "40", "1:1:20:raise")
    failed = [line for line in said if "failed" in line]
    assert len(failed) == 4
    assert all("ValueError: a bug of this rank's own" in line["failed"] and line["rank"] == 1 for line in failed)
    assert result.rc != 0


def test_a_process_that_exits_unreported_ends_the_run() -> None:
    result, said = toy(4, "3", "40", "1:1:20:exit")
    assert any("has exited and MPI does not say so" in line.get("failed", "") for line in said)
    assert not [line for line in said if "value" in line]
    assert result.rc != 0


def test_training_that_does_not_come_back_is_a_loss_too() -> None:
    _, said = toy(5, "3", "40", "1:1:20:kill", "1:2:20:hang", TOY_OPTIONS='{"grace_s": 2.0}')
    done(said, 3, 0)
    assert {rank: line["world_rank"] for rank, line in begins(said, 2).items()} == {0: 0, 1: 3, 2: 4}


def test_too_few_spares_is_one_error_on_all() -> None:
    result, said = toy(3, "3", "40", "1:1:20:kill")
    failed = [line["failed"] for line in said if "failed" in line]
    assert len(failed) == 2
    assert all("not enough spares: rank 1 lost, 0 spare left" in text for text in failed)
    assert result.rc != 0


def test_failures_without_progress_end_the_run() -> None:
    events = [f"{generation}:0:3:lost" for generation in range(1, 9)]
    _, said = toy(2, "2", "40", *events, TOY_OPTIONS='{"max_failures": 2}')
    failed = [line["failed"] for line in said if "failed" in line]
    assert len(failed) == 2
    assert all("3 interruptions in a row without progress, at last: PeerLost" in text for text in failed)
    assert len(begins(said, 3)) == 2
    assert not begins(said, 4)


def test_failures_with_progress_do_not() -> None:
    events = [f"{generation}:0:{3 * generation}:lost" for generation in range(1, 5)]
    _, said = toy(2, "2", "20", *events, TOY="mpi,progress", TOY_OPTIONS='{"max_failures": 2}')
    done(said, 2, 0)
    assert len(begins(said, 5)) == 2


def test_gloo_is_rebuilt_and_a_waiting_thread_is_freed() -> None:
    # Five ranks: in gloo's ring some wait for living neighbours only, and these get no error by themselves.
    _, said = toy(6, "5", "40", "1:1:20:kill", TOY="gloo", timeout_s=110.0)
    done(said, 5, 0)
    assert all(line["timeline"]["leave"] < 5 for line in begins(said, 2).values())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("soon_s", [0.0, 0.006])
def test_a_rank_dies_while_gloo_connects(victim: int, soon_s: float) -> None:
    _, said = toy(4, "3", "40", f"1:{victim}:-1:killsoon", TOY="gloo", TOY_SOON=str(soon_s), timeout_s=110.0)
    done(said, 3, 0)


def test_without_ulfm_it_trains_and_says_so() -> None:
    result, said = toy(3, "2", "20", ulfm=False)
    done(said, 2, 1)
    assert "no recovery inside the job" in result.stdout
    assert result.rc == 0


def test_below_thread_multiple_it_trains_and_says_so() -> None:
    result, said = toy(3, "2", "20", MPI4PY_RC_THREAD_LEVEL="serialized")
    done(said, 2, 1)
    assert "below MPI_THREAD_MULTIPLE" in result.stdout


def test_one_process_without_mpirun() -> None:
    command = [sys.executable, str(TOY), "1", "5"]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert '"value": "done"' in result.stdout
    assert "memckpt:" not in result.stdout


@pytest.mark.parametrize("what", ["raise", "exit", "kill"])
def test_without_ulfm_a_lost_rank_ends_the_job(what: str) -> None:
    result, said = toy(3, "3", "40", f"0:1:10:{what}", ulfm=False)
    assert result.rc != 0
    assert not [line for line in said if "value" in line]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_losses(seed: int) -> None:
    """Up to four of seven processes die or stand still, at any moment; three ranks train to the end."""
    rng = random.Random(seed)
    job = start(7, TOY, "3", "80", ulfm=True, env={"TOY_PAUSE": "0.005"})
    job.wait_for('"begin": 1', count=3, timeout_s=60)
    victims = rng.sample(range(7), rng.randint(1, 4))
    for victim in victims:
        time.sleep(rng.choice([0.0, 0.0, rng.random() * 0.05, rng.random() * 0.5]))
        if victim in job.ranks():
            job.signal(victim, rng.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP]))
    result = job.finish(60)
    assert not result.timed_out, f"victims {victims}\n{result.stdout}\n{result.stderr}"
    living = set(range(7)) - set(victims)
    assert living <= {line["world_rank"] for line in lines(result) if "value" in line}, f"{victims}\n{result.stdout}"
