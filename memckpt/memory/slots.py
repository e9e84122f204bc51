"""Which slots this rank may write, and which it must keep.

A node's slots are one pool; a restore divides the pool among the ranks of the node, so that between two restores each
slot has exactly one writer and no lock is needed for the choice of a slot. What is pinned is written down here and
nowhere else: for each shard the newest committed snapshot, the one in flight or in doubt, and, until the base is
committed again, the base and the fall-back. Every other slot is free, whatever it holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from memckpt.format.seal import Base
from memckpt.memory.arena import Arena
from memckpt.memory.slotfile import Slot
from memckpt.recovery.plan import Pinned


@dataclass
class Holding:
    """The slots of one shard that this rank keeps, its own shard or one that it holds a replica of."""

    shard: int
    committed: Slot | None = None
    pending: Slot | None = None


class SlotPool:
    """The slots of one rank. Local, safe to call from the training thread and the background thread.

    Parameters
    ----------
    arena : Arena
        Where slots are made.
    shards : list of int
        Own shard first, then the shards of which this rank holds replicas.
    threads : int
        Threads that populate a new slot.
    leases : int
        Own slots more than two, so that a snapshot may be read for longer than it is the newest: 1 where snapshots are
        persisted.
    """

    def __init__(self, arena: Arena, shards: list[int], *, threads: int, leases: int = 0) -> None:
        self._arena = arena
        self._threads = threads
        self._lock = threading.RLock()
        self._free: list[Slot] = []
        self._fallback: list[Slot] = []
        self._leased: list[Slot] = []
        self._leases = leases
        self._closed = False
        self.populate_s = 0.0
        self.holdings = {shard: Holding(shard) for shard in shards}

    @property
    def capacity(self) -> int:
        """Slots that this rank may have in all: two for each shard, own or held, and those that may be leased."""
        return 2 * len(self.holdings) + self._leases

    def adopt(self, free: Iterable[str], pinned: Iterable[Pinned], base: Base | None, own: Slot | None) -> None:
        """Take over the slots of this node that a restore gave to this rank.

        Parameters
        ----------
        free : iterable of str
            May be written.
        pinned : iterable of Pinned
            Must be kept until the base is committed again; those that hold the base count as committed then.
        base : Base or None
            What was restored.
        own : Slot or None
            The slot it was loaded from, one of the pinned, open already; its mapping is now the pool's.
        """
        with self._lock:
            for keep in pinned:
                mapped = own is not None and own.name == keep.slot
                slot = own if own is not None and mapped else self._arena.open_slot(keep.slot, writable=True)
                holding = self.holdings.get(keep.shard)
                if holding is not None and keep.snapshot == base and holding.committed is None:
                    holding.committed = slot
                else:
                    self._fallback.append(slot)
            self._free += [self._arena.open_slot(name, writable=True) for name in free]

    def take(self, nbytes: int) -> Slot | None:
        """A slot of exactly `nbytes` bytes without a seal, or None while every slot is pinned.

        Raises
        ------
        BudgetError, OSError
            When a new slot is needed and there is no room for it.
        """
        with self._lock:
            if self._closed:
                return None
            for slot in self._free:
                if slot.nbytes == nbytes:
                    self._free.remove(slot)
                    slot.unseal()
                    return slot
            # Another size is wanted: free slots of the old one make room first, pinned ones stay. The fall-back of a
            # restore does not count, or a base whose replicas need new slots could never be protected again.
            pinned = self._pinned()
            while self._free and len(pinned) + len(self._free) >= self.capacity:
                self._remove(self._free.pop(0))
            return self._create(nbytes) if len(pinned) - len(self._fallback) < self.capacity else None

    def warm(self) -> None:
        """Map the pages of slots that existed already, so that their next write meets no fault, and let go of mappings
        that a restore left over; from the background, since both take long.
        """
        self._arena.close_parked()
        with self._lock:
            cold = [slot for slot in (*self._free, *self._pinned()) if not slot.mapped]
        for slot in cold:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or no memory for page tables
                slot.map(1)

    def prepare(self, nbytes: int) -> bool:
        """Make one more free slot of `nbytes` bytes if there is none and the capacity allows; True if one was made.

        Called from the background, so that a capture finds populated pages.
        """
        with self._lock:
            if self._closed or any(s.nbytes == nbytes for s in self._free):
                return False
            if len(self._pinned()) + len(self._free) >= self.capacity:
                return False
        slot = self._create(nbytes)
        with self._lock:
            if not self._closed:
                self._free.append(slot)
        return True

    def _give_back(self, slot: Slot) -> None:
        """Make a slot free. What is sealed stays so until the slot is taken: it is one more that a restore may fall
        to.
        """
        if len(self._pinned()) + len(self._free) < self.capacity:
            self._free.append(slot)
        else:
            self._remove(slot)

    def lease(self, shard: int) -> Slot | None:
        """Keep the newest committed slot of a shard until `release`, whatever is committed after it; None where there
        is none, or no more may be leased.
        """
        with self._lock:
            slot = self.holdings[shard].committed
            if slot is None or len(self._leased) >= self._leases:
                return None
            self._leased.append(slot)
            return slot

    def release(self, slot: Slot) -> None:
        """End a lease; the slot is free unless it is still the newest."""
        with self._lock:
            if slot in self._leased and not self._closed:
                self._leased.remove(slot)
                if slot not in self._pinned():
                    self._give_back(slot)

    def commit(self) -> None:
        """The step in flight is committed: it becomes each shard's newest, what it replaces becomes free."""
        with self._lock:
            for holding in self.holdings.values():
                if holding.pending is not None:
                    old, holding.committed, holding.pending = holding.committed, holding.pending, None
                    if old is not None and old not in self._leased:
                        self._give_back(old)
            fallback, self._fallback = self._fallback, []
            for slot in fallback:
                self._give_back(slot)

    def drop(self) -> None:
        """The vote on the step in flight was no: its slots become free, and are the first to be taken."""
        with self._lock:
            for holding in self.holdings.values():
                if holding.pending is not None:
                    pending, holding.pending = holding.pending, None
                    pending.unseal()
                    self._free.insert(0, pending)

    def abandon(self, slot: Slot) -> None:
        """Give up a slot into which somebody may still write: its file goes, its name is never used again."""
        with self._lock:
            for holding in self.holdings.values():
                if holding.pending is slot:
                    holding.pending = None
        self._remove(slot)

    def nbytes(self) -> int:
        """Bytes of every slot of this rank."""
        with self._lock:
            return sum(s.nbytes for s in (*self._pinned(), *self._free))

    def close(self, *, park: bool = False) -> None:
        """Let go of the slots; the files stay. With `park` the arena keeps the mappings for the next pool."""
        with self._lock:
            self._closed = True
            for slot in (*self._free, *self._pinned()):
                if park:
                    self._arena.park(slot)
                    continue
                # A send that never ended after a failure still reads from its mapping, which then lives as long as
                # that.
                with contextlib.suppress(BufferError):
                    slot.close()
            self._free.clear()

    def _pinned(self) -> list[Slot]:
        held = [s for h in self.holdings.values() for s in (h.committed, h.pending)]
        pinned = [s for s in (*held, *self._fallback) if s is not None]
        return pinned + [s for s in self._leased if s not in pinned]

    def _create(self, nbytes: int) -> Slot:
        slot = self._arena.create_slot(nbytes, threads=self._threads)
        self.populate_s += slot.populate_s
        return slot

    def _remove(self, slot: Slot) -> None:
        with contextlib.suppress(BufferError):
            slot.close()
        self._arena.remove_slot(slot.name)
