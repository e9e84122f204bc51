"""What a rank is in its run, for every verb: one record, filled in once."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.comm.base import Communicator
from memckpt.memory.arena import Arena
from memckpt.recovery.inventory import Place
from memckpt.storage.base import Storage


@dataclass(frozen=True)
class Session:
    """One rank's place in a run.

    Attributes
    ----------
    comm : Communicator
        Of all ranks, for collective calls of the training thread.
    arena : Arena
        The run's memory on this node, with this process's lock taken.
    run : str
        Name of the run.
    rank : int
        Logical rank, which is the shard that this rank saves; the rank in `comm`.
    world : int
        Number of ranks.
    places : tuple of Place
        Node and failure domain of each rank.
    copies : int
        Replicas of each snapshot beside the rank's own.
    deadline_s : float
        Longest time without an answer before a peer is taken for lost.
    threads : int
        Threads of one copy.
    storage : Storage or None
        Where snapshots are persisted.
    storage_deadline_s : float
        Longest time for reading one shard from there.
    """

    comm: Communicator
    arena: Arena
    run: str
    rank: int
    world: int
    places: tuple[Place, ...]
    copies: int
    deadline_s: float = 60.0
    threads: int = 2
    storage: Storage | None = None
    storage_deadline_s: float = 3600.0

    @property
    def node(self) -> str:
        """Node of this rank."""
        return self.places[self.rank].node

    @property
    def is_first_of_node(self) -> bool:
        """Whether no lower rank runs on this node."""
        return all(place.node != self.node for place in self.places[: self.rank])
