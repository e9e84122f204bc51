"""`memckpt.resilient.run` with real processes and real signals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.harness import Result, mpirun, needs_mpi

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
