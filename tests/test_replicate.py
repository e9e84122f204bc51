from __future__ import annotations

import itertools
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memckpt import _native
from memckpt.comm.base import wait
from memckpt.comm.local import LocalComm
from memckpt.format.seal import Generation, Seal, encode
from memckpt.memory.arena import Arena
from memckpt.memory.slotfile import Slot
from memckpt.memory.slots import SlotPool
from memckpt.saving.replicate import (
    Begin,
    Pace,
    Receiving,
    Sending,
    chunk_count,
    chunk_range,
    seal_message_nbytes,
    tag,
)
from tests.ranks import fake_nodes, raise_errors, run_ranks

CHUNK = _native.CHUNK_BYTES
GENERATION = Generation(counter=3, id="ab" * 8)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2**31 - 1, 2**31, 2**32 + 5])
def test_chunks_cover_a_file_of_any_size_without_32_bit_numbers(nbytes: int) -> None:
    count = chunk_count(nbytes)
    assert count == (nbytes + CHUNK - 1) // CHUNK
    ends = [0]
    for index in {0, 1, count // 2, count - 2, count - 1} & set(range(count)):
        start, end = chunk_range(index, nbytes)
        assert start == index * CHUNK and 0 < end - start <= CHUNK
        ends.append(end)
    assert max(ends) == nbytes
    assert seal_message_nbytes(nbytes) >= 8 + 8192 + 11 * count


def test_tags_stay_within_what_every_transport_has() -> None:
    tags = {tag(seq, index) for seq in (1, 2, 10**9) for index in (0, 1, 5000, 2**20)}
    assert min(tags) >= 16 and max(tags) <= 32_767
    assert tag(7, 3) != tag(7, 4) and tag(7, 3) != tag(8, 3)


class Source:
    """Bytes in a slot whose watermark a test moves."""

    def __init__(self, slot: Slot, seal: bytes | None) -> None:
        self.memory, self.nbytes, self.seal = slot.memory, slot.nbytes, seal
        self.watermark = 0
        self.reason = "" if seal else "tensor 'w' changed under the copy"

    def seal_bytes(self) -> bytes | None:
        return self.seal


def seal_of(slot: Slot, *, crcs: list[int] | None = None, step: int = 4) -> Seal:
    with memoryview(slot.memory) as view:
        found = [_native.crc32c(view[i : i + CHUNK]) for i in range(0, slot.nbytes, CHUNK)]
    return Seal(
        run="r", shard=0, world=2, generation=GENERATION, step=step, layout="x", nbytes=slot.nbytes,
        chunk_nbytes=CHUNK, crcs=found if crcs is None else crcs, created=0.0,
    )  # fmt: skip


def transfer(
    comm: LocalComm, nbytes: int, *, spoil: str = "", full: bool = False
) -> tuple[bytes, Receiving | None, bytes]:
    """Rank 0 sends a random snapshot of `nbytes` bytes to rank 1; (bytes, receiver, bytes of the replica)."""
    arena = Arena.open("r")
    lock = arena.lock(rank=comm.rank)
    pool = SlotPool(arena, [comm.rank, 1 - comm.rank], threads=1)
    end = time.monotonic() + 20
    try:
        if comm.rank == 0:
            slot = pool.take(nbytes)
            assert slot is not None
            data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
            with memoryview(slot.memory) as view:
                view[:] = data
            seal = seal_of(slot, step=5 if spoil == "step" else 4)
            if spoil == "chunk":
                seal = seal_of(slot, crcs=[crc ^ (i == 1) for i, crc in enumerate(seal.crcs)])
            source = Source(slot, b"" if spoil == "torn" else encode(seal))
            sending = Sending(comm, source, Begin(1, 4, nbytes), 1, Pace(None))
            while not sending.done:
                assert time.monotonic() < end
                source.watermark = min(source.watermark + 1, chunk_count(nbytes))  # as the copy proceeds
                sending.poll()
                time.sleep(1e-4)
            return data, None, b""
        if full:
            for holding in pool.holdings.values():
                holding.committed, holding.pending = pool.take(4096), pool.take(4096)
        receiving = Receiving(comm, pool, source=0, seq=1, step=4, generation=GENERATION, run="r")
        while not receiving.done:
            assert time.monotonic() < end
            receiving.poll()
            time.sleep(1e-4)
        pending = pool.holdings[0].pending
        replica = b""
        if receiving.sealed:
            assert pending is not None and pending.read_seal() is not None
            replica = bytes(memoryview(pending.memory))
        elif not full and pending is not None:
            assert pending.read_seal() is None
        return b"", receiving, replica
    finally:
        pool.close()
        lock.release()


def test_what_arrived_is_taken_in_turn_with_what_is_sent(tmp_path: Path) -> None:
    """A rank that takes all that has arrived before it sends again halves what a link of two directions carries."""

    def work(comm: LocalComm) -> None:
        def meet() -> None:
            wait([comm.iallreduce_min(np.zeros(1, dtype=np.int64))], 20, "the other rank")

        chunks = 4
        if comm.rank == 0:
            body = msgspec.msgpack.encode(Begin(1, 4, chunks * CHUNK))
            comm.isend((len(body).to_bytes(2, "little") + body).ljust(512, b"\0"), 1, tag(1, 0))
            for chunk in range(chunks):
                comm.isend(bytes(CHUNK), 1, tag(1, chunk + 1))
            meet()
            return
        arena = Arena.open("r")
        lock = arena.lock(rank=1)
        pool = SlotPool(arena, [1, 0], threads=1)
        receiving = Receiving(comm, pool, source=0, seq=1, step=4, generation=GENERATION, run="r")
        meet()  # everything is there by now
        landed = [0]
        end = time.monotonic() + 20
        while landed[-1] < chunks:
            assert time.monotonic() < end
            receiving.poll()
            landed.append(receiving._landed)
        assert max(after - before for before, after in itertools.pairwise(landed)) == 1
        receiving.abandon()
        pool.drop()
        pool.close()
        lock.release()

    with fake_nodes(str(tmp_path)):
        raise_errors(run_ranks(2, work, nodes=["a", "b"]))


@pytest.mark.parametrize("nbytes", [1, CHUNK, 3 * CHUNK + 1])
def test_a_replica_is_the_same_bytes_and_is_sealed_last(tmp_path: Path, nbytes: int) -> None:
    with fake_nodes(str(tmp_path)):
        (data, _, _), (_, receiving, replica) = raise_errors(
            run_ranks(2, lambda c: transfer(c, nbytes), nodes=["a", "b"])
        )
    assert receiving.sealed and receiving.reason is None
    assert replica == data


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("torn", "tensor 'w' changed under the copy"),
        ("chunk", "differs from the owner's snapshot in chunk 1"),
        ("step", "step 5"),
    ],
)
def test_what_does_not_match_its_seal_is_received_to_the_end_and_not_sealed(
    tmp_path: Path, spoil: str, said: str
) -> None:
    with fake_nodes(str(tmp_path)):
        _, (_, receiving, _) = raise_errors(
            run_ranks(2, lambda c: transfer(c, 2 * CHUNK + 5, spoil=spoil), nodes=["a", "b"])
        )
    assert not receiving.sealed
    assert said in receiving.reason
    assert receiving.torn == (spoil == "torn")


def test_a_holder_without_a_free_slot_receives_all_the_same(tmp_path: Path) -> None:
    with fake_nodes(str(tmp_path)):
        _, (_, receiving, _) = raise_errors(
            run_ranks(2, lambda c: transfer(c, 2 * CHUNK + 5, full=True), nodes=["a", "b"])
        )
    assert receiving.done and not receiving.sealed
    assert "no free slot" in receiving.reason


def test_after_an_error_a_slot_with_an_unfinished_receive_is_never_used_again(tmp_path: Path) -> None:
    """What was matched may be written long after the error: no file of that name may be there to be taken for free."""

    def work(comm: LocalComm) -> None:
        if comm.rank == 0:
            seq_of_begin = [(1, 3 * CHUNK), (2, CHUNK)]
            for seq, nbytes in seq_of_begin:
                body = msgspec.msgpack.encode(Begin(seq, 4, nbytes))
                comm.isend((len(body).to_bytes(2, "little") + body).ljust(512, b"\0"), 1, tag(seq, 0))
            comm.isend(bytes(CHUNK), 1, tag(2, 1))
            return
        arena = Arena.open("r")
        lock = arena.lock(rank=1)
        pool = SlotPool(arena, [1, 0], threads=1)
        for seq, left_over in ((1, False), (2, True)):
            receiving = Receiving(comm, pool, source=0, seq=seq, step=4, generation=GENERATION, run="r")
            end = time.monotonic() + 20
            while pool.holdings[0].pending is None or (left_over and not receiving._landed):
                assert time.monotonic() < end
                receiving.poll()
            slot = pool.holdings[0].pending
            receiving.abandon()
            assert Path(slot.path).exists() == left_over
            assert (pool.holdings[0].pending is slot) == left_over
            pool.drop()
        pool.close()
        lock.release()

    with fake_nodes(str(tmp_path)):
        raise_errors(run_ranks(2, work, nodes=["a", "b"]))


def test_pace_holds_back_until_somebody_waits() -> None:
    pace = Pace(1000.0)
    assert pace.allows(0) and not pace.allows(10**6)
    pace.urgent = True
    assert pace.allows(10**6)
    assert Pace(None).allows(10**12)
