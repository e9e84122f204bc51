"""`run`: train on N ranks, and when some die, go on with spares in their place.

Every generation ends with one agreement of all living members: "yes" from the spares and from ranks whose training has
finished, "no" from ranks whose training was interrupted. All yes and nobody lost: the run is over, for everybody.
Anything else: shrink, say who one is, decide (a pure function), split, agree again, and train. A loss in the middle of
that starts it again from the shrink.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from memckpt import faults, surroundings
from memckpt.comm.mpi import _load as load_mpi
from memckpt.errors import DeadlineExceeded, PeerLost, UsageError
from memckpt.resilient import groups, roster
from memckpt.resilient.context import Context, Failure
from memckpt.resilient.roster import SPARE, Member, Place, RunFailed
from memckpt.resilient.watch import Heartbeat, Watch
from memckpt.resilient.world import World, peer_loss, places_of

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

SETTLE_S = 1.0
"""How long an error that may be a lost peer's, or may not, waits for the loss to be seen."""

_current: Context | None = None


def current() -> Context | None:
    """The context of the `train` that this process is in; None outside of `run`. Local."""
    return _current


def has_ulfm() -> bool:
    """Whether this job was started so that MPI survives a lost process. Local."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes", "enabled", "t")


def run(
    train: Callable[[Context], T],
    active: int | None = None,
    *,
    max_failures: int = 10,
    grace_s: float = 60.0,
    frozen_s: float = 1.0,
    silent_s: float = 60.0,
    verbose: bool = True,
) -> T | None:
    """Call ``train(ctx)`` on `active` ranks; when a process is lost, give its rank to a spare and call it again on
    all. Collective over COMM_WORLD.

    Parameters
    ----------
    train : callable
        Restores from its Checkpointer, trains, and returns. It is called again, in the same process, after each
        failure, also when it had returned already, so it must begin from what it restores, not from what its objects
        hold.
    active : int, optional
        Ranks that train; the others are spares. All by default.
    max_failures : int
        Interruptions in a row, without a step of progress in between, after which the run ends.
    grace_s : float
        Seconds for an interrupted `train` to come back; then its process ends, and is one more that is lost. Also for
        each step of regrouping.
    frozen_s : float
        A process of this job that is stopped (SIGSTOP) for so long is killed by its neighbours on the node.
    silent_s : float
        The same for a process that does not run although it is not stopped.
    verbose : bool
        Print what happens, on logical rank 0.

    Returns
    -------
    object or None
        What `train` returned; None on a spare. It is returned only once every active rank has finished and all have
        agreed that it has.

    Raises
    ------
    RunFailed
        On every rank: the training of one rank raised an error of its own, too few spares are left, or failures
        repeat. Snapshots stay in memory.
    UsageError
        MPI or its thread level does not do, or there are fewer processes than `active`.

    Notes
    -----
    Without ``mpirun --with-ft ulfm`` the job ends with its first lost process, and is to be started again.
    """
    MPI = load_mpi()
    size = MPI.COMM_WORLD.Get_size()
    active = size if active is None else active
    if not 1 <= active <= size:
        raise UsageError(f"active={active} ranks are wanted and mpirun started {size}")
    if _current is not None:
        raise UsageError("run() inside run()")
    problem = None
    if size > 1 and not has_ulfm():
        problem = "start it with mpirun --with-ft ulfm"
    elif size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        problem = "MPI was initialised below MPI_THREAD_MULTIPLE, so nobody could watch while training waits"
    if size == 1 or problem:
        if problem and verbose and MPI.COMM_WORLD.Get_rank() == 0:
            print(f"memckpt: recovery inside the job is off ({problem}); after a lost process, start the same program again", flush=True)
        return _run_plainly(train, active)
    return _Run(train, active, max_failures, grace_s, verbose).go(frozen_s, silent_s)


def _run_plainly(train: Callable[[Context], T], active: int) -> T | None:
    """No recovery: the first `active` ranks train, the others wait for their end."""
    global _current
    MPI = load_mpi()
    comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.Get_rank() < active else 1, 0)
    value: T | None = None
    if MPI.COMM_WORLD.Get_rank() < active:
        _current = Context(comm, 0, [], {}, members=None, deadline_s=60.0)
        try:
            surroundings.enter(_current)
            value = train(_current)
        except BaseException:
            if MPI.COMM_WORLD.Get_size() > 1:
                _exit_without_finalize()  # peers may wait for this rank for ever: only its exit ends the job
            raise
        finally:
            _current = None
            surroundings.enter(None)
        groups.destroy()
    end = MPI.COMM_WORLD.Ibarrier()
    while not end.Test():
        time.sleep(1e-3)
    return value


def _exit_without_finalize() -> None:
    """MPI_Finalize waits for peers; after a failed run these may never come, so this process is to end without it, with status 1."""

    def leave() -> None:
        if not load_mpi().Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    atexit.register(leave)


@dataclass
class _Regrouped:
    """What a regrouping ended in."""

    world: World
    comm: MPI.Intracomm | None
    decision: roster.Decision
    members: list[Member]


@dataclass
class _Run:
    train: Callable[[Context], Any]
    active: int
    max_failures: int
    grace_s: float
    verbose: bool
    me: Member = field(init=False)
    places: list[Place] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    best: int = -1  # highest progress of any rank
    in_a_row: int = 0
    ctx: Context | None = None
    value: Any = None

    def go(self, frozen_s: float, silent_s: float) -> Any:
        node = os.environ.get("MEMCKPT_NODE") or socket.gethostname()
        place = Place(node, os.environ.get("MEMCKPT_DOMAIN") or node)
        self.me = Member(logical=SPARE, place=place, pid=os.getpid())
        job = os.environ.get("PMIX_NAMESPACE") or f"ppid-{os.getppid()}"
        self.watch = Watch(Heartbeat(job, node, frozen_s, silent_s), self.grace_s)
        self.watch.start()
        try:
            return self._go()
        except DeadlineExceeded as error:
            _exit_without_finalize()
            raise RunFailed(f"{error}; it stands still on another node: start the same program again") from error
        except RunFailed:
            _exit_without_finalize()
            raise
        finally:
            self.watch.stop()
            self._retire(failed=sys.exc_info()[0] is not None)

    def _go(self) -> Any:
        MPI = load_mpi()
        # A shrink is the duplicate that also works when a process was lost before this point.
        group = self._regroup(World(MPI.COMM_WORLD, self.grace_s + 15.0), start=True)
        while group.decision.kind == "train":
            self._adopt(group)
            good = self._train(group) if group.comm is not None else True
            everybody, clean = group.world.agree(good, forever=good)
            self.times["gathered"] = time.time()
            if everybody and clean:
                return self.value
            self.watch.rest()
            self._retire(failed=True)
            group = self._regroup(group.world)
        if group.decision.kind == "finish":
            return self.value
        where = "" if group.decision.rank is None else f"rank {group.decision.rank}: "
        raise RunFailed(f"{where}{group.decision.reason}", rank=group.decision.rank)

    def _adopt(self, group: _Regrouped) -> None:
        """Take the part that was decided on. What was a spare may now be a rank, and a rank that had finished is one that trains."""
        decision, members = group.decision, group.members
        rank = group.world.rank
        self.places = places_of(members, decision.roster)
        logical = decision.roster.index(rank) if rank in decision.roster else SPARE
        self.me = msgspec.structs.replace(
            self.me, logical=logical, state="waiting", reason="", generation=max(m.generation for m in members) + 1
        )

    def _train(self, group: _Regrouped) -> bool:
        """One call of `train`; whether it returned. Afterwards this process is in no communicator but the world."""
        global _current
        assert group.comm is not None
        self.value = None
        ctx = self.ctx = _current = Context(
            group.comm, self.me.generation, list(self.failures), dict(self.times), members=group.world, deadline_s=self.grace_s
        )
        self.watch.train(group.world, frozenset(group.decision.roster), ctx.on_failure)
        ctx.had_commit = self.best >= 0
        surroundings.enter(ctx)
        self._tell(ctx)
        state, reason = "finished", ""
        try:
            self.value = self.train(ctx)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: the other ranks must not wait for this
        one
            state = "interrupted" if _means_loss(error, ctx) else "failed"
            reason = _describe(error)
            if state == "failed":
                traceback.print_exc()
            ctx.on_failure(error)
            self.times = {"seen": ctx.seen or time.time(), "left": time.time()}
            _clear(error)
        finally:
            _current = None
            surroundings.enter(None)
            self.watch.rest()
        self.me = msgspec.structs.replace(self.me, state=state, reason=reason, progress=ctx.done)
        if state != "finished":
            self._retire(failed=True)
            faults.point("run.revoked", self.me.logical, self.me.generation)
        return state == "finished"

    def _retire(self, *, failed: bool) -> None:
        ctx, self.ctx = self.ctx, None
        if ctx is not None:
            if failed:
                ctx.on_failure("this generation has ended")
            ctx.retire(failed=failed)

    def _regroup(self, world: World, start: bool = False) -> _Regrouped:
        """From the world with losses to one without. Collective over the living; again from the shrink when somebody dies in it."""
        began = time.monotonic()
        me, point = self.me, (self.me.logical, self.me.generation)
        while True:
            clock = _Clock()
            self.watch.shrink()
            world = world.shrink()
            clock.mark("shrink")
            faults.point("run.shrunk", *point)
            self.watch.regroup(world)
            good, comm, members = True, None, []
            decision = roster.Decision("fail")
            try:
                members = world.exchange(me)
                clock.mark("exchange")
                decision = self._decide(members, start)
                faults.point("run.assigned", *point)
                if decision.kind == "train":
                    here = decision.roster.index(world.rank) if world.rank in decision.roster else SPARE
                    comm = world.split(here)
                clock.mark("split")
                faults.point("run.split", *point)
            except Exception as error:
                if not peer_loss(error):
                    raise
                good = False
                world.revoke()  # whoever still waits in one of these steps
            everybody, clean = world.agree(good)
            clock.mark("agree")
            faults.point("run.agreed", *point)
            if everybody and clean:
                break
        self.watch.rest()
        self._record(decision, members, clock, time.monotonic() - began, start)
        return _Regrouped(world, comm, decision, members)

    def _decide(self, members: list[Member], start: bool) -> roster.Decision:
        places = [] if start else self.places
        decision = roster.decide(members, self.active, places)
        if start or decision.kind != "train":
            return decision
        in_a_row = 1 if max(m.progress for m in members) > self.best else self.in_a_row + 1
        if in_a_row > self.max_failures:
            reason = f"{in_a_row} interruptions in a row without progress, the last one: {decision.reason or 'a rank was lost'}"
            return roster.Decision("fail", lost=decision.lost, reason=reason)
        return decision

    def _record(self, decision: roster.Decision, members: list[Member], clock: _Clock, total_s: float, start: bool) -> None:
        if start:
            return
        progress = max(m.progress for m in members)
        self.in_a_row = 1 if progress > self.best else self.in_a_row + 1
        self.best = max(self.best, progress)
        now = time.time()
        self.times.setdefault("seen", self.times.get("gathered", now))
        self.times.setdefault("left", self.times["seen"])
        self.times |= clock.seconds | {"entered": now, "regroup": total_s}
        self.times["leave"] = self.times["left"] - self.times["seen"]
        self.times["gather"] = max(0.0, self.times["gathered"] - self.times["left"])
        generation = max(m.generation for m in members)
        self.failures.append(Failure(generation, decision.lost, decision.reason, self.times["seen"]))

    def _tell(self, ctx: Context) -> None:
        if not (self.verbose and ctx.rank == 0 and self.failures):
            return
        last = self.failures[-1]
        ranks = ", ".join(str(loss.logical) for loss in last.lost)
        what = f"rank {ranks} lost" if ranks else f"interrupted: {last.reason}"
        parts = ", ".join(f"{name} {1e3 * self.times[name]:.1f}" for name in ("leave", "gather", "shrink", "exchange", "split", "agree"))
        print(f"memckpt: {what}; generation {ctx.generation} regrouped in {1e3 * self.times['regroup']:.1f} ms ({parts})", flush=True)


class _Clock:
    """Seconds from mark to mark."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now


def _chain(error: BaseException) -> list[BaseException]:
    """`error` and what led to it."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and one not in found:
            found.append(one)
            pending += [one.__cause__, one.__context__]
    return found


def _means_loss(error: BaseException, ctx: Context) -> bool:
    """Whether training ended because of a peer, rather than by an error of its own."""
    chain = _chain(error)
    if any(isinstance(e, PeerLost) or peer_loss(e) for e in chain):
        return True
    lost = ctx.lost.wait(SETTLE_S)  # an error in a collective is often faster than the notice of the loss
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return False
    return lost or any(groups.failure(e) for e in chain)


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _clear(error: BaseException) -> None:
    """Free what the frames of a dead generation hold: its tensors may be as large as the state."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
