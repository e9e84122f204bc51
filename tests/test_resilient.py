"""The pure part of `memckpt.resilient`: who runs which rank after a failure, and whether anything is left to go on."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memckpt.errors import ProtocolError
from memckpt.resilient.roster import (
    MEMBER_NBYTES,
    SPARE,
    Loss,
    Member,
    Place,
    decide,
    decode,
    encode,
    fill,
    first_roster,
)

A, B, C = Place("a", "rack1"), Place("b", "rack1"), Place("c", "rack2")


def member(logical: int, place: Place = A, state: str = "interrupted", **fields: object) -> Member:
    return Member(logical=logical, place=place, state="waiting" if logical == SPARE else state, **fields)


def test_first_roster_takes_the_first_ranks_of_one_node() -> None:
    assert first_roster([A] * 5, 4) == (0, 1, 2, 3)


def test_first_roster_leaves_a_spare_on_every_node() -> None:
    assert first_roster([A, A, A, B, B, B], 4) == (0, 1, 3, 4)
    assert first_roster([A, B, A, B, A], 4) == (0, 1, 2, 3)


def test_survivors_keep_their_ranks_and_the_lost_go_to_spares() -> None:
    members = [member(2), member(SPARE), member(0), member(3)]
    decision = decide(members, 4, [A] * 4)
    assert decision.kind == "train"
    assert decision.roster == (2, 1, 0, 3)
    assert decision.lost == (Loss(1, A),)


def test_the_spare_of_the_same_node_then_of_the_same_domain_is_taken() -> None:
    spares = [(7, C), (8, B), (9, A)]
    assert fill([Loss(0, A)], spares) == {0: 9}
    assert fill([Loss(0, A)], spares[:2]) == {0: 8}
    assert fill([Loss(0, A)], spares[:1]) == {0: 7}


def test_nobody_takes_the_spare_of_another_lost_rank_s_node() -> None:
    # Rank 0 has no spare of its own, and the one at B, of the same domain, is the only one on rank 3's node.
    assert fill([Loss(0, A), Loss(3, B)], [(5, B), (6, C)]) == {0: 6, 3: 5}


def test_too_few_spares_is_one_error_that_names_the_ranks() -> None:
    decision = decide([member(0), member(SPARE)], 3, [A] * 3)
    assert decision.kind == "fail"
    assert "rank 1, 2 lost, 1 spare left" in decision.reason


def test_an_own_error_of_one_rank_ends_the_run_whatever_else_happened() -> None:
    members = [member(0), member(1, state="failed", reason="ValueError: x"), member(SPARE)]
    decision = decide(members, 3, [A] * 3)
    assert (decision.kind, decision.rank, decision.reason) == ("fail", 1, "ValueError: x")


def test_the_loss_of_a_spare_does_not_undo_a_finish() -> None:
    assert decide([member(0, state="finished"), member(1, state="finished")], 2, [A] * 2).kind == "finish"


def test_a_finished_rank_is_called_back() -> None:
    decision = decide([member(0, state="finished"), member(SPARE)], 2, [A] * 2)
    assert (decision.kind, decision.roster) == ("train", (0, 1))


def test_interrupted_without_a_loss_trains_again() -> None:
    decision = decide([member(1, reason="DeadlineExceeded: x"), member(0)], 2, [A] * 2)
    assert (decision.kind, decision.roster, decision.lost) == ("train", (1, 0), ())
    assert decision.reason == "DeadlineExceeded: x"


def test_too_few_processes_at_the_start() -> None:
    assert decide([member(SPARE)], 2, []).kind == "fail"


@pytest.mark.parametrize("logical", [(0, 0), (0, 5), (0, -2)])
def test_impossible_claims_are_refused(logical: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError):
        decide([member(rank) for rank in logical], 2, [A] * 2)


@given(st.text(max_size=3000), st.text(max_size=3000), st.integers(-1, 10**6))
def test_a_member_always_fits_its_message(reason: str, node: str, logical: int) -> None:
    sent = member(logical, Place(node, node), reason=reason)
    data = encode(sent)
    assert len(data) == MEMBER_NBYTES
    got = decode(data)
    assert msgspec.structs.replace(got, reason="", place=A) == msgspec.structs.replace(sent, reason="", place=A)


@pytest.mark.parametrize("data", [b"", b"\xff" * MEMBER_NBYTES, b"{}".ljust(MEMBER_NBYTES), b'{"logical": "x"}'])
def test_hostile_members_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


PLACES = st.sampled_from([A, B, C])


@given(st.data())
def test_every_decision_is_a_valid_roster(data: st.DataObject) -> None:
    active = data.draw(st.integers(1, 6))
    alive = data.draw(st.lists(st.integers(0, active - 1), unique=True))
    spares = data.draw(st.integers(0, 4))
    logical = data.draw(st.permutations([*alive, *[SPARE] * spares]))
    states = st.sampled_from(["interrupted", "finished"])
    members = [member(rank, data.draw(PLACES), state=data.draw(states)) for rank in logical]
    before = [data.draw(PLACES) for _ in range(active)]
    decision = decide(members, active, before)
    assert {loss.logical for loss in decision.lost} == set(range(active)) - set(alive) or decision.kind == "finish"
    if decision.kind == "train":
        assert len(set(decision.roster)) == active
        for rank, position in enumerate(decision.roster):
            assert members[position].logical in (rank, SPARE)
        assert all(members[decision.roster[rank]].logical == rank for rank in alive)
    elif decision.kind == "fail":
        assert active - len(alive) > spares
