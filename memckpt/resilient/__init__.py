"""Training that goes on inside the job when a process is lost: `run`, its `Context`, and what is current."""

from __future__ import annotations

from memckpt.resilient.context import Context, Failure, current
from memckpt.resilient.roster import Loss, Place, RunFailed
from memckpt.resilient.run import run
from memckpt.resilient.world import has_ulfm

__all__ = ["Context", "Failure", "Loss", "Place", "RunFailed", "current", "has_ulfm", "run"]
