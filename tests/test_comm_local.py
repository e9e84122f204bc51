"""Threads as ranks: the contract, and the failures made on purpose."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import pytest

from memckpt.comm import Communicator, LocalComm, LocalGroup
from tests.comm_contract import CHECKS

pytestmark = pytest.mark.timeout(60)


def on_every_rank(group: LocalGroup, work: Callable[[Communicator], object], timeout_s: float = 40.0) -> list[object]:
    """Result or exception of `work` on each rank."""
    results: list[object] = [None] * group.size

    def body(rank: int) -> None:
        try:
            results[rank] = work(group.comms[rank])
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(group.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    return results


def succeed(group: LocalGroup, work: Callable[[Communicator], object]) -> list[object]:
    results = on_every_rank(group, work)
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            pytest.fail(f"rank {rank}: {''.join(traceback.format_exception(result))}")
    return results


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_one_rank(check: Callable[[Communicator], None]) -> None:
    check(LocalComm())


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_threads(check: Callable[[Communicator], None], n: int) -> None:
    succeed(LocalGroup(n), check)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_threads_with_delays(check: Callable[[Communicator], None]) -> None:
    succeed(LocalGroup(3, seed=7, max_delay_s=0.005), check)
