"""What `train` gets: its rank, its communicators, and the record of what has happened."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from memckpt import surroundings
from memckpt.comm.base import Communicator
from memckpt.errors import PeerLost
from memckpt.resilient import groups, world
from memckpt.resilient.roster import Loss

if TYPE_CHECKING:
    from mpi4py import MPI


_current: Context | None = None


def enter(ctx: Context | None) -> None:
    """Make `ctx` what this process, and every Checkpointer made in it, is in; None to leave it. Local."""
    global _current
    _current = ctx
    surroundings.enter(ctx)


def current() -> Context | None:
    """The context of the `train` that this process is in; None outside of `run`. Local."""
    return _current


class Abandonable(Protocol):
    """What a Checkpointer is to `run`."""

    def abandon(self) -> None:
        """Stop the thread, remove the hooks, drop the lock; talk to no peer; keep the memory."""

    def interrupt(self, error: PeerLost) -> None:
        """End every wait in it, from any thread."""


class Failure:
    """One interruption of training, as the survivors know it.

    Attributes
    ----------
    generation : int
        The generation that it ended.
    lost : tuple of Loss
        Logical ranks whose process was lost, with their node; empty when all are alive.
    reason : str
        What a survivor's training raised.
    seen : float
        Wall clock, seconds since the epoch, at which this process saw it.
    """

    def __init__(self, generation: int, lost: tuple[Loss, ...], reason: str, seen: float) -> None:
        self.generation, self.lost, self.reason, self.seen = generation, lost, reason, seen

    def __repr__(self) -> str:
        ranks = ", ".join(f"{loss.logical} ({loss.place.node})" for loss in self.lost) or "none"
        return f"Failure(generation={self.generation}, lost=[{ranks}], reason={self.reason!r})"


class Context:
    """One generation of training, as one active rank sees it.

    Attributes
    ----------
    rank, world : int
        Logical rank and number of active ranks; a lost rank's number goes to its successor.
    comm : mpi4py.MPI.Intracomm
        The active ranks; revoked when a peer is lost, so that calls on it raise. It and what `split` gives are the
        only communicators that may be used in `train`: others would not wake a waiting rank.
    generation : int
        Rises with every regrouping.
    failures : list of Failure
        What has happened so far, oldest first.
    timeline : dict of str to float
        Of the regrouping that led here. Wall clock, seconds since the epoch: "seen", "left", "gathered", "entered".
        Seconds: "leave" (until the training thread came back), "gather" (until all survivors did), "shrink",
        "exchange", "split", "agree", and "regroup", which is all after the gathering (also of attempts that a further
        loss ended). Empty at the start.
    resilient : bool
        Whether a lost peer leads back here; False without ULFM.
    had_commit : bool
        Some rank reported progress in an earlier generation of this job, so there must be something to restore.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        generation: int,
        failures: list[Failure],
        timeline: dict[str, float],
        *,
        members: world.World | None,
        deadline_s: float,
        had_commit: bool = False,
    ) -> None:
        self.comm = comm
        self.rank, self.world = comm.Get_rank(), comm.Get_size()
        self.generation = generation
        self.failures = failures
        self.timeline = timeline
        self.resilient = members is not None
        self.had_commit = had_commit
        self.done = -1
        self._members = members
        self._deadline_s = deadline_s
        self._listeners = groups.listeners()
        self._splits: list[MPI.Intracomm] = []
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._checkpointers: weakref.WeakSet[Abandonable] = weakref.WeakSet()
        self._trip_guard = threading.Lock()
        self._seen: float | None = None
        self._made_group = False
        self.lost = threading.Event()

    @property
    def seen(self) -> float | None:
        """Wall clock at which the loss of a peer was seen here; None while all is well."""
        return self._seen

    def split(self, color: int, key: int = 0) -> Any:
        """Like ``comm.Split(color, key)``, for a part that is revoked with this generation. Collective over `comm`.

        Parameters
        ----------
        color, key : int
            Ranks of one colour form a part, ordered by key. Not MPI.UNDEFINED.

        Raises
        ------
        PeerLost
            A peer is gone.
        """
        part = world.split_with_care(self.comm, color, key, self._deadline_s, self.lost.is_set)
        with self._trip_guard:
            if part:  # not COMM_NULL
                self._splits.append(part)
            late = self._seen is not None
        if late:
            world.revoke(part)
        return part

    def init_process_group(self, backend: str = "gloo", *, timeout_s: float = 600.0, **options: Any) -> None:
        """Initialise torch.distributed for the active ranks; destroyed with the generation. Collective.

        Parameters
        ----------
        backend : str
            "gloo", "nccl", or what else torch knows.
        timeout_s : float
            For its collectives. A lost peer is noticed long before.
        **options
            For torch: ``device_id``, ``pg_options``.

        Raises
        ------
        UsageError
            There is a default process group already.
        PeerLost
            A peer is gone.
        """
        groups.init(self.comm, backend, self.generation, timeout_s, options)
        self._made_group = True

    def communicator(self) -> Communicator:
        """The active ranks as a Communicator for a Checkpointer. Collective over `comm`."""
        from memckpt.comm.mpi import MPIComm

        made = MPIComm(self.comm)
        self._communicators.add(made)
        return made

    def register(self, checkpointer: Abandonable) -> None:
        """Remember `checkpointer`, weakly, to abandon when this generation ends by a failure. Local."""
        self._checkpointers.add(checkpointer)

    def progress(self, step: int) -> None:
        """Say that `step` steps are done; `run` gives up when failures repeat without any. Local."""
        self.done = max(self.done, step)

    def on_commit(self, step: int) -> None:
        """A Checkpointer committed `step`, which is progress; called from any thread. Local."""
        self.progress(step)

    def check(self) -> None:
        """Raise PeerLost when a peer is known to be gone: for loops that do not communicate. Local."""
        if self._seen is not None:
            raise PeerLost("a peer is gone; this generation has ended", rank=self.rank)

    def on_failure(self, error: BaseException | str) -> None:
        """End this generation: revoke its communicators, break its process groups, so that waiting threads come back.

        `error` is what was seen. Called by whoever sees that a peer is gone, from any thread; idempotent. Local, and
        every other rank is told.
        """
        with self._trip_guard:
            if self._seen is not None:
                return
            self._seen = time.time()
            splits = list(self._splits)
        self.lost.set()
        if self._members is None:
            return
        self._members.revoke()
        world.revoke(self.comm)
        for part in splits:
            world.revoke(part)
        # A Checkpointer talks over communicators of its own, which no peer has revoked for us.
        for made in list(self._communicators):
            made.close(abort=True)
        for checkpointer in list(self._checkpointers):
            checkpointer.interrupt(error if isinstance(error, PeerLost) else PeerLost(f"a peer was lost: {error}"))
        groups.abort(self._listeners)

    def retire(self, *, failed: bool) -> None:
        """Let go of what belongs to this generation, which `failed` or is over. Local.

        Called by `run` when no thread is in `train` any more.
        """
        for checkpointer in list(self._checkpointers):
            if failed:
                checkpointer.abandon()
        if failed or self._made_group:
            groups.destroy()
