"""What every transport must do: run on threads by test_comm_local.py and, as a script, on real ranks by
mpi/test_comm.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from memckpt.comm import (
    FIRST_TAG,
    Communicator,
    allgather,
    allreduce_min,
    barrier,
    broadcast,
    gather,
    transport_speed,
    wait,
)
from memckpt.errors import Closed, DeadlineExceeded, PeerLost, ProtocolError, UsageError

DEADLINE_S = 30.0
MIB = 1 << 20


def pattern(rank: int, nbytes: int) -> bytes:
    return random.Random(rank * 1000003 + nbytes).randbytes(nbytes)


def check_identity(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.size
    assert comm.kind in ("mpi", "torch", "local")
    assert comm.name
    assert comm.max_tag >= 32767
    assert [int(part) for part in allgather(comm, str(comm.rank).encode(), DEADLINE_S)] == list(range(comm.size))


def check_ring_of_every_size(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for nbytes in (0, 1, 7, 4096, 65537, 3 * MIB + 1):
        target = np.full(nbytes + 3, 0xEE, dtype=np.uint8)
        receive = comm.irecv(target[:nbytes], before, FIRST_TAG)
        send = comm.isend(pattern(comm.rank, nbytes), after, FIRST_TAG)
        wait([receive, send], DEADLINE_S, "ring")
        assert target[:nbytes].tobytes() == pattern(before, nbytes)
        assert (target[nbytes:] == 0xEE).all()
        assert receive.nbytes == send.nbytes == nbytes
        assert receive.test()
        assert send.test()


def check_short_message_in_a_long_buffer(comm: Communicator) -> None:
    target = bytearray(b"x" * 10)
    receive = comm.irecv(target, (comm.rank - 1) % comm.size, FIRST_TAG)
    send = comm.isend(b"abc", (comm.rank + 1) % comm.size, FIRST_TAG)
    wait([receive, send], DEADLINE_S, "short")
    assert receive.nbytes == 3
    assert target == b"abcxxxxxxx"


def check_order_within_a_tag_and_choice_by_tag(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    tags = (FIRST_TAG, FIRST_TAG + 1, min(comm.max_tag, 2**20))
    sends = [comm.isend(bytes([tag % 251, number]), after, tag) for number in range(20) for tag in tags]
    for tag in reversed(tags):  # tags in another order than sent, numbers in the order sent
        targets = [bytearray(2) for _ in range(20)]
        wait([comm.irecv(target, before, tag) for target in targets], DEADLINE_S, "order")
        assert [bytes(target) for target in targets] == [bytes([tag % 251, number]) for number in range(20)]
    wait(sends, DEADLINE_S, "order")


def check_many_large_messages_both_ways(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    count, nbytes = 8, MIB + 3
    targets = [np.zeros(nbytes, dtype=np.uint8) for _ in range(count)]
    receives = [comm.irecv(target, before, FIRST_TAG + i) for i, target in enumerate(targets)]
    sends = [comm.isend(pattern(comm.rank * count + i, nbytes), after, FIRST_TAG + i) for i in range(count)]
    wait(receives + sends, DEADLINE_S, "large")
    for i, target in enumerate(targets):
        assert target.tobytes() == pattern(before * count + i, nbytes)


def check_reductions(comm: Communicator) -> None:
    extreme = np.iinfo(np.int64)
    values = np.array([comm.rank, -comm.rank, extreme.max, extreme.min, 2**53 + 1 + comm.rank], dtype=np.int64)
    request = comm.iallreduce_min(values)
    wait([request], DEADLINE_S, "reduction")
    assert values.tolist() == [0, 1 - comm.size, extreme.max, extreme.min, 2**53 + 1]
    several = [np.array([number * 10 + comm.rank], dtype=np.int64) for number in range(5)]
    wait([comm.iallreduce_min(value) for value in several], DEADLINE_S, "reductions")  # several under way at once
    assert [int(value[0]) for value in several] == [0, 10, 20, 30, 40]
    assert allreduce_min(comm, [5 - comm.rank, 3], DEADLINE_S) == [6 - comm.size, 3]


def check_trees(comm: Communicator) -> None:
    mine = pattern(comm.rank, 1000 * comm.rank)  # rank 0 has none
    everything = [pattern(rank, 1000 * rank) for rank in range(comm.size)]
    for root in range(comm.size):
        assert gather(comm, mine, root, DEADLINE_S) == (everything if comm.rank == root else None)
        word = pattern(root, 12345) if root else b""
        assert broadcast(comm, word if comm.rank == root else None, root, DEADLINE_S) == word
    assert allgather(comm, mine, DEADLINE_S) == everything
    big = pattern(comm.rank, 2 * MIB)
    assert allgather(comm, big, DEADLINE_S) == [pattern(rank, 2 * MIB) for rank in range(comm.size)]
    barrier(comm, DEADLINE_S)


def check_byte_bounds(comm: Communicator) -> None:
    with pytest.raises(UsageError):
        allgather(comm, bytes(2000), DEADLINE_S, limit=1000)
    with pytest.raises(UsageError):
        broadcast(comm, bytes(2000) if comm.rank == 0 else None, 0, DEADLINE_S, limit=1000)
    last = comm.size - 1
    if comm.rank == last or comm.size == 1:
        with pytest.raises(UsageError):
            gather(comm, bytes(600), last, DEADLINE_S, limit=600)
    else:
        try:
            gather(comm, bytes(600), last, DEADLINE_S, limit=600)
        except UsageError:
            pass  # a rank may know, the root must
    assert allgather(comm, b"still in step", DEADLINE_S) == [b"still in step"] * comm.size


def check_message_longer_than_the_buffer(comm: Communicator) -> None:
    if comm.size == 1:
        return  # Open MPI cuts a message to oneself off without a word
    comm = comm.dup(DEADLINE_S)
    receive = comm.irecv(bytearray(4), (comm.rank - 1) % comm.size, FIRST_TAG)
    send = comm.isend(b"12345678", (comm.rank + 1) % comm.size, FIRST_TAG)
    with pytest.raises(ProtocolError):
        wait([receive], DEADLINE_S, "too long")
    wait([send], DEADLINE_S, "too long")
    barrier(comm, DEADLINE_S)
    comm.close()


def check_dup_is_separate(comm: Communicator) -> None:
    other = comm.dup(DEADLINE_S)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    here, there = bytearray(1), bytearray(1)
    sends = [comm.isend(b"c", after, FIRST_TAG), other.isend(b"o", after, FIRST_TAG)]
    wait([other.irecv(there, before, FIRST_TAG)], DEADLINE_S, "dup")
    wait([comm.irecv(here, before, FIRST_TAG), *sends], DEADLINE_S, "dup")
    assert (here, there) == (b"c", b"o")
    assert (other.rank, other.size) == (comm.rank, comm.size)
    one, two = (np.array([value + comm.rank], dtype=np.int64) for value in (100, 200))
    first, second = (comm.iallreduce_min(one), other.iallreduce_min(two))
    wait([second, first], DEADLINE_S, "dup")
    assert (one[0], two[0]) == (100, 200)
    barrier(other, DEADLINE_S)
    other.close()
    barrier(comm, DEADLINE_S)


def check_arguments(comm: Communicator) -> None:
    frozen = np.zeros(4, dtype=np.uint8)
    frozen.setflags(write=False)
    for bad in (lambda: comm.irecv(frozen, 0, FIRST_TAG), lambda: comm.irecv(bytearray(1), comm.size, FIRST_TAG)):
        with pytest.raises(UsageError):
            bad()
    with pytest.raises(UsageError):
        comm.irecv(bytearray(1), -1, FIRST_TAG)  # MPI's wildcard
    with pytest.raises(UsageError):
        comm.isend(b"x", comm.size, FIRST_TAG)
    with pytest.raises(UsageError):
        comm.isend(np.zeros((4, 4))[:, ::2], 0, FIRST_TAG)
    with pytest.raises(UsageError, match="in parts"):
        comm.isend(np.empty(2**31, dtype=np.uint8), 0, FIRST_TAG)  # never touched, so it takes no memory
    with pytest.raises(UsageError, match="in parts"):
        comm.irecv(np.empty(2**32 + 5, dtype=np.uint8), 0, FIRST_TAG)
    with pytest.raises(UsageError):
        comm.iallreduce_min(np.zeros(1, dtype=np.int32))  # type: ignore[arg-type]


def check_deadlines(world: Communicator) -> None:
    comm = world.dup(DEADLINE_S)
    peer = (comm.rank + 1) % comm.size
    request = comm.irecv(bytearray(1), peer, FIRST_TAG + 5)
    begun, polls = time.monotonic(), 0

    def poll() -> None:
        nonlocal polls
        polls += 1

    told = rf"the news: .*receive from rank {peer} \(tag {FIRST_TAG + 5}\)"
    with pytest.raises(DeadlineExceeded, match=told) as caught:
        wait([request], 0.1, "the news", poll)
    assert isinstance(caught.value, PeerLost)
    assert caught.value.rank == peer
    assert 0.1 <= time.monotonic() - begun < 5
    assert 0 < polls < 2000
    assert not request.test()  # it stays what it was
    barrier(comm, DEADLINE_S)
    back = comm.isend(b"!", (comm.rank - 1) % comm.size, FIRST_TAG + 5)
    wait([request, back], DEADLINE_S, "after all")
    if comm.size > 1 and comm.rank == 0:  # the others do not take part
        for late in (
            lambda: gather(comm, b"", 0, 0.05, what="roll call"),
            lambda: barrier(comm, 0.05, what="roll call"),
        ):
            with pytest.raises(DeadlineExceeded, match="roll call"):
                late()
    barrier(world, DEADLINE_S)
    comm.close(abort=True)


def check_speed(comm: Communicator) -> None:
    speed = transport_speed(comm, 9 * MIB, DEADLINE_S)
    assert speed == float("inf") if comm.size == 1 else 1e5 < speed < 1e12
    assert len(set(allgather(comm, repr(speed).encode(), DEADLINE_S))) == 1


def check_close(comm: Communicator) -> None:
    other = comm.dup(DEADLINE_S)
    barrier(other, DEADLINE_S)
    other.close()
    other.close()
    other.close(abort=True)
    for use in (
        lambda: other.isend(b"", 0, FIRST_TAG),
        lambda: other.irecv(bytearray(), 0, FIRST_TAG),
        lambda: other.iallreduce_min(np.zeros(1, dtype=np.int64)),
        lambda: other.dup(1.0),
    ):
        with pytest.raises(Closed):
            use()
    barrier(comm, DEADLINE_S)


def check_abort_frees_peers(comm: Communicator) -> None:
    if comm.size == 1 or not comm.revocable:
        return
    other = comm.dup(DEADLINE_S)
    barrier(comm, DEADLINE_S)  # all are out of dup, which a revoke may still make fail
    if comm.rank == comm.size - 1:
        other.close(abort=True)
        barrier(comm, DEADLINE_S)
        return
    target = np.zeros(MIB, dtype=np.uint8)
    begun = time.monotonic()
    with pytest.raises(PeerLost):
        wait([other.irecv(target, comm.size - 1, FIRST_TAG)], DEADLINE_S, "a message that nobody sends")
    with pytest.raises(PeerLost):
        other.iallreduce_min(np.zeros(1, dtype=np.int64)).test()
    assert time.monotonic() - begun < DEADLINE_S / 2
    other.close(abort=True)
    barrier(comm, DEADLINE_S)


CHECKS: list[Callable[[Communicator], None]] = [
    value for name, value in list(globals().items()) if name.startswith("check_") and callable(value)
]

if __name__ == "__main__":
    from memckpt.comm import detect

    world = detect()
    for check in CHECKS:
        check(world)
        print(f"{check.__name__} ok on {world.rank} of {world.size}, pid {os.getpid()}", flush=True)
    world.close()
