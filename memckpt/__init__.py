"""Checkpoints in memory, on this node and its buddies, for training runs that must go on after a failure."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memckpt.errors import (
    BudgetError,
    Closed,
    CorruptSnapshot,
    DeadlineExceeded,
    ForeignMemory,
    LayoutMismatch,
    MemckptError,
    NothingToRestore,
    PeerLost,
    ProtocolError,
    RunInUse,
    SaveFailed,
    StateDamaged,
    StateError,
    StepMismatch,
    UsageError,
)

if TYPE_CHECKING:
    from memckpt import policy
    from memckpt.checkpointer import Checkpointer
    from memckpt.options import Persist
    from memckpt.redundancy import Mirror
    from memckpt.reports import RestoreReport, Stats
    from memckpt.resilient.context import Context
    from memckpt.resilient.run import run
    from memckpt.state.rng import RNG

__version__ = "0.1.0"

# Loaded when first used: the command line needs no torch, and torch takes seconds to load.
_LAZY = {
    "RNG": "memckpt.state.rng",
    "Checkpointer": "memckpt.checkpointer",
    "Context": "memckpt.resilient.context",
    "Mirror": "memckpt.redundancy",
    "Persist": "memckpt.options",
    "RestoreReport": "memckpt.reports",
    "Stats": "memckpt.reports",
    "run": "memckpt.resilient.run",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "RNG",
    "BudgetError",
    "Checkpointer",
    "Closed",
    "Context",
    "CorruptSnapshot",
    "DeadlineExceeded",
    "ForeignMemory",
    "LayoutMismatch",
    "MemckptError",
    "Mirror",
    "NothingToRestore",
    "PeerLost",
    "Persist",
    "ProtocolError",
    "RestoreReport",
    "RunInUse",
    "SaveFailed",
    "StateDamaged",
    "StateError",
    "Stats",
    "StepMismatch",
    "UsageError",
    "policy",
    "run",
]
