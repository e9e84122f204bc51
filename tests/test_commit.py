from __future__ import annotations

import time
from collections.abc import Callable

from memckpt.comm.local import LocalComm
from memckpt.format.seal import Generation
from memckpt.saving.commit import NO, NO_REASON, NOT_YET, YES, Vote, Why
from tests.ranks import raise_errors, run_ranks

GENERATION = Generation(counter=1, id="0" * 16)


def take_part(comm: LocalComm, ballot: Callable[[int], tuple[int, Why]], step: int = 5) -> Vote:
    """Vote to the end; `ballot(turn)` says what this rank has to say at each turn."""
    vote, turn, end = Vote(comm, step, GENERATION), 0, time.monotonic() + 10
    while vote.outcome is None:
        assert time.monotonic() < end
        vote.poll(*ballot(turn))
        turn += 1
        time.sleep(1e-4)
    return vote


def test_all_yes_is_yes() -> None:
    votes = raise_errors(run_ranks(3, lambda comm: take_part(comm, lambda turn: (YES, NO_REASON))))
    assert [v.outcome for v in votes] == [True] * 3


def test_a_rank_that_is_not_ready_delays_but_never_decides() -> None:
    def work(comm: LocalComm) -> Vote:
        return take_part(comm, lambda turn: (NOT_YET if comm.rank == 2 and turn < 300 else YES, NO_REASON))

    assert [v.outcome for v in raise_errors(run_ranks(3, work))] == [True] * 3


def test_one_no_is_no_and_every_rank_learns_whose_and_why() -> None:
    def work(comm: LocalComm) -> Vote:
        return take_part(comm, lambda turn: (NO, Why(comm.rank, "no room")) if comm.rank == 1 else (YES, NO_REASON))

    for vote in raise_errors(run_ranks(3, work)):
        assert vote.outcome is False
        assert vote.reason == Why(1, "no room")
        assert str(vote.reason) == "rank 1: no room"


def test_the_cause_is_named_whoever_tells() -> None:
    """Rank 0 says no first, because rank 1 did not seal; what every rank hears is of rank 1."""

    def work(comm: LocalComm) -> Vote:
        return take_part(comm, lambda turn: (NO, Why(1, "é" * 2000)) if comm.rank == 0 else (NOT_YET, NO_REASON))

    for vote in raise_errors(run_ranks(3, work)):
        assert vote.outcome is False
        assert vote.reason.rank == 1
        assert 400 < len(vote.reason.text) < 1000 and {*vote.reason.text} == {"é"}


def test_no_wins_over_not_yet() -> None:
    def work(comm: LocalComm) -> Vote:
        return take_part(comm, lambda turn: (NO, Why(0, "torn")) if comm.rank == 0 else (NOT_YET, NO_REASON))

    assert [v.outcome for v in raise_errors(run_ranks(2, work))] == [False] * 2


def test_votes_on_different_steps_never_commit() -> None:
    votes = raise_errors(run_ranks(2, lambda comm: take_part(comm, lambda turn: (YES, NO_REASON), step=5 + comm.rank)))
    assert [v.outcome for v in votes] == [False] * 2
    assert "5" in votes[0].reason.text and "6" in votes[0].reason.text
