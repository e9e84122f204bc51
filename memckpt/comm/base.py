"""What the protocol needs from a transport: five non-blocking methods, and everything else built on them here.

Nothing in this package blocks without a deadline, and every operation is polled: a blocking call cannot be left once a
peer has died (seen with collectives in a background thread after a revoke), a polled one can.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from memckpt.errors import DeadlineExceeded, UsageError

Int64 = npt.NDArray[np.int64]

FIRST_TAG = 16
"""Lowest tag for users of a Communicator; the ones below belong to `memckpt.comm.trees`."""

MAX_MESSAGE_NBYTES = 2**31 - 1
"""Most bytes in one message: MPI counts in 32 bits."""

DUP_DEADLINE_S = 60.0
SPINS = 20
PAUSE_MIN_S = 20e-6
PAUSE_MAX_S = 1e-3


class Request(ABC):
    """An operation under way; it owns a reference to its buffer until it is complete, or for ever when that never
    happens.

    Attributes
    ----------
    what : str
        Kind of operation ("receive", "send", "reduction"), for messages.
    peer : int or None
        The other rank; ``None`` for a reduction.
    tag : int or None
        Tag of the message.
    nbytes : int
        Bytes of the message: of the buffer until completion, then what was really sent or received.
    """

    what: str
    peer: int | None
    tag: int | None
    nbytes: int

    @abstractmethod
    def test(self) -> bool:
        """Make progress; True once the operation is complete (and on every later call). Local, does not block.

        Until then a send's buffer must not be written and a receive's or reduction's buffer must not be touched.

        Raises
        ------
        PeerLost
            A peer is gone or the communicator was revoked: on every later call too. The buffer's content is then
            undefined, and it may still be written to, so it must never be used again.
        ProtocolError
            The message is longer than the receive's buffer.
        """

    def describe(self) -> str:
        """Name the operation and its peer, for error messages. Local."""
        if self.peer is None:
            return f"{self.what} with all ranks"
        direction = "to" if self.what == "send" else "from"
        return f"{self.what} {direction} rank {self.peer} (tag {self.tag})"


class Communicator(ABC):
    """A private group of ranks.

    Attributes
    ----------
    rank, size : int
        This process's rank, and how many there are.
    concurrent : bool
        Whether a background thread may use it while other threads use the transport too.
    kind : str
        "mpi", "torch" or "local".
    name : str
        The transport in words, for what is printed first.
    revocable : bool
        Whether ``close(abort=True)`` frees peers that wait for this rank.
    max_tag : int
        Highest tag; at least 32767.

    Notes
    -----
    Messages between two ranks with the same tag arrive in the order in which they were sent. One communicator is used
    by one thread at a time (each thread takes its own `dup`); only `close` may be called from another one. After
    `PeerLost` a communicator can only be closed: which operations took effect is unknown.
    """

    rank: int
    size: int
    concurrent: bool
    kind: str
    name: str
    revocable: bool
    max_tag: int

    @abstractmethod
    def isend(self, buffer: Any, dest: int, tag: int) -> Request:
        """Start to send `buffer` (contiguous, buffer protocol, at most 2 GiB less one byte) to rank `dest`. Local.

        Raises
        ------
        PeerLost
            The communicator is broken.
        Closed
            It was closed, or MPI was finalized.
        """

    @abstractmethod
    def irecv(self, buffer: Any, source: int, tag: int) -> Request:
        """Start to receive at most ``len(buffer)`` bytes from rank `source` (never from any). Local; raises as
        `isend`.
        """

    @abstractmethod
    def iallreduce_min(self, values: Int64) -> Request:
        """Start the element-wise minimum over all ranks of `values` (int64, contiguous), in place.

        Collective: every rank in the same order. Ranks may disagree about the outcome when a peer dies meanwhile: some
        complete, some raise `PeerLost`.
        """

    @abstractmethod
    def dup(self, deadline_s: float = DUP_DEADLINE_S) -> Communicator:
        """A new communicator of the same ranks whose messages do not mix with this one's. Collective, blocks up to
        `deadline_s`.
        """

    @abstractmethod
    def close(self, *, abort: bool = False) -> None:
        """Give the communicator up; idempotent, never raises, makes no MPI call once MPI is finalized. Local.

        Parameters
        ----------
        abort : bool
            Every request of this rank that is still open ends with `PeerLost`, in whichever thread it is waited for.
            Also revoke it where the transport can (ULFM), so that pending and later operations of every peer on it end
            with `PeerLost`.
        """


def readable(buffer: Any) -> memoryview:
    """The bytes of a contiguous buffer as a flat view of uint8. Local."""
    view = memoryview(buffer)
    if not view.contiguous:
        raise UsageError("a message buffer must be contiguous")
    if view.nbytes > MAX_MESSAGE_NBYTES:
        raise UsageError(
            f"a message of {view.nbytes} bytes; at most {MAX_MESSAGE_NBYTES} are possible, so send it in parts"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


def writable(buffer: Any) -> memoryview:
    """Like `readable`, for a buffer to be written to. Local."""
    view = memoryview(buffer)
    if view.readonly:
        raise UsageError("a receive buffer must be writable")
    return readable(view) if view.nbytes else memoryview(bytearray())


def check_values(values: Int64) -> None:
    """Refuse what cannot be reduced in place. Local."""
    if values.dtype != np.int64 or not values.flags.c_contiguous or not values.flags.writeable:
        raise UsageError("a reduction needs a contiguous, writable int64 array")


def wait(
    requests: Iterable[Request],
    deadline_s: float,
    what: str,
    poll: Callable[[], object] | None = None,
) -> None:
    """Block until all requests are complete. Local.

    Parameters
    ----------
    requests : iterable of Request
        Stay valid after an error; a failed one makes the wait raise at once, whatever the state of the others.
    deadline_s : float
        Seconds from now; ``math.inf`` for none.
    what : str
        What is waited for, for the message.
    poll : callable, optional
        Called between looks, for other work that must go on; a true result means that it got something done, so no
        sleep follows.

    Raises
    ------
    PeerLost
        From a request.
    DeadlineExceeded
        Naming `what` and the peers that did not answer. Nothing is known about the outcome.
    """
    limit = time.monotonic() + deadline_s
    pending = list(requests)
    spins, pause_s = 0, PAUSE_MIN_S
    while True:
        before = len(pending)
        pending = [request for request in pending if not request.test()]
        if not pending:
            return
        worked = bool(poll()) if poll is not None else False
        now = time.monotonic()
        if now >= limit:
            raise _late(pending, deadline_s, what)
        if worked or len(pending) < before:
            spins, pause_s = 0, PAUSE_MIN_S
        elif spins < SPINS:
            spins += 1
            time.sleep(0)  # gives up the processor: on a busy node the peer may need this very core to answer
        else:
            time.sleep(min(pause_s, limit - now) if math.isfinite(limit) else pause_s)
            pause_s = min(pause_s * 1.5, PAUSE_MAX_S)


def _late(pending: list[Request], deadline_s: float, what: str) -> DeadlineExceeded:
    shown = ", ".join(request.describe() for request in pending[:8])
    more = f" and {len(pending) - 8} more" if len(pending) > 8 else ""
    peers = {request.peer for request in pending}
    return DeadlineExceeded(
        f"{what}: no answer within {deadline_s:g} s; still open: {shown}{more}",
        rank=peers.pop() if len(peers) == 1 else None,
    )
