"""What a save costs training, from the durations of steps with and without one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_QUIET_KEPT = 64
_QUIET_NEEDED = 5
_SAVES_KEPT = 9
_SAVES_NEEDED = 3
_HEAD = 16
_TAIL_KEPT = 64


@dataclass
class _Run:
    """The steps that one save touches. The first ones differ from each other (eager copy, lazy copy, sending) and are
    kept each by its place; the others are alike, and a sample of them is enough.
    """

    head: list[float] = field(default_factory=list)
    tail: deque[float] = field(default_factory=lambda: deque(maxlen=_TAIL_KEPT))
    steps: int = 0
    blocked_s: float = 0.0

    def add(self, work_s: float, blocked_s: float) -> None:
        self.steps += 1
        self.blocked_s += blocked_s
        (self.head if len(self.head) < _HEAD else self.tail).append(work_s)


@dataclass(frozen=True)
class _Excess:
    """What the steps of one save took beyond quiet ones: blocked, in each of its first steps, in all the others."""

    blocked_s: float
    head_s: list[float]
    tail_s: float


class StepCosts:
    """Estimates the usual step without a save, and what one save costs. Local; one observation for each step.

    A save's cost has two parts. What it *blocks* is measured directly, less what steps without a save block. What it
    *slows down* is the sum over the steps it touches of their time beyond the usual: for each place in a save (its
    first step, its second, ...) the median over the last saves, so that evaluations, stalls and other things that hit a
    step now and then do not count, even if they hit every save somewhere.

    Memory and time are bounded: the last 64 quiet steps and 9 saves are kept. Saves before the fifth quiet step count
    for nothing; the cost is known three saves later. What the clocks of two ranks say differs, so the ranks have to
    agree on the numbers (the slowest) before they decide by them.
    """

    def __init__(self) -> None:
        self._quiet_step: deque[float] = deque(maxlen=_QUIET_KEPT)
        self._quiet_work: deque[float] = deque(maxlen=_QUIET_KEPT)
        self._quiet_blocked: deque[float] = deque(maxlen=_QUIET_KEPT)
        self._run = _Run()
        self._run_fenced = False
        self._newest: tuple[float, float] | None = None  # not in the run yet: it may turn out to begin the next
        self._saves: deque[_Excess] = deque(maxlen=_SAVES_KEPT)
        self._step_s: float | None = None
        self._cost_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds of the usual step without a save; None until five were seen."""
        return self._step_s

    @property
    def cost_s(self) -> float | None:
        """Seconds of training time that one save costs, never negative; None until three saves were compared."""
        return self._cost_s

    def observe(self, step_s: float, *, blocked_s: float, saving: bool, fenced: bool) -> None:
        """Tell of one step.

        Parameters
        ----------
        step_s : float
            Seconds from the end of `Checkpointer.step` to the end of the next call of it.
        blocked_s : float
            Part of it that memckpt held training: in that call and at the fence.
        saving : bool
            A save was under way at any moment of it, or began at its end.
        fenced : bool
            A save passed its fence in it: the step after the one at whose end that save began. It tells two saves apart
            that follow each other without a quiet step between.
        """
        work_s = step_s - blocked_s
        if saving:
            if fenced and self._run_fenced:
                self._close_run()
            self._take_newest()
            self._newest = (work_s, blocked_s)
            self._run_fenced = self._run_fenced or fenced
            return
        self._take_newest()
        self._close_run()
        self._quiet_step.append(step_s)
        self._quiet_work.append(work_s)
        self._quiet_blocked.append(blocked_s)
        if len(self._quiet_step) >= _QUIET_NEEDED:
            self._step_s = median(self._quiet_step)

    def _take_newest(self) -> None:
        if self._newest is not None:
            self._run.add(*self._newest)
            self._newest = None

    def _close_run(self) -> None:
        run, self._run, self._run_fenced = self._run, _Run(), False
        if run.steps == 0 or len(self._quiet_work) < _QUIET_NEEDED:
            return
        usual_s = median(self._quiet_work)
        self._saves.append(
            _Excess(
                max(0.0, run.blocked_s - run.steps * median(self._quiet_blocked)),
                [work_s - usual_s for work_s in run.head],
                (run.steps - len(run.head)) * (median(run.tail) - usual_s) if run.tail else 0.0,
            )
        )
        if len(self._saves) >= _SAVES_NEEDED:
            self._cost_s = self._estimate()

    def _estimate(self) -> float:
        places = max(len(save.head_s) for save in self._saves)
        slowed_s = sum(
            median(save.head_s[place] if place < len(save.head_s) else 0.0 for save in self._saves)
            for place in range(places)
        )
        slowed_s += median(save.tail_s for save in self._saves)
        return median(save.blocked_s for save in self._saves) + max(0.0, slowed_s)
