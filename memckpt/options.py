"""What a user may choose, checked once and the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from memckpt.errors import UsageError
from memckpt.redundancy import Mirror


@dataclass(frozen=True)
class Options:
    """The settings of a Checkpointer that all ranks must share.

    Attributes
    ----------
    every : int
        Save each step that is a multiple of it.
    fresh : {"auto", True, False}
        Whether to start over: "auto" starts over only where this is no restart; True although there is memory; False
        never.
    on_error : {"warn", "raise"}
        What a save that did not commit does to training.
    on_busy : {"skip", "wait"}
        What a save does that falls due while the last one is under way.
    deadline_s : float
        Longest wait for a peer without a sign of life.
    max_unprotected : int or None
        Steps that may be taken after a restore before the base is protected again.
    bandwidth : float or None
        Bytes per second that one rank may send for replication; None spreads a save over half the interval between
        saves.
    """

    every: int
    fresh: bool | Literal["auto"]
    on_error: Literal["warn", "raise"]
    on_busy: Literal["skip", "wait"]
    deadline_s: float
    max_unprotected: int | None
    bandwidth: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise UsageError(f"every must be a whole number of steps, at least 1, not {self.every!r}")
        if self.fresh not in ("auto", True, False):
            raise UsageError(f'fresh must be "auto", True or False, not {self.fresh!r}')
        if self.on_error not in ("warn", "raise"):
            raise UsageError(f'on_error must be "warn" or "raise", not {self.on_error!r}')
        if self.on_busy not in ("skip", "wait"):
            raise UsageError(f'on_busy must be "skip" or "wait", not {self.on_busy!r}')
        if not self.deadline_s > 0 or math.isnan(self.deadline_s):
            raise UsageError(f"deadline must be a positive number of seconds, not {self.deadline_s!r}")
        if self.max_unprotected is not None and self.max_unprotected < 0:
            raise UsageError(f"max_unprotected must be a number of steps or None, not {self.max_unprotected!r}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"bandwidth must be a positive number of bytes per second or None, not {self.bandwidth!r}")


def copies_of(redundancy: Mirror | str, world: int) -> int:
    """Replicas that a `redundancy` means among `world` ranks.

    Raises
    ------
    UsageError
        It is neither "auto" nor a Mirror, or asks for more replicas than there are other ranks.
    """
    if redundancy == "auto":
        return min(1, world - 1)
    if not isinstance(redundancy, Mirror):
        raise UsageError(f'redundancy must be "auto" or memckpt.Mirror(k), not {redundancy!r}')
    if redundancy.copies > world - 1:
        raise UsageError(f"Mirror({redundancy.copies}) needs {redundancy.copies + 1} ranks, there are {world}")
    return redundancy.copies
