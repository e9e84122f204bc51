"""What a user may choose, checked once and the same on every rank."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memckpt.errors import UsageError
from memckpt.policy import describe
from memckpt.policy.base import check_seconds, check_whole, is_number
from memckpt.policy.preserve import PreservePolicy, parse_keep
from memckpt.policy.save import SavePolicy, parse
from memckpt.redundancy import Mirror


@dataclass(frozen=True, init=False, repr=False)
class Persist:
    """Where committed snapshots go besides memory, how often, and what is kept there.

    Parameters
    ----------
    target : str or path
        A directory on storage that every rank sees (``~`` is the home directory), or a URL that fsspec knows
        (``s3://bucket/prefix``). The run's checkpoints lie in a directory of its name below it.
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
        _check_bandwidth(bandwidth)
        check_seconds("deadline", deadline)
        if stagger is not None and not (is_number(stagger) and 0 <= stagger < math.inf):
            raise UsageError(f"stagger must be a number of seconds or None, not {stagger!r}")
        for field, value in {
            "target": _target(target),
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
    dedup : bool
        Whether ranks save what they have in common in parts.
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
    dedup: bool = False

    def described(self) -> dict[str, str]:
        """Every setting in words that are the same on every rank. Local."""
        return {name: describe(getattr(self, name)) for name in self.__dataclass_fields__}

    def __post_init__(self) -> None:
        if not (self.fresh == "auto" or isinstance(self.fresh, bool)):
            raise UsageError(f'fresh must be "auto", True or False, not {self.fresh!r}')
        if self.on_error not in ("warn", "raise"):
            raise UsageError(f'on_error must be "warn" or "raise", not {self.on_error!r}')
        if self.on_busy not in ("skip", "wait"):
            raise UsageError(f'on_busy must be "skip" or "wait", not {self.on_busy!r}')
        check_seconds("deadline", self.deadline_s)
        if self.max_unprotected is not None:
            check_whole("max_unprotected", self.max_unprotected, least=0)
        _check_bandwidth(self.bandwidth)
        check_seconds("grace", self.grace_s)
        if not isinstance(self.dedup, bool):
            raise UsageError(f"dedup must be True or False, not {self.dedup!r}")


def parse_persist(persist: object) -> Persist | None:
    """What a `persist` means: a directory or URL alone is a `Persist` of it. Local; raises UsageError."""
    return persist if persist is None or isinstance(persist, Persist) else Persist(persist)  # type: ignore[arg-type]


def _target(target: object) -> str:
    """A directory as an absolute path, so that it means the same on every rank and later; a URL as it is."""
    if not isinstance(target, (str, os.PathLike)) or not os.fspath(target):
        raise UsageError(f"persist takes a Persist, a directory or a URL, not {target!r}")
    where = os.fspath(target)
    return where if "://" in where else os.path.abspath(os.path.expanduser(where))


def _check_bandwidth(bandwidth: object) -> None:
    if bandwidth is not None and not (is_number(bandwidth) and bandwidth > 0):
        raise UsageError(f"bandwidth must be a positive number of bytes per second or None, not {bandwidth!r}")


def checked_step(step: object, *, least: int = 1) -> int:
    """A number of steps as an int, whatever kind of integer it is; raises UsageError for anything else."""
    try:
        whole = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        whole = -1
    check_whole("a step", whole if whole >= 0 else step, least=least)
    return whole


def checked_names(names: object, known: Collection[str]) -> frozenset[str]:
    """Names of objects of a state; raises UsageError for what is none."""
    if isinstance(names, str) or not isinstance(names, Collection) or not set(names) <= set(known):
        raise UsageError(f"leave takes names of objects in states ({', '.join(known)}), not {names!r}")
    return frozenset(names)


def checked_metrics(metrics: object) -> dict[str, float] | None:
    """Metrics as floats by name.

    Raises
    ------
    UsageError
        It is no mapping of names to numbers.
    """
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics takes a mapping of names to numbers, not {metrics!r}")
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise UsageError(f"metrics takes names and numbers, not {name!r}: {value!r}")
    return {name: float(value) for name, value in metrics.items()}


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
