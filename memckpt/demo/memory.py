"""The demonstration's own memory and storage: losing a pretended node, and looking at what is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from memckpt import storage
from memckpt.memory.arena import default_base
from memckpt.storage import checkpoints


def _root() -> Path:
    return Path(default_base()) / f"memckpt-{os.getuid()}"


def wipe(node: str) -> None:
    """Lose all memory of a pretended `node`, whatever state it is in, as a power failure would. Local."""
    shutil.rmtree(_root() / node, ignore_errors=True)


def left(nodes: list[str]) -> list[Path]:
    """What lies in the memory of `nodes`. Local."""
    return [path for node in nodes for path in sorted((_root() / node).rglob("*"))]


def newest_persisted(directory: Path, run: str) -> int | None:
    """Newest step of `run` that is complete in storage, None while there is none: found by looking there. Local."""
    complete = [s for s in checkpoints.scan(storage.open(directory), run) if s.complete]
    return max((s.step for s in complete), default=None)
