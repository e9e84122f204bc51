"""The life of a process in a resilient run: train or wait, agree, and when somebody was lost, regroup.

Every generation ends with its world revoked, because a loss was seen, or because every rank has finished. Then all
living members agree: "yes" from spares and from ranks whose training has finished, "no" from ranks whose training was
interrupted and from whoever knows of a loss. All yes: the run is over, for everybody. Anything else: shrink, say who
one is, decide (a pure function), split, agree that all of it went well, and train. A loss in the middle starts that
again.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from memckpt import faults
from memckpt.comm.mpi import _load as load_mpi
from memckpt.memory import process
from memckpt.resilient import blame, context, roster
from memckpt.resilient.context import Context, Failure
from memckpt.resilient.roster import SPARE, Decision, Member, Place, RunFailed
from memckpt.resilient.watch import Heartbeat, Watch
from memckpt.resilient.world import World, finalize_without_fence, peer_loss, progress

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

MARGIN_S = 15.0
"""How much longer than its grace period a peer is waited for: by then it has ended itself, and that is known."""

SHRINK_S = 10.0
"""How long a shrink may take that everybody has come to."""

START_S = 600.0
"""How much later than this one another process may come to `run`."""

IDLE_S = 2e-3
"""Between two looks of a process that waits for the end, or for a loss."""

PHASES = ("leave", "gather", "shrink", "exchange", "split", "agree")


class Clock:
    """Seconds from mark to mark."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, name: str) -> None:
        """The phase `name` ends here. Local."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now


@dataclass
class Group:
    """What a regrouping ended in: the same members and decision everywhere, and a communicator on the active ones."""

    world: World
    comm: MPI.Intracomm | None
    decision: Decision
    members: list[Member]


@dataclass
class Survivors(Generic[T]):
    """This process's part in a run; see `run` for the parameters.

    Attributes
    ----------
    me : Member
        What this process says of itself when members regroup.
    places : list of Place
        Where each logical rank runs, or ran; the same on all members.
    best : int
        Highest progress that any rank has reported by the last regrouping; the same on all members.
    in_a_row : int
        Interruptions since there was progress; the same on all members.
    """

    train: Callable[[Context], T]
    active: int
    max_failures: int
    grace_s: float
    verbose: bool
    me: Member = field(init=False)
    watch: Watch = field(init=False)
    places: list[Place] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    best: int = -1
    in_a_row: int = 0
    ctx: Context | None = None
    world: World | None = None
    value: T | None = None

    def begin(self, frozen_s: float, silent_s: float) -> None:
        """Start to watch. Local."""
        node = os.environ.get("MEMCKPT_NODE") or socket.gethostname()
        pid, start = process.identity()
        self.me = Member(
            logical=SPARE,
            place=Place(node, os.environ.get("MEMCKPT_DOMAIN") or node),
            host=f"{socket.gethostname()}/{process.pid_namespace()}"[: roster.NAME_CHARS],
            pid=pid,
            start=start,
        )
        job = os.environ.get("PMIX_NAMESPACE") or f"child-of-{os.getppid()}"
        self.watch = Watch(Heartbeat(job, node, frozen_s, silent_s), self.grace_s)
        self.watch.start()

    def end(self, *, failed: bool) -> None:
        """Let go of the last generation and stop watching. Local."""
        self.watch.stop()
        self._retire(failed=failed)
        finalize_without_fence()

    def go(self) -> T | None:
        """Train, wait and regroup until all agree that it is over. Collective over the living."""
        # At the start a shrink is the duplicate that also works when a process was lost already.
        began = World(load_mpi().COMM_WORLD, self.grace_s + MARGIN_S, lambda: self.watch.fatal)
        group = self._regroup(began, START_S, start=True)
        while group.decision.kind == "train":
            self._adopt(group)
            self.watch.know(group.world, [(m.host == self.me.host, m.pid, m.start) for m in group.members])
            timeline, self.times = self.times, {}
            good = group.comm is None or self._train(group, group.comm, timeline)
            if good:
                self._wait(group)
            group.world.settle()
            self.watch.rest()
            over, everybody = group.world.agree(good)
            if over:
                return self.value
            self.times["gathered"] = time.time()
            self._retire(failed=True)  # a rank that had finished is called back
            group = self._regroup(group.world, SHRINK_S if everybody else self.grace_s + MARGIN_S)
        if group.decision.kind == "finish":
            return self.value
        cause = "" if group.decision.rank is None else f"rank {group.decision.rank}: "
        raise RunFailed(cause + group.decision.reason, rank=group.decision.rank)

    def _adopt(self, group: Group) -> None:
        """Take the part that was decided on."""
        chosen = group.decision.roster
        self.places = [group.members[position].place for position in chosen]
        self.me = msgspec.structs.replace(
            self.me,
            logical=chosen.index(group.world.rank) if group.world.rank in chosen else SPARE,
            state="waiting",
            reason="",
            generation=max(member.generation for member in group.members) + 1,
        )

    def _train(self, group: Group, comm: MPI.Intracomm, timeline: dict[str, float]) -> bool:
        """One call of `train`; whether it returned."""
        self.value = None
        ctx = self.ctx = Context(
            comm,
            self.me.generation,
            list(self.failures),
            timeline,
            members=group.world,
            deadline_s=self.grace_s,
            had_commit=self.best >= 0,
        )
        self.watch.train(group.world, frozenset(group.decision.roster), ctx.on_failure)
        context.enter(ctx)
        self._tell(ctx)
        state, reason = "finished", ""
        try:
            self.value = self.train(ctx)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: nobody must wait for this rank in vain
            state = "interrupted" if self.watch.fatal or blame.means_loss(error, ctx) else "failed"
            reason = blame.describe(error)
            if state == "failed":
                traceback.print_exc()
            ctx.on_failure(error)
            self.times = {"seen": ctx.seen or time.time(), "left": time.time()}
            blame.clear(error)
        finally:
            context.enter(None)
        self.me = msgspec.structs.replace(self.me, state=state, reason=reason, progress=ctx.done)
        if state != "finished":
            self._retire(failed=True)
            faults.point("run.revoked", self.me.logical, self.me.generation)
        return state == "finished"

    def _wait(self, group: Group) -> None:
        """Until the world is revoked: by rank 0 when every rank has finished, by whoever sees a loss otherwise."""
        world, chosen = group.world, group.decision.roster
        self.watch.idle(world, frozenset(chosen))
        others: list[MPI.Request] | None = None
        if self.me.logical == 0:
            others = world.announcements(chosen[1:])
        elif self.me.logical != SPARE:
            world.announce(chosen[0])
        while not world.revoked():
            progress()
            try:
                if others is not None and all(request.Test() for request in others):
                    world.revoke()
            except load_mpi().Exception:
                others = None  # that rank is lost, which the watching thread sees too
            if self.watch.fatal is not None:
                raise RunFailed(self.watch.fatal)
            time.sleep(IDLE_S)

    def _retire(self, *, failed: bool) -> None:
        ctx, self.ctx = self.ctx, None
        if ctx is not None:
            if failed:
                ctx.on_failure("this generation has ended")
            ctx.retire(failed=failed)

    def _regroup(self, world: World, limit_s: float, *, start: bool = False) -> Group:
        """From a world with losses to one without; again from the shrink after a loss. Collective over the living."""
        began = time.monotonic()
        who = (self.me.logical, self.me.generation)
        while True:
            clock = Clock()
            self.watch.shrink(world, limit_s)
            world = world.shrink()
            clock.mark("shrink")
            faults.point("run.shrunk", *who)
            self.watch.exchange(world)
            self.world = world
            group = Group(world, None, Decision("fail"), [])
            good = True
            try:
                group.members = world.exchange(self.me)
                clock.mark("exchange")
                self.watch.regroup(world)
                group.decision = self._decide(group.members, start=start)
                faults.point("run.assigned", *who)
                if group.decision.kind == "train":
                    chosen = group.decision.roster
                    group.comm = world.split(chosen.index(world.rank) if world.rank in chosen else SPARE)
                clock.mark("split")
                faults.point("run.split", *who)
            except Exception as error:
                if not peer_loss(error):
                    raise
                good = False
                if group.members:
                    world.revoke()  # whoever still waits in the split
                world.settle()
            over, _ = world.agree(good)
            clock.mark("agree")
            faults.point("run.agreed", *who)
            if over:
                break
            # The second agreement on this world, as those will make who take the first one for a Yes; see `world`.
            _, everybody = world.agree(False)
            limit_s = SHRINK_S if everybody else self.grace_s + MARGIN_S
        self.watch.rest()
        if not start:
            self._record(group, clock, time.monotonic() - began)
        return group

    def _decide(self, members: list[Member], *, start: bool) -> Decision:
        decision = roster.decide(members, self.active, [] if start else self.places)
        if start or decision.kind != "train":
            return decision
        in_a_row = self._count(members)
        if in_a_row > self.max_failures:
            cause = decision.reason or "a rank was lost"
            reason = f"{in_a_row} interruptions in a row without progress, at last: {cause}"
            return Decision("fail", lost=decision.lost, reason=reason)
        return decision

    def _count(self, members: list[Member]) -> int:
        return 1 if max(member.progress for member in members) > self.best else self.in_a_row + 1

    def _record(self, group: Group, clock: Clock, total_s: float) -> None:
        self.in_a_row = self._count(group.members)
        self.best = max(self.best, *(member.progress for member in group.members))
        times = self.times
        times.setdefault("seen", times["gathered"])  # who was not training learns of it by the agreement
        times.setdefault("left", times["seen"])
        times |= clock.seconds | {"regroup": total_s, "entered": time.time()}
        times["leave"] = max(0.0, times["left"] - times["seen"])
        times["gather"] = max(0.0, times["gathered"] - times["left"])
        generation = max(member.generation for member in group.members)
        self.failures.append(Failure(generation, group.decision.lost, group.decision.reason, times["seen"]))

    def _tell(self, ctx: Context) -> None:
        if not (self.verbose and ctx.rank == 0 and self.failures):
            return
        last = self.failures[-1]
        ranks = ", ".join(str(loss.logical) for loss in last.lost)
        what = f"rank {ranks} lost" if ranks else f"interrupted ({last.reason})"
        parts = ", ".join(f"{phase} {1e3 * ctx.timeline[phase]:.1f}" for phase in PHASES)
        total_ms = 1e3 * ctx.timeline["regroup"]
        print(f"memckpt: {what}; generation {ctx.generation} regrouped in {total_ms:.1f} ms ({parts})", flush=True)
