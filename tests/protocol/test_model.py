"""The protocol's rules hold in every interleaving, and each is needed. ``--long`` searches every row to its end."""

from __future__ import annotations

import pytest

from .model import TABLE, Base, Model, Rank, Slot, State

LEFT_OUT = [name for name, row in TABLE.items() if row.violation]
KEPT = [name for name, row in TABLE.items() if not row.violation]
#: too many states for Python (above 23 million, in part); cut off even in a long run
ENDLESS = {"F4-two-sets", "F4b-two-per-node"}
SHORT_STATES, LONG_STATES = 40_000, 6_000_000


@pytest.mark.parametrize("name", LEFT_OUT)
def test_leaving_a_rule_out_breaks_the_protocol(name: str) -> None:
    row = TABLE[name]
    verdict = row.model.check(seconds=float("inf"))
    assert verdict.violation, f"{name}: the rule is not needed? {verdict.states} states"
    assert verdict.violation.startswith(row.violation or "")
    assert verdict.trace, "a violation comes with the way to it"


@pytest.mark.parametrize("name", KEPT)
def test_protocol_holds(name: str) -> None:
    verdict = TABLE[name].model.check(max_states=SHORT_STATES, seconds=float("inf"))
    assert verdict.violation is None, "\n".join(verdict.trace)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)  # millions of states in Python: far beyond the default
@pytest.mark.parametrize("name", KEPT)
def test_protocol_holds_in_every_state(name: str) -> None:
    states = 1_000_000 if name in ENDLESS else LONG_STATES
    verdict = TABLE[name].model.check(max_states=states, seconds=float("inf"))
    assert verdict.violation is None, "\n".join(verdict.trace)
    assert verdict.complete or name in ENDLESS


def test_newest_commit_keeps_its_slot() -> None:
    model = Model()
    committed, dropped = Slot(1, 1, 1, "S"), Slot(1, 1, 2, "T")
    assert model.pick((committed, dropped), (1, 1)) == 1
    assert model.pick((committed, committed._replace(step=2)), (1, 2)) == 0
    assert model.pick((None, committed), (1, 1)) == 0


def test_restore_keeps_the_base_and_the_fallback() -> None:
    model, base = Model(), Base(1, 1, 2, fallback=(1, 1))
    pinned, other = Slot(1, 1, 2, "S"), Slot(1, 1, 3, "S")
    assert model.free_for_base((pinned, other), base) == 1
    with pytest.raises(AssertionError):
        model.free_for_base((pinned, pinned._replace(step=1)), base)


def test_plan_never_joins_generations() -> None:
    model, none = Model(), (None, None)
    start = model.start()
    mixed = State((((Slot(1, 1, 1, "S")), None), (Slot(2, 2, 1, "S"), None)), (none, none), start.ranks, start.shared)
    assert model.plan(mixed) == (None, set())
    assert mixed.ranks == (Rank("R", 0, None, "I"),) * 2
