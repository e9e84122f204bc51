"""Several Checkpointers that take turns with one training run, each as if the others were not there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _training import Training

from memckpt import Checkpointer, Persist
from memckpt.policy.save import SaveContext, SaveInfo, SavePolicy

_LONGEST_TAIL = 500  # steps; a save that takes longer is stuck


class Turn(SavePolicy):
    """A policy whose clock stands still while others train, and that begins no save when its turn is ending.

    What falls due then is put off to the next turn. It has state, which no policy of more than one rank may have.
    """

    def __init__(self, policy: SavePolicy) -> None:
        self._policy = policy
        self._absent_s = self._now_s = 0.0
        self._last: SaveInfo | None = None
        self._owed = False
        self.is_open = False
        self.context: SaveContext | None = None

    def __repr__(self) -> str:
        return f"Turn({self._policy!r})"

    def absent(self, seconds: float) -> None:
        """Others have trained for so long."""
        self._absent_s += seconds

    @property
    def under_way(self) -> bool:
        """A save is not known to have ended."""
        return self._last is not None and self._last.ended_s is None

    def should_save(self, step: int, previous: Sequence[SaveInfo], *, context: SaveContext) -> bool:
        """What the policy says, on a clock of its own."""
        before_s, self._now_s = self._now_s, max(self._now_s, context.now_s - self._absent_s)
        if previous:
            last = previous[-1]
            if self._last is None or self._last.step != last.step:
                self._last = SaveInfo(last.step, before_s)
            if last.ended_s is not None and self._last.ended_s is None:
                self._last = replace(self._last, ended_s=self._now_s)
        self.context = replace(context, now_s=self._now_s, uptime_s=self._now_s)
        known = [] if self._last is None else [self._last]
        self._owed |= self._policy.should_save(step, known, context=self.context)
        if not self.is_open:
            return False
        due, self._owed = self._owed, False
        return due


@dataclass(frozen=True)
class Moment:
    """What was there at the end of a step: newest step in memory and in storage, -1 for none.

    `at_s` counts training of this policy only, and begins with its first turn.
    """

    step: int
    at_s: float
    in_memory: int
    in_storage: int


class Trainee:
    """A training run under one policy for both tiers, or under none."""

    def __init__(
        self, name: str, training: Training, policies: tuple[SavePolicy, SavePolicy] | None, files: Path
    ) -> None:
        self.name = name
        self.moments: list[Moment] = []
        self._training = training
        self._step, self._trained_s = 0, 0.0
        self._left = time.monotonic()
        self.turns: tuple[Turn, ...] = ()
        self._checkpointer: Checkpointer | None = None
        if policies is None:
            return
        memory, storage = self.turns = Turn(policies[0]), Turn(policies[1])
        self._checkpointer = Checkpointer(
            {"model": training.module, "optimizer": training.optimizer},
            name=f"bench-{name}",
            every=memory,
            persist=Persist(files, every=storage, keep=1),
            fresh=True,
            on_error="raise",
            quiet=True,
        )
        self._checkpointer.restore()

    def train(self, steps: int) -> float:
        """A turn: so many steps, and then those during which a save is still under way. Seconds of a step, the mean."""
        for turn in self.turns:
            turn.absent(time.monotonic() - self._left)
        first, before_s = self._step, self._trained_s
        while self._step < first + steps or any(turn.under_way for turn in self.turns):
            if self._step >= first + steps + _LONGEST_TAIL:
                raise RuntimeError(f"{self.name}: a save does not end")
            for turn in self.turns:  # not at the first step: to the Checkpointer that one was as long as the absence
                turn.is_open = first < self._step < first + steps
            self._advance()
        self._left = time.monotonic()
        return (self._trained_s - before_s) / (self._step - first)

    def _advance(self) -> None:
        begin = time.monotonic()
        self._training.work()
        self._training.update()
        self._step += 1
        if self._checkpointer is not None:
            self._checkpointer.step(self._step)
        self._trained_s += time.monotonic() - begin
        in_memory, in_storage = -1, -1
        if self._checkpointer is not None:
            stats = self._checkpointer.stats()
            in_memory, in_storage = stats.committed_step, stats.persisted_step
        self.moments.append(Moment(self._step, self._trained_s, in_memory, in_storage))

    def close(self) -> None:
        """End of the run; the memory goes."""
        if self._checkpointer is not None:
            self._checkpointer.close()
