"""The engine: what goes on behind training for one save at a time: seal, replicate, vote.

It is one state machine, `Engine.poll`. Where the communicator may be used from a second thread, a background thread
drives it; elsewhere (MPI below THREAD_MULTIPLE) the training thread does, in every call it makes. Errors of this rank
alone (no room, a CRC that differs) end in its no. Errors of the communicator, and whatever else breaks the machine,
leave the outcome unknown: the engine stops, keeps seals and slots as they are, and gives the error to the training
thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from memckpt import faults
from memckpt.comm.base import SPINS, Communicator
from memckpt.errors import DeadlineExceeded, MemckptError
from memckpt.format.seal import Generation
from memckpt.memory.slots import SlotPool
from memckpt.saving.commit import NO, NO_REASON, NOT_YET, YES, Vote, Why
from memckpt.saving.outgoing import FreshSource, History, SealedSource
from memckpt.saving.replicate import Begin, Held, Pace, Receiving, Sending

_IDLE_S = 0.05
_SHORTEST_SLEEP_S = 20e-6
_PATIENT_SLEEP_S = 100e-6  # the first one where nobody waits: each turn takes training's processor away for a moment
_LONGEST_SLEEP_S = 1e-3


@dataclass
class Save:
    """One save on its way to its vote.

    Attributes
    ----------
    holders : sequence of int
        Ranks that this rank sends to.
    clients : sequence of int
        Ranks whose replicas this rank receives.
    held : sequence of Held
        Replicas that lie here already and have to be proved.
    protect : bool
        The base of a restore, not a new snapshot.
    """

    seq: int
    step: int
    generation: Generation
    source: FreshSource | SealedSource
    holders: list[int]
    clients: list[int]
    held: list[Held] = field(default_factory=list)
    protect: bool = False
    pace: Pace = field(default_factory=lambda: Pace(None))
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on every rank.

    Attributes
    ----------
    committed : bool
    replicated_s : float
        From `step()` until everything that this rank sends and holds was sealed, in seconds.
    committed_s : float
        Until the vote was known.
    reason : Why
        Of a save that was dropped.
    """

    step: int
    committed: bool
    protect: bool
    replicated_s: float
    committed_s: float
    reason: Why = NO_REASON


class Engine:
    """Drives one save at a time. `submit`, `pump`, `stop` from the training thread; `poll` from the one that drives it.

    Parameters
    ----------
    comm : Communicator
        Private to the engine.
    pool : SlotPool
    history : History
    deadline_s : float
        Longest time without any progress while a save is under way.
    on_failure : callable
        Told of an error that leaves an outcome unknown, at once and from the thread that saw it.
    beat : callable
        Called often while this process is alive.
    """

    def __init__(
        self,
        comm: Communicator,
        pool: SlotPool,
        history: History,
        *,
        deadline_s: float,
        on_failure: Callable[[BaseException], None],
        on_outcome: Callable[[Outcome], None],
        beat: Callable[[], None],
    ) -> None:
        self._comm = comm
        self._pool = pool
        self.history = history
        self._deadline_s = deadline_s
        self._on_failure = on_failure
        self._on_outcome = on_outcome
        self._beat = beat
        self._save: Save | None = None
        self._sending: list[Sending] = []
        self._receiving: list[Receiving | Held] = []
        self._vote: Vote | None = None
        self._moved = 0.0
        self._last_beat = 0.0
        self._replicated_s: float | None = None
        self._wanted_nbytes = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not comm.concurrent:
            pool.warm()
        else:
            self._thread = threading.Thread(target=self._run, name="memckpt-engine", daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """A save is under way, or its outcome is unknown."""
        return not self._idle.is_set()

    def submit(self, save: Save) -> None:
        """Take over a save whose capture has begun. Every rank submits the same saves in the same order."""
        assert self._idle.is_set()
        self._idle.clear()
        self._moved = time.monotonic()
        self._replicated_s = None
        self._save = save
        if self._thread is None:
            self._guarded_poll()
        self._wake.set()

    def hurry(self) -> None:
        """Somebody waits: stop pacing the save under way."""
        if (save := self._save) is not None:
            save.pace.urgent = True
            self._wake.set()

    def pump(self) -> None:
        """Drive the engine from the caller's thread where it has none of its own."""
        if self._thread is None and self.failure is None:
            self._beat_now_and_then()
            self._guarded_poll()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no save is under way; False when time ran out. Raises nothing: look at `failure`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.busy and self.failure is None:
            if end is not None and time.monotonic() >= end:
                return False
            if self._thread is None:
                self._guarded_poll()
                time.sleep(_SHORTEST_SLEEP_S)
            elif not self._idle.wait(0.02) and not self._thread.is_alive():
                self.fail(RuntimeError("the background thread has ended without a word"))
        return not self.busy

    def stop(self, timeout_s: float) -> None:
        """End the thread. Seals and slots stay as they are, but for slots with an unfinished receive, which go."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        for receiving in self._receiving:
            if isinstance(receiving, Receiving):
                receiving.abandon()
        self._receiving = []

    def _run(self) -> None:
        idle, sleep_s = 0, 0.0
        warmed = False
        while not self._stop.is_set():
            self._beat_now_and_then()
            save = self._save
            if save is None or self.failure is not None:
                if not warmed:
                    warmed = True
                    self._pool.warm()
                self._wake.wait(_IDLE_S)
                self._wake.clear()
                idle, sleep_s = 0, 0.0
            elif self._guarded_poll():
                idle, sleep_s = 0, 0.0
            elif save.pace.urgent and idle < SPINS:
                idle += 1
                time.sleep(0)  # gives up the processor: the peer may need this very core
            else:
                shortest_s = _SHORTEST_SLEEP_S if save.pace.urgent else _PATIENT_SLEEP_S
                sleep_s = min(max(1.5 * sleep_s, shortest_s), _LONGEST_SLEEP_S)
                time.sleep(sleep_s)

    def _beat_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= _IDLE_S:
            self._last_beat = now
            self._beat()

    def _guarded_poll(self) -> bool:
        try:
            return self.poll()
        except Exception as error:
            self.fail(error)
            return False

    def fail(self, error: BaseException) -> None:
        """The outcome of what is under way is unknown from here on. Idempotent."""
        if self.failure is None:
            self.failure = error
            self._on_failure(error)

    def poll(self) -> bool:
        """One turn of the machine; True if something moved.

        Raises
        ------
        PeerLost, DeadlineExceeded
            The outcome of the save under way is unknown.
        """
        save = self._save
        if save is None:
            return False
        if self._vote is None:
            self._begin(save)
        assert self._vote is not None
        moved = save.source.advance()
        for sending in self._sending:
            moved |= sending.poll()
        for receiving in self._receiving:
            moved |= receiving.poll()
        complete = all(s.done for s in self._sending) and all(r.done for r in self._receiving)
        if complete and self._replicated_s is None:
            self._replicated_s = time.monotonic() - save.started
        ballot, why = self._ballot(save, complete)
        moved |= self._vote.poll(ballot, why)
        now = time.monotonic()
        if moved:
            self._moved = now
        elif now - self._moved > self._deadline_s:
            raise DeadlineExceeded(
                f"nothing moved for {self._deadline_s:.1f} s while step {save.step} was saved",
                run=self.history.run,
                rank=self._comm.rank,
                step=save.step,
            )
        if complete and self._vote.outcome is not None:
            self._end(save, self._vote)
            moved = True
        return moved

    def _begin(self, save: Save) -> None:
        save.source.start()
        begin = Begin(save.seq, save.step, save.source.nbytes)
        self._vote = Vote(self._comm, save.step, save.generation)
        self._receiving = list(save.held)
        self._receiving += [
            Receiving(
                self._comm,
                self._pool,
                source=client,
                seq=save.seq,
                step=save.step,
                generation=save.generation,
                run=self.history.run,
            )
            for client in save.clients
        ]
        self._sending = [Sending(self._comm, save.source, begin, holder, save.pace) for holder in save.holders]

    def _ballot(self, save: Save, complete: bool) -> tuple[int, Why]:
        """Yes when all is sealed here; no only when nothing of this rank is under way any more."""
        seal = save.source.seal_bytes()
        if not complete or seal is None:
            return NOT_YET, NO_REASON
        failed = [r for r in self._receiving if not r.sealed]
        own = [] if seal else [save.source.reason or "not sealed"]
        own += [r.reason or "not sealed" for r in failed if not r.torn]
        if own:
            return NO, Why(self._comm.rank, "; ".join(own))
        if failed:  # all torn by their owners, whose word this is
            return NO, Why(failed[0].source, failed[0].reason or "not sealed")
        return YES, NO_REASON

    def _end(self, save: Save, vote: Vote) -> None:
        assert vote.outcome is not None
        faults.point("commit.known", self._comm.rank, save.step)
        if vote.outcome:
            self._pool.commit()
        else:
            self._pool.drop()
        faults.point("commit.pinned", self._comm.rank, save.step)
        now = time.monotonic() - save.started
        outcome = Outcome(save.step, vote.outcome, save.protect, self._replicated_s or now, now, vote.reason)
        self._save = self._vote = None
        self._sending, self._receiving = [], []
        self._on_outcome(outcome)
        if save.source.nbytes and not self._stop.is_set():
            self._prepare(save.source.nbytes)
        self._idle.set()

    def _prepare(self, nbytes: int) -> None:
        """Make the slot that the next capture will want, here, where nobody waits for it."""
        try:
            self._pool.prepare(nbytes)
        except (OSError, MemckptError):
            pass  # said again, with its numbers, by the capture that needs it
