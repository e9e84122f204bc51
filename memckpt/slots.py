"""Which slots this rank may write, and which it must keep.

A node's slots are one pool; a restore divides the pool among the ranks of the node, so that between two restores each slot
has exactly one writer and no lock is needed for the choice of a slot. What is pinned is written down here and nowhere else:
for each shard the newest committed snapshot, the one in flight or in doubt, and, until the base is committed again, the base
and the fall-back. Every other slot is free, whatever it holds.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from memckpt.arena import Arena, Slot


@dataclass
class Holding:
    """The slots of one shard that this rank keeps, its own shard or one that it holds a replica of."""

    shard: int
    committed: Slot | None = None
    pending: Slot | None = None
    fallback: list[Slot] = field(default_factory=list)

    def slots(self) -> list[Slot]:
        """Every pinned slot of this shard."""
        return [s for s in (self.committed, self.pending, *self.fallback) if s is not None]


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
    """

    def __init__(self, arena: Arena, shards: list[int], *, threads: int) -> None:
        self._arena = arena
        self._threads = threads
        self._lock = threading.RLock()
        self._free: list[Slot] = []
        self._closed = False
        self.populate_s = 0.0
        self.holdings = {shard: Holding(shard) for shard in shards}

    @property
    def capacity(self) -> int:
        """Slots that this rank may have in all: two for each shard, own or held."""
        return 2 * len(self.holdings)

    def adopt(self, names: list[str]) -> None:
        """Take over free slots that already exist on this node."""
        with self._lock:
            for name in names:
                self._free.append(self._arena.open_slot(name, writable=True))

    def open(self, name: str) -> Slot:
        """Open an existing slot that is to be pinned (it joins no free list)."""
        return self._arena.open_slot(name, writable=True)

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
            pinned = sum(len(h.slots()) for h in self.holdings.values())
            if not self._free and pinned >= self.capacity:
                return None
            # Another size is wanted: a free slot of the old size makes room first, pinned ones stay.
            if self._free and pinned + len(self._free) >= self.capacity:
                self._remove(self._free.pop(0))
            return self._create(nbytes)

    def prepare(self, nbytes: int) -> bool:
        """Make one more free slot of `nbytes` bytes if there is none and the capacity allows; True if one was made.

        Called from the background, so that a capture finds populated pages.
        """
        with self._lock:
            pinned = sum(len(h.slots()) for h in self.holdings.values())
            if self._closed or any(s.nbytes == nbytes for s in self._free):
                return False
            if pinned + len(self._free) >= self.capacity:
                return False
        slot = self._create(nbytes)
        with self._lock:
            if not self._closed:
                self._free.append(slot)
        return True

    def give_back(self, slot: Slot) -> None:
        """Make a slot free; its seal goes first, so that nobody takes it for a snapshot."""
        slot.unseal()
        with self._lock:
            self._free.append(slot)

    def commit(self) -> None:
        """The step in flight is committed: it becomes each shard's newest, what it replaces becomes free."""
        with self._lock:
            for holding in self.holdings.values():
                old = [holding.committed, *holding.fallback]
                if holding.pending is not None:
                    holding.committed, holding.pending = holding.pending, None
                    self._release(old)
                else:
                    self._release(holding.fallback)
                holding.fallback = []

    def drop(self) -> None:
        """The vote on the step in flight was no: its slots become free."""
        with self._lock:
            for holding in self.holdings.values():
                if holding.pending is not None:
                    pending, holding.pending = holding.pending, None
                    self.give_back(pending)

    def nbytes(self) -> int:
        """Bytes of every slot of this rank."""
        with self._lock:
            pinned = [s for h in self.holdings.values() for s in h.slots()]
            return sum(s.nbytes for s in (*pinned, *self._free))

    def close(self) -> None:
        """Let go of the mappings; the files stay."""
        with self._lock:
            self._closed = True
            for slot in (*self._free, *(s for h in self.holdings.values() for s in h.slots())):
                slot.close()
            self._free.clear()

    def _release(self, slots: list[Slot | None]) -> None:
        for slot in slots:
            if slot is not None:
                self.give_back(slot)

    def _create(self, nbytes: int) -> Slot:
        slot = self._arena.create_slot(nbytes, threads=self._threads)
        self.populate_s += slot.populate_s
        return slot

    def _remove(self, slot: Slot) -> None:
        slot.close()
        self._arena.remove_slot(slot.name)
