"""Checkpoints in memory, on this node and its buddies, for training runs that must go on after a failure."""

from __future__ import annotations

from memckpt.checkpointer import Checkpointer
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
from memckpt.redundancy import Mirror
from memckpt.reports import RestoreReport, Stats
from memckpt.resilient import Context, run
from memckpt.state import RNG

__version__ = "0.1.0"

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
    "ProtocolError",
    "RestoreReport",
    "RunInUse",
    "SaveFailed",
    "StateDamaged",
    "StateError",
    "Stats",
    "StepMismatch",
    "UsageError",
    "run",
]
