"""Recover: bring the newest step that every rank can have back into the live state, on all ranks or on none.

inventory (each node lists its slots) -> plan (rank 0, pure, broadcast) -> check (structure, on all ranks, before
anything changes) -> fetch (into a free slot, sealed there like any snapshot) -> load (bytes are verified while they are
copied). Between two phases the ranks agree; where one of them met a bad slot, all plan again without it and load again
in full. Until the end nothing but free slots was written, so a failure anywhere starts again at the inventory.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import msgspec

from memckpt import faults
from memckpt.comm import broadcast, gather
from memckpt.errors import MemckptError, NothingToRestore, PeerLost, ProtocolError, UsageError
from memckpt.format.seal import Base, Generation
from memckpt.memory.slotfile import Slot
from memckpt.recovery import plan as planning
from memckpt.recovery.attempt import Attempt
from memckpt.recovery.inventory import Listing, list_node
from memckpt.recovery.lineage import Where, name
from memckpt.recovery.phases import damaged, timed
from memckpt.recovery.placement import Holders
from memckpt.recovery.plan import Pinned, Plan, Rebuild
from memckpt.recovery.reshard import Reshard
from memckpt.recovery.session import Session
from memckpt.recovery.stored import list_storage
from memckpt.recovery.verdict import Problem, describe, restore_error
from memckpt.state.state import State


@dataclass(frozen=True)
class Recovery:
    """How a restore ended, and what the generation that begins now has to know.

    Attributes
    ----------
    base, fallback : Base or None
        What was loaded (None when there was nothing), and what would be next; pinned until the base is committed again.
    generation : Generation
        The new one.
    own : Slot or None
        Slot of this node that holds this rank's sealed snapshot of the base: open for writing, its pages mapped, so
        that nobody has to map them again. Belongs to the caller, who closes it.
    free : tuple of str
        Slots of this node that this rank, and no other, may write.
    pinned : tuple of Pinned
        Slots of this node that this rank, and no other, keeps.
    holders : tuple of tuple of int
        Placement of the replicas, by rank.
    rebuild : tuple of Rebuild
        Replicas of the base that are missing, the same list on every rank.
    sources : tuple of str
        For each rank "own", "peer", "storage" or "none".
    nbytes : int
        Bytes of all ranks' snapshots.
    seconds : dict of str to float
        Wall time of this rank by phase ("inventory", "plan", "check", "fetch", "load") and "total".
    rejected : tuple of str
        What was not taken and why.
    damaged : tuple of str
        Those of them that turned out to be damaged while they were loaded.
    existed : bool
        Whether there was any snapshot of this run.
    saved_by : int
        Number of ranks that saved the base. Where it is another one than there are, `own` is None and no replica is
        rebuilt: what those ranks saved is kept as it is, until a step of this generation is committed.
    """

    base: Base | None
    fallback: Base | None
    generation: Generation
    own: Slot | None
    free: tuple[str, ...]
    pinned: tuple[Pinned, ...]
    holders: Holders
    rebuild: tuple[Rebuild, ...]
    sources: tuple[str, ...]
    nbytes: int
    seconds: dict[str, float]
    rejected: tuple[str, ...]
    damaged: tuple[str, ...]
    existed: bool
    saved_by: int


def recover(
    session: Session,
    state: State,
    *,
    wanted_step: int | None = None,
    require: bool = False,
    start_over: bool = False,
    refuse_existing: bool = False,
    leave: frozenset[str] = frozenset(),
) -> Recovery:
    """Restore the newest step that every rank can have. Collective over ``session.comm``.

    Parameters
    ----------
    session : Session
        This rank's place in the run.
    state : State
        What is written to; its tensors stay where they are.
    wanted_step : int, optional
        Take exactly this step.
    require : bool
        Raise where there is nothing, in place of a `Recovery` without a base.
    start_over : bool
        Take nothing; what there is becomes a history that was left.
    refuse_existing : bool
        Raise when there is any snapshot of this run.
    leave : frozenset of str
        Names of objects that stay as they are.

    Raises
    ------
    NothingToRestore
        `wanted_step` cannot be had (the message lists what can), or nothing can and it was required. State unchanged.
    LayoutMismatch
        The snapshot does not fit the live state, on some rank; the rows of all. Nothing was changed.
    UsageError
        Ranks want different things, or `refuse_existing`.
    StateDamaged
        The live state was overwritten and no good copy is left.
    BudgetError
        A rank has no room for the snapshot it has to fetch. State unchanged.
    PeerLost, DeadlineExceeded
        The live state may be overwritten in part; a recovery starts again from the beginning.
    """
    return _Restore(
        session, state, _Request(wanted_step, require, start_over, refuse_existing, tuple(sorted(leave)))
    ).run()


class _Request(msgspec.Struct, frozen=True):
    """What must be the same on every rank."""

    wanted_step: int | None
    require: bool
    start_over: bool
    refuse_existing: bool
    leave: tuple[str, ...] = ()


class _Report(msgspec.Struct, frozen=True):
    """To rank 0: the request, and from one rank of each node what lies there."""

    request: _Request
    listing: Listing | None = None
    problem: Problem | None = None


class _Answer(msgspec.Struct, frozen=True):
    """From rank 0."""

    plan: Plan | None = None
    problem: Problem | None = None


class _Restore:
    """One call of `recover` on one rank."""

    def __init__(self, session: Session, state: State, request: _Request) -> None:
        self._session, self._state, self._request = session, state, request
        self._comm, self._rank, self._deadline_s = session.comm, session.rank, session.deadline_s
        self._excluded: dict[Where, str] = {}
        self._touched = False
        self._seconds: dict[str, float] = {}
        self._new_id = os.urandom(8).hex()

    def run(self) -> Recovery:
        started = time.monotonic()
        while True:
            plan = self._make_plan()
            attempt: Attempt | Reshard | None = None
            if plan.base is None:
                self._accept_nothing(plan)
                break
            kind = Reshard if plan.carriers else Attempt
            attempt = kind(self._session, self._state, plan, self._seconds, frozenset(self._request.leave))
            bad = attempt.run()
            self._touched |= attempt.touched
            if not bad:
                break
            self._excluded.update(bad)
        faults.point("recover.agreed", self._rank, plan.base.step if plan.base else 0)
        self._seconds["total"] = time.monotonic() - started
        return self._result(plan, attempt)

    def _make_plan(self) -> Plan:
        """Inventory and plan. Collective; errors are the same on every rank."""
        with timed(self._seconds, "inventory"):
            report = msgspec.msgpack.encode(self._look())
            reports = gather(self._comm, report, 0, self._deadline_s, what="inventory")
        faults.point("recover.inventoried", self._rank)
        with timed(self._seconds, "plan"):
            payload = None if reports is None else msgspec.msgpack.encode(self._decide(reports))
            payload = broadcast(self._comm, payload, 0, self._deadline_s, what="plan of the restore")
            try:
                answer = msgspec.msgpack.decode(payload, type=_Answer)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"rank 0 sent no valid plan: {error}", run=self._session.run) from error
        faults.point("recover.planned", self._rank)
        if answer.plan is None:
            assert answer.problem is not None
            raise restore_error(answer.problem, self._session.run)
        return answer.plan

    def _look(self) -> _Report:
        if not self._session.is_first_of_node:
            return _Report(self._request)
        arena = self._session.arena
        try:
            found = arena.inventory()
            newest = arena.newest_generation()
            crashes = arena.crashes()
        except (OSError, MemckptError) as error:
            return _Report(self._request, problem=describe(error, self._rank))
        run, job = arena.run.name, arena.run.job
        return _Report(
            self._request, list_node(self._session.node, found, run=run, job=job, newest=newest, crashes=crashes)
        )

    def _decide(self, payloads: list[bytes]) -> _Answer:
        """On rank 0: the plan, or the error that every rank raises."""
        try:
            reports = [msgspec.msgpack.decode(payload, type=_Report) for payload in payloads]
            return _Answer(self._plan_from(reports))
        except NothingToRestore as error:
            if self._touched:
                return _Answer(problem=describe(damaged(error.message, self._session.run), self._rank))
            return _Answer(problem=describe(error, self._rank))
        except PeerLost:
            raise
        except Exception as error:  # whatever it is, the others must not wait for an answer
            return _Answer(problem=describe(error, self._rank))

    def _plan_from(self, reports: list[_Report]) -> Plan:
        run = self._session.run
        for rank, report in enumerate(reports):
            if report.request != self._request:
                mine, theirs = _differing(self._request, report.request)
                raise UsageError(f"rank 0 restores with {mine}, rank {rank} with {theirs}", run=run, rank=rank)
            if report.problem is not None:
                raise restore_error(report.problem, run)
        stored, unreadable = self._look_into_storage()
        plan = planning.make(
            [report.listing for report in reports if report.listing is not None],
            self._session.places,
            self._session.copies,
            new_id=self._new_id,
            wanted_step=self._request.wanted_step,
            start_over=self._request.start_over,
            excluded=self._excluded,
            stored=stored,
        )
        if plan.base is None and not self._request.start_over and (why := self._why_not_afresh(plan, unreadable)):
            raise NothingToRestore(why, run=run)
        if self._request.refuse_existing and plan.existed:
            there = f"the newest whole one is {name(plan.base)}" if plan.base else "no step of it is whole"
            raise UsageError(
                f"there are snapshots of run {run!r} in memory ({there}): call restore() before the first step()",
                run=run,
            )
        return plan

    @staticmethod
    def _why_not_afresh(plan: Plan, unreadable: str) -> str:
        """Where nothing can be restored: why that is no reason to begin at step 0 without being told to."""
        rejected = "".join(f"\n  {line}" for line in plan.rejected)
        if plan.crashing:
            return (
                "the program failed right after the restore of every step there is; restore(step=N) takes one all the "
                f"same, fresh=True starts over:{rejected}"
            )
        if unreadable:
            return (
                "nothing whole is in memory, and storage cannot be read, so that nobody knows whether there is a "
                f"checkpoint: {unreadable}"
            )
        if plan.damaged:
            return f"every step there is is damaged or incomplete; fresh=True starts over:{rejected}"
        return ""

    def _looked(self) -> str:
        storage = self._session.storage
        return "the memory of its nodes" + (f" or in {storage.url}" if storage is not None else "")

    def _look_into_storage(self) -> tuple[Listing | None, str]:
        """On rank 0, for all ranks: what lies in storage, or why that cannot be said."""
        if self._session.storage is None:
            return None, ""
        try:
            return list_storage(self._session.storage, self._session.run), ""
        except (OSError, MemckptError) as error:
            return None, str(error)

    def _accept_nothing(self, plan: Plan) -> None:
        why = "".join(f"\n  {line}" for line in plan.rejected)
        if self._touched:
            raise damaged(why, self._session.run)
        if self._request.require and not self._request.start_over:
            raise NothingToRestore(
                f"no step of run {self._session.run!r} is whole in {self._looked()}{':' if why else ''}{why}",
                run=self._session.run,
            )

    def _result(self, plan: Plan, attempt: Attempt | Reshard | None) -> Recovery:
        mine = plan.ranks[self._rank]
        own = attempt.slot if attempt is not None else None
        free, pinned = mine.free, mine.pinned
        if attempt is not None and attempt.fetched is not None:
            assert plan.base is not None
            new = attempt.fetched.name
            free = tuple(slot for slot in free if slot != new and slot not in attempt.removed)
            pinned = (*pinned, Pinned(new, self._rank, plan.base))
        return Recovery(
            base=plan.base,
            fallback=plan.fallback,
            generation=plan.generation,
            own=own,
            free=free,
            pinned=pinned,
            holders=plan.holders,
            rebuild=plan.rebuild,
            sources=tuple(rank.source for rank in plan.ranks),
            nbytes=sum(part.nbytes for part in plan.carriers or plan.ranks),
            seconds=dict(self._seconds),
            rejected=plan.rejected,
            damaged=tuple(self._excluded[where] for where in sorted(self._excluded)),
            existed=plan.existed,
            saved_by=plan.world,
        )


def _differing(mine: _Request, theirs: _Request) -> tuple[str, str]:
    fields = [f for f in mine.__struct_fields__ if getattr(mine, f) != getattr(theirs, f)]
    return tuple(", ".join(f"{f}={getattr(r, f)}" for f in fields) for r in (mine, theirs))  # type: ignore[return-value]
