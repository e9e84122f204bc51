"""Measures what saves cost training, from the time of its steps."""

from __future__ import annotations

from memckpt.policy.costs import StepCosts


class Meter:
    """The costs of both tiers on this rank. Training thread only.

    Attributes
    ----------
    memory, storage : StepCosts
    """

    def __init__(self) -> None:
        self.memory, self.storage = StepCosts(), StepCosts()
        self._was_saving = self._was_persisting = False

    def observe(self, step_s: float, blocked_s: float, *, fenced: bool, saving: bool, persisting: bool) -> None:
        """Take in one step of training.

        Parameters
        ----------
        step_s : float
            Seconds from the end of the last `Checkpointer.step` to the end of this one.
        blocked_s : float
            Part of it that was spent in memckpt.
        fenced : bool
            A save passed its fence in it.
        saving, persisting : bool
            A save, a write to storage, is under way now.
        """
        self.memory.observe(step_s, blocked_s=blocked_s, saving=saving or self._was_saving, fenced=fenced)
        self.storage.observe(step_s, blocked_s=0.0, saving=persisting or self._was_persisting, fenced=False)
        self._was_saving, self._was_persisting = saving, persisting


def microseconds(seconds: float | None) -> int:
    """For an exchange; 0 where nothing is known."""
    return 0 if seconds is None else max(0, int(1e6 * seconds))
