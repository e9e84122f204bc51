"""StepCosts: what a save costs, whatever else hits single steps; None until it is known; never grows."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memckpt.policy.costs import StepCosts


def feed(costs: StepCosts, *steps: tuple[float, float, str]) -> None:
    """Steps as (work seconds, blocked seconds, marks): "s" a save touches it, "f" a save passes its fence in it."""
    for work_s, blocked_s, marks in steps:
        costs.observe(work_s + blocked_s, blocked_s=blocked_s, saving="s" in marks, fenced="f" in marks)


QUIET = (1.0, 0.01, "")
SAVE = [(1.0, 0.21, "s"), (1.5, 0.11, "sf"), (1.1, 0.01, "s")]
SAVE_COST_S = 0.2 + 0.1 + 0.5 + 0.1


def test_none_until_it_knows() -> None:
    costs = StepCosts()
    assert costs.step_s is None and costs.cost_s is None
    feed(costs, *SAVE, *[QUIET] * 4, *SAVE)
    assert costs.step_s is None, "four quiet steps"
    feed(costs, QUIET)
    assert costs.step_s == pytest.approx(1.01)
    feed(costs, *[*SAVE, QUIET] * 2)
    assert costs.cost_s is None, "two saves since the usual step is known"
    feed(costs, *SAVE, QUIET)
    assert costs.cost_s == pytest.approx(SAVE_COST_S)


def test_what_quiet_steps_block_is_no_cost() -> None:
    costs = StepCosts()
    feed(costs, *[(1.0, 0.3, "")] * 9, *[(1.0, 0.3, "sf"), (1.0, 0.3, "")] * 5)
    assert costs.step_s == pytest.approx(1.3)
    assert costs.cost_s == pytest.approx(0.0)


def test_saves_that_follow_each_other_are_told_apart_by_their_fences() -> None:
    # every step begins a save at its end and passes the fence of the one before
    costs = StepCosts()
    feed(costs, *[QUIET] * 9, (1.0, 0.21, "s"), *[(1.4, 0.31, "sf")] * 40, (1.4, 0.11, "sf"), QUIET)
    assert costs.cost_s == pytest.approx(0.3 + 0.4)
    # the next begins in the step in which the last one ends
    costs = StepCosts()
    long = [(1.2, 0.21, "s"), (1.5, 0.11, "sf"), (1.2, 0.01, "s"), (1.2, 0.01, "s")]
    feed(costs, *[QUIET] * 9, *long * 12, QUIET)
    assert costs.cost_s == pytest.approx(0.3 + 0.2 * 3 + 0.5)


def test_a_save_over_hundreds_of_steps() -> None:
    costs = StepCosts()
    save = [(1.0, 0.11, "s"), (1.5, 0.01, "sf"), *[(1.02, 0.01, "s")] * 500]
    feed(costs, *[QUIET] * 9, *[*save, *[QUIET] * 3] * 4)
    assert costs.cost_s == pytest.approx(0.1 + 0.5 + 500 * 0.02)


@pytest.mark.parametrize("every", [2, 7, 10, 23])
def test_evaluations_and_stalls_do_not_count(every: int) -> None:
    """Each `every`-th step takes a hundred times as long, so that most saves are hit somewhere."""
    costs, count = StepCosts(), 0
    for _ in range(60):
        for work_s, blocked_s, marks in [*SAVE, *[(1.05, 0.01, "s")] * 9, *[QUIET] * 19]:
            count += 1
            feed(costs, (100.0 if count % every == 1 and every > 2 else work_s, blocked_s, marks))
    assert costs.step_s == pytest.approx(1.01)
    assert costs.cost_s == pytest.approx(SAVE_COST_S + 9 * 0.05)


def test_the_first_save_and_the_first_steps_are_forgotten() -> None:
    costs = StepCosts()
    feed(costs, (30.0, 9.0, "s"), (20.0, 5.0, "sf"), (8.0, 0.0, ""), (3.0, 0.0, ""), *[QUIET] * 5)
    feed(costs, (1.0, 4.0, "s"), (9.0, 2.0, "sf"), QUIET, *[*SAVE, QUIET, QUIET] * 2)
    assert costs.cost_s == pytest.approx(SAVE_COST_S)


def test_it_follows_when_steps_become_longer() -> None:
    costs = StepCosts()
    feed(costs, *[*SAVE, *[QUIET] * 10] * 20)
    longer = [(3 * work_s, 2 * blocked_s, marks) for work_s, blocked_s, marks in [*SAVE, *[QUIET] * 10]]
    feed(costs, *longer * 20)
    assert costs.step_s == pytest.approx(3.02)
    assert costs.cost_s == pytest.approx(3 * 0.6 + 2 * 0.3)


def test_noise_averages_out() -> None:
    rng = random.Random(7)
    costs = StepCosts()
    seen = []
    for _ in range(200):
        for work_s, blocked_s, marks in [*SAVE, *[QUIET] * 30]:
            feed(costs, (work_s * rng.lognormvariate(0, 0.03), blocked_s, marks))
        if costs.cost_s is not None:
            seen.append(costs.cost_s)
    assert sum(seen) / len(seen) == pytest.approx(SAVE_COST_S, rel=0.05)
    assert min(seen) > 0.8 * SAVE_COST_S and max(seen) < 1.2 * SAVE_COST_S


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.sampled_from(["", "s", "sf"])), max_size=120))
def test_whatever_it_sees_a_cost_is_never_negative(steps: list[tuple[float, float, str]]) -> None:
    costs = StepCosts()
    feed(costs, *steps)
    assert costs.cost_s is None or costs.cost_s >= 0
    assert costs.step_s is None or costs.step_s >= 0


@pytest.mark.parametrize("marks", ["", "s", "sf", "mixed"])
def test_it_never_grows(marks: str) -> None:
    costs = StepCosts()

    def held() -> int:
        run = costs._run
        saves = sum(len(save.head_s) for save in costs._saves)
        quiet = [costs._quiet_step, costs._quiet_work, costs._quiet_blocked]
        return sys.getsizeof(run.head) + sum(len(q) for q in quiet) + len(run.tail) + saves

    sizes = []
    for count in range(6000):
        feed(costs, (1.0, 0.1, marks if marks != "mixed" else ["", "s", "sf", "s"][count // 50 % 4]))
        if count >= 2000 and count % 200 == 0:
            sizes.append(held())
    assert max(sizes) <= sizes[0] and sizes[0] < 1000
