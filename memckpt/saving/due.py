"""What falls due: the policies, asked with nothing but what all ranks agreed on, so that all ranks get one answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memckpt.policy.save import Adaptive, Continuous, FixedInterval, SaveContext, SaveInfo, SavePolicy
from memckpt.saving.decide import Agreed

_REMEMBERED = 64  # saves that a policy is shown


@dataclass(frozen=True)
class Due:
    """What a step is due for.

    Attributes
    ----------
    save : bool
        A snapshot.
    persist : bool
        That it goes to storage as well.
    refused : str
        Why it does not, though it is due.
    """

    save: bool
    persist: bool
    refused: str = ""


class Schedule:
    """The saves of one generation and what they are due by. Training thread only; the same on every rank.

    Parameters
    ----------
    every : SavePolicy
        Of the memory tier.
    persist : SavePolicy or None
        Of the storage tier.
    first_step : int
        The first that this generation may save.
    failures : int
        Failures that this job has seen.
    """

    def __init__(
        self,
        every: SavePolicy,
        persist: SavePolicy | None,
        *,
        first_step: int,
        failures: int = 0,
    ) -> None:
        self._every, self._persist = every, persist
        self._saves: list[SaveInfo] = []
        self._persists: list[SaveInfo] = []
        self._context = SaveContext(now_s=0.0, first_step=first_step, failures=failures)

    @property
    def names_steps(self) -> bool:
        """The storage tier may want just the steps that it names, so that one of them is worth waiting for; a policy
        that goes by time alone wants any step.
        """
        return not isinstance(self._persist, (FixedInterval, Continuous, Adaptive))

    @property
    def persisting(self) -> SaveInfo | None:
        """The step that is on its way to storage."""
        last = self._persists[-1] if self._persists else None
        return last if last is not None and last.ended_s is None else None

    def hear(self, agreed: Agreed, *, settled: bool, persisted: bool) -> None:
        """Learn what an exchange said.

        Parameters
        ----------
        settled : bool
            Every rank knows how the last save ended.
        persisted : bool
            No rank has anything left to write.
        """
        now_s = max(self._context.now_s, agreed.clock_ms / 1e3)
        self._context = replace(
            self._context,
            now_s=now_s,
            preempted=agreed.preempted,
            step_s=_seconds(agreed.step_us),
            cost_s=_seconds(agreed.cost_us),
            replicate_s=_seconds(agreed.replicate_us),
            persist_s=_seconds(agreed.persist_us),
            persist_cost_s=_seconds(agreed.persist_cost_us),
            uptime_s=now_s,
        )
        for infos, ended in ((self._saves, settled), (self._persists, persisted)):
            if ended and infos and infos[-1].ended_s is None:
                infos[-1] = replace(infos[-1], ended_s=now_s)

    def due(self, step: int) -> Due:
        """Whether `step` is to be saved, and persisted."""
        save = self._every.should_save(step, self._saves, context=self._context)
        in_storage = replace(self._context, tier="storage")
        if self._persist is None or not self._persist.should_save(step, self._persists, context=in_storage):
            return Due(save, False)
        if self.persisting is not None:
            return Due(save, False, f"step {self.persisting.step} is still being written")
        return Due(True, True)

    def began(self, step: int, *, persist: bool) -> None:
        """A save of `step` has begun."""
        info = SaveInfo(step, self._context.now_s)
        self._saves = [*self._saves[1 - _REMEMBERED :], info]
        if persist:
            self._persists = [*self._persists[1 - _REMEMBERED :], info]


def _seconds(microseconds: int) -> float | None:
    return microseconds / 1e6 if microseconds > 0 else None
