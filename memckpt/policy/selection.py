"""Choosing what may be removed, by a policy that may be a user's own and is not trusted.

Oldest first means as a recovery ranks them: by generation, then by step; so after a rollback the history that was left
counts as older.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from memckpt.errors import UsageError
from memckpt.policy.base import describe


@dataclass(frozen=True)
class CheckpointInfo:
    """One complete checkpoint.

    Attributes
    ----------
    step : int
    created_s : float
        Unix time in seconds.
    nbytes : int
        Bytes of all its shards.
    tier : {"memory", "storage"}
    generation : int
        Counter of the generation that saved it.
    metrics : mapping of str to float, or None
        What the user said of this step.
    """

    step: int
    created_s: float
    nbytes: int
    tier: Literal["memory", "storage"]
    generation: int = 0
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class PreserveContext:
    """What a policy may want to know beside the checkpoints.

    Attributes
    ----------
    now_s : float
        Unix time in seconds.
    tier : {"memory", "storage"}
    nbytes_total : int
        Bytes of all the checkpoints.
    free_nbytes : int or None
        Bytes still free where they lie; None where that is not known (object stores).
    """

    now_s: float
    tier: Literal["memory", "storage"]
    nbytes_total: int = 0
    free_nbytes: int | None = None


@runtime_checkable
class PreservePolicy(Protocol):
    """Says which checkpoints are to be kept. Any class with this method is one; there is no need to inherit."""

    @abstractmethod
    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: PreserveContext) -> Sequence[bool]:
        """For each of the checkpoints, oldest first, whether to keep it. Local, pure.

        The newest one is kept whatever the policy says.
        """


def select(
    policy: PreservePolicy, checkpoints: Iterable[CheckpointInfo], *, context: PreserveContext
) -> list[CheckpointInfo]:
    """Choose what is to be removed. Local; removes nothing itself.

    Parameters
    ----------
    policy : PreservePolicy
        May be a user's own class.
    checkpoints : iterable of CheckpointInfo
        The complete checkpoints of one tier, in any order; a torn one must not be among them, or it could pass for the
        newest.
    context : PreserveContext

    Returns
    -------
    list of CheckpointInfo
        Oldest first. Never the newest one (of the newest generation, the newest step), whatever the policy says.

    Raises
    ------
    UsageError
        The policy raised something, or returned something else than one bool for each checkpoint: nothing may be
        removed.
    """
    ordered = tuple(sorted(checkpoints, key=lambda checkpoint: (checkpoint.generation, checkpoint.step)))
    if not ordered:
        return []
    flags = answers(policy, ordered, context)
    return [checkpoint for checkpoint, keep in zip(ordered[:-1], flags[:-1], strict=True) if not keep]


def answers(policy: PreservePolicy, checkpoints: Sequence[CheckpointInfo], context: PreserveContext) -> list[bool]:
    """What a policy says, checked. Local; raises UsageError with the policy's name as `select`."""
    try:
        flags = list(policy.should_preserve(checkpoints, context=context))
    except Exception as error:
        raise UsageError(f"{describe(policy)}.should_preserve failed: {type(error).__name__}: {error}") from error
    if len(flags) != len(checkpoints):
        raise UsageError(
            f"{describe(policy)}.should_preserve returned {len(flags)} answers for {len(checkpoints)} checkpoints"
        )
    for flag in flags:
        if not isinstance(flag, (bool, np.bool_)):
            raise UsageError(f"{describe(policy)}.should_preserve must answer with bools, not {flag!r}")
    return flags
