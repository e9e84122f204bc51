"""Moves sealed snapshots from a rank whose node has one to the rank that needs it.

Wire format, between one serving rank and one fetching rank, all little-endian:

====== ========== ===================== =================================================================
tag    direction  length                content
====== ========== ===================== =================================================================
sizes  to fetch   16                    length of the seal (0: it is not there), length of the head
seal   to fetch   as announced          the seal
head   to fetch   as announced          the leading chunks of the file, which hold its header; without a
                                        seal, why there is none
go     to serve   1                     1: send the rest, 0: do not
chunk  to fetch   4 MiB, last less      each further chunk of the file
end    to fetch   1                     1: the seal is still the same
====== ========== ===================== =================================================================

Chunks land in the slot itself and are checksummed there. A transfer, once begun, runs to its end or to a communicator
error, whatever the checksums say, so that nothing is left outstanding for the next one. After an error a receive that
was matched may still write: the slot is then abandoned for good (its file goes), by whoever drives the transfer.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from memckpt import _native, faults
from memckpt.comm.base import FIRST_TAG, PAUSE_MAX_S, PAUSE_MIN_S, SPINS, Communicator, Request
from memckpt.errors import CorruptSnapshot, DeadlineExceeded, ForeignMemory, ProtocolError
from memckpt.format.seal import Seal, decode, encode
from memckpt.memory.arena import Arena
from memckpt.memory.slotfile import MAX_HEADER_NBYTES, MAX_SEAL_NBYTES, Slot

WINDOW = 4
"""Chunks under way at once on either side: some move while others are checksummed."""

_SIZES, _SEAL, _HEAD, _GO, _CHUNK, _END = (FIRST_TAG + i for i in range(6))
_LENGTHS = struct.Struct("<QQ")
_MAX_REASON_NBYTES = 1000

T = TypeVar("T")
Steps = Generator[Callable[[], bool], None, T]
"""A transfer, written down in its order: it yields what it waits for, as a function that says whether that is over."""


def nothing() -> Steps[str]:
    """A transfer of nothing."""
    yield from ()
    return ""


def drive(transfers: Sequence[Steps[T]], deadline_s: float, what: str) -> list[T]:
    """Run transfers side by side until each has ended; their results. Local.

    Raises
    ------
    DeadlineExceeded
        Nothing has moved for `deadline_s` seconds.
    PeerLost
        From a request.
    """
    results: dict[int, T] = {}
    waits: dict[int, Callable[[], bool]] = {}

    def advance(i: int) -> None:
        try:
            waits[i] = next(transfers[i])
        except StopIteration as stop:
            results[i] = stop.value
            waits.pop(i, None)

    for i in range(len(transfers)):
        advance(i)
    last, idle, pause_s = time.monotonic(), 0, PAUSE_MIN_S
    while waits:
        ready = [i for i, over in waits.items() if over()]
        for i in ready:
            advance(i)
        now = time.monotonic()
        if ready:
            last, idle, pause_s = now, 0, PAUSE_MIN_S
        elif now - last > deadline_s:
            raise DeadlineExceeded(f"{what}: nothing has moved for {deadline_s:g} s, {len(waits)} transfers are open")
        elif idle < SPINS:
            idle += 1
            time.sleep(0)  # gives up the processor: the peer may need this very core
        else:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, PAUSE_MAX_S)
    return [results[i] for i in range(len(transfers))]


@dataclass
class Offer:
    """A sealed slot opened for reading, or why it cannot be.

    Attributes
    ----------
    seal : Seal or None
        None when there is nothing to be had.
    head : memoryview
        The leading chunks of the file, which hold its header; checked against the seal. In the slot where there is one.
    slot : Slot or None
        Where it lies on this node; None for what a peer offers.
    reason : str
        Why it cannot be had.
    """

    seal: Seal | None = None
    head: memoryview = field(default_factory=lambda: memoryview(b""))
    slot: Slot | None = None
    reason: str = ""

    def unchanged(self) -> bool:
        """Whether the seal is still what it was when the slot was opened. Local."""
        try:
            return self.slot is None or self.slot.read_seal() == self.seal
        except (OSError, CorruptSnapshot, ForeignMemory, ProtocolError):
            return False


def open_offer(arena: Arena, name: str, *, writable: bool = False) -> Offer:
    """Open a sealed slot of this node and check its header against its seal. Local."""
    slot, head = None, memoryview(b"")
    try:
        slot = arena.open_slot(name, writable=writable)
        seal = slot.read_seal()
        if seal is None:
            raise CorruptSnapshot("its seal is gone")
        with memoryview(slot.memory) as view:
            size = 8 + int.from_bytes(view[:8], "little")
            if not 8 < size <= min(seal.nbytes, len(view), MAX_HEADER_NBYTES):
                raise CorruptSnapshot(f"its header says that it is {size} bytes long, in a file of {seal.nbytes}")
            head = view[: min(chunks_of(size) * _native.CHUNK_BYTES, seal.nbytes)]
        check_head(head, seal)
    except (OSError, CorruptSnapshot, ForeignMemory, ProtocolError) as error:
        head.release()
        if slot is not None:
            arena.park(slot)
        return Offer(reason=str(getattr(error, "message", error)))
    return Offer(seal, head, slot)


def chunks_of(nbytes: int) -> int:
    """Number of chunks of a file of `nbytes` bytes. Local."""
    return -(-nbytes // _native.CHUNK_BYTES)


def check_head(head: memoryview, seal: Seal) -> None:
    """CorruptSnapshot unless the leading chunks are what the seal says. Local."""
    if len(seal.crcs) != chunks_of(seal.nbytes) or len(head) > seal.nbytes:
        raise CorruptSnapshot("the seal does not fit the file")
    for i, crc in enumerate(map(_native.crc32c, _cut(head))):
        if crc != seal.crcs[i]:
            raise CorruptSnapshot(f"chunk {i}, which holds the header, differs from its checksum")


def _cut(head: memoryview) -> Iterator[memoryview]:
    """The chunks one by one; each is let go of before the next, so that none keeps the mapping open."""
    for start in range(0, len(head), _native.CHUNK_BYTES):
        with head[start : start + _native.CHUNK_BYTES] as chunk:
            yield chunk


def send_head(comm: Communicator, offer: Offer, dest: int) -> Steps[None]:
    """Serving rank, first part: the seal and the header."""
    seal = encode(offer.seal) if offer.seal is not None else b""
    head = offer.head if seal else memoryview(offer.reason.encode()[:_MAX_REASON_NBYTES])
    parts = (_LENGTHS.pack(len(seal), len(head)), _SIZES), (seal, _SEAL), (head, _HEAD)
    for request in [comm.isend(part, dest, tag) for part, tag in parts]:
        yield request.test


def receive_head(comm: Communicator, source: int) -> Steps[Offer]:
    """Fetching rank, first part."""
    sizes = bytearray(_LENGTHS.size)
    yield comm.irecv(sizes, source, _SIZES).test
    seal_nbytes, head_nbytes = _LENGTHS.unpack(sizes)
    if seal_nbytes > MAX_SEAL_NBYTES or head_nbytes > MAX_HEADER_NBYTES + _native.CHUNK_BYTES:
        raise ProtocolError(f"a seal of {seal_nbytes} and a head of {head_nbytes} bytes announced", rank=source)
    encoded, head = bytearray(seal_nbytes), memoryview(bytearray(head_nbytes))
    for request in comm.irecv(encoded, source, _SEAL), comm.irecv(head, source, _HEAD):
        yield request.test
    if not seal_nbytes:
        return Offer(reason=bytes(head[:_MAX_REASON_NBYTES]).decode(errors="replace"))
    try:
        seal = decode(bytes(encoded))
        check_head(head, seal)
    except (CorruptSnapshot, ProtocolError) as error:
        return Offer(reason=error.message)
    return Offer(seal, head)


def send_rest(comm: Communicator, offer: Offer, dest: int) -> Steps[None]:
    """Serving rank, second part: every further chunk, straight from the slot."""
    assert offer.slot is not None
    assert offer.seal is not None
    go = bytearray(1)
    yield comm.irecv(go, dest, _GO).test
    if not go[0]:
        return
    window: deque[Request] = deque()
    for start in range(len(offer.head), offer.seal.nbytes, _native.CHUNK_BYTES):
        if len(window) == WINDOW:
            yield window.popleft().test
        faults.point("recover.serve", comm.rank, offer.seal.step)
        end = min(start + _native.CHUNK_BYTES, offer.seal.nbytes)
        window.append(comm.isend(memoryview(offer.slot.memory)[start:end], dest, _CHUNK))
    while window:
        yield window.popleft().test
    yield comm.isend(bytes([offer.unchanged()]), dest, _END).test


def receive_rest(comm: Communicator, offer: Offer, source: int, slot: Slot | None) -> Steps[str]:
    """Fetching rank, second part: into `slot`, which is unsealed and of the right size; None: decline.

    Returns
    -------
    str
        What is wrong with what came; empty when it matches the seal.
    """
    assert offer.seal is not None
    yield comm.isend(bytes([slot is not None]), source, _GO).test
    if slot is None:
        return ""
    nbytes = offer.seal.nbytes
    crcs = [_native.copy_crc(slot.memory, i * _native.CHUNK_BYTES, chunk) for i, chunk in enumerate(_cut(offer.head))]
    starts = iter(range(len(offer.head), nbytes, _native.CHUNK_BYTES))
    posted: deque[tuple[Request, int, int]] = deque()

    def post() -> None:
        for start in islice(starts, 1):
            end = min(start + _native.CHUNK_BYTES, nbytes)
            posted.append((comm.irecv(memoryview(slot.memory)[start:end], source, _CHUNK), start, end))

    for _ in range(WINDOW):
        post()
    while posted:
        request, start, end = posted[0]
        yield request.test
        posted.popleft()
        post()
        if request.nbytes != end - start:
            raise ProtocolError(f"a chunk of {request.nbytes} bytes at {start} of {nbytes}", rank=source)
        with memoryview(slot.memory)[start:end] as chunk:
            crcs.append(_native.crc32c(chunk))
        faults.point("recover.chunk", comm.rank, offer.seal.step)
    end_mark = bytearray(1)
    yield comm.irecv(end_mark, source, _END).test
    if not end_mark[0]:
        return "its seal changed while it was read"
    bad = [i for i, (have, want) in enumerate(zip(crcs, offer.seal.crcs, strict=True)) if have != want]
    return f"chunk {bad[0]} differs from its checksum ({len(bad)} of {len(crcs)} do)" if bad else ""
