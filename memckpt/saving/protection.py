"""What protects what: who holds this rank's replicas, whose it holds, and which of the base's are still missing."""

from __future__ import annotations

from memckpt.memory.slots import SlotPool
from memckpt.recovery.recover import Recovery
from memckpt.saving.outgoing import SealedSource
from memckpt.saving.replicate import Held


class Protection:
    """The replicas of one generation, as one rank sees them. `proved` is called by the engine, the rest in training.

    Parameters
    ----------
    recovery : Recovery
        What the generation begins with.
    rank, world : int

    Attributes
    ----------
    holders : list of int
        Ranks that hold this rank's replicas.
    clients : list of int
        Ranks whose replicas this rank holds.
    needed : bool
        The base has to be protected again before anything is saved.
    """

    def __init__(self, recovery: Recovery, rank: int, world: int) -> None:
        self._rank = rank
        self._rebuild = recovery.rebuild
        self._rebuild_all = False
        self._steps = 0
        self.holders = list(recovery.holders[rank])
        self.clients = [shard for shard, holders in enumerate(recovery.holders) if rank in holders]
        # What another number of ranks saved stays where it is, until these have committed a step of their own.
        self.needed = recovery.base is not None and recovery.saved_by == world

    def missing(self, pool: SlotPool) -> tuple[SealedSource, list[int], list[int], list[Held]]:
        """The base's snapshot of this rank, to whom it has to be sent, from whom replicas come, and those that lie here
        already, which are read once. Where the last vote was no, every replica is sent again.
        """
        holders, clients = self.holders, self.clients
        if not self._rebuild_all:
            holders = [r.to_rank for r in self._rebuild if r.shard == self._rank]
            clients = [r.shard for r in self._rebuild if r.to_rank == self._rank]
        committed = {shard: holding.committed for shard, holding in pool.holdings.items()}
        held = [Held(committed[shard], shard) for shard in self.clients if shard not in clients]
        return SealedSource(committed[self._rank]), holders, clients, held

    def proved(self, *, committed: bool) -> None:
        """The vote on the base has ended."""
        self._rebuild_all |= not committed
        self.needed = self.needed and not committed

    def is_overdue(self, limit: int | None) -> bool:
        """Count a step that is taken without protection; whether these are more than `limit`."""
        self._steps += 1
        return limit is not None and self._steps > limit
