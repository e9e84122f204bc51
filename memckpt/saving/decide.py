"""The decision that all ranks take alike without waiting for each other: a reduction that runs one step behind.

Each exchange starts a small non-blocking minimum over all ranks and completes the one before it, so a rank waits only
for ranks that are more than a step behind. What a rank learns is therefore one step old, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memckpt.comm.base import Communicator, Request, wait
from memckpt.errors import StepMismatch

_NO_STEP = np.iinfo(np.int64).max  # neutral in the minimum: a closing rank has no step of its own


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
    """

    step: int | None
    settled: bool
    leaving: bool


class Decisions:
    """The exchanges of one generation. Training thread only; collective in the sense that every rank makes the same
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

    def exchange(self, step: int | None, *, settled: bool, poll: Callable[[], object] | None = None) -> Agreed | None:
        """Say where this rank is, and learn what all ranks said one exchange ago.

        Parameters
        ----------
        step : int or None
            Step of this rank; None when it is leaving.
        settled : bool
            This rank knows the outcome of the last save and could start the next.
        poll : callable, optional
            Called while waiting (drives replication where there is no background thread).

        Returns
        -------
        Agreed or None
            None at the first exchange.

        Raises
        ------
        StepMismatch
            Ranks were at different steps; raised on every rank.
        PeerLost, DeadlineExceeded
        """
        before = self.complete(poll=poll)
        leaving = step is None
        values = np.array(
            [_NO_STEP if step is None else step, _NO_STEP if step is None else -step, int(settled), int(not leaving)],
            dtype=np.int64,
        )
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
        low, high, settled, staying = (int(v) for v in values)
        if low == _NO_STEP:
            self._last = Agreed(None, bool(settled), True)
        elif low != -high:
            raise StepMismatch(
                f"ranks called step() with different numbers: from {low} to {-high}", run=self._run, step=low
            )
        else:
            self._last = Agreed(low, bool(settled), not staying)
        return self._last
