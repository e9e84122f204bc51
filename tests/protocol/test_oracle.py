"""The judge itself: what it lets pass and what it does not."""

from __future__ import annotations

import pytest

from .oracle import Oracle, RankLife, Violation


def life(first: int, last: int, committed: int, *, returned: bool = True, mark: str = "") -> dict[int, RankLife]:
    """Two ranks that came back with `first`, began steps up to `last` and heard of the commit of `committed`."""
    return {
        rank: RankLife(
            (first, f"{rank}:{first}{mark}") if returned else None,
            {step: f"{rank}:{step}" for step in range(first + 1, last + 1)},
            committed,
        )
        for rank in range(2)
    }


@pytest.fixture
def oracle() -> Oracle:
    judge = Oracle(2)
    assert judge.observe(life(0, 6, committed=5)) == 0
    return judge


@pytest.mark.parametrize("step", [5, 6])
def test_the_newest_commit_or_one_in_doubt(oracle: Oracle, step: int) -> None:
    assert oracle.observe(life(step, step, committed=0)) == step


@pytest.mark.parametrize("step", [0, 4, 7])
def test_no_older_and_no_newer_step(oracle: Oracle, step: int) -> None:
    with pytest.raises(Violation, match="expected a step from 5 to 6"):
        oracle.observe(life(step, step, committed=0))


def test_one_node_may_be_lost(oracle: Oracle) -> None:
    oracle.lost(["a"])
    with pytest.raises(Violation):
        oracle.observe(life(4, 4, committed=0))


def test_two_nodes_may_take_all_with_them(oracle: Oracle) -> None:
    oracle.lost(["a", "b"])
    assert oracle.expected().floor is None
    assert oracle.observe(life(0, 0, committed=0)) == 0


def test_a_second_node_is_beyond_until_protected_again(oracle: Oracle) -> None:
    oracle.lost(["a"])
    oracle.observe(life(5, 5, committed=0))
    oracle.lost(["b"])
    assert oracle.expected().floor is None
    oracle.observe(life(5, 7, committed=5))
    oracle.lost(["b"])
    assert (oracle.expected().floor, oracle.expected().ceiling) == (5, 7)


def test_processes_may_die_at_any_time(oracle: Oracle) -> None:
    oracle.lost(["a"])
    oracle.observe(life(6, 6, committed=0))
    assert oracle.expected().floor == 6, "it was told to users, and no memory was lost since"
    oracle.lost(["a"])
    assert oracle.expected().floor == 5, "it was in doubt and may have been on one node only"


def test_a_restore_that_nobody_came_back_from_changes_nothing(oracle: Oracle) -> None:
    assert oracle.observe(life(6, 6, committed=0, returned=False)) is None
    assert (oracle.expected().floor, oracle.expected().ceiling) == (5, 6)


def test_ranks_must_agree(oracle: Oracle) -> None:
    mixed = {0: life(5, 5, 0)[0], 1: life(6, 6, 0)[1]}
    with pytest.raises(Violation, match="different steps"):
        oracle.observe(mixed)


def test_bytes_must_be_those_of_that_history(oracle: Oracle) -> None:
    with pytest.raises(Violation, match="not with the bytes"):
        oracle.observe(life(5, 5, committed=0, mark="!"))
    oracle.observe(life(5, 5, committed=0))
    assert oracle.expected().ceiling == 5, "step 6 is a history that was left"
