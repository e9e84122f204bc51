"""When to save: policies of steps, of time and of events, and their combinations.

Names and meanings are those of Orbax where it has them, with these differences. `EveryNSteps` is Orbax's
``FixedIntervalPolicy``, and `FixedInterval` counts seconds. Time counts from the *end* of the previous save, where
Orbax compares the times of the two steps; so it cannot be over before the save is. And no rank asks another, since what
they decide by was agreed before.

A step that was saved is not saved again. Step-counted policies fall due whatever is under way: whether such a save is
skipped or waited for is the Checkpointer's `on_busy`. Time-based ones do not fall due while a save is under way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memckpt.errors import UsageError
from memckpt.policy.adaptive import Adaptive
from memckpt.policy.base import (
    SaveContext,
    SaveInfo,
    SavePolicy,
    check_seconds,
    check_whole,
    checked_steps,
    contains,
    describe,
)

__all__ = [
    "Adaptive",
    "AllOf",
    "AnyOf",
    "Continuous",
    "EveryNSteps",
    "FixedInterval",
    "Initial",
    "Preemption",
    "SaveContext",
    "SaveInfo",
    "SavePolicy",
    "SpecificSteps",
    "parse",
]

_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d)\s*")
_UNIT_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class EveryNSteps(SavePolicy):
    """Save each step that is a multiple of `n`; raises UsageError if `n` is no whole number of at least 1."""

    n: int

    def __post_init__(self) -> None:
        check_whole("EveryNSteps(n)", self.n)

    def __str__(self) -> str:
        return "every step" if self.n == 1 else f"every {self.n} steps"

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether `step` is a multiple. Local, pure."""
        return step % self.n == 0 and not _is_saved(step, previous)


@dataclass(frozen=True)
class FixedInterval(SavePolicy):
    """Save at the first step, and then at the first one that ends `seconds` or more after the end of the last save.

    The first save is not put off, so that what cannot be saved is found at once. Raises UsageError if `seconds` is not
    positive.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("FixedInterval(seconds)", self.seconds)

    def __str__(self) -> str:
        return f"every {self.seconds:g} s"

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether the last save ended that long ago. Local, pure."""
        return _is_past(self.seconds, step, previous, context)


@dataclass(frozen=True)
class Continuous(SavePolicy):
    """Save as often as possible: the next save starts at the first step after the last one has ended.

    Parameters
    ----------
    minimum_interval_secs : float, optional
        Seconds that have to pass from the end of a save to the start of the next; in Orbax, from the time of
        the last checkpoint.

    Raises
    ------
    UsageError
        It is not positive.
    """

    minimum_interval_secs: float | None = None

    def __post_init__(self) -> None:
        if self.minimum_interval_secs is not None:
            check_seconds("Continuous(minimum_interval_secs)", self.minimum_interval_secs)

    def __str__(self) -> str:
        pause = self.minimum_interval_secs
        return "continuously" if pause is None else f"continuously, with {pause:g} s between two saves"

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether no save is under way and the minimum has passed. Local, pure."""
        return _is_past(self.minimum_interval_secs or 0.0, step, previous, context)


@dataclass(frozen=True)
class SpecificSteps(SavePolicy):
    """Save the steps listed (any iterable of step numbers; a range stays one); raises UsageError for other things."""

    steps: Iterable[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_steps("SpecificSteps(steps)", self.steps))

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether `step` is listed. Local, pure."""
        assert isinstance(self.steps, (range, tuple))
        return contains(self.steps, step) and not _is_saved(step, previous)


@dataclass(frozen=True)
class Preemption(SavePolicy):
    """Save when some rank was told to stop, at every step from then on; the Checkpointer stops at the first."""

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether the job is being stopped. Local, pure."""
        return context.preempted and not _is_saved(step, previous)


@dataclass(frozen=True)
class Initial(SavePolicy):
    """Save once as soon as possible after each start and each restore: due from the first step until a save began."""

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether this generation has not saved yet. Local, pure."""
        return not any(save.step >= context.first_step for save in previous)


@dataclass(frozen=True, init=False, repr=False)
class AnyOf(SavePolicy):
    """Save when any of the policies would: ``AnyOf(1000, "15min", Preemption())``; each may be what `parse` takes."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: int | str | SavePolicy) -> None:
        object.__setattr__(self, "policies", _parts("AnyOf", policies))

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(describe, self.policies))})"

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether any of them says so. Local, pure."""
        return any(policy.should_save(step, previous, context=context) for policy in self.policies)


@dataclass(frozen=True, init=False, repr=False)
class AllOf(SavePolicy):
    """Save when all of the policies would: ``AllOf(100, "1min")``; each may be what `parse` takes."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: int | str | SavePolicy) -> None:
        object.__setattr__(self, "policies", _parts("AllOf", policies))

    def __repr__(self) -> str:
        return f"AllOf({', '.join(map(describe, self.policies))})"

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether all of them say so. Local, pure."""
        return all(policy.should_save(step, previous, context=context) for policy in self.policies)


def parse(every: int | str | SavePolicy) -> SavePolicy:
    """The policy that an `every` means. Local, pure.

    Parameters
    ----------
    every : int, str or SavePolicy
        Steps; a time such as ``"30s"``, ``"15min"``, ``"2h"`` or ``"1d"``; ``"auto"`` for `Adaptive`; ``"continuous"``
        for `Continuous`; or a policy, which is returned as it is.

    Raises
    ------
    UsageError
        It is nothing of that.
    """
    if isinstance(every, SavePolicy):
        return every
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return EveryNSteps(every)
    if isinstance(every, str):
        if every == "auto":
            return Adaptive()
        if every == "continuous":
            return Continuous()
        if (match := _TIME.fullmatch(every)) and float(match[1]) > 0:
            return FixedInterval(float(match[1]) * _UNIT_S[match[2]])
    raise UsageError(
        'every takes a number of steps (100), a time ("30s", "15min", "2h", "1d"), "auto", "continuous" or a save '
        f"policy, not {every!r}"
    )


def _parts(name: str, policies: Sequence[int | str | SavePolicy]) -> tuple[SavePolicy, ...]:
    if not policies:
        raise UsageError(f"{name} takes at least one policy")
    return tuple(parse(policy) for policy in policies)


def _is_saved(step: int, previous: Sequence[SaveInfo]) -> bool:
    return bool(previous) and previous[-1].step == step


def _is_past(seconds: float, step: int, previous: Sequence[SaveInfo], context: SaveContext) -> bool:
    """Whether the last save ended, at another step, and `seconds` have passed since; or there was none."""
    if not previous:
        return True
    ended_s = previous[-1].ended_s
    return ended_s is not None and not _is_saved(step, previous) and context.now_s - ended_s >= seconds
