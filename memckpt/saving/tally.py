"""The counters of one Checkpointer."""

from __future__ import annotations

import threading
from dataclasses import replace

from memckpt.reports import Stats
from memckpt.saving.engine import Outcome

_KEPT_ERRORS = 20


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

    def note(self, error: str) -> None:
        """Keep the words of something that failed."""
        with self._lock:
            self._stats.errors = [*self._stats.errors, error][-_KEPT_ERRORS:]
