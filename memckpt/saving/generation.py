"""Saving in one generation: what falls due when, the same on every rank, handed to the engine.

A generation begins with a restore and ends with the next one, with `close`, or with a failure. Everything that decides
is a function of the step number and of what an exchange told all ranks; what a rank knows by itself it may wait for,
but never decide by.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace

from memckpt.assembly import Parts
from memckpt.errors import DeadlineExceeded, PeerLost, SaveFailed, UsageError
from memckpt.memory.slots import SlotPool
from memckpt.recovery.recover import Recovery
from memckpt.reports import Stats
from memckpt.saving.capture import Capture, Snapshot
from memckpt.saving.decide import Agreed, Decisions, Word
from memckpt.saving.engine import Engine, Outcome, Save
from memckpt.saving.outgoing import FreshSource, History, SealedSource
from memckpt.saving.replicate import Held, Pace

_KEPT_ERRORS = 20
_TOLD_AFTER_S = 5.0  # an error of the state is raised when the others know of the no, or after so long


class Tally:
    """The counters of one Checkpointer, shared by its two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = Stats()
        self._failed: list[Outcome] = []

    def add(self, **amounts: float) -> None:
        """Increase counters."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def set(self, **values: float) -> None:
        """Replace values."""
        with self._lock:
            for name, value in values.items():
                setattr(self._stats, name, value)

    def count(self, outcome: Outcome) -> None:
        """Note how a save ended."""
        with self._lock:
            stats = self._stats
            stats.last_replicated_s, stats.last_committed_s = outcome.replicated_s, outcome.committed_s
            if outcome.committed:
                stats.commits += not outcome.protect
                stats.committed_step = outcome.step
                stats.protected = True
            else:
                stats.failed += 1
                stats.errors = [*stats.errors, f"step {outcome.step}: {outcome.reason}"][-_KEPT_ERRORS:]
                self._failed.append(outcome)

    def take_failed(self) -> list[Outcome]:
        """The saves that ended in no since the last call."""
        with self._lock:
            failed, self._failed = self._failed, []
            return failed

    def snapshot(self) -> Stats:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stats, errors=list(self._stats.errors))


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
    first_seq : int
        Sequence number of the last save of the generation before.
    """

    def __init__(
        self, parts: Parts, capture: Capture, decisions: Decisions, recovery: Recovery, tally: Tally, first_seq: int
    ) -> None:
        session = parts.session
        self._parts = parts
        self._options = parts.options
        self._capture = capture
        self._decisions = decisions
        self._tally = tally
        self._rank = session.rank
        self._rebuild = recovery.rebuild
        self._rebuild_all = False
        self._holders = list(recovery.holders[session.rank])
        self._clients = [shard for shard, holders in enumerate(recovery.holders) if session.rank in holders]
        self.pool = SlotPool(parts.arena, [session.rank, *self._clients], threads=parts.session.threads)
        self.pool.adopt(recovery.free, recovery.pinned, recovery.base, recovery.own)
        self._history = History(parts.run, parts.job, session.rank, session.world, recovery.generation, recovery.base)
        self.seq = first_seq
        self._begun = False
        self._save_at_exchange = -1
        self._exchanges_before = decisions.count
        self._needs_protection = recovery.base is not None
        self._steps_unprotected = 0
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
        if self._needs_protection:
            self._protect()

    # -- what falls due ------------------------------------------------------------------------------------------------

    def at(self, n: int, fired: Iterable[object]) -> None:
        """Training is at step `n`: exchange, and begin what is due. Collective."""
        agreed = self._decisions.exchange(self._word(n), poll=self.engine.pump)
        self._begin_what_is_due(n, self._is_clear(agreed), fired, leaving=False)

    def _word(self, n: int | None) -> Word:
        return Word(n, settled=not self.engine.busy)

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
        """Answer the decisions and votes of ranks that are still stepping until every rank is leaving. Collective."""
        end = time.monotonic() + self._options.deadline_s
        while True:
            agreed = self._decisions.exchange(self._word(None), poll=self.engine.pump)
            clear = self._is_clear(agreed)
            now = self._decisions.complete(poll=self.engine.pump)
            assert now is not None
            if now.step is None:
                break
            self._begin_what_is_due(now.step, clear, (), leaving=True)
            if time.monotonic() > end:
                raise DeadlineExceeded("other ranks went on training after this one closed", run=self._parts.run)
        self.wait_for_outcome()

    def _is_clear(self, agreed: Agreed | None) -> bool | None:
        """Whether every rank is known to know how the last save ended; None where some rank is leaving. Alike on all
        ranks.
        """
        told_at = self._decisions.count - 2  # the exchange whose result `agreed` is
        if agreed is not None and agreed.leaving:
            return None
        if not self._begun:
            return True
        return agreed is not None and agreed.settled and told_at > self._save_at_exchange

    def _begin_what_is_due(self, n: int, clear: bool | None, fired: Iterable[object], *, leaving: bool) -> None:
        """Start the save, or the protection of the base, that is due.

        A rank that is leaving takes part in what the others start at that very exchange, with a no.
        """
        if clear is None:
            return
        if self._needs_protection:
            self._limit_unprotected()
        due = n % self._options.every == 0
        waits = due and self._options.on_busy == "wait"
        if not clear and not waits:
            self._tally.add(skipped=int(due))
            return
        if not clear:
            self.wait_for_outcome()
        if self._needs_protection:
            self._protect()
            if waits:
                self.wait_for_outcome()
            if not waits or self._needs_protection:
                self._tally.add(skipped=int(due))
                return
        if due:
            self._save(n, fired, leaving)

    def _limit_unprotected(self) -> None:
        self._steps_unprotected += 1
        limit = self._options.max_unprotected
        if limit is not None and self._steps_unprotected > limit:
            self.wait_for_outcome()

    # -- starting it ---------------------------------------------------------------------------------------------------

    def _save(self, n: int, fired: Iterable[object], leaving: bool) -> None:
        if leaving:
            snapshot = Snapshot(n, None, torn="this rank has closed its Checkpointer", fenced=True)
        else:
            now = time.monotonic()
            if self._last_started is not None:
                self._interval_s = now - self._last_started
            self._last_started = now
            snapshot = self._capture.begin(n, self.pool, fired)
            self._tally.add(saves=1)
            self._tally.set(lazy_nbytes=snapshot.lazy_nbytes, eager_nbytes=snapshot.eager_nbytes)
        self._submit(n, FreshSource(snapshot, self._history), self._holders, self._clients, [], protect=False)
        if snapshot.error is not None:
            self.engine.wait(min(_TOLD_AFTER_S, self._options.deadline_s))
            raise snapshot.error

    def _protect(self) -> None:
        """Send the base to the holders that lack it, and vote on it as on a save.

        Replicas that are there already are read once. Where the vote was no, every replica is sent again.
        """
        assert self._history.base is not None
        holders, clients = self._holders, self._clients
        if not self._rebuild_all:
            holders = [r.to_rank for r in self._rebuild if r.shard == self._rank]
            clients = [r.shard for r in self._rebuild if r.to_rank == self._rank]
        holdings = self.pool.holdings
        self._submit(
            self._history.base.step,
            SealedSource(holdings[self._rank].committed),
            holders,
            clients,
            [Held(holdings[shard].committed, shard) for shard in self._clients if shard not in clients],
            protect=True,
        )

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
        for outcome in self._tally.take_failed():
            if outcome.protect:  # nothing to decide for the user: it is tried again until it is a yes
                warnings.warn(
                    f"the restored step {outcome.step} is not protected yet, its replicas are sent again: "
                    f"{outcome.reason}",
                    RuntimeWarning,
                    stacklevel=3,
                )
                continue
            error = SaveFailed(
                f"step {outcome.step} was not committed: {outcome.reason}",
                run=self._parts.run,
                step=outcome.step,
                rank=outcome.reason.rank if outcome.reason.rank >= 0 else None,
            )
            if self._options.on_error == "raise":
                raise error
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)

    def stop(self, timeout_s: float, *, park: bool = False) -> None:
        """End the engine's thread and let go of the slots; files and seals stay as they are.

        With `park` the arena keeps the mappings for the generation that follows in this process.
        """
        self.engine.stop(timeout_s)
        self.pool.close(park=park)

    def _on_outcome(self, outcome: Outcome) -> None:
        self._tally.count(outcome)
        if not outcome.committed:
            self._rebuild_all |= outcome.protect
            return
        if outcome.protect:
            self._needs_protection = False
        if self._parts.context is not None:
            self._parts.context.on_commit(outcome.step)

    def _on_failure(self, error: BaseException) -> None:
        self._tally.set(protected=False)
        self._parts.break_off()
        if self._parts.context is not None:
            self._parts.context.on_failure(error)
