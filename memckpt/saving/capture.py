"""Capture: copy this rank's state into a slot, part of it behind the next forward and backward.

Contract
--------
`Capture.begin` returns when every *eager* byte is in the slot. The *lazy* bytes (parameters and per-parameter optimizer
state of an optimizer whose step pre-hook fired since the last capture point) are still being copied then, and training
may not change them before the fence. The fence is that very hook; `Capture.fence` waits for the copy. Only a snapshot
that passed a fence may be sealed. Where training comes back without having passed one (`Capture.settle`), the sources
are read again: equal bytes may be sealed, different ones are torn, and their tensors are captured eagerly from then on.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from memckpt import _native, faults
from memckpt.errors import MemckptError, SaveFailed, StateError
from memckpt.format.layout import Division, Layout, Pieces
from memckpt.memory.slotfile import Slot
from memckpt.memory.slots import SlotPool
from memckpt.state.leaves import Collected
from memckpt.state.state import State

AUDITED_SAVES = 3
"""The first lazy saves whose every byte is read again at the fence."""

_SAMPLE_NBYTES = 1 << 20


def _crc_of(address: int, nbytes: int) -> int:
    return _native.crc32c((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else 0


@dataclass
class Snapshot:
    """A snapshot in the making. `fenced` and `torn` are written by the training thread and read by the background
    thread.

    Attributes
    ----------
    job : CopyJob or None
        The copy; a lazy one is started by the background thread, or by whoever waits for it first.
    torn : str or None
        Why this snapshot must not be sealed.
    error : Exception or None
        What the user is to be told, once this rank has said no: the state itself cannot be saved, or a fault of ours.
    fenced : bool
        The bytes in the slot are final and may be sealed.
    """

    step: int
    slot: Slot | None
    layout: Layout | None = None
    job: _native.CopyJob | None = None
    pieces: Pieces | None = None
    lazy: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    lazy_nbytes: int = 0
    eager_nbytes: int = 0
    fenced: bool = False
    torn: str | None = None
    error: Exception | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes; 0 where there is no copy of anything."""
        return self.layout.file_nbytes if self.layout is not None and self.job is not None else 0

    @property
    def watermark(self) -> int:
        """Leading chunks that are complete in the slot."""
        return self.job.watermark if self.job is not None else 0


class Capture:
    """Captures of one rank. Training thread only. Local.

    Parameters
    ----------
    state : State
        What to save.
    run, shard, world : str, int, int
        Written into each snapshot.
    threads : int
        Threads of one copy.
    deadline_s : float
        Longest time in which a copy may make no progress.

    Attributes
    ----------
    changed : bool
        The structure is not the one that was divided any more, so nothing is captured until `divide` is called again.
    """

    def __init__(
        self, state: State, *, run: str, shard: int, world: int, threads: int, deadline_s: float = 600.0
    ) -> None:
        self._state = state
        self._run = run
        self._shard = shard
        self._world = world
        self._threads = threads
        self._deadline_s = deadline_s
        self._layout: Layout | None = None
        self._token: object = None
        self._distrusted: set[str] = set()
        self._division: Division | None = None
        self.changed = False
        self._lazy_saves = 0
        self._open: Snapshot | None = None
        self._fencing = threading.Lock()  # hooks may run in threads of the autograd engine
        self._random = random.Random(shard)

    def plan(self) -> Layout:
        """The layout that a capture would have now. Local.

        Raises
        ------
        StateError
            Something in the state cannot be saved.
        """
        return self._layout_of(self._state.collect())[0]

    # -- what ranks have in common -------------------------------------------------------------------------------------

    def undivided(self) -> Layout:
        """Divide nothing from now on; the layout of that. Local; raises as `plan`."""
        self.divide(None)
        return self.plan()

    def checksums(self) -> list[int]:
        """CRC-32C of the live bytes of each entry of `undivided`. Local."""
        assert self._layout is not None
        pieces = self._layout.pieces(self._state.collect())
        pieces.refresh()
        return [_crc_of(int(at), int(n)) for at, n in zip(pieces.sources, pieces.nbytes, strict=True)]

    def divide(self, division: Division | None) -> None:
        """Capture only this rank's part of what others have, too. Local."""
        self._division, self.changed = division, False
        self._layout = None

    def sample(self, step: int) -> int | None:
        """CRC-32C of a window of a tensor that is divided, whole, chosen by the step alone; None where none is. For the
        capture of this very step, before training goes on. Local.
        """
        layout = self._layout
        divided = [i for i, e in enumerate(layout.entries) if e.part is not None] if layout is not None else []
        if layout is None or not divided:
            return None
        index = divided[step * 2_654_435_761 % len(divided)]
        part = layout.entries[index].part
        assert part is not None
        begin, nbytes = part
        window = min(nbytes, _SAMPLE_NBYTES)
        at = step * 40_503 * _SAMPLE_NBYTES % (nbytes - window + 1)
        pieces = layout.pieces(self._state.collect())
        return _crc_of(int(pieces.sources[index]) - begin + at, window)

    # -- copying -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, pool: SlotPool, fired: Iterable[object]) -> Snapshot:
        """Copy the eager part and start to copy the lazy part.

        Parameters
        ----------
        step : int
            Step of the state.
        pool : SlotPool
            Where the slot comes from.
        fired : iterable of torch.optim.Optimizer
            Optimizers whose step pre-hook fired since the last call of `Checkpointer.step`.

        Returns
        -------
        Snapshot
            With `slot` None and `torn` set where it could not be made; an error of the state itself is kept there, too,
            since this rank still has to vote.
        """
        snapshot = Snapshot(step, None)
        try:
            self._begin(snapshot, step, pool, set(map(id, fired)))
        except Exception as error:
            snapshot.torn = f"{type(error).__name__}: {error}"
            if isinstance(error, StateError) or not isinstance(error, (MemckptError, OSError)):
                snapshot.error = error
            if snapshot.slot is None:
                snapshot.layout = None
            snapshot.fenced = True
        self._open = None if snapshot.fenced else snapshot
        return snapshot

    def _begin(self, snapshot: Snapshot, step: int, pool: SlotPool, fired: set[int]) -> None:
        collected = self._state.collect()
        layout, pieces = self._layout_of(collected)
        if self._division is not None and not layout.whole:
            self.changed = True
            snapshot.torn = "the structure of the state has changed; what ranks have in common is found out anew"
            snapshot.fenced = True
            return
        slot = pool.take(layout.file_nbytes)
        if slot is None:
            snapshot.torn = "no free slot"
            snapshot.fenced = True
            return
        pool.holdings[self._shard].pending = slot
        snapshot.slot, snapshot.layout, snapshot.pieces = slot, layout, pieces
        faults.point("capture.slot", self._shard, step)
        lazy = self._lazy(pieces, fired)
        snapshot.lazy, eager = lazy, ~lazy
        header = layout.header(collected.plain, step)
        with memoryview(slot.memory) as memory:
            memory[: len(header)] = header
        pieces.refresh()
        snapshot.lazy_nbytes = int(pieces.nbytes[lazy].sum())
        snapshot.eager_nbytes = int(pieces.nbytes[eager].sum())
        if snapshot.lazy_nbytes and snapshot.eager_nbytes:
            # Eager bytes go first, whole and unsummed; the second job finds them in place and only sums them.
            self._wait(self._gather(pieces, eager, slot, layout, crc=False), step)
        # The background starts the lazy copy: threads woken here would take the processor from a step not yet over.
        snapshot.job = self._gather(
            pieces, lazy if snapshot.lazy_nbytes else eager, slot, layout, crc=True, start=not snapshot.lazy_nbytes
        )
        if not snapshot.lazy_nbytes:
            self._wait(snapshot.job, step)
            snapshot.fenced = True
        else:
            self._lazy_saves += 1
        faults.point("capture.begun", self._shard, step)

    def _gather(
        self, pieces: Pieces, which: np.ndarray, slot: Slot, layout: Layout, *, crc: bool, start: bool = True
    ) -> _native.CopyJob:
        return _native.gather(
            pieces.sources[which],
            pieces.nbytes[which],
            pieces.offsets[which],
            slot.memory,
            layout.file_nbytes,
            crc=crc,
            threads=self._threads,
            keep=pieces.keep,
            start=start,
        )

    def _wait(self, job: _native.CopyJob, step: int) -> None:
        """Wait for the end of a copy.

        Raises
        ------
        SaveFailed
            It makes no progress.
        """
        before = -1
        while not job.wait(self._deadline_s):
            if job.watermark == before:
                raise SaveFailed(
                    f"the copy of the state has made no progress for {self._deadline_s:g} s (chunk {before})",
                    run=self._run, step=step, rank=self._shard,
                )  # fmt: skip
            before = job.watermark

    def _layout_of(self, collected: Collected) -> tuple[Layout, Pieces]:
        """The layout in use where it still fits what is there now, else a new one."""
        layout = self._layout
        if layout is not None and collected.token is self._token and layout.fits(collected.plain):
            pieces = layout.pieces(collected)
            moved = _native.first_change(pieces.address_methods, pieces.size_methods, pieces.addresses, pieces.sizes)
            if moved < 0 and not pieces.reshaped():
                return layout, pieces
        layout = Layout.build(collected, run=self._run, shard=self._shard, world=self._world, division=self._division)
        self._layout, self._token = layout, collected.token
        return layout, layout.pieces(collected)

    def _lazy(self, pieces: Pieces, fired: set[int]) -> np.ndarray:
        """Which pieces may be copied behind training: candidates whose own optimizer has passed its hook."""
        passed = np.array([id(optimizer) in fired for optimizer in pieces.optimizers] + [False])
        lazy: np.ndarray = pieces.lazy & passed[pieces.owners]
        if self._distrusted:
            lazy &= np.fromiter((k not in self._distrusted for k in pieces.keys), dtype=bool, count=len(lazy))
        return lazy

    def fence(self) -> bool:
        """Wait until the lazy copy is done; training may change the state afterwards. Called by the optimizers'
        pre-hook. Whether there was one.
        """
        with self._fencing:
            snapshot = self._open
            if snapshot is None:
                return False
            assert snapshot.job is not None
            self._wait(snapshot.job, snapshot.step)
            faults.point("capture.copied", self._shard, snapshot.step)
            if self._lazy_saves <= AUDITED_SAVES:
                self._audit(snapshot, None)
            else:
                self._audit(snapshot, self._random.randrange(max(1, -(-snapshot.nbytes // _native.CHUNK_BYTES))))
            snapshot.fenced = True
            self._open = None
            faults.point("capture.fenced", self._shard, snapshot.step)
            return True

    def settle(self) -> None:
        """As `fence`, where training may have changed the state already: every source is compared with its copy."""
        with self._fencing:
            snapshot = self._open
            if snapshot is None:
                return
            assert snapshot.job is not None
            self._wait(snapshot.job, snapshot.step)
            self._audit(snapshot, None)
            snapshot.fenced = True
            self._open = None

    def _audit(self, snapshot: Snapshot, chunk: int | None) -> None:
        pieces = snapshot.pieces
        assert pieces is not None
        assert snapshot.slot is not None
        chunks = None if chunk is None else np.array([chunk], dtype=np.int64)
        different = _native.audit(
            pieces.sources[snapshot.lazy],
            pieces.nbytes[snapshot.lazy],
            pieces.offsets[snapshot.lazy],
            snapshot.slot.memory,
            snapshot.nbytes,
            chunks,
            threads=self._threads,
        )
        if len(different):
            names = [pieces.keys[int(i)] for i in np.flatnonzero(snapshot.lazy)[different]]
            self._distrusted.update(names)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            snapshot.torn = f"changed while it was copied: {shown}; captured eagerly from now on"
