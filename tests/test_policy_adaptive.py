"""Adaptive: within its share of the training time, near the optimum of Young and Daly, in a synthetic trainer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memckpt.errors import UsageError
from memckpt.policy.adaptive import Adaptive, optimum_s
from memckpt.policy.costs import StepCosts
from memckpt.policy.save import SaveContext, SaveInfo, SavePolicy


@dataclass
class Trainer:
    """Trains on a fake clock: a save blocks for `blocked_s` and then slows training by `slow` for `save_s` seconds."""

    policy: SavePolicy
    step_s: float
    blocked_s: float
    save_s: float
    slow: float
    noise: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    step: int = 0
    useful_s: float = 0.0
    saves: list[SaveInfo] = field(default_factory=list)
    costs: StepCosts = field(default_factory=StepCosts)
    quiet_steps: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._left_s = 0.0

    @property
    def save_cost_s(self) -> float:
        return self.blocked_s + self.save_s * self.slow / (1 + self.slow)

    @property
    def added_s(self) -> float:
        return self.now_s - self.useful_s

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._one_step()

    def _one_step(self) -> None:
        began_s = self.now_s
        self.step += 1
        busy = fenced = self._left_s > 0
        work_s = self.step_s * (self._rng.lognormvariate(0, self.noise) if self.noise else 1.0)
        slowed_s = min(self._left_s, work_s * (1 + self.slow))
        self.useful_s += work_s
        self.now_s += slowed_s + work_s - slowed_s / (1 + self.slow)
        self._left_s -= slowed_s
        if busy and self._left_s <= 1e-12:
            self._left_s = 0.0
            self.saves[-1] = SaveInfo(self.saves[-1].step, self.saves[-1].started_s, began_s + slowed_s)
        fenced = fenced and self.saves[-1].step == self.step - 1
        context = SaveContext(
            now_s=self.now_s,
            step_s=self.costs.step_s,
            cost_s=self.costs.cost_s,
            replicate_s=self.save_s + self.blocked_s if len(self.saves) > 1 else None,
        )
        due = self.policy.should_save(self.step, self.saves[-1:], context=context)
        if due:
            assert self._left_s == 0, "a save is under way"
            started_s = self.now_s
            self.now_s += self.blocked_s
            self._left_s = self.save_s
            self.saves.append(SaveInfo(self.step, started_s, None if self.save_s else self.now_s))
        self.quiet_steps += not (busy or due)
        self.costs.observe(
            self.now_s - began_s, blocked_s=self.blocked_s if due else 0.0, saving=busy or due, fenced=fenced
        )


def learned(trainer: Trainer) -> None:
    """Train until the cost is known; it has to be soon."""
    while trainer.costs.cost_s is None:
        trainer.train(1)
        assert len(trainer.saves) <= 6


@settings(deadline=None, max_examples=60)
@given(
    step_s=st.sampled_from([0.001, 0.1, 1.0, 30.0]),
    blocked=st.floats(0, 3),
    duration=st.floats(0.05, 40),
    slow=st.floats(0, 0.5),
    max_overhead=st.sampled_from([0.002, 0.01, 0.05]),
)
def test_the_overhead_bound_holds(
    step_s: float, blocked: float, duration: float, slow: float, max_overhead: float
) -> None:
    trainer = Trainer(Adaptive(max_overhead), step_s, blocked * step_s, duration * step_s, slow)
    learned(trainer)
    assert trainer.costs.cost_s == pytest.approx(trainer.save_cost_s, rel=0.08, abs=(0.05 * slow + 1e-9) * step_s)
    added_s, useful_s, known = trainer.added_s, trainer.useful_s, len(trainer.saves)
    trainer.train(4000)
    share = (trainer.added_s - added_s) / (trainer.useful_s - useful_s)
    assert share <= 1.1 * max_overhead + 2 * trainer.save_cost_s / (trainer.useful_s - useful_s)
    # and it is used, as far as steps and the duration of a save allow: not twice as long between saves as necessary
    begun = trainer.saves[known:]
    assume(len(begun) > 4)
    every_s = (begun[-1].started_s - begun[0].started_s) / (len(begun) - 1)
    fastest_s = max(trainer.save_cost_s * (1 + 1 / max_overhead), trainer.save_s + trainer.blocked_s)
    assert every_s <= 1.1 * fastest_s + 4 * step_s


@pytest.mark.parametrize("seed", range(4))
def test_the_overhead_bound_holds_with_noise(seed: int) -> None:
    trainer = Trainer(Adaptive(0.01), 0.1, 0.03, 0.5, 0.2, noise=0.05, seed=seed)
    learned(trainer)
    added_s, useful_s = trainer.added_s, trainer.useful_s
    trainer.train(20_000)
    share = (trainer.added_s - added_s) / (trainer.useful_s - useful_s)
    assert 0.008 <= share <= 0.0115


def test_a_save_paced_over_the_interval_does_not_stretch_it() -> None:
    """The interval counts from start to start: a save that lasts half of it leaves the other half as a pause."""
    short = Trainer(Adaptive(0.01), 0.1, 0.02, 0.05, 0.0)
    paced = Trainer(Adaptive(0.01), 0.1, 0.02, 1.0, 0.0)
    for trainer in (short, paced):
        learned(trainer)
        trainer.train(4000)
    assert len(paced.saves) == pytest.approx(len(short.saves), rel=0.1)


def test_steps_without_a_save_remain_to_compare_with() -> None:
    """Saves that cost nothing would follow each other for ever; and when they come to cost something, it is seen."""
    trainer = Trainer(Adaptive(0.01), 0.1, 0.0, 0.95, 0.0)
    learned(trainer)
    trainer.quiet_steps = 0
    saves = len(trainer.saves)
    trainer.train(1000)
    assert trainer.quiet_steps >= 2 * (1000 // 32 - 1)
    assert len(trainer.saves) - saves >= 1000 / 14
    trainer.slow = 0.5
    trainer.train(1000)
    added_s, useful_s = trainer.added_s, trainer.useful_s
    trainer.train(2000)
    assert trainer.added_s - added_s <= 0.011 * (trainer.useful_s - useful_s) + trainer.save_cost_s


def decided(adaptive: Adaptive, step: int, *previous: SaveInfo, **context: float) -> bool:
    return adaptive.should_save(step, previous, context=SaveContext(**{"now_s": 0.0, **context}))  # type: ignore[arg-type]


def test_until_the_cost_is_known() -> None:
    adaptive = Adaptive()
    assert decided(adaptive, 1), "at once"
    assert not decided(adaptive, 8, SaveInfo(1, 0.0, 0.5), now_s=9.0)
    assert decided(adaptive, 9, SaveInfo(1, 0.0, 0.5), now_s=9.0), "every eighth step"
    assert not decided(adaptive, 9, SaveInfo(1, 0.0, 5.0), now_s=9.0, replicate_s=5.0)
    assert decided(adaptive, 9, SaveInfo(1, 0.0, 5.0), now_s=10.0, replicate_s=5.0), "half of the time"
    assert not decided(adaptive, 99, SaveInfo(1, 0.0), now_s=1e6), "under way"


def test_intervals() -> None:
    context = SaveContext(now_s=0, cost_s=0.5)
    assert Adaptive(0.01).save_every_s(context) == pytest.approx(50.5), "without an MTBF, the shortest allowed"
    assert Adaptive(0.01, mtbf_s=100).save_every_s(context) == pytest.approx(50.5), "more often would cost too much"
    assert Adaptive(0.01, mtbf_s=1e6).save_every_s(context) == pytest.approx(1000.2, rel=1e-4), "sqrt(2 C M)"
    observed = SaveContext(now_s=0, cost_s=0.5, uptime_s=3e6, failures=3)
    assert Adaptive(0.01).save_every_s(observed) == Adaptive(0.01, mtbf_s=1e6).save_every_s(context)
    assert Adaptive(0.01, mtbf_s=4e6).save_every_s(observed) > 1999, "what was given counts"
    assert Adaptive(0.01).save_every_s(SaveContext(now_s=0, cost_s=0.5, uptime_s=0.0, failures=1)) == 50.5
    assert Adaptive().save_every_s(SaveContext(now_s=0, cost_s=0.0)) == 0


def test_the_storage_tier_has_its_own_cost_and_a_rarer_failure() -> None:
    adaptive = Adaptive(0.01, mtbf_s=1e5, uncovered=0.1)
    context = SaveContext(now_s=0, cost_s=0.01, persist_cost_s=20.0, persist_s=60.0)
    assert adaptive.persist_every_s(context) == pytest.approx(20 + optimum_s(20.0, 1e6))
    assert adaptive.persist_every_s(context) > 100 * adaptive.save_every_s(context)
    assert adaptive.persist_every_s(SaveContext(now_s=0, cost_s=0.01, persist_s=60.0)) == 120.0, "cost not known yet"
    assert adaptive.persist_every_s(SaveContext(now_s=0, cost_s=0.01)) == 0.0, "nothing known yet: now"
    assert Adaptive(0.01).persist_every_s(context) == pytest.approx(2020.0)
    every_s = adaptive.persist_every_s(context)
    for now_s, due in ((every_s - 1, False), (every_s, True)):
        told = replace(context, tier="storage", now_s=now_s)
        assert adaptive.should_save(900, [SaveInfo(40, 0.0, 60.0)], context=told) is due
        assert not adaptive.should_save(900, [SaveInfo(40, 0.0)], context=told), "under way"
    rare = Adaptive(0.01, mtbf_s=1e5, uncovered=0.025)
    assert rare.persist_every_s(context) == pytest.approx(2 * adaptive.persist_every_s(context), rel=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_overhead": 0},
        {"max_overhead": 1.1},
        {"max_overhead": "1%"},
        {"mtbf_s": 0},
        {"mtbf_s": math.nan},
        {"uncovered": 0},
        {"uncovered": math.nan},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Adaptive(**wrong)


def test_settings_show() -> None:
    assert repr(Adaptive()) == "Adaptive(max_overhead=0.01, mtbf_s=None, uncovered=0.1)"


def wasted(every_s: float, cost_s: float, mtbf_s: float) -> float:
    """Expected share of time wasted when failures are exponential: Daly's complete model, without restart costs."""
    return 1 - every_s / (mtbf_s * math.expm1((every_s + cost_s) / mtbf_s))


@given(st.floats(1e-3, 1e4), st.floats(1e-6, 0.5))
def test_the_formula_is_near_the_true_optimum(mtbf_s: float, ratio: float) -> None:
    cost_s = ratio * mtbf_s
    best = min(wasted(every_s * mtbf_s, cost_s, mtbf_s) for every_s in (1.1**k for k in range(-170, 30)))
    assert wasted(optimum_s(cost_s, mtbf_s), cost_s, mtbf_s) <= best + 0.003


@given(st.just(0.0) | st.floats(1e-9, 1e5), st.just(0.0) | st.floats(1e-9, 1e7))
def test_the_formula_is_defined_everywhere(cost_s: float, mtbf_s: float) -> None:
    assert 0 <= optimum_s(cost_s, mtbf_s) <= max(mtbf_s, math.sqrt(2 * cost_s * mtbf_s) * 1.5)


@dataclass(frozen=True)
class Every(SavePolicy):
    """A tuned fixed interval, from start to start."""

    seconds: float

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        if not previous:
            return True
        return previous[-1].ended_s is not None and context.now_s - previous[-1].started_s >= self.seconds


def waste_with_failures(policy: SavePolicy, failures_s: Sequence[float], *, step_s: float, cost_s: float) -> float:
    """Share of time lost to saves and failures; a failure costs all since the start of the last save that has ended."""
    now_s = useful_s = safe_s = begun_at_s = 0.0
    previous: list[SaveInfo] = []
    step = 0
    for seen, fails_s in enumerate(failures_s):
        while now_s < fails_s:
            now_s += step_s
            useful_s += step_s
            step += 1
            if previous and previous[-1].ended_s is None and now_s >= previous[-1].started_s + 6 * cost_s:
                previous = [SaveInfo(previous[-1].step, previous[-1].started_s, now_s)]
                safe_s = begun_at_s
            context = SaveContext(
                now_s=now_s, step_s=step_s, cost_s=cost_s, replicate_s=6 * cost_s, uptime_s=now_s, failures=seen
            )
            if policy.should_save(step, previous, context=context):
                previous = [SaveInfo(step, now_s)]
                begun_at_s = useful_s
                now_s += cost_s
        useful_s, previous = safe_s, []
    return 1 - useful_s / now_s


@pytest.mark.parametrize("given", [True, False], ids=["given", "observed"])
def test_its_waste_is_near_that_of_the_tuned_interval(given: bool) -> None:
    """Real failures on the same trace; the best of many fixed intervals is found by trying them on it."""
    rng = random.Random(11)
    mtbf_s, cost_s, step_s = 7200.0, 10.0, 8.0
    failures_s = list(itertools.accumulate(rng.expovariate(1 / mtbf_s) for _ in range(120)))
    setting = {"step_s": step_s, "cost_s": cost_s}
    tuned = min(waste_with_failures(Every(s), failures_s, **setting) for s in (150, 250, 380, 550, 800))
    adaptive = Adaptive(0.2, mtbf_s=mtbf_s) if given else Adaptive(0.2)
    assert waste_with_failures(adaptive, failures_s, **setting) <= 1.08 * tuned
    assert waste_with_failures(Every(2000), failures_s, **setting) > 2 * tuned, "the trace tells them apart"
