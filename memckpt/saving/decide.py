"""The decision that all ranks take alike without waiting for each other: a reduction that runs one step behind.

Each exchange starts a small non-blocking minimum over all ranks and completes the one before it, so a rank waits only
for ranks that are more than a step behind. What a rank learns is therefore one step old, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from memckpt.comm.base import Communicator, Request, wait
from memckpt.errors import StepMismatch

_NOBODY = np.iinfo(np.int64).max  # neutral in the minimum: a closing rank has no step of its own


@dataclass(frozen=True)
class Word:
    """What one rank says at an exchange; in brackets what becomes of it over all ranks.

    Attributes
    ----------
    step : int or None
        Where it is; None when it is leaving [must be equal].
    settled : bool
        It knows the outcome of the last save and could start the next [all].
    clock_ms : int
        Milliseconds since its process was started [the youngest process's].
    preempted : bool
        It was told to stop [any].
    persist_idle : bool
        It has nothing left to write to storage [all].
    troubled : bool
        Writing to storage failed here and not every rank knows [the first rank].
    persisted_step : int
        Newest step that it knows to be complete in storage, -1 for none [the newest].
    cost_us, step_us, replicate_us : int
        Measured here: training time that a save costs, usual duration of a step, from a save's begin to its commit, in
        microseconds; 0 while not known [the largest].
    persist_cost_us, persist_us : int
        The same for the storage tier: what it costs training, and how long it takes [the largest].
    wanted : bool
        The user wants this step saved in any case [must be equal].
    changed : bool
        The structure of its state is not the one that was divided between ranks [any].
    sample : int or None
        Checksum of something that ranks have in common [whether two differ].
    """

    step: int | None
    settled: bool
    clock_ms: int = 0
    preempted: bool = False
    persist_idle: bool = True
    troubled: bool = False
    persisted_step: int = -1
    cost_us: int = 0
    step_us: int = 0
    replicate_us: int = 0
    persist_cost_us: int = 0
    persist_us: int = 0
    wanted: bool = False
    changed: bool = False
    sample: int | None = None


@dataclass(frozen=True)
class Agreed:
    """What one exchange said, the same on every rank.

    Attributes
    ----------
    step : int or None
        The step that ranks were at; None when all of them are leaving.
    settled : bool
        Every rank knows the outcome of the last save and has a slot for the next.
    leaving : bool
        Some rank is closing.
    clock_ms, preempted, persist_idle, persisted_step, wanted, changed
    cost_us, step_us, replicate_us, persist_cost_us, persist_us
        As in `Word`, over all ranks.
    troubled : int or None
        The first rank whose writing to storage failed.
    differs : bool
        What ranks had in common is not the same any more.
    index : int
        Number of the exchange, from 0.
    """

    step: int | None
    settled: bool
    leaving: bool
    clock_ms: int = 0
    preempted: bool = False
    persist_idle: bool = True
    troubled: int | None = None
    persisted_step: int = -1
    cost_us: int = 0
    step_us: int = 0
    replicate_us: int = 0
    persist_cost_us: int = 0
    persist_us: int = 0
    wanted: bool = False
    changed: bool = False
    differs: bool = False
    index: int = field(default=0, compare=False)


class Decisions:
    """The exchanges of one Checkpointer. Training thread only; collective in the sense that every rank makes the same
    number.

    Parameters
    ----------
    comm : Communicator
        Private to decisions.
    run : str
        For error messages.
    deadline_s : float
        How long to wait for the slowest rank.
    """

    def __init__(self, comm: Communicator, *, run: str, deadline_s: float) -> None:
        self._comm = comm
        self._run = run
        self._deadline_s = deadline_s
        self._pending: tuple[np.ndarray, Request] | None = None
        self._last: Agreed | None = None
        self.count = 0

    def exchange(self, word: Word, *, poll: Callable[[], object] | None = None) -> Agreed | None:
        """Say where this rank is, and learn what all ranks said one exchange ago.

        Parameters
        ----------
        word : Word
            What this rank has to say.
        poll : callable, optional
            Called while waiting (drives replication where there is no background thread).

        Returns
        -------
        Agreed or None
            None at the first exchange.

        Raises
        ------
        StepMismatch
            Ranks were at different steps, or only some of them wanted theirs saved; raised on every rank.
        PeerLost, DeadlineExceeded
        """
        before = self.complete(poll=poll)
        values = _encode(word, self._comm.rank)
        self._pending = (values, self._comm.iallreduce_min(values))
        self.count += 1
        return before

    def complete(self, *, poll: Callable[[], object] | None = None) -> Agreed | None:
        """Wait for the exchange under way, and return what the last one said; None before the first."""
        if self._pending is None:
            return self._last
        values, request = self._pending
        wait([request], self._deadline_s, f"the decision of every rank on step {values[0]}", poll=poll)
        self._pending = None
        low, negative_high = int(values[0]), int(values[1])
        if low != _NOBODY and low != -negative_high:
            raise StepMismatch(
                f"ranks called step() with different numbers: from {low} to {-negative_high}", run=self._run, step=low
            )
        if int(values[2]) != 1 and int(values[3]) != 0:
            raise StepMismatch(f"some ranks called step({low}) with save=True, others without", run=self._run, step=low)
        self._last = replace(_decode(values), index=self.count - 1)
        return self._last


def _encode(word: Word, rank: int) -> np.ndarray:
    """As numbers whose minimum over all ranks says what is wanted of them."""
    leaving = word.step is None
    return np.array(
        [
            _NOBODY if word.step is None else word.step,
            _NOBODY if word.step is None else -word.step,
            leaving or word.wanted,
            -word.wanted,
            word.settled,
            not leaving,
            word.clock_ms,
            not word.preempted,
            word.persist_idle,
            rank if word.troubled else _NOBODY,
            -word.persisted_step,
            -word.cost_us,
            -word.step_us,
            -word.replicate_us,
            -word.persist_cost_us,
            -word.persist_us,
            -word.changed,
            _NOBODY if word.sample is None else word.sample,
            _NOBODY if word.sample is None else -word.sample,
        ],
        dtype=np.int64,
    )


def _decode(values: np.ndarray) -> Agreed:
    low, _, _, wanted, settled, staying, clock_ms, going_on, persist_idle, *rest = map(int, values)
    troubled, persisted, *durations, changed, sample_low, sample_high = rest
    cost_us, step_us, replicate_us, persist_cost_us, persist_us = (-d for d in durations)
    return Agreed(
        step=None if low == _NOBODY else low,
        settled=bool(settled),
        leaving=low == _NOBODY or not staying,
        clock_ms=clock_ms,
        preempted=not going_on,
        persist_idle=bool(persist_idle),
        troubled=None if troubled == _NOBODY else troubled,
        persisted_step=-persisted,
        wanted=wanted != 0,
        changed=changed != 0,
        differs=sample_low not in (_NOBODY, -sample_high),
        cost_us=cost_us,
        step_us=step_us,
        replicate_us=replicate_us,
        persist_cost_us=persist_cost_us,
        persist_us=persist_us,
    )
