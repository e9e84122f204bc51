"""What memckpt tells its user: how a restore went, and how saving goes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RestoreReport:
    """How a restore went, the same on every rank except for `seconds`.

    Attributes
    ----------
    step : int
        Step that training continues from; 0 where nothing was there.
    generation : int
        Counter of the generation that starts now.
    sources : tuple of str
        For each rank "own" (memory of its node), "peer" (memory of another node or rank), "storage" or "none".
    nbytes : int
        Bytes of all snapshots loaded.
    seconds : dict of str to float
        Wall time of this rank for each phase.
    rejected : tuple of str
        Candidates that were not taken, and why.
    protected : bool
        Whether every replica was there already; otherwise `Stats.protected` says when they are.
    saved_by : int
        Number of ranks that saved the step.
    """

    step: int
    generation: int
    sources: tuple[str, ...]
    nbytes: int
    seconds: dict[str, float]
    rejected: tuple[str, ...] = ()
    protected: bool = False
    saved_by: int = 0

    @property
    def source(self) -> str:
        """The farthest source any rank had to use: "none", "own", "peer" or "storage"."""
        return next((s for s in ("storage", "peer", "own") if s in self.sources), "none")


@dataclass
class Stats:
    """Counters of one Checkpointer, of this rank. Times are wall time in seconds.

    Attributes
    ----------
    step : int
        Last step that `step()` was called with.
    committed_step : int
        Newest step known here to be committed; -1 when there is none.
    persisted_step : int
        Newest step known here to be complete in storage; -1 when there is none.
    protected : bool
        A loss that the redundancy covers would cost at most the steps since `committed_step`.
    saves, commits, skipped, failed : int
        Saves begun, ended in yes, not begun since the last one was in flight, ended in no.
    persist_skipped, persist_failed : int
        Steps that were due to go to storage and did not: since the last one was being written, and by an error.
    blocked_s, last_blocked_s : float
        Training time spent in `step()` and in the fence, in all and for the last save.
    last_replicated_s, last_committed_s : float
        From `step()` until all that this rank sends and holds was sealed, and until the vote was known.
    lazy_nbytes, eager_nbytes : int
        Bytes of the last capture copied behind training and before `step()` returned.
    memory_nbytes : int
        Bytes of every slot of this rank.
    populate_s : float
        Time spent making new slots ready.
    errors : list of str
        Saves that failed and why, newest last; the last 20.
    """

    step: int = 0
    committed_step: int = -1
    persisted_step: int = -1
    protected: bool = False
    saves: int = 0
    commits: int = 0
    skipped: int = 0
    failed: int = 0
    persist_skipped: int = 0
    persist_failed: int = 0
    blocked_s: float = 0.0
    last_blocked_s: float = 0.0
    last_replicated_s: float = 0.0
    last_committed_s: float = 0.0
    lazy_nbytes: int = 0
    eager_nbytes: int = 0
    memory_nbytes: int = 0
    populate_s: float = 0.0
    errors: list[str] = field(default_factory=list)
