"""Placement: everyone has a buddy, on another node wherever there is one, and nobody carries more than needed (C27)."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import UsageError
from memckpt.recovery.placement import Holders, place, survives, unprotected


def layouts(world: int) -> dict[str, list[str]]:
    """Host of every rank, in the shapes that C27 names."""
    hosts = {
        "one": ["h0"] * world,
        "each": [f"h{r}" for r in range(world)],
        "blocks": [f"h{r // 2}" for r in range(world)],
        "round": [f"h{r % 2}" for r in range(world)],
        "uneven": ["big"] * max(world - 2, 0) + [f"h{r}" for r in range(min(world, 2))],
        "stairs": [f"h{int(r**0.5)}" for r in range(world)],
    }
    for name in list(hosts):
        hosts[f"{name} shuffled"] = random.Random(world).sample(hosts[name], world)
    return hosts


def check(domains: list[str], copies: int, holders: Holders) -> None:
    world = len(domains)
    assert len(holders) == world
    for r, hs in enumerate(holders):
        assert len(hs) == len(set(hs)) == min(copies, world - 1)
        assert r not in hs
        others = set(domains) - {domains[r]}
        reached = {domains[h] for h in hs} - {domains[r]}
        assert len(reached) == min(len(hs), len(others)), "a farther place was left unused"


def load(holders: Holders, world: int) -> list[int]:
    count = Counter(itertools.chain.from_iterable(holders))
    return [count[r] for r in range(world)]


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("copies", [1, 2])
def test_c27_everyone_has_a_buddy_elsewhere(world: int, copies: int) -> None:
    for name, domains in layouts(world).items():
        holders = place(domains, copies)
        check(domains, copies, holders)
        assert holders == place(list(domains), copies)
        sizes = Counter(domains)
        loads = load(holders, world)
        if len(set(sizes.values())) == 1:
            assert max(loads) - min(loads) <= 1, (name, loads)
        for lost in sizes if len(sizes) > 1 and world > 1 else ():
            left = {r for r in range(world) if domains[r] != lost}
            assert all(r in left or left & set(holders[r]) for r in range(world)), (name, lost)
        alone = len(sizes) == 1 or world == 1
        assert unprotected(domains, holders) == (tuple(range(world)) if alone else ())
        assert survives(domains, holders) == (0 if alone else min(copies, len(sizes) - 1))


def best_load(domains: list[str]) -> int:
    """Smallest possible largest load for one replica each, by trying capacities with augmenting paths."""
    world = len(domains)
    apart = len(set(domains)) > 1
    allowed = [[h for h in range(world) if h != r and (domains[h] != domains[r] or not apart)] for r in range(world)]
    for capacity in range(1, world + 1):
        taken: dict[tuple[int, int], int] = {}

        def seat(r: int, seen: set[tuple[int, int]], capacity: int = capacity, taken: dict = taken) -> bool:
            for place_ in itertools.product(allowed[r], range(capacity)):
                if place_ not in seen:
                    seen.add(place_)
                    if place_ not in taken or seat(taken[place_], seen):
                        taken[place_] = r
                        return True
            return False

        if all(seat(r, set()) for r in range(world)):
            return capacity
    raise AssertionError


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=12))
@settings(max_examples=150, deadline=None)
def test_the_largest_load_is_as_small_as_it_can_be(domains: list[str]) -> None:
    holders = place(domains, 1)
    check(domains, 1, holders)
    assert max(load(holders, len(domains))) == best_load(domains)


@given(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=12), st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_replicas_that_lie_in_a_good_place_stay(domains: list[str], copies: int, data: st.DataObject) -> None:
    nodes = sorted(set(domains))
    held = [data.draw(st.sets(st.sampled_from(nodes))) for _ in domains]
    holders = place(domains, copies, held)
    check(domains, copies, holders)
    for r, hs in enumerate(holders):
        good = held[r] - {domains[r]}
        kept = {domains[h] for h in hs} & good
        assert len(kept) == min(len(good), len(hs))


def test_all_pairs_are_kept_when_nothing_moved() -> None:
    domains = ["a", "a", "b", "b", "c"]
    holders = place(domains, 1)
    held = [{domains[h] for h in hs} for hs in holders]
    again = place(domains, 1, held)
    assert [{domains[h] for h in hs} for hs in again] == held


def test_nested_domains_go_as_far_as_possible() -> None:
    racks = ["r1/a", "r1/b", "r1/c", "r2/d", "r2/e", "r2/f"]
    for r, (h,) in enumerate(place(racks, 1)):
        assert racks[h][:2] != racks[r][:2]
    for r, hs in enumerate(place(racks, 2)):
        assert {racks[h][:2] for h in hs} >= {"r1", "r2"} - {racks[r][:2]}
        assert len({racks[h] for h in hs} | {racks[r]}) == 3
    lonely = ["r1/a", "r1/b", "r1/c"]
    assert all(lonely[h] != lonely[r] for r, (h,) in enumerate(place(lonely, 1)))
    assert unprotected(lonely, place(lonely, 1)) == ()


def test_no_copies_and_bad_arguments() -> None:
    assert place(["a", "b"], 0) == ((), ())
    assert place([], 1) == ()
    assert unprotected(["a", "b"], ((), ())) == (0, 1)
    with pytest.raises(UsageError):
        place(["a"], -1)


def test_a_large_world_is_placed_quickly() -> None:
    domains = [f"n{r // 8}" for r in range(2048)]
    holders = place(domains, 1)
    assert max(load(holders, 2048)) == 1
    held = [{domains[h] for h in hs} for hs in holders]
    assert [{domains[h] for h in hs} for hs in place(domains, 1, held)] == held
