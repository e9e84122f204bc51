"""What ranks have in common is saved by each of them in part: found out by comparing checksums, and looked at again.

Ranks whose layouts are the same in every key, shape, dtype and place form a group: the replicas of DDP, or of one shard
under HSDP. Of those, tensors whose bytes have one checksum on all of them are in common. That is agreed on at the first
save of a generation, and anew where a structure changes. At each save one window of one such tensor is compared again;
a difference where there was none is reported, since it means that some rank computes wrongly, or that the tensor was
never meant to be the same; it is everybody's own from then on.
"""

from __future__ import annotations

import msgspec
import numpy as np

from memckpt.comm import allgather
from memckpt.comm.base import Communicator, wait
from memckpt.errors import MemckptError, ProtocolError
from memckpt.format.layout import Division, Layout
from memckpt.saving.capture import Capture

_NOBODY = np.iinfo(np.int64).max
_MAX_VALUES = 1 << 22


class _Structure(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its layout; `hash` is empty where it saves nothing."""

    hash: str
    entries: int


class Sharing:
    """What this rank has in common with others. Training thread only; every rank makes the same calls.

    Parameters
    ----------
    capture : Capture
        Told what to divide.
    comm : Communicator
        Of all ranks, for the training thread.
    deadline_s : float
    """

    def __init__(self, capture: Capture, comm: Communicator, deadline_s: float) -> None:
        self._capture, self._comm, self._deadline_s = capture, comm, deadline_s
        self._turn: tuple[int, int] | None = None  # number of this rank's group, and of groups
        self._due = True

    def hear(self, *, changed: bool, differs: bool) -> None:
        """Learn from an exchange that a structure has changed, or that something is not in common any more."""
        self._due |= changed or differs

    def agree(self, *, absent: bool = False) -> None:
        """Find out what is in common, where that is due; before a save. Collective.

        Parameters
        ----------
        absent : bool
            This rank saves nothing any more.
        """
        if not self._due:
            return
        self._due = False
        self._turn = None
        layout = None if absent else self._undivided()
        mine = _Structure("", 0) if layout is None else _Structure(layout.hash, len(layout.entries))
        said = allgather(self._comm, msgspec.msgpack.encode(mine), self._deadline_s, what="structures of the state")
        try:
            structures = [msgspec.msgpack.decode(payload, type=_Structure) for payload in said]
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a rank sent no valid structure: {error}") from error
        members: dict[_Structure, list[int]] = {}
        for rank, structure in enumerate(structures):
            members.setdefault(structure, []).append(rank)
        groups = [s for s, ranks in members.items() if s.hash and len(ranks) > 1]
        firsts = np.cumsum([0, *(s.entries for s in groups)])
        total = int(firsts[-1])
        if not 0 < 2 * total <= _MAX_VALUES:
            self._capture.divide(None)
            return
        values = np.full(2 * total, _NOBODY, dtype=np.int64)
        first = int(firsts[groups.index(mine)]) if mine in groups else -1
        if first >= 0:
            crcs = np.array(self._capture.checksums(), dtype=np.int64)
            values[first : first + mine.entries] = crcs
            values[total + first : total + first + mine.entries] = -crcs
        wait([self._comm.iallreduce_min(values)], self._deadline_s, "checksums of the state")
        if first < 0:
            self._capture.divide(None)
            return
        low, high = values[first : first + mine.entries], -values[total + first : total + first + mine.entries]
        ranks = members[mine]
        common = tuple((low == high).tolist())
        self._capture.divide(Division(mine.hash, common, ranks.index(self._comm.rank), len(ranks)))
        self._turn = (groups.index(mine), len(groups))

    def _undivided(self) -> Layout | None:
        """This rank's layout; None where its state cannot be saved, of which the capture will say why."""
        try:
            return self._capture.undivided()
        except MemckptError:
            return None

    def sample(self, step: int) -> int | None:
        """Checksum of what is looked at again at this save; None where it is another group's turn. Local."""
        if self._turn is None or step % self._turn[1] != self._turn[0]:
            return None
        return self._capture.sample(step)
