"""The members of a run, spares included, and the few collective steps that survive a failure in their midst.

Every wait is polled where MPI lets it. Facts this stands on, all seen with Open MPI 5.0.11:

- ``Iagree`` and ``Shrink`` complete on a revoked communicator and in spite of deaths, and all living members get the
  same answer. ``Ishrink`` does not (MPI_ERR_INTERN on a revoked one), so the shrink blocks, under the watching
  thread's deadline.
- A member that learns of a death only from an agreement's own message may leave another one waiting for ever. So nobody
  sits in an agreement while others train, and everybody waits a moment for the launcher's notice before it enters one.
- A communicator that is revoked while another member is still inside the call that makes it crashes that member. So a
  new world is revoked only by those whose exchange on it is complete: by then everybody is out of that call.
- ``Split`` blocks; when a peer dies in it, a revoke of its parent from another thread frees it.

On each world every member takes the same three agreeing steps in the same order, whatever it believes of their
outcome: agree that the world is good, agree that training is over, shrink. Otherwise one's shrink would meet another's
agreement.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from memckpt.comm.mpi import _load as load_mpi
from memckpt.errors import DeadlineExceeded, PeerLost
from memckpt.resilient import roster
from memckpt.resilient.roster import RunFailed

if TYPE_CHECKING:
    from mpi4py import MPI

PAUSE_MIN_S = 20e-6
PAUSE_MAX_S = 1e-3
PATIENCE_S = 3.0
"""How long an answer that can only be No is waited for."""
NOTICE_S = 0.25
"""How long the notice of a loss may take to reach all living members; seen: 10 ms on a machine with a core for each."""
FINISHED_TAG = 1


_kept: list[object] = []
"""Requests that nobody waits for any more, with their buffers: MPI may still use them, so they live for ever."""


def finish(
    request: MPI.Request,
    deadline_s: float,
    what: str,
    fatal: Callable[[], str | None] = lambda: None,
    broken: Callable[[], object] = lambda: None,
) -> None:
    """Poll `request` to its end. Local.

    Raises
    ------
    mpi4py.MPI.Exception
        Its own error.
    PeerLost
        `broken` gave something true: the request will not complete.
    DeadlineExceeded
        Naming `what`.
    RunFailed
        `fatal` gave a reason why there is no point in waiting.
    """
    limit = time.monotonic() + deadline_s
    pause_s = PAUSE_MIN_S
    while not request.Test():
        reason = fatal()
        if reason is not None:
            raise RunFailed(reason)
        if broken():
            _kept.append(request)
            raise PeerLost(f"{what}: a peer is gone")
        if time.monotonic() > limit:
            raise DeadlineExceeded(f"{what}: a peer did not take part within {deadline_s:g} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, PAUSE_MAX_S)


def progress() -> None:
    """Let MPI deliver what has arrived, notices of failures above all. Local."""
    load_mpi().COMM_SELF.Iprobe()


def has_ulfm() -> bool:
    """Whether this job was started so that MPI survives a lost process. Local."""
    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable", "0")  # noqa: SIM112, Open MPI's own spelling
    return enabled.lower() in ("1", "true", "yes", "enabled", "t")


def finalize_without_fence() -> None:
    """Let MPI_Finalize not wait for all processes of the job. Local.

    After losses that wait can last for ever (seen with two processes killed at once): the launcher's fence misses one
    of the dead. Open MPI has a parameter for it, read when it is initialised; so the variable behind it is set here.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.split(None, 5)[5].strip() for line in maps if "/libmpi.so" in line}
    for path in found:
        try:
            ctypes.c_bool.in_dll(ctypes.CDLL(path), "ompi_async_mpi_finalize").value = True
        except (OSError, ValueError):
            pass  # another MPI, or another release of it


def peer_loss(error: BaseException) -> bool:
    """Whether an error of MPI, or of a wait here, may mean that a peer is gone. Local."""
    MPI = load_mpi()
    if not isinstance(error, MPI.Exception):
        return isinstance(error, PeerLost) and not isinstance(error, DeadlineExceeded)
    return error.Get_error_class() in (
        MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS, MPI.ERR_PENDING,
        MPI.ERR_OTHER, MPI.ERR_INTERN, MPI.ERR_UNKNOWN,
    )  # fmt: skip


class World:
    """A private communicator of all living members.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Theirs alone; errors on it raise.
    deadline_s : float
        For each collective step, unless said otherwise.
    fatal : callable
        Gives a reason when the members cannot go on together; asked while waiting.
    """

    def __init__(self, comm: MPI.Intracomm, deadline_s: float, fatal: Callable[[], str | None]) -> None:
        self.comm = comm
        self.deadline_s = deadline_s
        self._fatal = fatal
        self._group = comm.Get_group()

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        return self.comm.Get_size()

    def agree(self, good: bool) -> tuple[bool, bool]:
        """(everybody said good and nobody was lost, everybody has said something). Collective over the living.

        Completes in spite of deaths and revocation, the first answer being the same on all living members. It may be
        False on one that gave up waiting, when it cannot be True on another: after a No of its own, or when a loss is
        known and no answer comes.

        Raises
        ------
        DeadlineExceeded
            A living peer did not take part.
        RunFailed
            There is no point in waiting.
        """
        good = good and not self.lost()
        flag = np.array([1 if good else 0], dtype=np.intc)
        request = self.comm.Iagree(flag)
        began = time.monotonic()
        pause_s = PAUSE_MIN_S
        try:
            while not request.Test():
                waited_s = time.monotonic() - began
                if waited_s > self.deadline_s:
                    raise DeadlineExceeded(f"agreement: a peer did not take part within {self.deadline_s:g} s")
                if waited_s > PATIENCE_S and (not good or self.lost()):
                    _kept.append((request, flag))
                    return False, False
                reason = self._fatal()
                if reason is not None:
                    raise RunFailed(reason)
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.3, PAUSE_MAX_S)
        except load_mpi().Exception:
            return False, True  # somebody is lost; that is agreed upon too
        return bool(flag[0]), True

    def farewell(self) -> None:
        """Wait a moment for the others before this process exits: the launcher may end all with the first. Local."""
        try:
            request = self.comm.Iagree(np.ones(1, dtype=np.intc))
            limit = time.monotonic() + PATIENCE_S
            while not request.Test() and time.monotonic() < limit:
                time.sleep(PAUSE_MAX_S)
        except load_mpi().Exception:
            pass  # they have come, and somebody was lost

    def settle(self) -> None:
        """Wait a moment for the launcher's notice of the loss that this world was revoked for, if any. Local."""
        limit = time.monotonic() + NOTICE_S
        while not self.lost() and time.monotonic() < limit:
            progress()
            time.sleep(PAUSE_MAX_S)

    def shrink(self) -> World:
        """The living members as a new world. Collective over the living; completes in spite of deaths and revocation.

        Blocks until all of them take part.
        """
        new: Any = self.comm.Shrink()
        new.Set_errhandler(load_mpi().ERRORS_RETURN)
        return World(new, self.deadline_s, self._fatal)

    def exchange(self, member: roster.Member) -> list[roster.Member]:
        """What every member says of itself, in order. Collective.

        Raises
        ------
        mpi4py.MPI.Exception
            Somebody died or revoked this world meanwhile; others may have got the list.
        """
        mine = np.frombuffer(roster.encode(member), dtype=np.uint8)
        everybody = np.empty((self.size, roster.MEMBER_NBYTES), dtype=np.uint8)
        # Who has left because of a loss cannot say so by a revoke yet; but every member is told of the loss.
        finish(self.comm.Iallgather(mine, everybody), self.deadline_s, "exchange of members", self._fatal, self.lost)
        return [roster.decode(row.tobytes()) for row in everybody]

    def announce(self, root: int) -> None:
        """Tell `root` that training has finished here. Local."""
        message = np.zeros(1, dtype=np.uint8)
        _kept.append((self.comm.Isend(message, root, FINISHED_TAG), message))

    def announcements(self, sources: Iterable[int]) -> list[MPI.Request]:
        """Requests that are complete when the ranks `sources` have announced themselves. Local."""
        message = np.zeros(1, dtype=np.uint8)
        requests = [self.comm.Irecv(message, source, FINISHED_TAG) for source in sources]
        _kept.append((requests, message))
        return requests

    def split(self, logical: int) -> MPI.Intracomm | None:
        """The active members in the order of their `logical` ranks; None on a spare. Collective; blocks, see above."""
        MPI = load_mpi()
        comm: Any = self.comm.Split(MPI.UNDEFINED if logical < 0 else 0, max(logical, 0))
        if logical < 0:
            return None
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm  # type: ignore[no-any-return]

    def revoke(self) -> None:
        """Tell every member; their pending operations on this world, agreements excepted, end with an error. Local."""
        revoke(self.comm)

    def revoked(self) -> bool:
        return bool(self.comm.Is_revoked())

    def lost(self) -> list[int]:
        """Ranks of this world that are known here to be dead. Local."""
        failed = self.comm.Get_failed()
        try:
            n = failed.Get_size()
            return [] if n == 0 else [int(r) for r in failed.Translate_ranks(list(range(n)), self._group)]
        finally:
            failed.Free()


def revoke(comm: Any) -> None:
    """Revoke `comm`, whatever state it is in. Local."""
    try:
        comm.Revoke()
    except (load_mpi().Exception, NotImplementedError):
        pass  # freed by its user, or already broken


def split_with_care(parent: MPI.Intracomm, color: int, key: int, deadline_s: float, broken: Callable[[], bool]) -> Any:
    """``parent.Split`` that returns when all members have left the call, so each may revoke the result. Collective.

    Raises
    ------
    PeerLost
        `broken` says that a peer is gone, or one does not take part.
    """
    MPI = load_mpi()
    comm = parent.Split(color, key)
    if comm == MPI.COMM_NULL:
        return comm
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    finish(comm.Ibarrier(), deadline_s, "split", broken=broken)
    return comm
