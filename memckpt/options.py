"""What a user may choose, checked once and the same on every rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memckpt.errors import UsageError
from memckpt.policy import describe
from memckpt.policy.preserve import PreservePolicy, parse_keep
from memckpt.policy.save import SavePolicy, parse
from memckpt.redundancy import Mirror


@dataclass(frozen=True, init=False, repr=False)
class Persist:
    """Where committed snapshots go besides memory, how often, and what is kept there.

    Parameters
    ----------
    target : str or path
        A directory on storage that every rank sees, or a URL that fsspec knows (``s3://bucket/prefix``). The run's
        checkpoints lie in a directory of its name below it.
    every : int, str or SavePolicy
        Steps, a time ("15min"), "auto", "continuous" or a policy of `memckpt.policy.save`. A step that falls due is
        saved for this even where the memory tier would not have saved it. While the last one is still being written,
        the next is skipped, counted and told.
    keep : int, PreservePolicy or None
        What is not pruned once a newer checkpoint is complete: so many, or what a policy of `memckpt.policy.preserve`
        says; None keeps all. The newest complete one always stays.
    bandwidth : float, optional
        Most bytes per second that a node writes.
    deadline : float
        Seconds for one checkpoint, retries and waiting for the slowest rank included. Then the error is told.
    stagger : float, optional
        Seconds over which ranks begin one after another, so that thousands do not come at once. Default: a fiftieth
        of a second for each rank where there are more than 16, at most half a minute.

    storage_options : mapping, optional
        What fsspec passes on to the file system of a URL, such as an endpoint; never shown.

    Raises
    ------
    UsageError
        One of them is not valid.
    """

    target: str
    every: SavePolicy
    keep: PreservePolicy
    bandwidth: float | None
    deadline_s: float
    stagger_s: float | None
    storage_options: Mapping[str, Any] | None

    def __init__(
        self,
        target: str | os.PathLike[str],
        every: int | str | SavePolicy = "15min",
        keep: int | PreservePolicy | None = None,
        *,
        bandwidth: float | None = None,
        deadline: float = 3600.0,
        stagger: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not os.fspath(target):
            raise UsageError("Persist(target) takes a directory or a URL, not nothing")
        if bandwidth is not None and not bandwidth > 0:
            raise UsageError(f"bandwidth must be a positive number of bytes per second or None, not {bandwidth!r}")
        if not 0 < deadline < math.inf:
            raise UsageError(f"deadline must be a positive number of seconds, not {deadline!r}")
        if stagger is not None and not 0 <= stagger < math.inf:
            raise UsageError(f"stagger must be a number of seconds or None, not {stagger!r}")
        for field, value in {
            "target": os.fspath(target),
            "every": parse(every),
            "keep": parse_keep(keep),
            "bandwidth": bandwidth,
            "deadline_s": float(deadline),
            "stagger_s": stagger,
            "storage_options": storage_options,
        }.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return (
            f"Persist({self.target!r}, every={describe(self.every)}, keep={describe(self.keep)}, "
            f"bandwidth={self.bandwidth}, deadline={self.deadline_s}, stagger={self.stagger_s})"
        )


@dataclass(frozen=True)
class Options:
    """The settings of a Checkpointer that all ranks must share.

    Attributes
    ----------
    every : SavePolicy
        When to save to memory.
    persist : Persist or None
        When and where to save to storage.
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
    grace_s : float
        Seconds from a SIGTERM to the end of the process at the latest.
    """

    every: SavePolicy
    persist: Persist | None
    fresh: bool | Literal["auto"]
    on_error: Literal["warn", "raise"]
    on_busy: Literal["skip", "wait"]
    deadline_s: float
    max_unprotected: int | None
    bandwidth: float | None
    grace_s: float

    def described(self) -> dict[str, str]:
        """Every setting in words that are the same on every rank. Local."""
        return {name: describe(getattr(self, name)) for name in self.__dataclass_fields__}

    def __post_init__(self) -> None:
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
        if not 0 < self.grace_s < math.inf:
            raise UsageError(f"grace must be a positive number of seconds, not {self.grace_s!r}")


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
