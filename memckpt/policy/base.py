"""What a save policy is asked and told, and the checks that all policies share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from memckpt.errors import UsageError


@dataclass(frozen=True)
class SaveInfo:
    """One save of this generation, on the agreed clock.

    Attributes
    ----------
    step : int
    started_s, ended_s : float
        Seconds on the agreed monotonic clock. `ended_s` is None while the save is under way; it ended when it was
        committed or dropped.
    """

    step: int
    started_s: float
    ended_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """What all ranks have agreed on before they decide. Durations are seconds, None while unknown.

    Attributes
    ----------
    now_s : float
        The agreed monotonic clock: the slowest rank's; it never goes back.
    preempted : bool
        Some rank was told to stop.
    first_step : int
        The first step of this generation.
    step_s : float or None
        Usual duration of a step without a save.
    cost_s : float or None
        Training time that one save costs: what it blocks, and what it slows down.
    replicate_s : float or None
        Usual duration of a save until it is committed.
    persist_s, persist_cost_s : float or None
        The same two for the storage tier: its duration, and the training time that it costs.
    uptime_s : float
        How long this run has been training, over all its generations.
    failures : int
        Failures seen in that time.
    tier : {"memory", "storage"}
        Whose saves are asked for: `previous` are then the persists of the storage tier.
    """

    now_s: float
    preempted: bool = False
    first_step: int = 1
    step_s: float | None = None
    cost_s: float | None = None
    replicate_s: float | None = None
    persist_s: float | None = None
    persist_cost_s: float | None = None
    uptime_s: float = 0.0
    failures: int = 0
    tier: Literal["memory", "storage"] = "memory"


class SavePolicy(ABC):
    """Decides at which steps a save falls due.

    A policy of one's own must decide by its arguments and settings alone: no clock, no randomness, no state. Ranks
    compare `describe(policy)` at the start, so its settings have to show there.
    """

    @abstractmethod
    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """Whether to save now. Local, pure.

        Parameters
        ----------
        step : int
            Optimizer steps completed.
        previous : sequence of SaveInfo
            Saves of this generation, oldest first: at least the last one, if there was any.
        context : SaveContext

        Returns
        -------
        bool
        """


def describe(policy: object) -> str:
    """Name and settings of a policy, for comparing ranks and for messages. Local.

    That is its repr; for a class that has none of its own, its name and attributes, since the default one shows an
    address that differs on each rank.
    """
    if type(policy).__repr__ is not object.__repr__:
        return repr(policy)
    settings = ", ".join(f"{name}={value!r}" for name, value in sorted(getattr(policy, "__dict__", {}).items()))
    return f"{type(policy).__qualname__}({settings})"


def in_words(policy: object) -> str:
    """A policy for people to read: what it says of itself, else what `describe` says. Local."""
    return describe(policy) if type(policy).__str__ is object.__str__ else str(policy)


def check_whole(what: str, value: object, *, least: int = 1) -> None:
    """Refuse what is no whole number of at least `least`; raises UsageError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{what} must be a whole number, at least {least}, not {value!r}")


def check_seconds(what: str, value: object) -> None:
    """Refuse what is no positive, finite number of seconds; raises UsageError."""
    if not is_number(value) or not 0 < value < math.inf:
        raise UsageError(f"{what} must be a positive number of seconds, not {value!r}")


def check_share(what: str, value: object) -> None:
    """Refuse what is no number above 0 and at most 1; raises UsageError."""
    if not is_number(value) or not 0 < value <= 1:
        raise UsageError(f"{what} must be above 0 and at most 1, not {value!r}")


def checked_steps(what: str, steps: Iterable[int]) -> range | tuple[int, ...]:
    """Step numbers in a form that is the same on every rank: sorted, each once; a range stays one.

    Raises
    ------
    UsageError
        Something in it is no step number.
    """
    if isinstance(steps, range):
        return steps
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
        raise UsageError(f"{what} takes step numbers, not {steps!r}")
    listed = list(steps)
    for step in listed:
        check_whole(f"each step of {what}", step, least=0)
    return tuple(sorted(set(listed)))


def contains(steps: range | tuple[int, ...], step: int) -> bool:
    """Whether a step is in a sorted list of steps (or in a range)."""
    if isinstance(steps, range):
        return step in steps
    at = bisect_left(steps, step)
    return at < len(steps) and steps[at] == step


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
