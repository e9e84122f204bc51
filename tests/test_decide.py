from __future__ import annotations

import pytest

from memckpt.comm.local import LocalComm
from memckpt.errors import DeadlineExceeded, StepMismatch
from memckpt.saving.decide import Agreed, Decisions, Word
from tests.ranks import raise_errors, run_ranks


def test_each_exchange_tells_what_all_said_one_exchange_ago() -> None:
    def work(comm: LocalComm) -> list[Agreed | None]:
        decisions = Decisions(comm, run="r", deadline_s=10)
        return [decisions.exchange(Word(n, settled=comm.rank != 1 or n != 2)) for n in range(1, 5)]

    for told in raise_errors(run_ranks(3, work)):
        assert told == [None, Agreed(1, True, False), Agreed(2, False, False), Agreed(3, True, False)]


def test_different_steps_are_an_error_on_every_rank_with_both_numbers() -> None:
    def work(comm: LocalComm) -> None:
        decisions = Decisions(comm, run="r", deadline_s=10)
        decisions.exchange(Word(7 + 2 * (comm.rank == 1), settled=True))
        decisions.exchange(Word(8, settled=True))

    for error in run_ranks(3, work):
        assert isinstance(error, StepMismatch)
        assert "7" in str(error) and "9" in str(error)


def test_a_leaving_rank_answers_without_a_step_and_all_leaving_is_told() -> None:
    def work(comm: LocalComm) -> tuple[Agreed | None, Agreed | None]:
        decisions = Decisions(comm, run="r", deadline_s=10)
        decisions.exchange(Word(None if comm.rank == 0 else 5, settled=True))
        first = decisions.complete()
        decisions.exchange(Word(None, settled=True))
        return first, decisions.complete()

    for first, last in raise_errors(run_ranks(3, work)):
        assert first == Agreed(5, True, True)
        assert last == Agreed(None, True, True)


def test_each_field_is_reduced_as_it_must_be() -> None:
    def work(comm: LocalComm) -> Agreed | None:
        decisions = Decisions(comm, run="r", deadline_s=10)
        r = comm.rank
        word = Word(
            3, True, clock_ms=100 - r, preempted=r == 1, persist_idle=r != 2, troubled=r > 0, persisted_step=-1 + r,
            cost_us=10 * r, step_us=7 + r, replicate_us=0,
        )  # fmt: skip
        decisions.exchange(word)
        return decisions.complete()

    for agreed in raise_errors(run_ranks(3, work)):
        assert agreed == Agreed(
            3, True, False, clock_ms=98, preempted=True, persist_idle=False, troubled=1, persisted_step=1,
            cost_us=20, step_us=9, replicate_us=0,
        )  # fmt: skip


def test_a_silent_rank_ends_the_wait_at_the_deadline() -> None:
    def work(comm: LocalComm) -> None:
        decisions = Decisions(comm, run="r", deadline_s=0.2)
        decisions.exchange(Word(1, settled=True))
        if comm.rank == 0:
            with pytest.raises(DeadlineExceeded):
                decisions.exchange(Word(2, settled=True))

    def silent(comm: LocalComm) -> None:
        if comm.rank == 0:
            work(comm)

    raise_errors(run_ranks(2, silent))
