"""Preserve policies and `select`: the newest is never removed, and a policy that fails removes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memckpt.errors import UsageError
from memckpt.policy import describe
from memckpt.policy.preserve import (
    AllOf,
    AnyOf,
    BestN,
    CheckpointInfo,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    LatestDuration,
    LatestN,
    PreserveContext,
    PreservePolicy,
    parse_keep,
    select,
)

CONTEXT = PreserveContext(now_s=1e9, tier="storage")


def at(step: int, created_s: float = 0.0, generation: int = 1, **metrics: float) -> CheckpointInfo:
    return CheckpointInfo(step, created_s, 100, "storage", generation, metrics or None)


def kept(policy: Any, checkpoints: Sequence[CheckpointInfo], context: PreserveContext = CONTEXT) -> list[int]:
    removed = select(policy, checkpoints, context=context)
    return [c.step for c in checkpoints if c not in removed]


def every(n: int, upto: int) -> list[CheckpointInfo]:
    return [at(step, created_s=10.0 * step) for step in range(n, upto + 1, n)]


def test_latest_n() -> None:
    assert kept(LatestN(2), every(10, 50)) == [40, 50]
    assert kept(LatestN(9), every(10, 50)) == [10, 20, 30, 40, 50]
    assert kept(LatestN(), every(10, 50)) == [10, 20, 30, 40, 50]
    assert kept(LatestN(1), []) == []


def test_every_n_steps() -> None:
    timed = [at(step) for step in (7, 95, 100, 112, 140, 207, 210, 300)]
    assert kept(EveryNSteps(100), timed) == [100, 300]
    assert kept(EveryNSteps(100, exact_interval=False), timed) == [7, 112, 300]


def test_every_n_seconds_and_latest_duration() -> None:
    times = [at(i, created_s=s) for i, s in enumerate((0, 50, 100, 130, 205, 206))]
    assert kept(EveryNSeconds(100), times) == [0, 2, 4, 5]
    assert kept(LatestDuration(101), times) == [3, 4, 5]
    assert kept(LatestDuration(106), times) == [2, 3, 4, 5]


def test_a_clock_that_was_set_back_makes_nothing_old() -> None:
    times = [at(i, created_s=s) for i, s in enumerate((5000, 5100, 1500, 1510, 1600))]
    assert kept(EveryNSeconds(100), times) == [0, 1, 2, 4]
    assert kept(LatestDuration(100), times) == [0, 1, 2, 3, 4]


def test_custom_steps() -> None:
    assert kept(CustomSteps([30, 10, 99]), every(10, 50)) == [10, 30, 50]
    assert kept(CustomSteps(range(0, 100, 20)), every(10, 60)) == [20, 40, 60]


def test_best_n() -> None:
    losses = [at(1, loss=3.0), at(2, loss=1.0), at(3, loss=2.0), at(4, loss=1.0), at(5), at(6, loss=9.0)]
    assert kept(BestN(2, "loss"), losses) == [2, 4, 5, 6]
    assert kept(BestN(1, "loss"), losses) == [4, 5, 6], "of equals, the newer"
    assert kept(BestN(2, "loss", mode="max"), losses) == [1, 5, 6]
    assert kept(BestN(2, "loss", keep_without_metrics=False), losses) == [2, 4, 6]
    assert kept(BestN(1, "accuracy"), losses) == [1, 2, 3, 4, 5, 6], "without this metric"
    assert kept(BestN(1, "accuracy", keep_without_metrics=False), losses) == [6]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_best(mode: Any) -> None:
    losses = [at(1, loss=float("nan")), at(2, loss=5.0), at(3, loss=float("inf")), at(4, loss=0.0)]
    assert 1 not in kept(BestN(3, "loss", mode=mode), losses)
    assert kept(BestN(4, "loss", mode=mode), losses) == [1, 2, 3, 4]


def test_combinations() -> None:
    assert kept(AnyOf(2, EveryNSteps(20), CustomSteps([10])), every(10, 70)) == [10, 20, 40, 60, 70]
    assert kept(AllOf(4, EveryNSteps(20)), every(10, 70)) == [40, 60, 70]
    assert kept(AnyOf(1, AllOf(EveryNSteps(20), EveryNSteps(30))), every(10, 70)) == [60, 70]
    assert kept(AllOf(1), []) == []
    for combination in (AnyOf, AllOf):
        with pytest.raises(UsageError, match="at least one"):
            combination()
    assert repr(AnyOf(2, AllOf(EveryNSteps(9)))) == (
        "AnyOf(LatestN(n=2), AllOf(EveryNSteps(interval_steps=9, exact_interval=True)))"
    )


def test_a_history_that_was_left_counts_as_older() -> None:
    """Rolled back from 50 to 20: what was saved after that is newer than 50."""
    checkpoints = [*every(10, 50), at(25, generation=2), at(35, generation=2)]
    assert kept(LatestN(2), checkpoints) == [25, 35]
    assert kept(LatestN(3), checkpoints[::-1]) == [35, 25, 50], "whatever the order they come in"
    assert [c.step for c in select(LatestN(1), checkpoints[::-1], context=CONTEXT)] == [10, 20, 30, 40, 50, 25]
    spaced = kept(EveryNSteps(20, exact_interval=False), [*checkpoints, at(45, generation=2), at(46, generation=2)])
    assert spaced == [10, 30, 50, 25, 45, 46]


def test_parse_keep() -> None:
    assert parse_keep(3) == LatestN(3)
    assert parse_keep(None) == LatestN(None)
    mine = Answers([True])
    assert parse_keep(mine) is mine
    for wrong in (0, -1, True, 2.0, "3", object()):
        with pytest.raises(UsageError, match=r"keep takes a number.*should_preserve"):
            parse_keep(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"not its class: LatestN\(\.\.\.\)"):
        parse_keep(LatestN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LatestN(0),
        lambda: EveryNSteps(0),
        lambda: EveryNSeconds(0),
        lambda: LatestDuration(-1),
        lambda: CustomSteps(["1"]),
        lambda: BestN(0, "loss"),
        lambda: BestN(1, "loss", mode="least"),
        lambda: AnyOf("5"),
    ],
)
def test_settings_are_checked(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


class Answers:
    """A user's class: only the method, no base, no repr."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.seen: list[Any] = []

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Any:
        self.seen.append((checkpoints, context))
        return self.answers(checkpoints) if callable(self.answers) else self.answers


def test_a_users_class_needs_only_the_method() -> None:
    mine = Answers([True, False, False])
    assert isinstance(mine, PreservePolicy)
    assert kept(mine, every(10, 30)) == [10, 30]
    assert kept(AnyOf(mine, CustomSteps([20])), every(10, 30)) == [10, 20, 30]
    checkpoints, context = mine.seen[0]
    assert [c.step for c in checkpoints] == [10, 20, 30] and context is CONTEXT
    assert kept(Answers(np.array([False, True, False])), every(10, 30)) == [20, 30]


@pytest.mark.parametrize(
    "answers",
    [
        [True, False],
        [True] * 4,
        [],
        None,
        [True, None, True],
        [1, 0, 1],
        "yes",
        lambda checkpoints: checkpoints,
        lambda checkpoints: checkpoints.clear(),
        lambda checkpoints: 1 / 0,
    ],
)
@pytest.mark.parametrize("wrap", [lambda p: p, AnyOf, lambda p: AllOf(1, AnyOf(2, p))], ids=["bare", "any", "nested"])
def test_a_policy_that_fails_removes_nothing(answers: Any, wrap: Any) -> None:
    with pytest.raises(UsageError, match=r"Answers\(.*\)\.should_preserve"):
        select(wrap(Answers(answers)), every(10, 30), context=CONTEXT)


def test_an_error_of_the_policy_is_chained() -> None:
    with pytest.raises(UsageError, match="ZeroDivisionError") as caught:
        select(Answers(lambda checkpoints: 1 / 0), every(10, 30), context=CONTEXT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_by_bytes() -> None:
    """What the context is for: as many as fit."""

    class Fits:
        def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> list[bool]:
            assert context.free_nbytes is not None
            over = max(0, 150 - context.free_nbytes)
            return [i * 100 >= over for i in range(len(checkpoints))]

    full = PreserveContext(now_s=0, tier="memory", nbytes_total=300, free_nbytes=20)
    assert kept(Fits(), every(10, 30), full) == [30]
    roomy = PreserveContext(now_s=0, tier="memory", nbytes_total=300, free_nbytes=500)
    assert kept(Fits(), every(10, 30), roomy) == [10, 20, 30]
    assert describe(Fits()).endswith("Fits()")


CHECKPOINTS = st.lists(
    st.builds(
        CheckpointInfo,
        step=st.integers(0, 200),
        created_s=st.floats(0, 1e4),
        nbytes=st.just(1),
        tier=st.just("storage"),
        generation=st.integers(0, 3),
        metrics=st.none() | st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats()),
    ),
    max_size=12,
    unique_by=lambda c: (c.generation, c.step),
)
LEAVES = st.one_of(
    st.builds(LatestN, st.none() | st.integers(1, 4)),
    st.builds(EveryNSteps, st.integers(1, 60), st.booleans()),
    st.builds(EveryNSeconds, st.floats(1, 5e3)),
    st.builds(LatestDuration, st.floats(1, 5e3)),
    st.builds(CustomSteps, st.lists(st.integers(0, 200))),
    st.builds(BestN, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"]), st.booleans()),
    st.sampled_from([Answers(lambda c: [False] * len(c)), Answers(lambda c: [True] * len(c))]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda ps: AnyOf(*ps)),
        st.lists(inner, min_size=1, max_size=3).map(lambda ps: AllOf(*ps)),
    ),
    max_leaves=6,
)


@given(TREES, CHECKPOINTS, st.randoms())
def test_the_newest_is_never_removed(policy: Any, checkpoints: list[CheckpointInfo], random: Any) -> None:
    removed = select(policy, checkpoints, context=CONTEXT)
    assert [c for c in removed if c not in checkpoints] == []
    assert removed == sorted(removed, key=lambda c: (c.generation, c.step))
    if checkpoints:
        assert max(checkpoints, key=lambda c: (c.generation, c.step)) not in removed
    assert select(policy, random.sample(checkpoints, len(checkpoints)), context=CONTEXT) == removed


@given(LEAVES, LEAVES, CHECKPOINTS)
def test_any_and_all_are_union_and_intersection(a: Any, b: Any, checkpoints: list[CheckpointInfo]) -> None:
    gone = [{(c.generation, c.step) for c in select(p, checkpoints, context=CONTEXT)} for p in (a, b)]
    for combination, wanted in ((AnyOf, gone[0] & gone[1]), (AllOf, gone[0] | gone[1])):
        got = {(c.generation, c.step) for c in select(combination(a, b), checkpoints, context=CONTEXT)}
        assert got == wanted


@given(
    st.one_of(
        st.builds(LatestN, st.integers(1, 4)),
        st.builds(EveryNSteps, st.integers(1, 60), st.booleans()),
        st.builds(EveryNSeconds, st.floats(1, 5e3)),
    ),
    CHECKPOINTS,
)
def test_removing_as_one_goes_and_at_the_end_leave_the_same(policy: Any, checkpoints: list[CheckpointInfo]) -> None:
    ordered = sorted(checkpoints, key=lambda c: (c.generation, c.step))
    there: list[CheckpointInfo] = []
    for checkpoint in ordered:
        there.append(checkpoint)
        for gone in select(policy, there, context=CONTEXT):
            there.remove(gone)
    gone_at_the_end = select(policy, ordered, context=CONTEXT)
    assert there == [c for c in ordered if c not in gone_at_the_end]
