"""Whole replicas on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from memckpt.errors import UsageError


@dataclass(frozen=True)
class Mirror:
    """Keep `copies` byte-identical replicas of each snapshot, each on another failure domain where there are enough.

    Parameters
    ----------
    copies : int
        Replicas beside the owner's snapshot; 0 keeps the owner's only, which survives processes but no node.

    Raises
    ------
    UsageError
        `copies` is no integer from 0 to 16.
    """

    copies: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.copies, int) or isinstance(self.copies, bool) or not 0 <= self.copies <= 16:
            raise UsageError(f"Mirror(copies) takes an integer from 0 to 16, not {self.copies!r}")
