"""Save policies: decided by arguments alone, time counted from the end of the last save (C35), alike on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memckpt.errors import UsageError
from memckpt.policy import describe
from memckpt.policy.save import (
    Adaptive,
    AllOf,
    AnyOf,
    Continuous,
    EveryNSteps,
    FixedInterval,
    Initial,
    Preemption,
    SaveContext,
    SaveInfo,
    SavePolicy,
    SpecificSteps,
    parse,
)

POLICIES = [
    EveryNSteps(3),
    FixedInterval(10.0),
    SpecificSteps([2, 5, 7]),
    Continuous(),
    Continuous(4.0),
    Preemption(),
    Initial(),
    Adaptive(),
    AnyOf(3, Preemption()),
    AllOf("auto", 2),
]


def saved_at(policy: SavePolicy, *, steps: int, step_s: float, save_s: float, **context: object) -> list[int]:
    """The steps that a Checkpointer would begin to save, with saves of `save_s` seconds, skipping while one is busy."""
    previous: list[SaveInfo] = []
    saved = []
    for step in range(1, steps + 1):
        now_s = 1000.0 + step * step_s
        if previous and previous[-1].ended_s is None and now_s >= previous[-1].started_s + save_s:
            previous[-1] = replace(previous[-1], ended_s=previous[-1].started_s + save_s)
        due = policy.should_save(step, previous, context=SaveContext(now_s=now_s, **context))  # type: ignore[arg-type]
        if due and not (previous and previous[-1].ended_s is None):
            saved.append(step)
            previous.append(SaveInfo(step, now_s))
    return saved


def due(policy: SavePolicy, step: int, *previous: SaveInfo, **context: object) -> bool:
    return policy.should_save(step, previous, context=SaveContext(**{"now_s": 0.0, **context}))  # type: ignore[arg-type]


def test_every_n_steps_and_specific_steps() -> None:
    assert saved_at(EveryNSteps(4), steps=13, step_s=1, save_s=0.5) == [4, 8, 12]
    assert saved_at(SpecificSteps([9, 2, 2, 5]), steps=10, step_s=1, save_s=0.5) == [2, 5, 9]
    assert saved_at(SpecificSteps(range(3, 10, 3)), steps=12, step_s=1, save_s=0.5) == [3, 6, 9]


def test_step_counted_policies_fall_due_while_a_save_is_under_way() -> None:
    busy = SaveInfo(3, 0.0)
    assert due(EveryNSteps(2), 4, busy)
    assert due(SpecificSteps([4]), 4, busy)


def test_fixed_interval_saves_first_and_then_counts_from_the_end() -> None:
    # saves end 3 s after they began, the next begins 10 s after that
    assert saved_at(FixedInterval(10), steps=40, step_s=1, save_s=3) == [1, 14, 27, 40]


def test_c35_a_save_slower_than_the_interval_leaves_the_interval_free() -> None:
    assert saved_at(FixedInterval(5), steps=60, step_s=1, save_s=20) == [1, 26, 51]
    assert saved_at(Continuous(5), steps=60, step_s=1, save_s=20) == [1, 26, 51]


def test_continuous_starts_when_the_last_save_has_ended() -> None:
    assert saved_at(Continuous(), steps=13, step_s=1, save_s=2.5) == [1, 4, 7, 10, 13]
    assert saved_at(Continuous(), steps=4, step_s=1, save_s=0.1) == [1, 2, 3, 4]
    assert saved_at(Continuous(2.0), steps=12, step_s=1, save_s=1.5) == [1, 5, 9]


@pytest.mark.parametrize("policy", [FixedInterval(1), Continuous(), Adaptive()], ids=repr)
def test_timed_policies_never_start_while_a_save_is_under_way(policy: SavePolicy) -> None:
    assert not due(policy, 100, SaveInfo(1, 0.0), now_s=1e9)


def test_preemption_and_initial() -> None:
    assert not due(Preemption(), 7)
    assert due(Preemption(), 7, preempted=True)
    assert due(Preemption(), 8, SaveInfo(7, 0.0), preempted=True)
    assert due(Initial(), 41, first_step=41)
    assert due(Initial(), 43, first_step=41), "a first save that was skipped is still wanted"
    assert due(Initial(), 41, SaveInfo(40, 0.0, 1.0), first_step=41), "that was before the restore"
    assert not due(Initial(), 42, SaveInfo(41, 0.0), first_step=41)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != Initial()], ids=repr)
def test_a_saved_step_is_not_saved_again(policy: SavePolicy) -> None:
    for step in range(1, 12):
        assert not due(policy, step, SaveInfo(step, 0.0, 1.0), now_s=1e6, preempted=True)


def test_combinations() -> None:
    either = AnyOf(5, FixedInterval(7.0), Preemption())
    assert saved_at(either, steps=20, step_s=1, save_s=0.5) == [1, 5, 10, 15, 20]
    assert saved_at(AnyOf(50, "3s"), steps=10, step_s=1, save_s=0.5) == [1, 5, 9]
    assert saved_at(AllOf(4, "6s"), steps=30, step_s=1, save_s=0.5) == [4, 12, 20, 28]
    assert due(AllOf(2, AnyOf(3, 5)), 6) and not due(AllOf(2, AnyOf(3, 5)), 3)
    for combination in (AnyOf, AllOf):
        with pytest.raises(UsageError, match="at least one"):
            combination()
        with pytest.raises(UsageError, match="every takes"):
            combination(3, "often")


@pytest.mark.parametrize(
    ("every", "policy"),
    [
        (100, EveryNSteps(100)),
        ("30s", FixedInterval(30)),
        ("15min", FixedInterval(900)),
        ("2h", FixedInterval(7200)),
        (" 1.5 h ", FixedInterval(5400)),
        ("1d", FixedInterval(86400)),
        ("auto", Adaptive()),
        ("continuous", Continuous()),
        (Initial(), Initial()),
    ],
)
def test_parse(every: int | str | SavePolicy, policy: SavePolicy) -> None:
    assert parse(every) == policy


@pytest.mark.parametrize("every", [0, -1, True, 2.5, None, "", "15", "0s", "-1s", "1m", "Auto", "1e3s", Continuous, {}])
def test_parse_names_what_is_allowed(every: object) -> None:
    with pytest.raises(UsageError, match=r'steps.*"15min".*"auto", "continuous" or a save policy, not '):
        parse(every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryNSteps(0),
        lambda: EveryNSteps(1.0),  # type: ignore[arg-type]
        lambda: FixedInterval(0),
        lambda: FixedInterval(float("inf")),
        lambda: FixedInterval("15min"),  # type: ignore[arg-type]
        lambda: Continuous(-1),
        lambda: Continuous(float("nan")),
        lambda: SpecificSteps([1, -1]),
        lambda: SpecificSteps("12"),  # type: ignore[arg-type]
        lambda: SpecificSteps(7),  # type: ignore[arg-type]
    ],
)
def test_settings_are_checked(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


def test_settings_show_alike_on_every_rank() -> None:
    assert describe(SpecificSteps({9, 2, 5})) == "SpecificSteps(steps=(2, 5, 9))"
    assert describe(SpecificSteps(range(0, 10**9, 1000))) == "SpecificSteps(steps=range(0, 1000000000, 1000))"
    assert describe(AnyOf(5, "1h", AllOf(Mine(3)))) == (
        "AnyOf(EveryNSteps(n=5), FixedInterval(seconds=3600.0), AllOf(Mine(n=3)))"
    )
    assert describe(Mine(3)) == "Mine(n=3)"
    for policy in POLICIES:
        assert eval(describe(policy)) == policy, "nothing is missing"
        with pytest.raises(AttributeError):
            policy.n = 1  # type: ignore[attr-defined]


class Mine(SavePolicy):
    """A user's own, without a repr."""

    def __init__(self, n: int) -> None:
        self.n = n

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        return step % self.n == 1


def test_a_policy_of_ones_own() -> None:
    assert saved_at(AnyOf(Mine(4), 8), steps=12, step_s=1, save_s=0.5) == [1, 5, 8, 9]


@dataclass(frozen=True)
class Question:
    step: int
    previous: tuple[SaveInfo, ...]
    context: SaveContext


SECONDS = st.integers(0, 60).map(float)  # whole ones: a clock may be shifted without rounding


@st.composite
def questions(draw: st.DrawFn) -> Question:
    at_s = 0.0
    previous: list[SaveInfo] = []
    step = 0
    for _ in range(draw(st.integers(0, 3))):
        step += draw(st.integers(1, 40))
        started_s = at_s + draw(SECONDS)
        at_s = started_s + draw(SECONDS)
        previous.append(SaveInfo(step, started_s, at_s))
    if previous and draw(st.booleans()):
        previous[-1] = replace(previous[-1], ended_s=None)
    context = SaveContext(
        now_s=at_s + draw(SECONDS),
        preempted=draw(st.booleans()),
        step_s=draw(st.none() | SECONDS),
        cost_s=draw(st.none() | st.floats(0, 0.5)),
        replicate_s=draw(st.none() | SECONDS),
        uptime_s=draw(st.floats(0, 1e6)),
        failures=draw(st.integers(0, 3)),
    )
    return Question(step + draw(st.integers(0, 40)), tuple(previous), context)


@given(st.lists(questions(), min_size=1, max_size=8), st.sampled_from(POLICIES), st.randoms())
def test_c35_decisions_are_a_function_of_the_arguments(asked: list[Question], policy: SavePolicy, random) -> None:  # type: ignore[no-untyped-def]
    """Two ranks that ask in another order, one of them with the last save only, get the same answers."""
    first = {q: policy.should_save(q.step, q.previous, context=q.context) for q in asked}
    for q in random.sample(asked, len(asked)):
        assert policy.should_save(q.step, list(q.previous), context=replace(q.context)) is first[q]
        if policy != Initial():
            assert policy.should_save(q.step, q.previous[-1:], context=q.context) is first[q]


@given(questions(), st.integers(-100_000, 100_000))
def test_c35_only_differences_of_the_agreed_clock_count(q: Question, shift_s: int) -> None:
    moved = [
        SaveInfo(save.step, save.started_s + shift_s, None if save.ended_s is None else save.ended_s + shift_s)
        for save in q.previous
    ]
    context = replace(q.context, now_s=q.context.now_s + shift_s)
    for policy in POLICIES:
        here = policy.should_save(q.step, q.previous, context=q.context)
        assert policy.should_save(q.step, moved, context=context) is here


@given(st.floats(0.5, 30), st.floats(0, 60), st.floats(0.1, 5))
def test_the_minimum_gap_is_honoured(seconds: float, save_s: float, step_s: float) -> None:
    steps = saved_at(FixedInterval(seconds), steps=200, step_s=step_s, save_s=save_s)
    gaps_s = [(b - a) * step_s for a, b in itertools.pairwise(steps)]
    assert all(save_s + seconds - 1e-6 <= gap_s <= save_s + seconds + 1.001 * step_s for gap_s in gaps_s)
