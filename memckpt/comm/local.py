"""Ranks as threads of one process, with the failures of the real thing on demand; and the transport of a run of one
rank.

Messages between threads behave as under MPI where the protocol can tell: order per source and tag, late visibility,
large sends that complete only when they are received, and, when a rank is killed, survivors of which some see success
and others an error for the same operation. What happens is drawn from the seed and from what is concerned
(communicator, ranks, tag, count), never from the order in which threads run.
"""

from __future__ import annotations

import math
import random
import threading
import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from memckpt.comm.base import DUP_DEADLINE_S, Communicator, Int64, Request, check_values, readable, wait, writable
from memckpt.errors import Closed, MemckptError, PeerLost, ProtocolError, UsageError


class Killed(BaseException):
    """Raised by every call of a rank that was killed; not an `Exception`, so that no handler under test survives its
    own death.
    """


@dataclass(eq=False)
class _Message:
    """One message, copied when it was sent."""

    data: bytes
    visible_at: float
    serial: tuple[object, ...]
    taken: bool = False


class _Reduction:
    """One reduction: contributions by rank, and when the last one came."""

    def __init__(self, serial: tuple[object, ...]) -> None:
        self.serial = serial
        self.parts: dict[int, Int64] = {}
        self.result: Int64 | None = None
        self.complete_at = 0.0


class _Context:
    """What the ranks' handles of one communicator share."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path
        self.sent: dict[tuple[int, int, int], deque[_Message]] = {}
        self.posted: dict[tuple[int, int, int], deque[_Receive]] = {}
        self.count: dict[tuple[int, int], int] = {}
        self.reductions: dict[int, _Reduction] = {}
        self.revoked_at: float | None = None
        self.children: dict[int, _Context] = {}

    def child(self, index: int) -> _Context:
        return self.children.setdefault(index, _Context((*self.path, index)))


class LocalGroup:
    """`n` ranks for `n` threads. Local.

    Parameters
    ----------
    n : int
        Number of ranks.
    seed : int, optional
        Makes delays, and what survivors see of a death, vary; the same seed gives the same. ``None``: no delays, what
        was sent arrives, and deaths are seen at once.
    max_delay_s : float
        A message, a reduction's result, a death or a revocation becomes visible up to this much later, drawn for each.
    eager_nbytes : int
        Larger sends complete only when they are received.
    revocable : bool
        Whether ``close(abort=True)`` reaches the peers, as under ULFM.

    Attributes
    ----------
    comms : list of LocalComm
        One for each rank.
    """

    def __init__(
        self,
        n: int,
        *,
        seed: int | None = None,
        max_delay_s: float = 0.0,
        eager_nbytes: int = 4096,
        revocable: bool = True,
    ) -> None:
        if n < 1:
            raise UsageError(f"a group has at least one rank, not {n}")
        self.size, self.seed, self.max_delay_s = n, seed, max_delay_s
        self.eager_nbytes, self.revocable = eager_nbytes, revocable
        self._changed = threading.Condition()
        self._dead: dict[int, float] = {}
        self._held: set[int] = set()
        root = _Context(())
        self.comms = [LocalComm(_handle=(self, root, rank)) for rank in range(n)]

    def kill(self, rank: int) -> None:
        """SIGKILL's stand-in: calls of `rank` raise `Killed`; peers find out by `PeerLost`, not all of them and not
        at once when seeded.
        """
        with self._changed:
            self._dead.setdefault(rank, time.monotonic())
            self._changed.notify_all()

    def hold(self, rank: int) -> None:
        """SIGSTOP's stand-in: calls of `rank` block until `release` or `kill`."""
        with self._changed:
            self._held.add(rank)

    def release(self, rank: int) -> None:
        """SIGCONT's stand-in."""
        with self._changed:
            self._held.discard(rank)
            self._changed.notify_all()

    def alive(self) -> list[int]:
        """Ranks that were not killed."""
        with self._changed:
            return [rank for rank in range(self.size) if rank not in self._dead]

    def _draw(self, *about: object) -> random.Random:
        return random.Random(f"{self.seed}:{about}")

    def _delay(self, *about: object) -> float:
        if self.seed is None or self.max_delay_s == 0:
            return 0.0
        return self._draw("delay", *about).uniform(0, self.max_delay_s)

    def _coin(self, *about: object) -> bool:
        """False without a seed, else drawn."""
        return self.seed is not None and self._draw("coin", *about).random() < 0.5

    def check(self, rank: int) -> None:
        """What every call of `rank` does first: raise `Killed` if it was killed, block while it is held."""
        with self._changed:
            self._enter(rank)

    def _enter(self, rank: int) -> None:
        while rank in self._held and rank not in self._dead:
            self._changed.wait()
        if rank in self._dead:
            raise Killed(f"rank {rank} was killed")

    def _seen_dead(self, observer: int, rank: int) -> bool:
        at = self._dead.get(rank)
        return at is not None and time.monotonic() >= at + self._delay("death", observer, rank)


class LocalRequest(Request):
    """See `Request`."""

    def __init__(self, comm: LocalComm, what: str, peer: int | None, tag: int | None, nbytes: int) -> None:
        self.what, self.peer, self.tag, self.nbytes = what, peer, tag, nbytes
        self._comm = comm
        self._done = False
        self._error: MemckptError | None = None

    def test(self) -> bool:
        """See `Request.test`."""
        comm, group = self._comm, self._comm._group
        with group._changed:
            group._enter(comm.rank)
            if self._error is None and not self._done:
                self._done = self._finish()
            if self._error is None and not self._done:
                dead = self._lost_to()
                if dead is not None:
                    self._error = PeerLost(f"{self.describe()}: rank {dead} is gone", rank=dead)
                elif comm._aborted or comm._sees_revoked():
                    self._error = PeerLost(f"{self.describe()}: the communicator was revoked", rank=self.peer)
                if self._error is not None:
                    self._spoil()
            if self._error is not None:
                raise self._error
            return self._done

    @abstractmethod
    def _finish(self) -> bool:
        """Complete the operation if that is possible now."""

    def _lost_to(self) -> int | None:
        """The rank whose death, as far as this rank knows, keeps the operation from completing."""
        assert self.peer is not None
        return self.peer if self._comm._group._seen_dead(self._comm.rank, self.peer) else None

    def _spoil(self) -> None:
        """What a failed operation does to its buffer."""


class _Send(LocalRequest):
    def __init__(self, comm: LocalComm, message: _Message, dest: int, tag: int) -> None:
        super().__init__(comm, "send", dest, tag, len(message.data))
        self._message = message
        # A small send to a rank that is known to be dead may fail or vanish.
        known = comm._group._seen_dead(comm.rank, dest) and not comm._group._coin("vanish", *message.serial)
        self._done = len(message.data) <= comm._group.eager_nbytes and not known

    def _finish(self) -> bool:
        return self._message.taken


class _Receive(LocalRequest):
    def __init__(self, comm: LocalComm, target: memoryview, source: int, tag: int) -> None:
        super().__init__(comm, "receive", source, tag, len(target))
        self._target = target
        self._message: _Message | None = None

    def _is_lost(self, message: _Message) -> bool:
        """Whether the sender died before the message was through."""
        group = self._comm._group
        died_at = group._dead.get(self.peer or 0)
        return died_at is not None and died_at < message.visible_at and group._coin("lost", *message.serial)

    def _finish(self) -> bool:
        message = self._message
        if message is None or time.monotonic() < message.visible_at or self._is_lost(message):
            return False
        if len(message.data) > len(self._target):
            self._error = ProtocolError(f"{self.describe()}: the message is longer than the buffer", rank=self.peer)
            return False
        self._target[: len(message.data)] = message.data
        self.nbytes = len(message.data)
        message.taken = True
        return True

    def _lost_to(self) -> int | None:
        if self._message is not None and not self._is_lost(self._message):
            return None
        return super()._lost_to()

    def _spoil(self) -> None:
        if self._message is not None and self._comm._group._coin("torn", *self._message.serial):
            part = self._message.data[: len(self._target) // 2]
            self._target[: len(part)] = part


class _Reduce(LocalRequest):
    def __init__(self, comm: LocalComm, values: Int64, reduction: _Reduction) -> None:
        super().__init__(comm, "reduction", None, None, values.nbytes)
        self._values, self._reduction = values, reduction

    def _visible_at(self) -> float:
        reduction = self._reduction
        if reduction.result is None:
            return math.inf
        return reduction.complete_at + self._comm._group._delay(*reduction.serial, self._comm.rank)

    def _is_spoilt_by(self, rank: int) -> bool:
        group = self._comm._group
        if rank not in self._reduction.parts:
            return True
        return group._dead[rank] < self._visible_at() and group._coin(*self._reduction.serial, self._comm.rank)

    def _finish(self) -> bool:
        result = self._reduction.result
        if result is None or time.monotonic() < self._visible_at():
            return False
        if any(self._is_spoilt_by(rank) for rank in self._comm._group._dead):
            return False
        np.copyto(self._values, result)
        return True

    def _lost_to(self) -> int | None:
        group = self._comm._group
        dead = (rank for rank in group._dead if group._seen_dead(self._comm.rank, rank) and self._is_spoilt_by(rank))
        return next(dead, None)


class LocalComm(Communicator):
    """One rank of a `LocalGroup`; without arguments a run of one rank."""

    kind = "local"
    concurrent = True
    max_tag = 2**31 - 1

    def __init__(self, *, _handle: tuple[LocalGroup, _Context, int] | None = None) -> None:
        if _handle is None:
            _handle = LocalGroup(1).comms[0]._group, _Context(()), 0
        group, context, rank = _handle
        self._group: LocalGroup = group
        self._context: _Context = context
        self.rank: int = rank
        self.size = self._group.size
        self.name = "one process" if self.size == 1 else f"{self.size} threads of one process"
        self.revocable = self._group.revocable
        self._closed = self._aborted = False
        self._reductions = self._dups = 0

    def _sees_revoked(self) -> bool:
        at = self._context.revoked_at
        return at is not None and time.monotonic() >= at + self._group._delay("revoked", self._context.path, self.rank)

    def _start(self) -> None:
        self._group._enter(self.rank)
        if self._closed:
            raise Closed("communicator: closed")
        if self._sees_revoked():
            raise PeerLost("the communicator was revoked")

    def _check(self, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise UsageError(f"no rank {peer} among {self.size}")
        if not 0 <= tag <= self.max_tag:
            raise UsageError(f"tag {tag} is out of range")

    def isend(self, buffer: Any, dest: int, tag: int) -> LocalRequest:
        """See `Communicator.isend`."""
        data = bytes(readable(buffer))
        self._check(dest, tag)
        with self._group._changed:
            self._start()
            context, key = self._context, (self.rank, dest, tag)
            number = context.count[key[:2]] = context.count.get(key[:2], 0) + 1
            serial = ("message", context.path, self.rank, dest, number)
            message = _Message(data, time.monotonic() + self._group._delay(*serial), serial)
            posted = context.posted.get(key)
            if posted:
                posted.popleft()._message = message
                if not posted:
                    del context.posted[key]
            else:
                context.sent.setdefault(key, deque()).append(message)
            return _Send(self, message, dest, tag)

    def irecv(self, buffer: Any, source: int, tag: int) -> LocalRequest:
        """See `Communicator.irecv`."""
        view = writable(buffer)
        self._check(source, tag)
        with self._group._changed:
            self._start()
            context, key = self._context, (source, self.rank, tag)
            request = _Receive(self, view, source, tag)
            sent = context.sent.get(key)
            if sent:
                request._message = sent.popleft()
                if not sent:
                    del context.sent[key]
            else:
                context.posted.setdefault(key, deque()).append(request)
            return request

    def iallreduce_min(self, values: Int64) -> LocalRequest:
        """See `Communicator.iallreduce_min`."""
        check_values(values)
        with self._group._changed:
            self._start()
            context, number = self._context, self._reductions
            self._reductions += 1
            serial = ("reduction", context.path, number)
            reduction = context.reductions.setdefault(number, _Reduction(serial))
            reduction.parts[self.rank] = values.copy()
            if len(reduction.parts) == self.size:
                del context.reductions[number]  # from here on only the requests need it
                reduction.result = np.minimum.reduce(list(reduction.parts.values()))
                reduction.complete_at = time.monotonic()
            return _Reduce(self, values, reduction)

    def dup(self, deadline_s: float = DUP_DEADLINE_S) -> LocalComm:
        """See `Communicator.dup`."""
        with self._group._changed:
            self._start()
            new = LocalComm(_handle=(self._group, self._context.child(self._dups), self.rank))
            self._dups += 1
        wait([new.iallreduce_min(np.zeros(1, dtype=np.int64))], deadline_s, "new communicator")
        return new

    def close(self, *, abort: bool = False) -> None:
        """See `Communicator.close`."""
        with self._group._changed:
            self._group._enter(self.rank)
            if not self._closed:
                self._closed, self._aborted = True, abort
                if abort and self.revocable and self._context.revoked_at is None:
                    self._context.revoked_at = time.monotonic()
                    self._group._changed.notify_all()
