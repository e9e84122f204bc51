"""Saving in one generation: what falls due when, the same on every rank, handed to the engine.

A generation begins with a restore and ends with the next one, with `close`, or with a failure. Everything that decides
is a function of the step number and of what an exchange told all ranks; what a rank knows by itself it may wait for,
but never decide by.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping

from memckpt.assembly import Parts
from memckpt.errors import DeadlineExceeded, PeerLost, SaveFailed, UsageError
from memckpt.memory import process
from memckpt.memory.slots import SlotPool
from memckpt.preemption import Watch
from memckpt.recovery.recover import Recovery
from memckpt.saving.capture import Capture, Snapshot
from memckpt.saving.decide import Agreed, Decisions, Word
from memckpt.saving.due import Due, Schedule
from memckpt.saving.durable import open_durable
from memckpt.saving.engine import Engine, Outcome, Save
from memckpt.saving.meter import Meter, microseconds
from memckpt.saving.outgoing import FreshSource, History, SealedSource
from memckpt.saving.protection import Protection
from memckpt.saving.replicate import Held, Pace
from memckpt.saving.sharing import Sharing
from memckpt.saving.tally import Tally
from memckpt.saving.telling import tell
from memckpt.storage.checkpoints import note_crash

_TOLD_AFTER_S = 5.0  # an error of the state is raised when the others know of the no, or after so long
_STORAGE_PAUSE_S = 0.02  # between two exchanges that only wait for storage


class Saving:
    """The saves of one generation. Training thread only, but for the callbacks of the engine.

    Parameters
    ----------
    parts : Parts
        What the Checkpointer is made of.
    capture, decisions : Capture, Decisions
        They live longer than a generation.
    recovery : Recovery
        What the generation begins with.
    tally : Tally
    watch : Watch
        Knows whether this process was told to stop.
    first_seq : int
        Sequence number of the last save of the generation before.

    Attributes
    ----------
    preempted : bool
        All ranks know that one was told to stop, and have saved the step at which they learnt it.
    stopping : bool
        All ranks have left, some of them because one was told to stop: the run is not over. Set by `leave`.
    """

    def __init__(
        self,
        parts: Parts,
        capture: Capture,
        decisions: Decisions,
        recovery: Recovery,
        tally: Tally,
        watch: Watch,
        first_seq: int,
    ) -> None:
        session = parts.session
        self._parts = parts
        self._options = parts.options
        self._capture = capture
        self._decisions = decisions
        self._tally = tally
        self._rank = session.rank
        self._protection = Protection(recovery, session.rank, session.world)
        shards = [session.rank, *self._protection.clients]
        self.pool = SlotPool(parts.arena, shards, threads=session.threads, leases=parts.leases)
        self.pool.adopt(recovery.free, recovery.pinned, recovery.base, recovery.own)
        self._history = History(parts.run, parts.job, session.rank, session.world, recovery.generation, recovery.base)
        self.seq = first_seq
        self._begun = False
        self._save_at_exchange = -1
        self._first_exchange = decisions.count
        self._persist_at_exchange = -1
        self._began_at = time.monotonic() - process.age_s()
        self._watch = watch
        self.preempted = self.stopping = False
        persist = self._options.persist
        self._sharing = Sharing(capture, session.comm, session.deadline_s) if self._options.dedup else None
        self._sample: int | None = None
        self._schedule = Schedule(
            self._options.every,
            None if persist is None else persist.every,
            first_step=1 + (recovery.base.step if recovery.base is not None else 0),
            failures=0 if parts.context is None else parts.context.generation,
        )
        self._meter = Meter()
        self._durable = open_durable(parts, self.pool, decisions.count)
        self._last_started: float | None = None
        self._interval_s: float | None = None
        self.engine = Engine(
            parts.engine_comm,
            self.pool,
            self._history,
            deadline_s=self._options.deadline_s,
            on_failure=self._on_failure,
            on_outcome=self._on_outcome,
            beat=parts.lock.beat,
        )
        tally.set(protected=False, committed_step=-1)
        if self._protection.needed:
            self._protect()

    # -- what falls due ------------------------------------------------------------------------------------------------

    def at(
        self, n: int, fired: Iterable[object], metrics: Mapping[str, float] | None = None, *, wanted: bool = False
    ) -> None:
        """Training is at step `n`: exchange, and begin what is due, or `wanted` in any case. Collective."""
        agreed = self._decisions.exchange(self._word(n, wanted=wanted), poll=self.engine.pump)
        if wanted:
            self._decisions.complete(poll=self.engine.pump)  # raises on all ranks if some do not want it
        self._turn(n, agreed, fired, metrics, wanted=wanted, leaving=False)

    def observe(self, step_s: float, blocked_s: float, *, fenced: bool) -> None:
        """Learn what saves cost, from the time of one step of training. Local.

        Parameters
        ----------
        step_s : float
            Seconds from the end of the last `Checkpointer.step` to the end of this one.
        blocked_s : float
            Part of it that was spent in memckpt.
        fenced : bool
            A save passed its fence in it.
        """
        persisting = self._durable is not None and not self._durable.idle
        self._meter.observe(step_s, blocked_s, fenced=fenced, saving=self.engine.busy, persisting=persisting)

    def _word(self, n: int | None, *, wanted: bool = False) -> Word:
        durable = self._durable
        return Word(
            n,
            settled=not self.engine.busy,
            clock_ms=int(1e3 * (time.monotonic() - self._began_at)),
            preempted=self._watch.told,
            persist_idle=durable is None or durable.idle,
            troubled=durable is not None and durable.troubled,
            persisted_step=-1 if durable is None else durable.persisted_step,
            cost_us=microseconds(self._meter.memory.cost_s),
            step_us=microseconds(self._meter.memory.step_s),
            replicate_us=microseconds(self._tally.snapshot().last_committed_s),
            persist_cost_us=microseconds(self._meter.storage.cost_s),
            persist_us=0 if durable is None else microseconds(durable.last_s),
            wanted=wanted,
            changed=self._capture.changed,
            sample=self._take_sample(),
        )

    def _take_sample(self) -> int | None:
        sample, self._sample = self._sample, None
        return sample

    def _warn_of_difference(self) -> None:
        text = (
            "a tensor that was the same on some ranks is not any more, at one of the last saves: maybe silent data "
            "corruption on one of them; it is saved by each rank for itself from now on"
        )
        self._tally.note(text)
        if self._rank == 0:
            warnings.warn(f"run {self._parts.run!r}: {text}", RuntimeWarning, stacklevel=6)

    def refuse(self, n: int, last: int) -> None:
        """This rank is at a step that does not follow `last`: let every other rank hear of it, and raise.

        Raises
        ------
        StepMismatch
            Other ranks are at another step.
        UsageError
            All are at this one.
        """
        self._decisions.exchange(Word(n, settled=False), poll=self.engine.pump)
        self._decisions.complete(poll=self.engine.pump)
        raise UsageError(f"step({n}) after step {last}: steps are counted one by one", run=self._parts.run, step=n)

    def leave(self) -> None:
        """Answer the decisions and votes of ranks that are still stepping until every rank is leaving, and nothing is
        left to be written. Collective.
        """
        end = time.monotonic() + self._options.deadline_s
        while True:
            agreed = self._decisions.exchange(self._word(None), poll=self.engine.pump)
            now = self._decisions.complete(poll=self.engine.pump)
            assert now is not None
            if now.step is None:
                self.stopping = self.preempted or now.preempted
                break
            self._turn(now.step, agreed, (), None, wanted=now.wanted, leaving=True)
            if time.monotonic() > end:
                raise DeadlineExceeded("other ranks went on training after this one closed", run=self._parts.run)
        self.wait_for_outcome()
        persist = self._options.persist
        self.wait_for_storage(None, self._options.deadline_s + (0.0 if persist is None else persist.deadline_s))

    def wait_for_storage(self, step: int | None, timeout_s: float) -> bool:
        """Exchange until no rank has anything left to write, and every rank has heard of every error. Collective.

        Parameters
        ----------
        step : int or None
            Where all ranks are; None: leaving.
        timeout_s : float
            By the agreed clock.

        Returns
        -------
        bool
            False when time ran out, on every rank alike.
        """
        if self._durable is None:
            return True
        first: Agreed | None = None
        while True:
            self._durable.hurry()
            self._decisions.exchange(self._word(step), poll=self.engine.pump)
            now = self._decisions.complete(poll=self.engine.pump)
            assert now is not None
            self._hear(now, self._is_clear(now))
            if now.persist_idle and now.troubled is None:
                break
            first = first or now
            if now.clock_ms - first.clock_ms > 1e3 * timeout_s:
                return False
            time.sleep(_STORAGE_PAUSE_S)
        end = time.monotonic() + self._options.deadline_s
        while self._durable.hears and time.monotonic() < end:
            time.sleep(_STORAGE_PAUSE_S)
        return True

    def _is_clear(self, agreed: Agreed | None) -> bool | None:
        """Whether every rank is known to know how the last save ended; None where some rank is leaving. Alike on all
        ranks.
        """
        if agreed is not None and agreed.leaving:
            return None
        if not self._begun:
            return True
        return agreed is not None and agreed.settled and agreed.index > self._save_at_exchange

    def _hear(self, agreed: Agreed | None, clear: bool | None) -> None:
        """Take in what all ranks said, unless that was before this generation."""
        if agreed is None or agreed.index < self._first_exchange:
            return
        persisted = agreed.persist_idle and agreed.index > self._persist_at_exchange
        if self._sharing is not None:
            if agreed.differs:
                self._warn_of_difference()
            self._sharing.hear(changed=agreed.changed, differs=agreed.differs)
        self._schedule.hear(agreed, settled=clear is True, persisted=persisted)
        self._tally.set(persisted_step=agreed.persisted_step)
        if self._durable is not None:
            self._durable.hear(agreed)

    def _turn(
        self,
        n: int,
        agreed: Agreed | None,
        fired: Iterable[object],
        metrics: Mapping[str, float] | None,
        *,
        wanted: bool,
        leaving: bool,
    ) -> None:
        """One step's decisions. A rank that is leaving takes part in what the others start at that very exchange, with
        a no.
        """
        clear = self._is_clear(agreed)
        self._hear(agreed, clear)
        if clear is None:
            return
        if agreed is not None and agreed.index >= self._first_exchange and agreed.preempted and not self.preempted:
            self._stop_at(n, fired, metrics, leaving)
            return
        if wanted:
            persist = self._options.persist
            self._save_now(n, fired, metrics, leaving, 0.0 if persist is None else persist.deadline_s)
            return
        if self._protection.needed and self._protection.is_overdue(self._options.max_unprotected):
            self.wait_for_outcome()
        due = self._schedule.due(n)
        if due.refused:
            self._say_refused(n, due)
        waits = due.save and (self._options.on_busy == "wait" or (due.persist and self._schedule.names_steps))
        if not clear and not waits:
            self._tally.add(skipped=int(due.save))
            return
        if not clear:
            self.wait_for_outcome()
        if self._protection.needed:
            self._protect()
            if waits:
                self.wait_for_outcome()
            if not waits or self._protection.needed:
                self._tally.add(skipped=int(due.save))
                return
        if due.save:
            self._save(n, fired, leaving, persist=due.persist, metrics=metrics)

    def _say_refused(self, n: int, due: Due) -> None:
        self._tally.add(persist_skipped=1)
        if self._rank == 0:
            warnings.warn(f"step {n} is not persisted: {due.refused}", RuntimeWarning, stacklevel=5)

    def _stop_at(self, n: int, fired: Iterable[object], metrics: Mapping[str, float] | None, leaving: bool) -> None:
        """Some rank was told to stop: save step `n` now, in memory at once, in storage within the grace time."""
        self.preempted = True
        if not self._save_now(n, fired, metrics, leaving, self._watch.grace_left_s()):
            return  # the base, which is all there is to lose, is still where it was restored from
        self._capture.settle()
        self.wait_for_outcome()
        if self._durable is not None and not self._durable.drain(self._watch.grace_left_s()):
            warnings.warn(
                f"step {n} is in memory, but not in storage within the grace time", RuntimeWarning, stacklevel=5
            )

    def _save_now(
        self, n: int, fired: Iterable[object], metrics: Mapping[str, float] | None, leaving: bool, storage_s: float
    ) -> bool:
        """Begin to save step `n`, in storage too, once what is under way has ended; for that of storage the wait is
        `storage_s` seconds. False where the base is not protected yet, and cannot be.
        """
        self.wait_for_outcome()
        if self._protection.needed:
            self._protect()
            self.wait_for_outcome()
        if self._protection.needed:
            self._tally.add(skipped=1)
            return False
        if self._durable is not None:
            self._durable.drain(storage_s)
        self._save(n, fired, leaving, persist=self._durable is not None, metrics=metrics)
        return True

    # -- starting it ---------------------------------------------------------------------------------------------------

    def _save(
        self,
        n: int,
        fired: Iterable[object],
        leaving: bool,
        *,
        persist: bool,
        metrics: Mapping[str, float] | None,
    ) -> None:
        if self._sharing is not None:
            self._sharing.agree(absent=leaving)
        self._schedule.began(n, persist=persist)
        if persist:
            assert self._durable is not None
            self._persist_at_exchange = self._decisions.count - 1
            self._durable.decided(n, metrics)
        if leaving:
            snapshot = Snapshot(n, None, torn="this rank has closed its Checkpointer", fenced=True)
        else:
            now = time.monotonic()
            if self._last_started is not None:
                self._interval_s = now - self._last_started
            self._last_started = now
            snapshot = self._capture.begin(n, self.pool, fired)
            if self._sharing is not None and snapshot.torn is None:
                self._sample = self._sharing.sample(n)
            self._tally.add(saves=1)
            self._tally.set(lazy_nbytes=snapshot.lazy_nbytes, eager_nbytes=snapshot.eager_nbytes)
        holders, clients = self._protection.holders, self._protection.clients
        self._submit(n, FreshSource(snapshot, self._history), holders, clients, [], protect=False)
        if snapshot.error is not None:
            self.engine.wait(min(_TOLD_AFTER_S, self._options.deadline_s))
            raise snapshot.error

    def _protect(self) -> None:
        """Send the base to the holders that lack it, and vote on it as on a save."""
        assert self._history.base is not None
        self._submit(self._history.base.step, *self._protection.missing(self.pool), protect=True)

    def _submit(
        self,
        step: int,
        source: FreshSource | SealedSource,
        holders: list[int],
        clients: list[int],
        held: list[Held],
        *,
        protect: bool,
    ) -> None:
        self.seq += 1
        self._begun = True
        self._save_at_exchange = self._decisions.count - 1
        base = self._history.base
        generation = base.generation if protect and base is not None else self._history.generation
        pace = Pace(self._bytes_per_s(source.nbytes * max(1, len(holders))))
        self.engine.submit(Save(self.seq, step, generation, source, holders, clients, held, protect, pace))

    def _bytes_per_s(self, nbytes: int) -> float | None:
        """The pace: what the user said, else so that a save takes half of the interval between saves."""
        if self._options.bandwidth is not None:
            return self._options.bandwidth
        return None if self._interval_s is None else max(nbytes, 1) / (0.5 * self._interval_s)

    # -- waiting and telling -------------------------------------------------------------------------------------------

    def wait_for_outcome(self) -> None:
        """Wait until the save under way has ended here.

        Raises
        ------
        PeerLost, DeadlineExceeded, SaveFailed
        """
        self.engine.hurry()
        if not self.engine.wait(self._options.deadline_s):
            self.raise_failure()
            raise DeadlineExceeded(
                f"the last save did not end within {self._options.deadline_s:.1f} s",
                run=self._parts.run,
                rank=self._rank,
            )

    def raise_failure(self) -> None:
        """Raise what left an outcome unknown, if anything did."""
        failure = self.engine.failure
        if failure is None:
            return
        if isinstance(failure, PeerLost):
            raise type(failure)(
                failure.message, run=self._parts.run, step=failure.step, rank=failure.rank, path=failure.path
            ) from failure
        raise SaveFailed(
            f"the background of this rank failed: {type(failure).__name__}: {failure}",
            run=self._parts.run,
            rank=self._rank,
        ) from failure

    def report_failed(self) -> None:
        """Warn of the saves that ended in no since the last call, or raise, as the user chose."""
        troubles = [] if self._durable is None else self._durable.take_troubles()
        tell(self._tally, troubles, run=self._parts.run, on_error=self._options.on_error)

    def drain_storage(self, timeout_s: float) -> bool:
        """Wait until this rank has nothing left to write to storage; False when time ran out."""
        return self._durable is None or self._durable.drain(timeout_s)

    def note_crash(self) -> None:
        """Note where the program came from when it failed, in memory and in storage. Local."""
        history, session = self._history, self._parts.session
        if history.base is None:
            return
        self._parts.arena.note_crash(history.base, history.generation)
        if session.storage is not None:
            note_crash(session.storage, session.run, history.base, history.generation)

    def salvage(self) -> bool:
        """Bring the newest committed step of this rank to storage within the grace time, without a word to the others;
        False when time ran out. Local.
        """
        if self._durable is None:
            return True
        self._durable.drain(self._watch.grace_left_s())
        self._durable.salvage()
        return self._durable.drain(self._watch.grace_left_s())

    def stop(self, timeout_s: float, *, park: bool = False) -> None:
        """End the engine's thread and let go of the slots; files and seals stay as they are.

        With `park` the arena keeps the mappings for the generation that follows in this process.
        """
        self.engine.stop(timeout_s)
        if self._durable is not None:
            self._durable.stop(timeout_s)
        self.pool.close(park=park)

    def _on_outcome(self, outcome: Outcome) -> None:
        self._tally.count(outcome)
        if self._durable is not None:
            self._durable.on_outcome(outcome)
        if outcome.protect:
            self._protection.proved(committed=outcome.committed)
        if outcome.committed and self._parts.context is not None:
            self._parts.context.on_commit(outcome.step)

    def _on_failure(self, error: BaseException) -> None:
        self._tally.set(protected=False)
        self._parts.break_off()
        if self._parts.context is not None:
            self._parts.context.on_failure(error)
