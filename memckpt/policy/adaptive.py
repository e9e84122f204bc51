"""The save interval from what a save costs and how often something fails, for memory and for storage.

Sources: J. W. Young, CACM 17(9), 1974, doi:10.1145/361147.361115 (first order); J. T. Daly, FGCS 22(3), 2006,
doi:10.1016/j.future.2004.11.016 (higher order); N. H. Vaidya, IEEE TC 46(8), 1997, doi:10.1109/12.609281 (a save that
goes on behind training: the optimum depends on what it costs, not on how long it takes). Several levels: S. Di,
M. S. Bouguerra, L. Bautista-Gomez, F. Cappello, IPDPS 2014, doi:10.1109/IPDPS.2014.122; A. Moody, G. Bronevetsky,
K. Mohror, B. R. de Supinski, SC 2010, doi:10.1109/SC.2010.18; A. Benoit, A. Cavelan, V. Le Fèvre, Y. Robert, H. Sun,
IEEE TC 66(7), 2017, doi:10.1109/TC.2016.2643660 (to first order each level has its own optimum, from its own cost and
rate of failures).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memckpt.policy.base import SaveContext, SaveInfo, SavePolicy, check_seconds, check_share

# Until the cost is known: steps from one save to the next, so that some between them are free of both.
_LEARNING_STEPS = 8
# Afterwards: once in so many steps, a save waits for so many steps after the last, so that what a step takes without
# one stays known where saves would otherwise follow each other closely.
_WINDOW_STEPS = 32
_QUIET_STEPS = 3


@dataclass(frozen=True)
class Adaptive(SavePolicy):
    """Save as often as is worth it, and never for more than `max_overhead` of the training time.

    From the start of a save to the start of the next lie the save's own cost and the longer of two times:
    ``cost / max_overhead``, and the optimum of Young and Daly for that cost and the MTBF. The MTBF is the one given, or
    the one observed once there was a failure (training time by failures); without either, `max_overhead` alone decides.
    No save starts while the last one is under way: the pause after its end is what its duration has left of the
    interval, so a save paced over half the interval does not make the interval longer. A save that takes longer than
    the interval is followed by the next at the first step after its end.

    The first save is at the first step. While the cost is not known, a save starts every eighth step, or later if that
    leaves more than half of the time to saves: at twice the usual duration. `StepCosts` knows the cost after about five
    saves. From then on, once in 32 steps, three steps pass after the end of a save before the next one, for comparison.

    Parameters
    ----------
    max_overhead : float
        Added training time, as a share of the training time without saves; above 0, at most 1. It holds for each tier.
    mtbf_s : float, optional
        Mean time between failures of the whole job, in seconds; default: as observed.
    uncovered : float
        Share of failures that memory does not cover (an owner and all its buddies at once), for the storage tier; above
        0, at most 1. The default is a guess, and it need not be good: the interval goes with its root, so a guess
        that is wrong by a factor of four doubles or halves it and adds a quarter to the waste.

    Raises
    ------
    UsageError
        A number out of its bounds.
    """

    max_overhead: float = 0.01
    mtbf_s: float | None = None
    uncovered: float = 0.1

    def __post_init__(self) -> None:
        check_share("Adaptive(max_overhead)", self.max_overhead)
        check_share("Adaptive(uncovered)", self.uncovered)
        if self.mtbf_s is not None:
            check_seconds("Adaptive(mtbf_s)", self.mtbf_s)

    def __str__(self) -> str:
        return f"as often as {self.max_overhead:.3g} of the training time allows"

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether to save, or with ``context.tier == "storage"`` to persist, now; see the class. Local, pure."""
        in_memory = context.tier == "memory"
        if not previous:
            return True
        last = previous[-1]
        if last.ended_s is None or last.step == step:
            return False
        cost_s = context.cost_s if in_memory else context.persist_cost_s
        if cost_s is None and step - last.step < _LEARNING_STEPS:
            return False
        compares = context.step_s is not None and step // _WINDOW_STEPS != last.step // _WINDOW_STEPS
        if compares and context.now_s - last.ended_s < _QUIET_STEPS * (context.step_s or 0.0):
            return False
        every_s = self.save_every_s(context) if in_memory else self.persist_every_s(context)
        return context.now_s - last.started_s >= every_s

    def save_every_s(self, context: SaveContext) -> float:
        """Seconds from the start of one save to the start of the next, in the memory tier. Local, pure."""
        return self._every_s(context.cost_s, context.replicate_s, self._mtbf_s(context))

    def persist_every_s(self, context: SaveContext) -> float:
        """Seconds from the start of one persist to the start of the next, never while one is under way. Local, pure.

        As `save_every_s`, from the cost of persisting and the time between failures that memory does not cover:
        ``MTBF / uncovered``. 0 means now: nothing is known yet.
        """
        mtbf_s = self._mtbf_s(context)
        rarer_s = None if mtbf_s is None else mtbf_s / self.uncovered
        return self._every_s(context.persist_cost_s, context.persist_s, rarer_s)

    def _every_s(self, cost_s: float | None, duration_s: float | None, mtbf_s: float | None) -> float:
        if cost_s is None:
            return 2 * (duration_s or 0.0)
        shortest_s = cost_s / self.max_overhead
        return cost_s + (shortest_s if mtbf_s is None else max(shortest_s, optimum_s(cost_s, mtbf_s)))

    def _mtbf_s(self, context: SaveContext) -> float | None:
        if self.mtbf_s is not None:
            return self.mtbf_s
        return context.uptime_s / context.failures if context.failures > 0 else None


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """Training time between two saves that wastes least. Local, pure.

    Young's ``sqrt(2 cost MTBF)`` with Daly's terms for a cost that is not small; ``MTBF`` where the cost is at least
    twice that. The save's own cost is not in it: from start to start it is ``optimum + cost``.

    Parameters
    ----------
    cost_s : float
        Training time that one save costs, in seconds; not negative.
    mtbf_s : float
        Mean time between failures, in seconds; not negative.

    Returns
    -------
    float
        Seconds.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(cost_s / (2 * mtbf_s))
    return 2 * mtbf_s * root * (1 + root / 3 + root**2 / 9) - cost_s  # the first factor is Young's
