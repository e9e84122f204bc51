"""What the logs of a job add up to: who trained which rank when, and whether two jobs are equal byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memckpt.demo.log import AnyEvent, Entered, Finished, Left, Restored, Started, Stepped


@dataclass
class Life:
    """One stay of one process in the training function, as one logical rank."""

    pid: int
    rank: int
    entered: Entered
    restored: Restored | None = None
    steps: list[Stepped] = field(default_factory=list)
    finished: Finished | None = None
    left: Left | None = None

    @property
    def last_step(self) -> int:
        """Last step that this life finished, or came back with; 0 before that."""
        if self.steps:
            return self.steps[-1].step
        return self.restored.step if self.restored else 0


@dataclass
class History:
    """All lives of a job, in the order in which they began."""

    processes: dict[int, Started]
    lives: list[Life]

    @classmethod
    def of(cls, events: Iterable[tuple[int, AnyEvent]]) -> History:
        """Sort the (pid, event) pairs of a `Follower` into lives. Local."""
        processes: dict[int, Started] = {}
        current: dict[int, Life] = {}
        lives: list[Life] = []
        for pid, event in events:
            if isinstance(event, Started):
                processes[pid] = event
            elif isinstance(event, Entered):
                current[pid] = Life(pid, event.rank, event)
                lives.append(current[pid])
            elif isinstance(event, Restored):
                current[pid].restored = event
            elif isinstance(event, Stepped):
                current[pid].steps.append(event)
            elif isinstance(event, Left):
                current[pid].left = event
            else:
                current[pid].finished = event
        return cls(processes, sorted(lives, key=lambda life: life.entered.at))

    def latest(self) -> dict[int, Life]:
        """The last life of each rank."""
        return {life.rank: life for life in self.lives}

    def before(self, at: float) -> list[Life]:
        """Lives that had begun by `at`."""
        return [life for life in self.lives if life.entered.at < at]

    def finished(self, ranks: int) -> bool:
        """Whether the last life of each of `ranks` ranks came to its end."""
        latest = self.latest()
        return len(latest) == ranks and all(life.finished for life in latest.values())


@dataclass
class Comparison:
    """How many values were compared, and what differs or is missing, in words."""

    losses: int = 0
    digests: int = 0
    final_nbytes: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Nothing differs and nothing is missing."""
        return not self.differences and self.final_nbytes > 0

    def steps(self, reference: Sequence[Life], lives: Sequence[Life], ranks: int, last: int) -> None:
        """Every loss and digest of `lives`, also of steps done twice, against the same rank and step in `reference`."""
        expected = {(life.rank, s.step): s for life in reference for s in life.steps}
        seen: set[tuple[int, int]] = set()
        for life in lives:
            for s in life.steps:
                wanted = expected.get((life.rank, s.step))
                seen.add((life.rank, s.step))
                self.losses += 1
                self.digests += 1
                if wanted is None:
                    self.differences.append(f"rank {life.rank} step {s.step}: not in the uninterrupted run")
                elif s.loss != wanted.loss:
                    self.differences.append(f"rank {life.rank} step {s.step}: loss {s.loss}, not {wanted.loss}")
                elif s.digest != wanted.digest:
                    self.differences.append(f"rank {life.rank} step {s.step}: the parameters differ")
        missing = {(r, s) for r in range(ranks) for s in range(1, last + 1)}
        self.differences += [f"rank {r} step {s}: never finished" for r, s in sorted(missing - seen)]
        self.differences += [
            f"rank {r} step {s}: not in the uninterrupted run's log" for r, s in sorted(missing - set(expected))
        ]

    def finals(self, reference: History, reference_log: Path, history: History, log: Path, ranks: int) -> None:
        """The last parameters and optimizer state of every rank, byte for byte."""
        expected, found = reference.latest(), history.latest()
        for rank in range(ranks):
            ours = found[rank].finished if rank in found else None
            theirs = expected[rank].finished if rank in expected else None
            if ours is None or theirs is None:
                self.differences.append(f"rank {rank}: no final state")
                continue
            got, want = (log / ours.final).read_bytes(), (reference_log / theirs.final).read_bytes()
            self.final_nbytes += len(got)
            if got != want:
                self.differences.append(f"rank {rank}: the final states differ ({len(got)} and {len(want)} bytes)")
