"""Small collectives over point-to-point messages, for any number of ranks, with deadlines: binomial trees.

MPI's own collectives on bytes would need the sizes first, and the blocking ones cannot be left when a peer dies. Each
hop sends the size, then the bytes. All of these are collective: every rank calls them, in the same order, with the
same root and limit.
"""

from __future__ import annotations

import struct
import time

import numpy as np

from memckpt.comm.base import Communicator, wait
from memckpt.errors import ProtocolError, UsageError

MAX_NBYTES = 64 << 20
_GATHER, _BROADCAST = 0, 2  # tags; the size travels under the tag, the bytes under the one after it
_SIZE = struct.Struct("<q")
_FRAME = struct.Struct("<IQ")
_TOO_LARGE = -1


class _Clock:
    """What is left of one deadline over the several waits of a tree."""

    def __init__(self, deadline_s: float) -> None:
        self._limit = time.monotonic() + deadline_s

    def left(self) -> float:
        return max(self._limit - time.monotonic(), 0.0)


def _send(comm: Communicator, payload: bytes | None, dest: int, tag: int, clock: _Clock, what: str) -> None:
    size = _TOO_LARGE if payload is None else len(payload)
    requests = [comm.isend(_SIZE.pack(size), dest, tag)]
    if payload:
        requests.append(comm.isend(payload, dest, tag + 1))
    wait(requests, clock.left(), what)


def _receive(comm: Communicator, source: int, tag: int, limit: int, clock: _Clock, what: str) -> bytes | None:
    head = bytearray(_SIZE.size)
    wait([comm.irecv(head, source, tag)], clock.left(), what)
    (size,) = _SIZE.unpack(head)
    if size == _TOO_LARGE:
        return None
    if not 0 <= size <= limit:
        raise ProtocolError(f"{what}: {size} bytes announced, at most {limit} allowed", rank=source)
    body = bytearray(size)
    if size:
        request = comm.irecv(body, source, tag + 1)
        wait([request], clock.left(), what)
        if request.nbytes != size:
            raise ProtocolError(f"{what}: {size} bytes announced, {request.nbytes} sent", rank=source)
    return bytes(body)


def _pack(parts: dict[int, bytes]) -> bytes:
    return b"".join(chunk for rank, part in parts.items() for chunk in (_FRAME.pack(rank, len(part)), part))


def _unpack(blob: bytes, size: int, source: int) -> dict[int, bytes]:
    parts: dict[int, bytes] = {}
    at = 0
    while at < len(blob):
        if len(blob) - at < _FRAME.size:
            raise ProtocolError("a gathered message ends within a frame", rank=source)
        rank, nbytes = _FRAME.unpack_from(blob, at)
        at += _FRAME.size
        if rank >= size or rank in parts or nbytes > len(blob) - at:
            raise ProtocolError("a gathered message has a frame that cannot be", rank=source)
        parts[rank] = blob[at : at + nbytes]
        at += nbytes
    return parts


def _too_large(what: str, limit: int) -> UsageError:
    return UsageError(f"{what}: more than {limit} bytes in all")


def _gather(
    comm: Communicator, payload: bytes, root: int, clock: _Clock, limit: int, what: str
) -> dict[int, bytes] | None:
    """Parts by rank of this rank's subtree (of all at the root); ``None`` when they are too large, which every rank
    above hears too.
    """
    me = (comm.rank - root) % comm.size
    parts: dict[int, bytes] | None = {comm.rank: payload}
    bit = 1
    while bit < comm.size:
        if me & bit:
            blob = None if parts is None else _pack(parts)
            if blob is not None and len(blob) > limit:
                blob = parts = None
            _send(comm, blob, (me - bit + root) % comm.size, _GATHER, clock, what)
            return parts
        if me + bit < comm.size:
            source = (me + bit + root) % comm.size
            blob = _receive(comm, source, _GATHER, limit, clock, what)
            if blob is None or parts is None:
                parts = None  # still receive from the other children: a message left lying would meet the next call
            else:
                parts.update(_unpack(blob, comm.size, source))
        bit <<= 1
    if parts is not None and sum(map(len, parts.values())) + _FRAME.size * len(parts) > limit:
        return None
    return parts


def _broadcast(
    comm: Communicator, payload: bytes | None, root: int, clock: _Clock, limit: int, what: str
) -> bytes | None:
    me = (comm.rank - root) % comm.size
    bit = 1
    while bit < comm.size and not me & bit:
        bit <<= 1
    if me:
        payload = _receive(comm, (me - bit + root) % comm.size, _BROADCAST, limit, clock, what)
    bit >>= 1
    while bit:
        if me + bit < comm.size:
            _send(comm, payload, (me + bit + root) % comm.size, _BROADCAST, clock, what)
        bit >>= 1
    return payload


def gather(
    comm: Communicator,
    payload: bytes,
    root: int,
    deadline_s: float,
    *,
    limit: int = MAX_NBYTES,
    what: str = "gather",
) -> list[bytes] | None:
    """Bring every rank's `payload` to `root`; there the list by rank, elsewhere ``None``. Collective.

    Raises
    ------
    PeerLost, DeadlineExceeded
        See `wait`.
    UsageError
        More than `limit` bytes in all (with some overhead for each rank): at the root and on the ranks that know it.
    """
    parts = _gather(comm, bytes(payload), root, _Clock(deadline_s), limit, what)
    if parts is None:
        raise _too_large(what, limit)
    return _ordered(parts, comm.size, what) if comm.rank == root else None


def broadcast(
    comm: Communicator,
    payload: bytes | None,
    root: int,
    deadline_s: float,
    *,
    limit: int = MAX_NBYTES,
    what: str = "broadcast",
) -> bytes:
    """`root`'s `payload` (ignored elsewhere) on every rank. Collective; raises as `gather`, `UsageError` on every
    rank.
    """
    if comm.rank == root:
        if payload is None:
            raise UsageError(f"{what}: the root must give bytes")
        payload = bytes(payload) if len(payload) <= limit else None
    result = _broadcast(comm, payload, root, _Clock(deadline_s), limit, what)
    if result is None:
        raise _too_large(what, limit)
    return result


def allgather(
    comm: Communicator, payload: bytes, deadline_s: float, *, limit: int = MAX_NBYTES, what: str = "allgather"
) -> list[bytes]:
    """Every rank's `payload`, by rank, on every rank. Collective; raises as `gather`, `UsageError` on every rank."""
    clock = _Clock(deadline_s)
    parts = _gather(comm, bytes(payload), 0, clock, limit, what)
    blob = _broadcast(comm, _pack(parts) if parts is not None else None, 0, clock, limit, what)
    if blob is None:
        raise _too_large(what, limit)
    return _ordered(_unpack(blob, comm.size, 0), comm.size, what)


def _ordered(parts: dict[int, bytes], size: int, what: str) -> list[bytes]:
    if len(parts) != size:
        raise ProtocolError(f"{what}: parts of {len(parts)} ranks, not {size}")
    return [parts[rank] for rank in range(size)]


def allreduce_min(comm: Communicator, values: list[int], deadline_s: float, *, what: str = "reduction") -> list[int]:
    """Element-wise minimum (int64) over all ranks. Collective; ranks may disagree on success when a peer dies
    meanwhile.
    """
    array = np.array(values, dtype=np.int64)
    wait([comm.iallreduce_min(array)], deadline_s, what)
    return [int(value) for value in array]


def barrier(comm: Communicator, deadline_s: float, *, what: str = "barrier") -> None:
    """Return once every rank has called it. Collective."""
    allreduce_min(comm, [0], deadline_s, what=what)
