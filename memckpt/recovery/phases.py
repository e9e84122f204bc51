"""What the phases of a restore share: how long each takes, and the error for a state that is in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memckpt.errors import StateDamaged


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the wall time of a block to ``seconds[phase]``. Local."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - started


def damaged(why: str, run: str) -> StateDamaged:
    """The error for a live state that is neither the old nor the new one. Local."""
    return StateDamaged(
        f"the live state was overwritten in part and no good copy is left; it must not be trained on. {why}", run=run
    )
