"""The demonstration's own memory: losing a pretended node, and clearing up at the end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from memckpt.memory.arena import default_base


def _root() -> Path:
    return Path(default_base()) / f"memckpt-{os.getuid()}"


def wipe(node: str) -> None:
    """Lose all memory of a pretended `node`, whatever state it is in, as a power failure would. Local."""
    shutil.rmtree(_root() / node, ignore_errors=True)


def left(nodes: list[str]) -> list[Path]:
    """What lies in the memory of `nodes`. Local."""
    return [path for node in nodes for path in sorted((_root() / node).rglob("*"))]
