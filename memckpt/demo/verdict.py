"""What the observer concludes from the logs: what was lost, how long it took, and every reason not to believe it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from memckpt.demo.history import Comparison, History, Life

PHASES = ("detect", "leave", "regroup", "inventory", "plan", "verify", "fetch", "load")
MOST_LOST_STEPS = 2


@dataclass
class Recovery:
    """What was done to a job and what its logs say.

    Attributes
    ----------
    rank, pid : int
        The victim; in a relaunch the rank by which the moment was picked.
    at : float
        When the signal was sent, seconds since the epoch.
    before : list of Life
        Lives that had begun when the signal was sent.
    after : History
        Logs of the job that ended well: the same job, or the one started again.
    log : Path
        Where those lie.
    in_job : bool
        Whether the job itself went on.
    restarted_at : float
        When the job was started again; `at` within a job.
    persisted_step : int or None
        What the observer found to be the newest complete step in storage when all memory was lost; None where memory
        was left.
    """

    rank: int
    pid: int
    at: float
    before: list[Life]
    after: History
    log: Path
    in_job: bool
    restarted_at: float
    persisted_step: int | None = None

    @property
    def lives(self) -> list[Life]:
        """All lives, of both jobs in a relaunch."""
        return self.after.lives if self.in_job else self.before + self.after.lives

    @property
    def killed_in_step(self) -> int:
        """The step that the victim was in."""
        done = [s.step for life in self.before if life.rank == self.rank for s in life.steps if s.at <= self.at]
        return max(done, default=0) + 1

    def back(self) -> list[Life]:
        """The life of each rank that came back and went through to the end."""
        latest = self.after.latest()
        return [latest[rank] for rank in sorted(latest)]

    def lost_steps(self, recovered_step: int) -> int:
        """Steps that some rank had finished and every rank had to do again."""
        last = {life.pid: life for life in self.back()}.values()
        return max(0, max((life.last_step for life in self.lives if life not in last), default=0) - recovered_step)

    def seconds(self) -> dict[str, float]:
        """Wall time of each phase on the slowest rank.

        `detect` goes from the signal until the first survivor saw the loss, `leave` until all survivors had left their
        training, `regroup` until the training was entered again; the rest is what the restore report says. `verify` is
        the check of structure and seals on all ranks; the bytes' checksums are verified by `load`, in the same pass.
        `total` goes from the signal until every rank has its state back, `first_step` until every rank finished a step
        again. In a relaunch `detect` is the time until the job was started again, and `regroup` that of its start.
        """
        back = self.back()
        entered = max(life.entered.at for life in back)
        told = [life.restored.seconds for life in back if life.restored]
        phases = {name: max((t.get(name, 0.0) for t in told), default=0.0) for name in PHASES}
        phases["verify"] += max((t.get("check", 0.0) for t in told), default=0.0)
        if self.in_job:
            timelines = [life.entered.timeline for life in back]
            seen = [t["seen"] for t in timelines if t.get("seen", 0.0) >= self.at]
            phases["leave"] = max(t.get("gather", 0.0) for t in timelines)
            phases["regroup"] = max(t.get("regroup", 0.0) for t in timelines)
            phases["detect"] = (min(seen) if seen else entered - phases["leave"] - phases["regroup"]) - self.at
        else:
            phases["detect"] = self.restarted_at - self.at
            phases["regroup"] = entered - self.restarted_at
        phases["total"] = max(life.restored.at for life in back if life.restored) - self.at
        phases["first_step"] = max(life.steps[0].at for life in back if life.steps) - self.at
        return {name: round(value, 6) for name, value in phases.items()}

    def problems(self, active: int, recovered_step: int, lost_steps: int) -> list[str]:
        """What keeps the logs from proving that the job lost a rank and came back."""
        back = self.back()
        found = []
        if any(life.entered.at < self.at or life.restored is None for life in back):
            found.append("a rank did not restore after the failure")
        if len({life.restored.step for life in back if life.restored}) != 1:
            found.append("the ranks came back at different steps")
        if recovered_step <= 0:
            found.append("the training started over instead of coming back")
        if recovered_step >= max((life.steps[0].step for life in back if life.steps), default=0):
            found.append("no step was done after coming back")
        if self.persisted_step is None and lost_steps > MOST_LOST_STEPS:
            found.append(f"{lost_steps} finished steps were lost, more than {MOST_LOST_STEPS}")
        if self.persisted_step is not None and recovered_step != self.persisted_step:
            found.append(f"back at step {recovered_step}, while step {self.persisted_step} was complete in storage")
        if any(life.pid == self.pid for life in back):
            found.append(f"the victim, process {self.pid}, went on as if nothing had happened")
        if self.in_job:
            was = {life.rank: life.pid for life in self.before}
            found += [
                f"rank {life.rank} changed from process {was[life.rank]} to {life.pid} though it was not the victim"
                for life in back
                if life.rank != self.rank and was.get(life.rank) != life.pid
            ]
        return found + self._wrong_sources()

    def _wrong_sources(self) -> list[str]:
        sources = {life.rank: life.restored.source for life in self.back() if life.restored}
        right = ("own", "peer") if self.persisted_step is None else ("storage",)
        wrong = ", ".join(f"rank {rank}: {source}" for rank, source in sources.items() if source not in right)
        if self.persisted_step is not None:
            return [f"all memory was lost, and yet state came from elsewhere than storage ({wrong})"] if wrong else []
        found = [f"state that came neither from own nor from a peer's memory ({wrong})"] if wrong else []
        if self.source != "peer":
            found.append(f"the lost rank's state came from {self.source!r}, not from a peer")
        return found

    @property
    def source(self) -> str:
        """Where the lost rank's state came from; in a relaunch the farthest that any rank had to go."""
        sources = {life.rank: life.restored.source for life in self.back() if life.restored}
        if self.in_job:
            return sources.get(self.rank, "none")
        return next((s for s in ("storage", "peer", "own") if s in sources.values()), "none")


class Verdict(msgspec.Struct, frozen=True):
    """The result, as ``--json`` prints it; `proved` is true only if there are no `problems`."""

    run: str
    scenario: str
    seed: int
    steps: int
    ranks: int
    signal: str
    victim_rank: int
    victim_pid: int
    killed_at_step: int
    recovered_step: int
    lost_steps: int
    source: str
    sources: list[str]
    bitwise_equal: bool
    compared: dict[str, int]
    seconds: dict[str, float]
    elapsed_s: float
    proved: bool
    problems: list[str] = field(default_factory=list)
    persisted_step: int | None = None


def conclude(
    run: str,
    scenario: str,
    seed: int,
    steps: int,
    signal: str,
    active: int,
    recovery: Recovery,
    comparison: Comparison,
    elapsed_s: float,
) -> Verdict:
    """Put logs and comparison together. Local."""
    back = recovery.back()
    recovered = min((life.restored.step for life in back if life.restored), default=0)
    lost = recovery.lost_steps(recovered)
    problems = recovery.problems(active, recovered, lost) + comparison.differences[:20]
    return Verdict(
        run=run, scenario=scenario, seed=seed, steps=steps, ranks=active, signal=signal,
        victim_rank=recovery.rank, victim_pid=recovery.pid, killed_at_step=recovery.killed_in_step,
        recovered_step=recovered, lost_steps=lost, source=recovery.source,
        sources=[life.restored.source if life.restored else "none" for life in back],
        bitwise_equal=comparison.equal,
        compared={"losses": comparison.losses, "digests": comparison.digests, "final_nbytes": comparison.final_nbytes},
        seconds=recovery.seconds(), elapsed_s=round(elapsed_s, 3),
        proved=not problems and comparison.equal, problems=problems, persisted_step=recovery.persisted_step,
    )  # fmt: skip
