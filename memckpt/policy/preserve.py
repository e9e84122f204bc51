"""What to keep: policies over the complete checkpoints of one tier, oldest first.

Names and meanings are those of Orbax's preservation policies, except that `BestN` takes the name of a metric, and that
the newest checkpoint is kept by `select` whatever they say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from memckpt.errors import UsageError
from memckpt.policy.base import check_seconds, check_whole, checked_steps, contains, describe
from memckpt.policy.selection import CheckpointInfo, PreserveContext, PreservePolicy, answers, select

__all__ = [
    "AllOf",
    "AnyOf",
    "BestN",
    "CheckpointInfo",
    "CustomSteps",
    "EveryNSeconds",
    "EveryNSteps",
    "LatestDuration",
    "LatestN",
    "PreserveContext",
    "PreservePolicy",
    "parse_keep",
    "select",
]


@dataclass(frozen=True)
class LatestN(PreservePolicy):
    """Keep the newest `n`; None keeps all. Raises UsageError if `n` is no whole number of at least 1."""

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            check_whole("LatestN(n)", self.n)

    def __str__(self) -> str:
        return "all" if self.n is None else f"the newest {self.n}"

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True for the last `n`. Local, pure."""
        first = 0 if self.n is None else len(checkpoints) - self.n
        return [at >= first for at in range(len(checkpoints))]


@dataclass(frozen=True)
class EveryNSteps(PreservePolicy):
    """Keep a checkpoint every `interval_steps` steps.

    Parameters
    ----------
    interval_steps : int
    exact_interval : bool
        Keep the multiples of `interval_steps`. False keeps the oldest, and then each that is that many steps or more
        after the last one kept: for saves that are not counted in steps, such as timed and adaptive ones.

    Raises
    ------
    UsageError
        `interval_steps` is no whole number of at least 1.
    """

    interval_steps: int
    exact_interval: bool = True

    def __post_init__(self) -> None:
        check_whole("EveryNSteps(interval_steps)", self.interval_steps)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True for those that lie so far apart. Local, pure."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        if self.exact_interval:
            return [step % self.interval_steps == 0 for step in steps]
        return _spaced(steps, self.interval_steps)


@dataclass(frozen=True)
class EveryNSeconds(PreservePolicy):
    """Keep the oldest, and then each that was created `interval_secs` or more after the last one kept.

    Raises UsageError if `interval_secs` is not positive.
    """

    interval_secs: float

    def __post_init__(self) -> None:
        check_seconds("EveryNSeconds(interval_secs)", self.interval_secs)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True for those that lie so far apart. Local, pure."""
        return _spaced([checkpoint.created_s for checkpoint in checkpoints], self.interval_secs)


@dataclass(frozen=True)
class LatestDuration(PreservePolicy):
    """Keep those created in the last `seconds` before the newest one, which is not the same as before now.

    So a run that is taken up again after a long pause keeps what it had. Raises UsageError if `seconds` is not
    positive.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("LatestDuration(seconds)", self.seconds)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True for the young ones. Local, pure."""
        return [checkpoints[-1].created_s - checkpoint.created_s <= self.seconds for checkpoint in checkpoints]


@dataclass(frozen=True)
class CustomSteps(PreservePolicy):
    """Keep the steps listed (any iterable of step numbers; a range stays one); raises UsageError for other things."""

    steps: Iterable[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_steps("CustomSteps(steps)", self.steps))

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True for the steps listed. Local, pure."""
        assert isinstance(self.steps, (range, tuple))
        return [contains(self.steps, checkpoint.step) for checkpoint in checkpoints]


@dataclass(frozen=True)
class BestN(PreservePolicy):
    """Keep the `n` best by a metric; of equals, the newer.

    Parameters
    ----------
    n : int
    metric : str
        Key in `CheckpointInfo.metrics`.
    mode : {"min", "max"}
        What is better. NaN is worse than any number in both.
    keep_without_metrics : bool
        Also keep, uncounted, those of which this metric is not known (yet).

    Raises
    ------
    UsageError
        `n` is no whole number of at least 1, or `mode` is something else.
    """

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"
    keep_without_metrics: bool = True

    def __post_init__(self) -> None:
        check_whole("BestN(n)", self.n)
        if self.mode not in ("min", "max"):
            raise UsageError(f'BestN(mode) must be "min" or "max", not {self.mode!r}')

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True for the best. Local, pure."""
        values = [(checkpoint.metrics or {}).get(self.metric) for checkpoint in checkpoints]
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(
            (math.isnan(value), 0.0 if math.isnan(value) else sign * value, -at)
            for at, value in enumerate(values)
            if value is not None
        )
        best = {-minus_at for _, _, minus_at in ranked[: self.n]}
        return [at in best or (value is None and self.keep_without_metrics) for at, value in enumerate(values)]


@dataclass(frozen=True, init=False, repr=False)
class AnyOf(PreservePolicy):
    """Keep what any of the policies keeps: ``AnyOf(3, EveryNSteps(10_000))``; each may be what `parse_keep` takes."""

    policies: tuple[PreservePolicy, ...]

    def __init__(self, *policies: int | PreservePolicy) -> None:
        object.__setattr__(self, "policies", _parts("AnyOf", policies))

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(describe, self.policies))})"

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True where any of them says so. Local, pure; raises UsageError as `select`."""
        return _combined(any, self.policies, checkpoints, context)


@dataclass(frozen=True, init=False, repr=False)
class AllOf(PreservePolicy):
    """Keep what all of the policies keep; each may be what `parse_keep` takes."""

    policies: tuple[PreservePolicy, ...]

    def __init__(self, *policies: int | PreservePolicy) -> None:
        object.__setattr__(self, "policies", _parts("AllOf", policies))

    def __repr__(self) -> str:
        return f"AllOf({', '.join(map(describe, self.policies))})"

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """True where all of them say so. Local, pure; raises UsageError as `select`."""
        return _combined(all, self.policies, checkpoints, context)


def parse_keep(keep: int | PreservePolicy | None) -> PreservePolicy:
    """The policy that a `keep` means. Local, pure.

    Parameters
    ----------
    keep : int, PreservePolicy or None
        How many of the newest; None keeps all; or a policy, which is returned as it is.

    Raises
    ------
    UsageError
        It is nothing of that.
    """
    if keep is None or (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1):
        return LatestN(keep)
    if isinstance(keep, type):
        raise UsageError(f"keep takes a policy, not its class: {keep.__name__}(...)")
    if isinstance(keep, PreservePolicy):
        return keep
    raise UsageError(
        "keep takes a number of checkpoints, at least 1, None for all, or an object with "
        f"should_preserve(checkpoints, *, context), not {keep!r}"
    )


def _combined(
    combine: Callable[[Iterable[object]], bool],
    policies: Sequence[PreservePolicy],
    checkpoints: Sequence[CheckpointInfo],
    context: PreserveContext,
) -> list[bool]:
    said = [answers(policy, checkpoints, context) for policy in policies]
    return [combine(flags) for flags in zip(*said, strict=True)]


def _parts(name: str, policies: Sequence[int | PreservePolicy]) -> tuple[PreservePolicy, ...]:
    if not policies:
        raise UsageError(f"{name} takes at least one policy")
    return tuple(parse_keep(policy) for policy in policies)


def _spaced(places: Sequence[float], interval: float) -> list[bool]:
    """The first, and then each that is `interval` or more after the last one kept, or not after it.

    Not after it means that steps or the wall clock went back (a rollback, a clock that was set): a line of its own
    begins. Only what is kept counts for what follows, so removing as one goes and removing at the end leave the same.
    """
    kept: list[bool] = []
    last = math.nan
    for place in places:
        keep = not 0 < place - last < interval
        kept.append(keep)
        last = place if keep else last
    return kept
