"""Persist: write committed snapshots to storage, behind training and out of the way of the memory tier.

Each rank writes its own shard straight from the leased slot, in a thread of its own that never touches a communicator.
Rank 0 waits until it sees every shard in the storage, writes the marker, and only then prunes. What goes wrong is kept
for the training thread, whose exchanges tell the other ranks.
"""

from __future__ import annotations

import errno
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memckpt.errors import MemckptError, SaveFailed
from memckpt.format.seal import Seal
from memckpt.memory.slotfile import Slot
from memckpt.policy.preserve import PreserveContext, PreservePolicy, select
from memckpt.storage import checkpoints, marker
from memckpt.storage.base import HOPELESS, Storage

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.01, 1.0
_LOOKS = 20  # the time between two looks for the other ranks' shards is this part of the time waited so far
_SOON = {errno.ENOSPC, errno.EDQUOT, errno.ENOENT}  # may pass at once, or never: training should hear soon


class _Cancelled(Exception):
    """The writer was told to stop."""


@dataclass(frozen=True)
class Task:
    """One committed step to be written.

    Attributes
    ----------
    slot : Slot
        Holds this rank's sealed snapshot; kept until `release`.
    seal : Seal
    metrics : mapping of str to float, optional
        What the user said of the step; rank 0's is written.
    release : callable
        Ends the lease of the slot.
    """

    slot: Slot
    seal: Seal
    metrics: Mapping[str, float] | None
    release: Callable[[], object]
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Trouble:
    """Why a step is not in storage."""

    rank: int
    step: int
    text: str


@dataclass(frozen=True)
class Manner:
    """How to write.

    Attributes
    ----------
    bytes_per_s : float or None
        Most bytes per second of this rank; its share of the node's cap.
    stagger_s : float
        Ranks begin spread over this time.
    deadline_s : float
        Longest time for one checkpoint, retries and waiting for the other ranks included.
    keep : PreservePolicy
        What pruning leaves.
    """

    bytes_per_s: float | None
    stagger_s: float
    deadline_s: float
    keep: PreservePolicy


class Persister:
    """Writes one task at a time. `submit`, `drain` and the rest are called by the training thread or the engine.

    Attributes
    ----------
    persisted_step : int
        Newest step that this rank knows to be complete in storage (rank 0), or its own shard to be there; -1 for none.
    written_nbytes, last_s : int, float
        Bytes of this rank's shards written so far, and seconds that the last checkpoint took.
    """

    def __init__(self, storage: Storage, *, run: str, rank: int, world: int, manner: Manner) -> None:
        self._storage = storage
        self._run, self._rank, self._world = run, rank, world
        self._manner = manner
        self._lock = threading.Condition()
        self._task: Task | None = None
        self._given_up: set[int] = set()
        self._urgent = threading.Event()
        self._stop = threading.Event()
        self._troubles: list[Trouble] = []
        self._unsure: OSError | None = None
        self.persisted_step = -1
        self.written_nbytes = 0
        self.last_s = 0.0
        self._thread = threading.Thread(target=self._work, name="memckpt-persist", daemon=True)
        self._thread.start()

    # -- from other threads --------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._task is not None

    def submit(self, task: Task) -> None:
        """Begin to write; there must be nothing under way."""
        with self._lock:
            assert self._task is None
            self._urgent.clear()
            self._task = task
            self._lock.notify_all()

    def hurry(self) -> None:
        """Somebody waits: no pacing and no stagger for what is under way."""
        self._urgent.set()

    def give_up(self, step: int) -> None:
        """Another rank failed to write its shard of `step`: there is nothing to wait for."""
        with self._lock:
            self._given_up.add(step)
            self._lock.notify_all()

    def complain(self, step: int, text: str) -> None:
        """Keep why `step` is not in storage, for `take_trouble`."""
        with self._lock:
            self._troubles.append(Trouble(self._rank, step, text))

    def take_trouble(self) -> Trouble | None:
        """The oldest failure of this rank that was not taken yet."""
        with self._lock:
            return self._troubles.pop(0) if self._troubles else None

    @property
    def troubled(self) -> bool:
        """There is a failure to be taken."""
        return bool(self._troubles)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False when time ran out."""
        self.hurry()
        with self._lock:
            return self._lock.wait_for(lambda: self._task is None or not self._thread.is_alive(), timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Break off what is under way and end the thread. What was half written is no checkpoint."""
        self._stop.set()
        self._urgent.set()
        with self._lock:
            self._lock.notify_all()
        self._thread.join(timeout_s)

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._task is not None or self._stop.is_set())
                task = self._task
            if task is None or self._stop.is_set():
                return
            try:
                self._persist(task)
            except _Cancelled:
                pass
            except Exception as error:  # whatever it is, training has to hear of it
                text = error.message if isinstance(error, MemckptError) else f"{type(error).__name__}: {error}"
                self.complain(task.seal.step, text)
            finally:
                task.release()
                with self._lock:
                    self._task = None
                    self._lock.notify_all()

    def _persist(self, task: Task) -> None:
        end = task.begun + self._manner.deadline_s
        self._unsure = None
        self._rest(self._manner.stagger_s * self._rank / self._world)
        self._retry(lambda: self._write_own(task), task.seal.step, end)
        self.written_nbytes += task.seal.nbytes
        if self._rank == 0:
            self._retry(lambda: self._mark(task, end), task.seal.step, end)
            self.persisted_step = task.seal.step
            self._prune(task.seal)
        self.last_s = time.monotonic() - task.begun

    def _say_trying(self, step: int, error: OSError, end: float) -> None:
        warnings.warn(
            f"step {step} is not persisted yet by rank {self._rank} of run {self._run!r}; tried again for up to "
            f"{end - time.monotonic():.0f} s: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _retry(self, action: Callable[[], object], step: int, end: float) -> None:
        """Storage fails for a while now and then: try again, later and later, until the deadline."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                action()
                return
            except OSError as error:
                wait_s = backoff_s * random.uniform(0.5, 1.5)  # so that ranks do not come back all at once
                if (error.errno in HOPELESS and error.errno not in _SOON) or time.monotonic() + wait_s > end:
                    raise
                if error.errno in _SOON and backoff_s > 4 * _FIRST_BACKOFF_S:
                    raise
                if backoff_s == 4 * _FIRST_BACKOFF_S:
                    self._say_trying(step, error, end)
            self._rest(wait_s, pace=False)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _rest(self, seconds: float, *, pace: bool = True) -> None:
        """Sleep, but not when told to stop, and where it is for the sake of the pace, not when somebody waits."""
        if pace:
            self._urgent.wait(seconds)
        else:
            self._stop.wait(seconds)
        self._go_on()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _Cancelled

    def _write_own(self, task: Task) -> None:
        start, sent = time.monotonic(), 0

        def pace(nbytes: int) -> None:
            nonlocal sent
            self._go_on()
            if self._manner.bytes_per_s is not None and not self._urgent.is_set():
                ahead = sent / self._manner.bytes_per_s - (time.monotonic() - start)
                if ahead > 0:
                    self._rest(ahead)
            sent += nbytes

        try:
            checkpoints.write_shard(self._storage, self._run, task.seal, task.slot.memory, pace=pace)
        except FileExistsError:
            pass  # complete already: a restore went back to what was persisted

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _mark(self, task: Task, end: float) -> None:
        """Wait for every shard, then make a checkpoint of them."""
        records = self._await_shards(task.seal, end)
        mark = marker.make(task.seal, records, metrics=task.metrics)
        try:
            checkpoints.write_marker(self._storage, self._run, mark)
        except FileExistsError:
            # Complete since before, unless it is the one that could not be made durable a moment ago.
            if self._unsure is not None:
                raise self._unsure from None
        except OSError as error:
            self._unsure = error
            raise

    def _await_shards(self, seal: Seal, end: float) -> list[marker.ShardRecord]:
        records: dict[int, marker.ShardRecord] = {}
        began = time.monotonic()
        while True:
            records = checkpoints.shards_there(self._storage, seal, known=records)
            if len(records) == self._world:
                return [records[shard] for shard in range(self._world)]
            missing = next(shard for shard in range(self._world) if shard not in records)
            if time.monotonic() > end:
                raise SaveFailed(
                    f"the shard of rank {missing} did not appear in {self._storage.url} within "
                    f"{self._manner.deadline_s:g} s",
                    run=self._run, step=seal.step, rank=missing,
                )  # fmt: skip
            look_s = min(max((time.monotonic() - began) / _LOOKS, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)
            with self._lock:
                self._lock.wait_for(lambda: seal.step in self._given_up or self._stop.is_set(), look_s)
                if seal.step in self._given_up:
                    raise _Cancelled  # that rank tells why
            self._go_on()

    def _prune(self, seal: Seal) -> None:
        """Something newer is safe: remove what the policy does not keep, and what never became a checkpoint."""
        found = [s for s in checkpoints.scan(self._storage, self._run) if not s.stray]
        complete = [(s.info, s) for s in found if s.complete]
        context = PreserveContext(
            now_s=time.time(),
            tier="storage",
            nbytes_total=sum(s.nbytes for _, s in complete),
            free_nbytes=self._storage.free_nbytes(),
        )
        chosen = select(self._manner.keep, [info for info, _ in complete], context=context)
        remove = [s for info, s in complete if any(info is c for c in chosen)]
        # No rank writes an older step any more: one is begun when every rank has done with the last.
        remove += [s for s in found if not s.complete and s.step < seal.step]
        checkpoints.prune(self._storage, remove)
