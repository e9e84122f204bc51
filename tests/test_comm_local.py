"""Threads as ranks: the contract, and the failures made on purpose."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from memckpt.comm import FIRST_TAG, Communicator, LocalComm, LocalGroup, barrier, wait
from memckpt.comm.local import Killed
from memckpt.errors import DeadlineExceeded, PeerLost
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


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except PeerLost:
        return "lost"
    return "done"


def one_death(seed: int | None) -> list[object]:
    """Rank 1 adds its part to a reduction, sends to both others and dies; what each rank then sees."""
    group = LocalGroup(3, seed=seed, max_delay_s=0.05)

    def work(comm: Communicator) -> object:
        request = comm.iallreduce_min(np.array([comm.rank], dtype=np.int64))
        if comm.rank == 1:
            for peer in (0, 2):
                comm.isend(b"last words", peer, FIRST_TAG)
            group.kill(1)
            comm.isend(b"from beyond", 0, FIRST_TAG)
        message = comm.irecv(bytearray(10), 1, FIRST_TAG)
        never = comm.irecv(bytearray(10), 1, FIRST_TAG + 1)
        barrier_of_living(comm)
        return (
            outcome(lambda: wait([request], 10.0, "reduction")),
            outcome(lambda: wait([message], 10.0, "message")),
            outcome(lambda: wait([never], 10.0, "never sent")),
            outcome(lambda: wait([comm.iallreduce_min(np.zeros(1, dtype=np.int64))], 10.0, "the next")),
        )

    return on_every_rank(group, work)


def barrier_of_living(comm: Communicator) -> None:
    peer = 2 - comm.rank
    wait([comm.irecv(bytearray(1), peer, FIRST_TAG + 2), comm.isend(b"!", peer, FIRST_TAG + 2)], 10.0, "the living")


def test_a_death_is_seen_by_the_peers() -> None:
    results = one_death(None)
    assert isinstance(results[1], Killed)
    assert not isinstance(results[1], Exception)
    for rank in (0, 2):
        assert results[rank] == ("done", "done", "lost", "lost")


def test_survivors_may_disagree() -> None:
    seen = {seed: [one_death(seed)[rank] for rank in (0, 2)] for seed in range(24)}
    for results in seen.values():
        assert all(isinstance(result, tuple) and result[2:] == ("lost", "lost") for result in results)
    reductions = {(a[0], b[0]) for a, b in seen.values()}  # type: ignore[index]
    assert ("done", "lost") in reductions or ("lost", "done") in reductions
    assert {result[1] for results in seen.values() for result in results} == {"done", "lost"}  # type: ignore[index]


def test_what_happens_is_drawn_from_the_seed_alone() -> None:
    def drawn(seed: int) -> list[object]:
        group = LocalGroup(2, seed=seed, max_delay_s=1.0)
        return [(group._delay("message", (), 0, 1, number), group._coin("lost", number)) for number in range(50)]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_a_large_send_needs_its_receiver() -> None:
    group = LocalGroup(2)

    def work(comm: Communicator) -> object:
        if comm.rank == 1:
            time.sleep(0.05)
            group.kill(1)
            return None
        small, large = comm.isend(bytes(10), 1, FIRST_TAG), comm.isend(bytes(100_000), 1, FIRST_TAG)
        assert small.test()
        assert not large.test()
        with pytest.raises(PeerLost, match="rank 1"):
            wait([large], 10.0, "large")
        with pytest.raises(PeerLost, match="rank 1"):
            comm.isend(b"", 1, FIRST_TAG).test()
        return "fine"

    assert succeed_of_living(group, work) == ["fine", None]


def succeed_of_living(group: LocalGroup, work: Callable[[Communicator], object]) -> list[object]:
    results = on_every_rank(group, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_a_held_rank_stops_and_goes_on() -> None:
    group = LocalGroup(2)
    group.hold(1)

    def work(comm: Communicator) -> object:
        if comm.rank == 0:
            with pytest.raises(DeadlineExceeded, match="from rank 1"):
                wait([comm.irecv(bytearray(1), 1, FIRST_TAG)], 0.1, "the sleeper")
            group.release(1)
        else:
            comm.isend(b"x", 0, FIRST_TAG)
        barrier(comm, 10.0)
        return "fine"

    assert succeed(group, work) == ["fine", "fine"]


def test_a_held_rank_can_be_killed() -> None:
    group = LocalGroup(2)
    group.hold(1)

    def work(comm: Communicator) -> object:
        if comm.rank == 0:
            group.kill(1)
            return outcome(lambda: barrier(comm, 10.0))
        return barrier(comm, 10.0)

    results = on_every_rank(group, work)
    assert results[0] == "lost"
    assert isinstance(results[1], Killed)
    assert group.alive() == [0]
    with pytest.raises(Killed):
        group.check(1)


def test_death_reaches_duplicates_and_revoking_does_not() -> None:
    group = LocalGroup(2, seed=1, max_delay_s=0.002)

    def work(comm: Communicator) -> object:
        other = comm.dup()
        barrier(comm, 10.0)
        other.close(abort=True)
        barrier(comm, 10.0)
        third = comm.dup()
        if comm.rank == 1:
            group.kill(1)
            third.close()
        return outcome(lambda: wait([third.irecv(bytearray(1), 1, FIRST_TAG)], 10.0, "third"))

    results = on_every_rank(group, work)
    assert results[0] == "lost"
    assert isinstance(results[1], Killed)


def test_an_abort_frees_a_thread_of_the_same_rank() -> None:
    group = LocalGroup(2, revocable=False)
    comm = group.comms[0]
    seen: list[object] = []
    request = comm.irecv(bytearray(1), 1, FIRST_TAG)
    thread = threading.Thread(target=lambda: seen.append(outcome(lambda: wait([request], 30.0, "nothing"))))
    thread.start()
    comm.close(abort=True)
    thread.join(10)
    assert seen == ["lost"]
    group.comms[1].irecv(bytearray(1), 0, FIRST_TAG)  # cannot be told


def test_a_failed_receive_leaves_anything_in_its_buffer() -> None:
    torn = 0
    for seed in range(20):
        group = LocalGroup(2, seed=seed, max_delay_s=0.001)
        comm, buffer = group.comms[0], bytearray(8)
        request = comm.irecv(buffer, 1, FIRST_TAG)
        group.comms[1].isend(b"\xff" * 8, 0, FIRST_TAG)
        comm.close(abort=True)
        if outcome(lambda request=request: wait([request], 5.0, "torn")) == "lost":  # type: ignore[misc]
            torn += buffer == b"\xff" * 4 + bytes(4)
    assert torn


def test_waiting_costs_little_processor_time() -> None:
    comm = LocalComm()
    request = comm.irecv(bytearray(1), 0, FIRST_TAG)
    begun = time.thread_time()
    with pytest.raises(DeadlineExceeded):
        wait([request], 0.5, "nothing")
    assert time.thread_time() - begun < 0.15


def test_a_single_rank_keeps_no_trace_of_what_is_done() -> None:
    comm = LocalComm()
    for number in range(50):
        wait([comm.irecv(bytearray(1), 0, FIRST_TAG + number), comm.isend(b"x", 0, FIRST_TAG + number)], 5.0, "self")
        barrier(comm, 5.0)
    context = comm._context
    assert (len(context.sent), len(context.posted), len(context.reductions), len(context.count)) == (0, 0, 0, 1)
