"""What a Checkpointer may find itself in, such as `memckpt.run`, told from above so that it imports nothing from
there.
"""

from __future__ import annotations

from typing import Any, Protocol

from memckpt.comm.base import Communicator


class Surroundings(Protocol):
    """One generation of a job that recovers without a relaunch.

    Attributes
    ----------
    generation : int
        How often this job has lost peers and gone on.
    had_commit : bool
        Some step was committed in an earlier generation of this job, as far as this process knows.
    """

    generation: int
    had_commit: bool

    def communicator(self) -> Communicator:
        """The ranks of this generation. Collective."""

    def register(self, checkpointer: Any) -> None:
        """Remember a Checkpointer, to abandon it when the generation ends by a failure."""

    def on_failure(self, error: BaseException) -> None:
        """A peer was lost; called once, from any thread."""

    def on_commit(self, step: int) -> None:
        """A step was committed; called from any thread."""


_current: Surroundings | None = None


def enter(surroundings: Surroundings | None) -> None:
    """Set what Checkpointers of this process find themselves in from now on; None to leave it."""
    global _current
    _current = surroundings


def current() -> Surroundings | None:
    """What this process finds itself in, if anything."""
    return _current
