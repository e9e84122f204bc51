"""torch.distributed's gloo below the `Communicator` contract, for jobs that torchrun starts.

What shaped it, all of it seen with torch 2.13:

- ``Work.is_completed()`` of a send or a receive stays false until somebody calls ``wait()``, so each one that is under
  way has a thread that waits for it. Reductions can be polled.
- A message longer than its receive ends the receiver's process (``terminate``), and one that is shorter does not tell
  its length. So each message begins with a head of fixed size that tells it, and that carries a short message itself.
- Neither ``abort()`` nor ``shutdown()`` nor letting the group go frees a thread that waits. A wait that runs into its
  time-out closes all connections of the group: its own waits end with an error, and so do those of peers for this rank.
  That is how a communicator is broken off here; it is also why no wait may have a time-out of its own.
- The groups are made beside torch's default one, from its store, so that the training may make, lose and destroy its
  own as it likes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import queue
import struct
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from memckpt.comm.base import DUP_DEADLINE_S, Communicator, Int64, Request, check_values, readable, writable
from memckpt.errors import Closed, DeadlineExceeded, MemckptError, PeerLost, ProtocolError, UsageError

_HEAD = struct.Struct("<qq")  # bytes of the message, number that its body travels under
_HEAD_NBYTES = 1024
_INLINE_NBYTES = _HEAD_NBYTES - _HEAD.size
_MAX_TAG = 2**20
_BREAK_TAG = _MAX_TAG + 1  # nobody sends under it
_FIRST_BODY_TAG, _BODY_TAGS = 2**21, 2**30
_NEVER = timedelta(days=3000)

_made = itertools.count()
_open: weakref.WeakSet[TorchComm] = weakref.WeakSet()


class _Waiters:
    """Threads that wait in gloo: as many as there are waits at once, kept for the next ones."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._serve, name="memckpt-gloo", daemon=True).start()
        self._todo.put(work)

    def _serve(self) -> None:
        while True:
            self._todo.get()()
            with self._lock:
                self._idle += 1


_waiters = _Waiters()


def _forget_in_child() -> None:
    """A forked child has neither the threads nor a right to the connections, which are its parent's."""
    global _waiters
    _waiters = _Waiters()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _tensor(view: memoryview) -> torch.Tensor:
    """The bytes of a view, read-only ones too (which torch would warn of); the caller keeps the view."""
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_char * view.nbytes).from_address(address), dtype=torch.uint8)


class _Message(Request):
    """A send or a receive: a thread waits for it, and keeps the memory that gloo knows only by its address."""

    def __init__(self, comm: TorchComm, view: memoryview, what: str, peer: int, tag: int) -> None:
        self.what, self.peer, self.tag, self.nbytes = what, peer, tag, view.nbytes
        self._comm = comm
        self._memory: tuple[memoryview, bytearray] | None = (view, bytearray(_HEAD_NBYTES))
        self._done = False
        self._error: MemckptError | None = None

    @property
    def head(self) -> bytearray:
        """What travels before the message. Only until it is complete."""
        assert self._memory is not None
        return self._memory[1]

    def begin(self, wait: Callable[[], int]) -> None:
        """Have a thread call `wait`, which returns the bytes of the message."""

        def body() -> None:
            try:
                self.nbytes = wait()
                self._memory = None
                self._done = True
            except MemckptError as error:
                self._error = error
            except Exception as error:
                self._error = self._comm._lost(self.describe(), self.peer, error)
            finally:
                self._comm._waits_end()

        self._comm._waits_begin()
        _waiters.run(body)

    def test(self) -> bool:
        """See `Request.test`."""
        if self._done:
            return True
        if self._error is not None:
            raise self._error
        if (broken := self._comm._broken) is not None:
            raise PeerLost(f"{self.describe()}: {broken}", rank=self.peer)
        return False


class _Reduction(Request):
    """A reduction, which torch runs on a thread of its own."""

    def __init__(self, comm: TorchComm, values: Int64) -> None:
        self.what, self.peer, self.tag, self.nbytes = "reduction", None, None, values.nbytes
        self._comm = comm
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        options.timeout = _NEVER
        self._values: Int64 | None = values
        self._work: Any = comm._group.allreduce([torch.from_numpy(values)], options)
        self._error: MemckptError | None = None

    def test(self) -> bool:
        """See `Request.test`."""
        if self._error is not None:
            raise self._error
        if self._work is None:
            return True
        if not self._work.is_completed():
            if (broken := self._comm._broken) is not None:
                raise PeerLost(f"{self.describe()}: {broken}")
            return False
        try:
            self._work.wait()
        except Exception as error:
            self._error = self._comm._lost(self.describe(), None, error)
            raise self._error from error
        self._work = self._values = None
        return True


class TorchComm(Communicator):
    """All ranks of a torch.distributed job, over a gloo group of its own. Collective.

    The default group's store is used where there is one, else the one that the environment names (``env://``, as
    torchrun sets it); the default group itself is neither needed nor touched.

    Parameters
    ----------
    deadline_s : float
        Seconds for the ranks to meet.

    Raises
    ------
    UsageError
        Nothing says where the other ranks are.
    PeerLost, DeadlineExceeded
        A peer is gone or did not take part.
    """

    kind = "torch"
    concurrent = True
    revocable = True
    max_tag = _MAX_TAG

    def __init__(self, *, deadline_s: float = DUP_DEADLINE_S) -> None:
        try:
            if dist.is_initialized():
                store = dist.distributed_c10d._get_default_store()
                rank, size = dist.get_rank(), dist.get_world_size()
            else:
                store, rank, size = next(iter(rendezvous("env://")))
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"torch.distributed is wanted and cannot be had: {error}") from error
        self._adopt(PrefixStore(f"memckpt/{next(_made)}", store), rank, size, deadline_s)

    def _adopt(self, store: Any, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size = rank, size
        self.name = f"torch.distributed {torch.__version__.split('+')[0]} (gloo)"
        self._store = store
        self._lock = threading.Lock()
        self._closed = False
        self._broken: str | None = None
        self._waiting = 0
        self._numbers, self._dups = itertools.count(), itertools.count()
        try:
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=deadline_s))
        except RuntimeError as error:
            if "imeout" in str(error) or "imed out" in str(error):
                raise DeadlineExceeded(
                    f"new communicator: not every rank took part within {deadline_s:g} s: {error}"
                ) from error
            raise PeerLost(f"new communicator: {error}") from error
        self._group.set_timeout(_NEVER)
        _open.add(self)

    def _lost(self, doing: str, peer: int | None, error: Exception) -> PeerLost:
        """Note that a connection broke: nothing more can be done here, as after a revoke."""
        reason = str(error).split("] ", 1)[-1].split(". ", 1)[0]
        with self._lock:
            self._broken = self._broken or f"a peer is gone ({reason})"
        lost = PeerLost(f"{doing}: a peer is gone ({reason})", rank=peer)
        lost.__cause__ = error
        return lost

    def _waits_begin(self) -> None:
        with self._lock:
            self._waiting += 1

    def _waits_end(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _check_usable(self, doing: str, peer: int | None = None) -> None:
        if self._closed:
            raise Closed("communicator: closed")
        if self._broken is not None:
            raise PeerLost(f"{doing}: {self._broken}", rank=peer)

    def _check_message(self, what: str, peer: int, tag: int) -> None:
        self._check_usable(what, peer)
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(f"no other rank {peer} among {self.size}")
        if not 0 <= tag <= _MAX_TAG:
            raise UsageError(f"a tag lies between 0 and {_MAX_TAG}, not at {tag}")

    def isend(self, buffer: Any, dest: int, tag: int) -> Request:
        """See `Communicator.isend`; not to this rank itself."""
        view = readable(buffer)
        self._check_message("send", dest, tag)
        request = _Message(self, view, "send", dest, tag)
        number = next(self._numbers) % _BODY_TAGS
        head = request.head
        _HEAD.pack_into(head, 0, view.nbytes, number)
        short = view.nbytes <= _INLINE_NBYTES
        if short:
            head[_HEAD.size : _HEAD.size + view.nbytes] = view
        try:
            works = [self._group.send([_tensor(memoryview(head))], dest, tag)]
            if not short:
                works.append(self._group.send([_tensor(view)], dest, _FIRST_BODY_TAG + number))
        except RuntimeError as error:
            raise self._lost(request.describe(), dest, error) from error

        def wait() -> int:
            for work in works:
                work.wait()
            return view.nbytes

        request.begin(wait)
        return request

    def irecv(self, buffer: Any, source: int, tag: int) -> Request:
        """See `Communicator.irecv`; not from this rank itself."""
        view = writable(buffer)
        self._check_message("receive", source, tag)
        request = _Message(self, view, "receive", source, tag)
        head, group = request.head, self._group
        try:
            work = group.recv([_tensor(memoryview(head))], source, tag)
        except RuntimeError as error:
            raise self._lost(request.describe(), source, error) from error

        def wait() -> int:
            work.wait()
            nbytes, number = _HEAD.unpack_from(head)
            fits = nbytes <= view.nbytes
            if nbytes <= _INLINE_NBYTES:
                if fits:
                    view[:nbytes] = head[_HEAD.size : _HEAD.size + nbytes]
            else:
                body = view[:nbytes] if fits else memoryview(bytearray(nbytes))  # taken, so that the sender gets on
                group.recv([_tensor(body)], source, _FIRST_BODY_TAG + number).wait()
            if not fits:
                raise ProtocolError(f"{request.describe()}: the message is longer than the buffer", rank=source)
            return int(nbytes)

        request.begin(wait)
        return request

    def iallreduce_min(self, values: Int64) -> Request:
        """See `Communicator.iallreduce_min`."""
        check_values(values)
        self._check_usable("reduction")
        try:
            return _Reduction(self, values)
        except RuntimeError as error:
            raise self._lost("reduction", None, error) from error

    def dup(self, deadline_s: float = DUP_DEADLINE_S) -> TorchComm:
        """See `Communicator.dup`."""
        self._check_usable("new communicator")
        new = TorchComm.__new__(TorchComm)
        new._adopt(PrefixStore(str(next(self._dups)), self._store), self.rank, self.size, deadline_s)
        return new

    def close(self, *, abort: bool = False) -> None:
        """See `Communicator.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if abort and self._broken is None:
                self._broken = "the communicator was given up"
            waiting, group, self._group = self._waiting, self._group, None
        if self.size > 1 and (abort or waiting):
            # A wait that times out closes all connections (see above); one for a peer that is gone fails before that.
            nothing = torch.empty(1, dtype=torch.uint8)
            for offset in range(1, self.size):
                with contextlib.suppress(RuntimeError):
                    group.recv([nothing], (self.rank + offset) % self.size, _BREAK_TAG).wait(timedelta(milliseconds=1))


@atexit.register
def _break_off_all() -> None:
    """No thread of ours waits in gloo while the interpreter is taken down, which would end in ``terminate``."""
    for comm in list(_open):
        comm.close(abort=True)
