from __future__ import annotations

import pytest

from memckpt.comm.local import LocalComm
from memckpt.errors import DeadlineExceeded, StepMismatch
from memckpt.saving.decide import Agreed, Decisions
from tests.ranks import raise_errors, run_ranks


def test_each_exchange_tells_what_all_said_one_exchange_ago() -> None:
    def work(comm: LocalComm) -> list[Agreed | None]:
        decisions = Decisions(comm, run="r", deadline_s=10)
        return [decisions.exchange(n, settled=comm.rank != 1 or n != 2) for n in range(1, 5)]

    for told in raise_errors(run_ranks(3, work)):
        assert told == [None, Agreed(1, True, False), Agreed(2, False, False), Agreed(3, True, False)]


def test_different_steps_are_an_error_on_every_rank_with_both_numbers() -> None:
    def work(comm: LocalComm) -> None:
        decisions = Decisions(comm, run="r", deadline_s=10)
        decisions.exchange(7 + 2 * (comm.rank == 1), settled=True)
        decisions.exchange(8, settled=True)

    for error in run_ranks(3, work):
        assert isinstance(error, StepMismatch)
        assert "7" in str(error) and "9" in str(error)


def test_a_leaving_rank_answers_without_a_step_and_all_leaving_is_told() -> None:
    def work(comm: LocalComm) -> tuple[Agreed | None, Agreed | None]:
        decisions = Decisions(comm, run="r", deadline_s=10)
        decisions.exchange(None if comm.rank == 0 else 5, settled=True)
        first = decisions.complete()
        decisions.exchange(None, settled=True)
        return first, decisions.complete()

    for first, last in raise_errors(run_ranks(3, work)):
        assert first == Agreed(5, True, True)
        assert last == Agreed(None, True, True)


def test_a_silent_rank_ends_the_wait_at_the_deadline() -> None:
    def work(comm: LocalComm) -> None:
        decisions = Decisions(comm, run="r", deadline_s=0.2)
        decisions.exchange(1, settled=True)
        if comm.rank == 0:
            with pytest.raises(DeadlineExceeded):
                decisions.exchange(2, settled=True)

    def silent(comm: LocalComm) -> None:
        if comm.rank == 0:
            work(comm)

    raise_errors(run_ranks(2, silent))
