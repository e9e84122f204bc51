"""An independent judge of recoveries: told what each rank says of itself and who was lost, and nothing of how memckpt
works.

A run is a sequence of lives; a life begins with a restore and ends with a failure, or with the end of the run. Of
each life the judge is told, for each rank: the step and a digest of the bytes that it came back with from `restore`
(if it came back), the steps that it then called `step` with and a digest of its bytes at each, and the newest step
that it was told to be committed and protected. Between two lives it is told which nodes' memory was lost. What it
demands:

* all ranks come back with the same step;
* that is the newest that any rank was told to be committed, or one that every rank had begun after it (whose outcome
nobody
  had heard yet), never an older one while the redundancy covers what was lost;
* every byte is what that rank had at that step of that history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class Violation(AssertionError):
    """The protocol broke a promise."""


@dataclass
class RankLife:
    """One life as one rank tells it.

    Attributes
    ----------
    returned : (int, str) or None
        Step and digest that `restore` came back with; step 0 where nothing was there.
    begun : dict of int to str
        Digest of the state at each step that `step` was called with.
    committed : int
        Newest step that it was told to be committed and protected; 0 for none.
    """

    returned: tuple[int, str] | None = None
    begun: dict[int, str] = field(default_factory=dict)
    committed: int = 0


@dataclass(frozen=True)
class Expected:
    """Steps that a restore may come back with. `floor` None: more was lost than the redundancy covers."""

    floor: int | None
    ceiling: int

    def allows(self, step: int) -> bool:
        """Whether a restore may come back with `step`; 0 means with nothing."""
        return step <= self.ceiling and (self.floor is None or step >= self.floor)

    def __str__(self) -> str:
        return f"step {self.ceiling}" if self.floor == self.ceiling else f"a step from {self.floor} to {self.ceiling}"


class Oracle:
    """The judge of one run.

    Parameters
    ----------
    world : int
        Ranks.
    copies : int
        Nodes that may be lost between two moments of protection.
    """

    def __init__(self, world: int, copies: int = 1) -> None:
        self._world = world
        self._copies = copies
        self._told = 0  # survives the death of any processes
        self._protected = 0  # survives the loss of nodes, too
        self._begun = dict.fromkeys(range(world), 0)
        self._digests: dict[tuple[int, int], str] = {}
        self._lost: set[str] = set()  # since the last protection
        self._lost_now = False  # since the last restore or commit

    def expected(self) -> Expected:
        """What a restore from here may come back with."""
        ceiling = max(self._told, min(self._begun.values()))
        if not self._lost_now:
            return Expected(self._told, ceiling)
        return Expected(self._protected if len(self._lost) <= self._copies else None, ceiling)

    def lost(self, nodes: Iterable[str]) -> None:
        """The memory of these nodes is gone."""
        nodes = set(nodes)
        self._lost |= nodes
        self._lost_now = self._lost_now or bool(nodes)

    def observe(self, life: Mapping[int, RankLife]) -> int | None:
        """Judge how a life began, and remember how it went on.

        Parameters
        ----------
        life : mapping of int to RankLife
            By rank; ranks may be missing.

        Returns
        -------
        int or None
            The step that its ranks came back with; None where nobody came back.

        Raises
        ------
        Violation
        """
        step = self._judge({rank: told.returned for rank, told in life.items() if told.returned is not None})
        for rank, told in life.items():
            for begun, digest in told.begun.items():
                self._begun[rank] = max(self._begun[rank], begun)
                self._digests[rank, begun] = digest
        committed = max((told.committed for told in life.values()), default=0)
        if committed:
            self._told = self._protected = max(self._told, committed)
            self._lost, self._lost_now = set(), False
        return step

    def _judge(self, returned: Mapping[int, tuple[int, str]]) -> int | None:
        if not returned:
            return None
        steps = {step for step, _ in returned.values()}
        if len(steps) > 1:
            raise Violation(f"ranks came back with different steps: { ({r: s for r, (s, _) in returned.items()}) }")
        step, expected = steps.pop(), self.expected()
        if not expected.allows(step):
            raise Violation(f"came back with step {step}, expected {expected}")
        wrong = [rank for rank, (_, digest) in returned.items() if step and self._digests.get((rank, step)) != digest]
        if wrong:
            raise Violation(f"ranks {wrong} came back with step {step}, but not with the bytes they had then")
        self._told, self._protected, self._lost_now = step, min(self._protected, step), False
        self._begun = dict.fromkeys(range(self._world), step)
        self._digests = {key: digest for key, digest in self._digests.items() if key[1] <= step}
        return step
