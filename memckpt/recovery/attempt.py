"""One attempt to load a planned step: check, fetch, load, each agreed on by all ranks before the next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from memckpt import _native, faults
from memckpt.comm import allreduce_min
from memckpt.errors import CorruptSnapshot, DeadlineExceeded, MemckptError, ProtocolError, StateDamaged
from memckpt.format.layout import Layout
from memckpt.format.seal import Base
from memckpt.format.seal import agree as agree_with_layout
from memckpt.memory.slotfile import Slot
from memckpt.recovery.fetch import (
    Offer,
    Steps,
    drive,
    nothing,
    open_offer,
    receive_head,
    receive_rest,
    send_head,
    send_rest,
)
from memckpt.recovery.inventory import STORAGE
from memckpt.recovery.lineage import Where, name
from memckpt.recovery.phases import damaged, timed
from memckpt.recovery.plan import Carrier, Plan
from memckpt.recovery.reshard import Reshard
from memckpt.recovery.session import Session
from memckpt.recovery.stored import for_job, open_stored, read_stored
from memckpt.recovery.verdict import Verdict, describe, settle
from memckpt.state.restore import prepare
from memckpt.state.state import State
from memckpt.storage.checkpoints import Stored

if TYPE_CHECKING:
    from memckpt.state.restore import Targets


class Attempt:
    """This rank's part in loading one planned step.

    Parameters
    ----------
    session, state : Session, State
    plan : Plan
        With a base.
    seconds : dict of str to float
        Where the time of each phase is added.
    leave : frozenset of str
        Names of objects that are not restored.

    Attributes
    ----------
    touched : bool
        Whether the live state may have changed, on this rank or another.
    fetched : Slot or None
        The slot into which this rank's snapshot was brought.
    removed : list of str
        Free slots that had to make room for it.
    slot : Slot or None
        The slot that this rank's snapshot was loaded from, still open; the caller closes it.
    """

    def __init__(
        self,
        session: Session,
        state: State,
        plan: Plan,
        seconds: dict[str, float],
        leave: frozenset[str] = frozenset(),
    ) -> None:
        assert plan.base is not None
        self._session, self._state, self._plan, self._seconds = session, state, plan, seconds
        self._base: Base = plan.base
        self._comm, self._rank, self._deadline_s = session.comm, session.rank, session.deadline_s
        self._mine = plan.ranks[session.rank]
        self._leave = leave
        self._offer = Offer()
        self._serving: dict[int, Offer] = {}
        self._stored: Stored | None = None
        self._layout: Layout | None = None
        self._targets: Targets | None = None
        self.touched = False
        self.fetched: Slot | None = None
        self.removed: list[str] = []
        self.slot: Slot | None = None

    def run(self) -> dict[Where, str]:
        """Check, fetch and load. Collective.

        Returns
        -------
        dict
            Slots that turned out to be bad, the same on every rank; empty when all is loaded.

        Raises
        ------
        LayoutMismatch, BudgetError, StateDamaged, ...
            On every rank alike.
        PeerLost, DeadlineExceeded
        """
        step = self._base.step
        try:
            with timed(self._seconds, "check"):
                bad = self._settle(self._check(), "structure check")
            faults.point("recover.checked", self._rank, step)
            if not bad and any(rank.source in ("peer", "storage") for rank in self._plan.ranks):
                with timed(self._seconds, "fetch"):
                    bad = self._settle(self._fetch(), "fetch")
            if bad:
                return bad
            if self._is_divided():
                return self._load_from_all()
            with timed(self._seconds, "load"):
                self.touched = True
                bad = self._settle(self._load(), "load")
                faults.point("recover.loaded", self._rank, step)
                bad = bad or self._settle(self._apply(), "end of the load")
                if not bad:
                    self.slot = self.fetched or self._offer.slot
                return bad
        finally:
            for offer in (self._offer, *self._serving.values(), Offer(slot=self.fetched)):
                offer.head.release()
                if offer.slot is not None and offer.slot is not self.slot:
                    self._session.arena.park(offer.slot)

    def _settle(self, mine: Verdict, what: str) -> dict[Where, str]:
        # Storage may be slow, and what one rank waits for all others wait for.
        slow = any(rank.source == "storage" for rank in self._plan.ranks)
        deadline_s = self._deadline_s + (self._session.storage_deadline_s if slow else 0.0)
        return settle(self._comm, mine, deadline_s, what, self._session.run)

    def _bad(self, why: str) -> Verdict:
        """A verdict on the slot that this rank's snapshot comes from."""
        node, slot = self._session.places[self._mine.server].node, self._mine.slot
        where = f"in slot {slot} on {node}"
        if self._mine.source == "storage":
            node, where = STORAGE, f"in storage ({slot})"
        text = f"{name(self._base)}: the snapshot of rank {self._rank} {where}: {why}"
        return Verdict(bad=((node, slot, text),))

    # -- check --------------------------------------------------------------------------------------------------------

    def _check(self) -> Verdict:
        """Exchange seals and headers, and compare this rank's with the live state. Changes nothing."""
        arena = self._session.arena
        if self._mine.source == "own":
            self._offer = open_offer(arena, self._mine.slot, writable=True)
        elif self._mine.source == "storage":
            assert self._session.storage is not None
            self._offer, self._stored = open_stored(self._session.storage, self._mine.slot)
            if self._offer.seal is not None:
                self._offer = for_job(self._offer, arena.run.job)
        for client, theirs in enumerate(self._plan.ranks):
            if theirs.source == "peer" and theirs.server == self._rank:
                self._serving[client] = open_offer(arena, theirs.slot)
        sends = [send_head(self._comm, offer, client) for client, offer in self._serving.items()]
        receives = [receive_head(self._comm, self._mine.server)] if self._mine.source == "peer" else []
        results = drive([*sends, *receives], self._deadline_s, "headers of snapshots")
        if receives:
            self._offer = results[-1] or Offer()
        return self._compare()

    def _compare(self) -> Verdict:
        seal = self._offer.seal
        if seal is None:
            return self._bad(self._offer.reason)
        run = self._session.arena.run
        snapshot = Base(generation=seal.generation, step=seal.step)
        says = (seal.run, seal.job, seal.shard, seal.world, snapshot, seal.nbytes)
        planned = (run.name, run.job, self._rank, self._session.world, self._base, self._mine.nbytes)
        if says != planned:
            return self._bad(f"its seal says {says}, planned was {planned}")
        try:
            self._layout = Layout.parse(self._offer.head, file_nbytes=seal.nbytes)
            agree_with_layout(seal, self._layout)
        except (CorruptSnapshot, ProtocolError) as error:
            return self._bad(error.message)
        if self._layout.whole:
            return Verdict()  # compared when it is put together with what other ranks have of it
        try:
            self._targets = prepare(self._state, self._layout, leave=self._leave)
        except CorruptSnapshot as error:
            return self._bad(error.message)
        except MemckptError as error:
            return Verdict(problem=describe(error, self._rank))
        return Verdict()

    # -- fetch --------------------------------------------------------------------------------------------------------

    def _fetch(self) -> Verdict:
        """Bring this rank's snapshot into a slot of its node, and serve the others."""
        sends = [send_rest(self._comm, offer, client) for client, offer in self._serving.items()]
        if self._mine.source == "own":
            drive(sends, self._deadline_s, "snapshots for other ranks")
            return Verdict()
        verdict = Verdict()
        try:
            self.fetched = self._room()
        except (OSError, MemckptError) as error:
            verdict = Verdict(problem=describe(error, self._rank))
        try:
            with ThreadPoolExecutor(2, thread_name_prefix="memckpt-fetch") as worker:
                if self.fetched is not None and not self.fetched.mapped:
                    worker.submit(self.fetched.map, self._session.threads)
                *_, why = drive([*sends, self._receive(worker)], self._deadline_s, "snapshots of other nodes")
        except BaseException:
            self._abandon_fetched()
            raise
        if self.fetched is None:
            return verdict
        faults.point("recover.fetched", self._rank, self._base.step)
        if why:
            return self._bad(why)
        assert self._offer.seal is not None
        try:
            self.fetched.seal(self._offer.seal)
        except (OSError, MemckptError) as error:
            return Verdict(problem=describe(error, self._rank))
        faults.point("recover.sealed", self._rank, self._base.step)
        return verdict

    def _receive(self, worker: ThreadPoolExecutor) -> Steps[str]:
        """This rank's transfer, from a peer or from storage."""
        if self._mine.source == "peer":
            return receive_rest(self._comm, self._offer, self._mine.server, self.fetched)
        if self.fetched is None:
            return nothing()
        assert self._session.storage is not None
        assert self._stored is not None
        return read_stored(
            self._session.storage, self._stored, self._rank, self.fetched, worker,
            deadline_s=self._session.storage_deadline_s,
        )  # fmt: skip

    def _abandon_fetched(self) -> None:
        """After an error a receive may still write into the slot: its file goes, and nobody takes it for a free one."""
        if self.fetched is not None:
            self._session.arena.remove_slot(self.fetched.name)

    def _room(self) -> Slot:
        """An unsealed slot of the right size; where there is no room for a new one, free ones of other sizes go."""
        arena = self._session.arena
        if self._mine.target is not None:
            slot = arena.open_slot(self._mine.target, writable=True)
            slot.unseal()
            return slot
        spare = list(self._mine.free)
        while True:
            try:
                # What comes from storage comes slower than pages are made ready, which then need not be waited for.
                slow = self._mine.source == "storage"
                return arena.create_slot(self._mine.nbytes, threads=self._session.threads, populate=not slow)
            except MemoryError:
                if not spare:
                    raise
                self.removed.append(spare[0])
                arena.remove_slot(spare.pop(0))

    # -- what ranks have divided between them --------------------------------------------------------------------------

    def _is_divided(self) -> bool:
        """Whether some rank's snapshot is not all of its state. Collective."""
        divided = self._layout is not None and bool(self._layout.whole)
        return not allreduce_min(self._comm, [int(not divided)], self._deadline_s, what="divided tensors")[0]

    def _load_from_all(self) -> dict[Where, str]:
        """Each rank's own snapshot is on its node by now, sealed: load from all of them. Collective."""
        carriers = []
        for rank, (part, place) in enumerate(zip(self._plan.ranks, self._session.places, strict=True)):
            mine = rank == self._rank and self.fetched is not None
            slot = self.fetched.name if mine and self.fetched is not None else part.slot
            carriers.append(Carrier(rank, rank, place.node, slot, part.nbytes))
        plan = msgspec.structs.replace(self._plan, carriers=tuple(carriers))
        together = Reshard(self._session, self._state, plan, self._seconds, self._leave)
        try:
            bad = together.run()
        finally:
            self.touched |= together.touched
        if not bad:
            self.slot = self.fetched or self._offer.slot
        return bad

    # -- load ---------------------------------------------------------------------------------------------------------

    def _load(self) -> Verdict:
        """Copy into the live tensors and verify."""
        slot = self.fetched if self.fetched is not None else self._offer.slot
        seal, layout, targets = self._offer.seal, self._layout, self._targets
        assert slot is not None
        assert seal is not None
        assert layout is not None
        assert targets is not None
        job = _native.scatter(
            slot.memory,
            seal.nbytes,
            targets.targets,
            targets.nbytes,
            targets.offsets,
            crcs=np.array(seal.crcs, dtype=np.uint32),
            threads=self._session.threads,
            keep=targets,
        )
        if not job.wait(self._deadline_s):
            raise DeadlineExceeded(f"copying {seal.nbytes} bytes took more than {self._deadline_s:g} s")
        wrong = job.bad_chunks()
        if len(wrong):
            chunk = int(wrong[0])
            return self._bad(f"chunk {chunk} (key {_key_at(layout, chunk)!r}) differs from its checksum")
        if not self._offer.unchanged():
            return self._bad("its seal changed while it was read")
        return Verdict()

    def _apply(self) -> Verdict:
        """New tensors and the values that are none; the bytes of every rank are known to be good by now."""
        assert self._targets is not None
        try:
            self._targets.apply()
        except Exception as error:  # whatever it is, the state is in between
            wrapped = error if isinstance(error, StateDamaged) else damaged(repr(error), self._session.run)
            return Verdict(problem=describe(wrapped, self._rank))
        return Verdict()


def _key_at(layout: Layout, chunk: int) -> str:
    """Key of the first entry with bytes in a chunk; empty for the header."""
    start, end = chunk * _native.CHUNK_BYTES, (chunk + 1) * _native.CHUNK_BYTES
    for entry in layout.entries:
        if entry.offset < end and entry.offset + entry.nbytes > start:
            return entry.key
    return ""
