"""MPI below the `Communicator` contract; the only module that imports mpi4py, and only when one is made.

What shaped it, all of it seen with Open MPI 5.0.11:

- A failure surfaces as any of several error classes, so whatever is not plainly a wrong argument means a lost peer.
- A communicator that is revoked while another rank is still inside the call that makes it crashes that rank, hence the
  barrier in `MPIComm._adopt`.
- ``Revoke`` without ``--with-ft ulfm`` reports success and reaches nobody.
- After a revoke a matched receive can stay incomplete and still be written to later, so its buffer is kept for ever.
- Under ULFM the barrier of MPI_Finalize hangs in about a third of the jobs that lost a rank, so `_load` asks Open MPI
  to leave it out (the survivors still agree with each other there); a stopped rank hangs MPI_Finalize in any case.
- More than 2**31 - 1 bytes in one message are refused by mpi4py 4.1 over Open MPI 5.0 (MPI_ERR_ARG), hence the limit.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from memckpt.comm.base import DUP_DEADLINE_S, Communicator, Int64, Request, check_values, readable, wait, writable
from memckpt.errors import Closed, DeadlineExceeded, MemckptError, PeerLost, ProtocolError, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

_kept: list[object] = []
"""Requests that never completed, with their buffers: MPI may still write into these, so they live as long as the
process.
"""

_ULFM = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm

_open: weakref.WeakSet[MPIComm] = weakref.WeakSet()
_watching = False


def _has_ulfm() -> bool:
    return os.environ.get(_ULFM, "0").lower() in ("1", "true", "yes", "enabled", "t")


def _load() -> Any:
    """The module ``mpi4py.MPI``, initialised (by the user, or by mpi4py as ``mpi4py.rc`` says)."""
    if _has_ulfm():
        # Read by MPI_Init, so it comes too late where the user did that before.
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError("MPI is wanted but mpi4py cannot be imported: pip install 'memckpt[mpi]'") from error
    if MPI.Is_finalized():
        raise Closed("MPI has been finalized")
    if not MPI.Is_initialized():
        raise UsageError("MPI is not initialised: mpi4py.rc.initialize is off, so call MPI.Init_thread() first")
    return MPI


def _watch_finalize(MPI: Any) -> None:
    """Be told at the start of MPI_Finalize, so that a background thread is out of MPI before it goes on."""
    global _watching
    if not _watching:
        keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: _finalizing())
        MPI.COMM_SELF.Set_attr(keyval, True)  # MPI_Finalize first deletes the attributes of COMM_SELF
        _watching = True


def _finalizing() -> None:
    for comm in list(_open):
        with comm._gate:
            comm._finalized = True


def _translate(MPI: Any, error: Exception, doing: str, peer: int | None) -> MemckptError:
    code = error.Get_error_class()  # type: ignore[attr-defined]
    name = next((n for n in dir(MPI) if n.startswith("ERR_") and getattr(MPI, n) == code), str(code))
    if code == MPI.ERR_TRUNCATE:
        return ProtocolError(f"{doing}: the message is longer than the buffer", rank=peer)
    if code in (MPI.ERR_TAG, MPI.ERR_RANK, MPI.ERR_COUNT, MPI.ERR_BUFFER, MPI.ERR_TYPE, MPI.ERR_ARG):
        return UsageError(f"{doing}: MPI_{name}", rank=peer)
    return PeerLost(f"{doing}: a peer is gone (MPI_{name})", rank=peer)


class MPIRequest(Request):
    """See `Request`."""

    def __init__(
        self,
        comm: MPIComm,
        request: MPI.Request,
        view: object,
        what: str,
        peer: int | None,
        tag: int | None,
        nbytes: int,
    ) -> None:
        self.what, self.peer, self.tag, self.nbytes = what, peer, tag, nbytes
        self._comm: MPIComm | None = comm
        self._request = request
        self._view = view  # owns the buffer until MPI lets go of it
        self._status = comm._mpi.Status() if what == "receive" else None
        self._error: MemckptError | None = None

    def test(self) -> bool:
        """See `Request.test`."""
        if self._error is not None:
            raise self._error
        comm = self._comm
        if comm is None:
            return True
        with comm._gate:
            comm._check_alive()
            try:
                done = self._request.Test(self._status)
                if comm._is_broken():
                    # Incomplete, it may stay so for as long as a stopped peer sleeps; complete, it may be a send that
                    # nobody received: MPI drops what a revoke finds unmatched, and reports success.
                    self._error = PeerLost(f"{self.describe()}: the communicator was revoked", rank=self.peer)
                elif not done:
                    return False
            except comm._mpi.Exception as error:
                self._error = _translate(comm._mpi, error, self.describe(), self.peer)
                self._error.__cause__ = error
            if self._error is not None:
                self._keep()
                raise self._error
        if self._status is not None:
            self.nbytes = self._status.Get_count(comm._mpi.BYTE)
        self._comm = self._view = self._status = None
        return True

    def _keep(self) -> None:
        if self._comm is not None:
            _kept.append((self._request, self._view))
            self._comm = None

    def __del__(self) -> None:
        self._keep()


class MPIComm(Communicator):
    """A private duplicate of an mpi4py communicator; errors on it raise instead of ending the job. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Whose ranks take part; ``COMM_WORLD`` by default. It stays untouched.
    deadline_s : float
        For the duplication.

    Raises
    ------
    UsageError
        mpi4py is missing, MPI is not initialised, or `comm` is no intracommunicator.
    PeerLost, DeadlineExceeded
        A peer is gone or did not take part.
    """

    kind = "mpi"

    def __init__(self, comm: MPI.Intracomm | None = None, *, deadline_s: float = DUP_DEADLINE_S) -> None:
        MPI = _load()
        source = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(source, MPI.Intracomm) or source == MPI.COMM_NULL:
            raise UsageError(f"an mpi4py intracommunicator is needed, not {source!r}")
        self._mpi: Any = MPI
        self.revocable = _has_ulfm()
        _watch_finalize(MPI)
        self._adopt(self._duplicate(source, deadline_s), deadline_s, source)

    def _adopt(self, private: MPI.Intracomm, deadline_s: float, source: MPI.Intracomm) -> None:
        MPI = self._mpi
        self._gate = threading.RLock()
        self._closed = self._aborted = self._finalized = False
        self._comm = private
        self.rank, self.size = private.Get_rank(), private.Get_size()
        level = MPI.Query_thread()
        self.concurrent = level == MPI.THREAD_MULTIPLE
        self.max_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        vendor, version = MPI.get_vendor()
        levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        extra = ", ULFM" if self.revocable else ""
        self.name = f"{vendor} {'.'.join(map(str, version))} (thread {levels.get(level, 'multiple')}{extra})"
        _open.add(self)
        # Nobody may revoke it before everybody is out of the call that made it: the message would crash a rank still
        # in there.
        ready = self.iallreduce_min(np.zeros(1, dtype=np.int64))
        wait([ready], deadline_s, "new communicator", poll=lambda: self._stop_if_revoked(source))

    def _stop_if_revoked(self, source: MPI.Intracomm) -> None:
        """Of the survivors of a failure some wait for others that gave up; all of them see the parent revoked."""
        if self.revocable and source.Is_revoked():
            raise PeerLost("new communicator: its parent was revoked")

    def _duplicate(self, source: MPI.Intracomm, deadline_s: float) -> MPI.Intracomm:
        MPI = self._mpi
        limit = time.monotonic() + deadline_s
        try:
            private, request = source.Idup()
            _kept.append(request)
            pause_s = 20e-6
            while not request.Test():
                self._stop_if_revoked(source)
                if time.monotonic() >= limit:
                    raise DeadlineExceeded(f"new communicator: not every rank took part within {deadline_s:g} s")
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 1e-3)
            _kept.remove(request)
            private.Set_errhandler(MPI.ERRORS_RETURN)
        except MPI.Exception as error:
            raise _translate(MPI, error, "new communicator", None) from error
        return private

    def _check_alive(self) -> None:
        if self._finalized or self._mpi.Is_finalized():
            raise Closed("communicator: MPI has been finalized")

    def _check_usable(self) -> None:
        self._check_alive()
        if self._closed:
            raise Closed("communicator: closed")

    def _is_broken(self) -> bool:
        """Given up here, or revoked by whomever."""
        return self._aborted or (self.revocable and not self._closed and self._comm.Is_revoked())

    def isend(self, buffer: Any, dest: int, tag: int) -> MPIRequest:
        """See `Communicator.isend`."""
        view = readable(buffer)
        return self._begin("send", lambda: self._comm.Isend([view, self._mpi.BYTE], dest, tag), view, dest, tag)

    def irecv(self, buffer: Any, source: int, tag: int) -> MPIRequest:
        """See `Communicator.irecv`."""
        if not 0 <= source < self.size:  # also keeps MPI's wildcards out
            raise UsageError(f"no rank {source} among {self.size}")
        view = writable(buffer)
        return self._begin("receive", lambda: self._comm.Irecv([view, self._mpi.BYTE], source, tag), view, source, tag)

    def iallreduce_min(self, values: Int64) -> MPIRequest:
        """See `Communicator.iallreduce_min`."""
        MPI = self._mpi
        check_values(values)
        return self._begin(
            "reduction",
            lambda: self._comm.Iallreduce(MPI.IN_PLACE, [values, MPI.INT64_T], MPI.MIN),
            readable(values),
            None,
            None,
        )

    def _begin(self, what: str, call: Any, view: memoryview, peer: int | None, tag: int | None) -> MPIRequest:
        with self._gate:
            self._check_usable()
            try:
                return MPIRequest(self, call(), view, what, peer, tag, view.nbytes)
            except self._mpi.Exception as error:
                raise _translate(self._mpi, error, what, peer) from error

    def dup(self, deadline_s: float = DUP_DEADLINE_S) -> MPIComm:
        """See `Communicator.dup`."""
        self._check_usable()
        new = MPIComm.__new__(MPIComm)
        new._mpi = self._mpi
        new.revocable = self.revocable
        new._adopt(self._duplicate(self._comm, deadline_s), deadline_s, self._comm)
        return new

    def close(self, *, abort: bool = False) -> None:
        """See `Communicator.close`."""
        with self._gate:
            if self._closed or self._finalized or self._mpi.Is_finalized():
                self._closed = True
                return
            self._closed, self._aborted = True, abort
            try:
                if not abort:
                    self._comm.Free()
                elif self.revocable:
                    self._comm.Revoke()  # and not freed: requests that never complete refer to it
            except (self._mpi.Exception, NotImplementedError):
                pass  # it is given up anyway, and this often runs while an error is on its way
