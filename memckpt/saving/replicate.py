"""Replicate: send a snapshot to the ranks that hold its replicas, chunk by chunk while it is still being copied.

Wire format, per save and per holder, all from the owner, tagged with the save's sequence number and the message's
index:

====== ================= ==========================================================
index  length            content
====== ================= ==========================================================
0      512               2 bytes little-endian length, `Begin` in msgpack, padding
1..n   4 MiB, last less  the chunks of the file
n + 1  from `nbytes`     8 bytes little-endian length, the owner's seal, padding;
                         length 0: torn, do not seal; the reason follows, UTF-8
====== ================= ==========================================================

A transfer runs to its end or to a communicator error, whatever happens to the snapshot: a torn owner goes on sending, a
holder without room goes on receiving, so that nothing of a save is outstanding after its vote. Chunks arrive in the
slot itself and are checksummed there. A receive that was matched before a revoke may still write long after it, so a
slot with an unfinished receive at an error is abandoned for good: its file goes, and nobody can take it for a free one.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from memckpt import _native, faults
from memckpt.comm.base import FIRST_TAG, Communicator, Request
from memckpt.errors import MemckptError, ProtocolError
from memckpt.format.seal import Generation, Seal, decode
from memckpt.memory.slotfile import Slot
from memckpt.memory.slots import SlotPool

SENDS = 4
"""Chunks that an owner has under way at once."""

RECEIVES = 4
"""Chunks that a holder has under way at once."""

_BEGIN_NBYTES = 512
_REASON_NBYTES = 1024
_TAGS = 32_000  # every transport has tags up to 32,767; the order between equal tags is kept


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """What the owner is about to send."""

    seq: int
    step: int
    nbytes: int


def tag(seq: int, index: int) -> int:
    """The tag of message `index` of save `seq`."""
    return FIRST_TAG + (seq * 8191 + index) % _TAGS


def chunk_count(nbytes: int) -> int:
    """Chunks of a file of `nbytes` bytes."""
    return -(-nbytes // _native.CHUNK_BYTES)


def chunk_range(index: int, nbytes: int) -> tuple[int, int]:
    """First byte and byte after the last of chunk `index`."""
    start = index * _native.CHUNK_BYTES
    return start, min(start + _native.CHUNK_BYTES, nbytes)


def seal_message_nbytes(nbytes: int) -> int:
    """Length of the message that carries the seal of a file of `nbytes` bytes, known on both sides beforehand."""
    return 8 + 8192 + 12 * chunk_count(nbytes)


class Source(Protocol):
    """What a `Sending` sends: a snapshot in the making, or a sealed one."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes; 0 for nothing."""

    @property
    def watermark(self) -> int:
        """Leading chunks that may be sent."""

    @property
    def memory(self) -> _native.SharedMemory:
        """The mapping of the file."""

    @property
    def reason(self) -> str:
        """Why there will be no seal."""

    def seal_bytes(self) -> bytes | None:
        """The encoded seal, empty when there will be none, None while that is not known."""


class Pace:
    """Spreads sending over time: at most `bytes_per_s` since `start`, unless somebody waits."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._start = time.monotonic()
        self.urgent = False

    def allows(self, sent_nbytes: int) -> bool:
        """Whether the next chunk may go when `sent_nbytes` bytes have gone."""
        if self._bytes_per_s is None or self.urgent:
            return True
        return sent_nbytes <= (time.monotonic() - self._start) * self._bytes_per_s


class Sending:
    """One save on its way to one holder. Driven by `poll`; never blocks."""

    def __init__(self, comm: Communicator, source: Source, begin: Begin, dest: int, pace: Pace) -> None:
        self._comm = comm
        self._source = source
        self._begin = begin
        self._dest = dest
        self._pace = pace
        self._chunks = chunk_count(begin.nbytes)
        self._next = 0
        self._stage = "begin"
        self._requests: deque[Request] = deque()

    @property
    def done(self) -> bool:
        """Every message has left."""
        return self._stage == "end" and not self._requests

    def poll(self) -> bool:
        """Do what can be done now; True if something moved."""
        moved = False
        while self._requests and self._requests[0].test():
            self._requests.popleft()
            moved = True
        if self._stage == "begin":
            payload = msgspec.msgpack.encode(self._begin)
            self._send((len(payload).to_bytes(2, "little") + payload).ljust(_BEGIN_NBYTES, b"\0"), 0)
            self._stage = "chunks"
            moved = True
        if self._stage == "chunks":
            moved |= self._send_chunks()
        if self._stage == "seal" and (seal := self._source.seal_bytes()) is not None:
            body = seal or self._source.reason.encode(errors="replace")[:_REASON_NBYTES]
            message = len(seal).to_bytes(8, "little") + body
            self._send(message.ljust(seal_message_nbytes(self._begin.nbytes), b"\0"), self._chunks + 1)
            self._stage = "end"
            moved = True
        return moved

    def _send_chunks(self) -> bool:
        moved = False
        ready = min(self._chunks, self._source.watermark)
        while self._next < ready and len(self._requests) < SENDS:
            start, end = chunk_range(self._next, self._begin.nbytes)
            if not self._pace.allows(start):
                break
            faults.point("replicate.chunk", self._comm.rank, self._begin.step)
            self._send(memoryview(self._source.memory)[start:end], self._next + 1)
            self._next += 1
            moved = True
        if self._next == self._chunks:
            self._stage = "seal"
        return moved

    def _send(self, buffer: bytes | memoryview, index: int) -> None:
        self._requests.append(self._comm.isend(buffer, self._dest, tag(self._begin.seq, index)))


class Receiving:
    """One save of one peer on its way into a slot of this rank. Driven by `poll`; never blocks but to make room.

    Attributes
    ----------
    source : int
        The owner.
    sealed : bool
        The replica is whole and sealed.
    reason : str or None
        Why it is not going to be.
    torn : bool
        Only because the owner did not seal its own snapshot; `reason` is its word.
    """

    def __init__(
        self,
        comm: Communicator,
        pool: SlotPool,
        *,
        source: int,
        seq: int,
        step: int,
        generation: Generation,
        run: str,
    ) -> None:
        self._comm = comm
        self._pool = pool
        self.source = source
        self._seq = seq
        self._step = step
        self._generation = generation
        self._run = run
        self._begin_buffer = np.zeros(_BEGIN_NBYTES, dtype=np.uint8)
        self._begin_request: Request | None = comm.irecv(self._begin_buffer, source, tag(seq, 0))
        self._nbytes = 0
        self._chunks = 0
        self._posted = 0
        self._landed = 0
        self._requests: deque[Request] = deque()
        self._crcs: list[int] = []
        self._seal_buffer: np.ndarray | None = None
        self._seal_request: Request | None = None
        self._slot: Slot | None = None
        self._sink: npt.NDArray[np.uint8] | None = None
        self.done = False
        self.sealed = False
        self.torn = False
        self.reason: str | None = None

    def poll(self) -> bool:
        """Do what can be done now; True if something moved."""
        if self.done:
            return False
        if self._begin_request is not None:
            if not self._begin_request.test():
                return False
            self._begin_request = None
            self._start()
            return True
        moved = False
        if self._requests and self._requests[0].test():  # one per turn: what this rank sends must go on, too
            nbytes = self._requests.popleft().nbytes
            self._post()
            self._land(nbytes)
            moved = True
        if self._seal_request is not None and not self._requests and self._seal_request.test():
            self._seal_request = None
            self._finish()
            moved = True
        return moved

    def _start(self) -> None:
        try:
            message = self._begin_buffer.tobytes()
            begin = msgspec.msgpack.decode(message[2 : 2 + int.from_bytes(message[:2], "little")], type=Begin)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"rank {self.source} sent no valid announcement: {error}", run=self._run) from error
        if begin.seq != self._seq or begin.nbytes < 0:
            raise ProtocolError(
                f"rank {self.source} sends save {begin.seq} of {begin.nbytes} bytes where save {self._seq} is due",
                run=self._run,
                rank=self.source,
            )
        if begin.step != self._step:
            self._fail(f"it sends step {begin.step} where step {self._step} is due")
        self._nbytes = begin.nbytes
        self._chunks = chunk_count(begin.nbytes)
        self._make_room()
        for _ in range(RECEIVES if self._slot is not None else 1):
            self._post()
        self._seal_buffer = np.zeros(seal_message_nbytes(begin.nbytes), dtype=np.uint8)
        self._seal_request = self._comm.irecv(self._seal_buffer, self.source, tag(self._seq, self._chunks + 1))

    def _make_room(self) -> None:
        if not self._nbytes or self.reason:
            return
        try:
            self._slot = self._pool.take(self._nbytes)
        except (OSError, MemckptError) as error:
            self._fail(f"no room for the replica of rank {self.source}: {error}")
            return
        if self._slot is None:
            self._fail(f"no free slot for the replica of rank {self.source}")
            return
        self._pool.holdings[self.source].pending = self._slot
        faults.point("replicate.slot", self._comm.rank, self._step)

    def _post(self) -> None:
        if self._posted >= self._chunks:
            return
        start, end = chunk_range(self._posted, self._nbytes)
        buffer: memoryview | npt.NDArray[np.uint8]
        if self._slot is not None:
            buffer = memoryview(self._slot.memory)[start:end]
        else:
            if self._sink is None:
                self._sink = np.empty(_native.CHUNK_BYTES, dtype=np.uint8)
            buffer = self._sink[: end - start]
        self._requests.append(self._comm.irecv(buffer, self.source, tag(self._seq, self._posted + 1)))
        self._posted += 1

    def _land(self, nbytes: int) -> None:
        start, end = chunk_range(self._landed, self._nbytes)
        if nbytes != end - start:
            self._fail(f"rank {self.source} sent {nbytes} bytes of chunk {self._landed}, which has {end - start}")
        if self._slot is not None:
            with memoryview(self._slot.memory)[start:end] as chunk:
                self._crcs.append(_native.crc32c(chunk))
        self._landed += 1
        faults.point("replicate.landed", self._comm.rank, self._step)

    def abandon(self) -> None:
        """After an error: give up the slot where a receive is unfinished, which may still write into it. Local."""
        if self._requests and self._slot is not None:
            self._pool.abandon(self._slot)

    def _finish(self) -> None:
        self.done = True
        assert self._seal_buffer is not None
        length = int.from_bytes(self._seal_buffer[:8].tobytes(), "little")
        if length == 0 or length > len(self._seal_buffer) - 8:
            self.torn = self.reason is None
            cause = self._seal_buffer[8:].tobytes().rstrip(b"\0").decode(errors="replace")
            self._fail(cause or "not sealed")
        if self._slot is None or self.reason is not None:
            return
        try:
            seal = decode(self._seal_buffer[8 : 8 + length].tobytes())
            self._check(seal)
            faults.point("replicate.received", self._comm.rank, self._step)
            self._slot.seal(seal)
        except (OSError, MemckptError) as error:
            self._fail(str(error))
            return
        self.sealed = True
        faults.point("replicate.sealed", self._comm.rank, self._step)

    def _check(self, seal: Seal) -> None:
        due = (self._run, self.source, self._step, self._generation, self._nbytes)
        if (seal.run, seal.shard, seal.step, seal.generation, seal.nbytes) != due:
            raise ProtocolError(
                f"rank {self.source} sent the seal of shard {seal.shard}, step {seal.step}, generation "
                f"{seal.generation.counter}, {seal.nbytes} bytes, where {due} is due",
                run=self._run,
                rank=self.source,
                step=self._step,
            )
        bad = [i for i, (ours, theirs) in enumerate(zip(self._crcs, seal.crcs, strict=True)) if ours != theirs]
        if bad:
            raise ProtocolError(
                f"the replica differs from the owner's snapshot in chunk {bad[0]} ({len(bad)} of {self._chunks})",
                run=self._run,
                rank=self.source,
                step=self._step,
            )

    def _fail(self, reason: str) -> None:
        self.reason = self.reason or reason


class Held:
    """A replica of the base that lies here already: read once, since it is about to be counted on. Driven by `poll`.

    Attributes
    ----------
    sealed, reason, torn, done, source
        As of a `Receiving`.
    """

    def __init__(self, slot: Slot | None, shard: int) -> None:
        self._slot = slot
        self.source = shard
        self._job: _native.CopyJob | None = None
        self.done = False
        self.sealed = False
        self.torn = False
        self.reason: str | None = None

    def poll(self) -> bool:
        """Do what can be done now; True if something moved."""
        if self.done:
            return False
        if self._job is None:
            self._start()
            return True
        if not self._job.done():
            return False
        bad = self._job.bad_chunks()
        if len(bad):
            self.reason = f"its replica of rank {self.source} differs from its seal in chunk {bad[0]}"
        self.done, self.sealed = True, not len(bad)
        return True

    def _start(self) -> None:
        try:
            seal = self._slot.read_seal() if self._slot is not None else None
        except (OSError, MemckptError) as error:
            seal, self.reason = None, f"the seal of its replica of rank {self.source} cannot be read: {error}"
        if seal is None or self._slot is None:
            self.reason = self.reason or f"it holds no replica of rank {self.source}"
            self.done = True
            return
        nothing = np.zeros(0, dtype=np.uint64)
        crcs = np.array(seal.crcs, dtype=np.uint32)
        self._job = _native.scatter(self._slot.memory, seal.nbytes, nothing, nothing, nothing, crcs=crcs, threads=1)
