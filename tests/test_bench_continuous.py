"""The benchmark of policies runs and reports in the agreed shape; what it counts is counted right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memckpt.policy.save import Continuous, EveryNSteps, FixedInterval, SaveContext, SaveInfo

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
POLICIES = ("fixed", "tuned", "continuous", "adaptive", "adaptive_told")


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import _turns
        import bench_continuous

        yield bench_continuous, _turns
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def bench(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[0]


@pytest.fixture
def turns(modules: tuple[ModuleType, ModuleType]) -> ModuleType:
    return modules[1]


def test_smoke(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "bench_continuous.py"),
        "--json",
        "--quick",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"] == "continuous"
    results = {r["name"]: r for r in found["results"]}
    assert len(results) == len(found["results"])
    for r in results.values():
        assert set(r) == {"name", "value", "unit", "against", "ratio"}
    for name in POLICIES:
        low, mean, high = (results[f"overhead_{name}{end}"]["value"] for end in ("_low", "", "_high"))
        assert low <= mean <= high
        assert results[f"step_{name}"]["value"] > 0
        assert results[f"lost_{name}"]["value"] >= 0
        assert results[f"goodput_{name}"]["ratio"] > 0
    p50 = results["p50_interval_continuous"]
    assert p50["value"] / p50["ratio"] == pytest.approx(100, rel=0.01)
    assert p50["value"] <= results["p95_interval_continuous"]["value"]
    assert not [*tmp_path.iterdir()]


# -- turns -------------------------------------------------------------------------------------------------------------


def ask(turn: object, step: int, now_s: float, *saves: SaveInfo) -> bool:
    return turn.should_save(step, saves, context=SaveContext(now_s=now_s))  # type: ignore[attr-defined,no-any-return]


def test_a_clock_stands_still_while_others_train(turns: ModuleType) -> None:
    turn = turns.Turn(FixedInterval(5.0))
    turn.is_open = True
    assert ask(turn, 1, 10.0)
    assert not ask(turn, 2, 11.0, SaveInfo(1, 10.0))
    assert turn.under_way
    assert not ask(turn, 3, 12.0, SaveInfo(1, 10.0, 12.0))
    assert not turn.under_way
    turn.absent(100.0)
    assert not ask(turn, 4, 12.0, SaveInfo(1, 10.0, 12.0))  # what an exchange says is from before the absence
    assert turn.context.now_s == 12.0
    assert not ask(turn, 5, 116.9, SaveInfo(1, 10.0, 12.0))
    assert ask(turn, 6, 117.0, SaveInfo(1, 10.0, 12.0))
    assert not ask(turn, 7, 118.0, SaveInfo(6, 117.0))
    assert not ask(turn, 8, 122.9, SaveInfo(6, 117.0, 119.0))  # ended at 22.9 of its own clock, when it was heard
    assert not ask(turn, 9, 127.8, SaveInfo(6, 117.0, 119.0))
    assert ask(turn, 10, 127.9, SaveInfo(6, 117.0, 119.0))


def test_what_falls_due_at_the_end_of_a_turn_is_put_off(turns: ModuleType) -> None:
    turn = turns.Turn(EveryNSteps(10))
    assert not ask(turn, 10, 1.0)
    assert not ask(turn, 11, 2.0)
    turn.is_open = True
    assert ask(turn, 12, 3.0)
    assert not ask(turn, 13, 4.0, SaveInfo(12, 3.0, 4.0))
    assert ask(turn, 20, 5.0, SaveInfo(12, 3.0, 4.0))


def test_a_save_that_another_tier_wanted_is_known(turns: ModuleType) -> None:
    turn = turns.Turn(Continuous())
    turn.is_open = True
    assert not ask(turn, 5, 1.0, SaveInfo(4, 0.5))
    assert turn.under_way
    assert ask(turn, 6, 2.0, SaveInfo(4, 0.5, 1.5))


# -- figures -----------------------------------------------------------------------------------------------------------


def measured(bench: ModuleType, seen: list[tuple[int, int]], overheads: list[float], first_step: int = 1) -> object:
    """Steps of two seconds, with what was in memory and in storage at the end of each."""
    return bench.Measured(
        overheads, first_step, [bench.Moment(n, 2.0 * n, *there) for n, there in enumerate(seen, start=1)]
    )


def test_intervals_are_those_of_complete_checkpoints(bench: ModuleType) -> None:
    seen = [(-1, -1), (1, -1), (1, -1), (3, 1), (3, 1), (3, 1), (6, 3), (7, 3)]
    one = measured(bench, seen, [0.0])
    assert one.intervals("memory") == [2, 3, 1]  # type: ignore[attr-defined]
    assert one.intervals("storage") == [2]  # type: ignore[attr-defined]
    assert measured(bench, seen, [0.0], first_step=3).intervals("memory") == [3, 1]  # type: ignore[attr-defined]
    assert bench.percentile([2, 3, 1], 0.5) == 2
    assert bench.percentile([*range(1, 21)], 0.95) == 19


def test_work_lost_is_what_no_checkpoint_has(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FAILURES", 20_000)
    seen = [(n - 3, n - 50) for n in range(1, 501)]
    monkeypatch.setattr(bench, "UNCOVERED", 0.0)
    lost = measured(bench, seen, [0.0], first_step=60).lost_steps()  # type: ignore[attr-defined]
    assert lost == pytest.approx(3.5, abs=0.02)  # three steps, and half of the one that was under way
    monkeypatch.setattr(bench, "UNCOVERED", 1.0)
    lost = measured(bench, seen, [0.0], first_step=60).lost_steps()  # type: ignore[attr-defined]
    assert lost == pytest.approx(50.5, abs=0.02)


def test_goodput_and_confidence(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    one = measured(bench, [(n, n) for n in range(1, 101)], [0.01, 0.02, 0.03])
    mean, low, high = one.overhead()  # type: ignore[attr-defined]
    assert mean == pytest.approx(0.02)
    half = 4.303 * 0.01 / 3**0.5
    assert (low, high) == (pytest.approx(0.02 - half, abs=0.001), pytest.approx(0.02 + half, abs=0.001))
    monkeypatch.setattr(bench, "MTBF_STEPS", 5)
    expected = (1 - one.lost_steps() / 5) / 1.02  # type: ignore[attr-defined]
    assert one.goodput() == pytest.approx(expected)  # type: ignore[attr-defined]
    assert 0.4 < one.lost_steps() < 0.6  # type: ignore[attr-defined]


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (11, 2.201), (19, 2.093), (99, 1.984)])
def test_student_t(bench: ModuleType, freedom: int, quantile: float) -> None:
    assert bench.student_t(freedom) == pytest.approx(quantile, rel=0.01)
