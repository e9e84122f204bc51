"""Explicit-state model of the save, commit and recover protocol; see docs/architecture.md for the rules it checks.

A breadth-first search over every interleaving that a budget of failures allows. What is checked in each state:

* I1: what a user was told to be committed is what a recovery from here would find (or something newer);
* I2: a recovery never mixes two histories;
* I5: nobody waits for ever: a state that is not the end has a move that is no failure.

Modelled: own and replica slots as memory that outlives a process but not a node; capture (torn until sealed),
streaming to the holder, the replica's seal, votes latched one by one, outcomes learnt by each rank at its own time,
errors seen by some ranks only, a definite "no", local time-outs, crashes of processes and nodes at any moment (in
recovery too), relaunch (which kills whatever still runs), plan, load, protecting again, agreement, zombie writers,
wiping at close.

Not modelled, and left to the tests on the thread communicator: lost or reordered messages, matching of single chunks,
CRC failures, storage, changes of layout, parity, more than one save in flight.

``python -m tests.protocol.model [-tSECONDS] [ROW ...]`` prints verdicts and traces.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol. The defaults are the protocol; each other value leaves one rule out."""

    #: which slot a new snapshot may take. pinned: any but the newest committed one. oldest: that of the oldest
    #: committed step, so that dropped steps hold theirs for ever. newer: one older than the newest commit
    slots: Literal["pinned", "oldest", "newer"] = "pinned"
    #: seals carry a generation and snapshots combine only within one
    generations: bool = True
    #: what an error in a vote means. doubt: the outcome is unknown, keep the step. drop: take it as a no
    on_error: Literal["doubt", "drop"] = "doubt"
    #: what a local deadline means. drop: a no, after this rank voted. late: a no, although all others said yes
    on_deadline: Literal["doubt", "drop", "late"] = "doubt"
    #: when a rank may vote yes. holder: its own snapshot and the replicas it holds are sealed. ack: its own is, and
    #: its holder said that the replica is sealed. early: the holder has begun to receive
    vote: Literal["holder", "ack", "early"] = "holder"
    #: a fetched snapshot is put into a slot and sealed, not only loaded
    store_fetched: bool = True
    #: after a restore nothing is free before the base is protected and committed again
    recommit: bool = True
    #: from when a user may count on another node's loss being covered
    protected_from: Literal["restore", "commit"] = "restore"
    #: whether a process of the past can still write after the relaunch
    zombies: Literal["fenced", "free"] = "fenced"
    #: own: a rank wipes its memory when it closes. agreed: only when all are closing
    close: Literal["agreed", "own"] = "agreed"
    #: while restoring, the next older complete step is pinned too
    fallback: bool = True


class Budget(NamedTuple):
    """How many of each misfortune may happen in one run."""

    processes: int = 1
    nodes: int = 1
    noes: int = 0
    deadlines: int = 0
    zombies: int = 0
    closes: int = 0


@dataclass(frozen=True)
class World:
    """Who runs where, who holds whose replica, and which nodes cover each other."""

    node: tuple[int, ...]
    holder: tuple[int, ...]
    sets: tuple[frozenset[int], ...]

    @classmethod
    def ring(cls, ranks: int) -> World:
        """One rank to a node, each replicated on the next."""
        return cls(tuple(range(ranks)), tuple((r + 1) % ranks for r in range(ranks)), (frozenset(range(ranks)),))


History = tuple[int, int]  # (number of the history, step)


class Slot(NamedTuple):
    """One snapshot. `history` is ghost state: the protocol sees the generation only."""

    generation: int
    history: int
    step: int
    mark: str  # T torn, S sealed, C sealed and then overwritten by a zombie


class Rank(NamedTuple):
    """What one rank knows."""

    mode: str  # D dead, L to load, P loaded, R runs, Z closed
    step: int
    known: History | None  # newest commit (or base) that this rank has learnt of
    phase: str  # I idle, C capturing, S sealed, N voted no


class Base(NamedTuple):
    generation: int
    history: int
    step: int
    fallback: History | None


class Shared(NamedTuple):
    """The rest. `history`, `told` and `lost` are ghost state."""

    history: int
    generation: int
    outcome: tuple[str, ...]  # for each step: ? open, y, n
    votes: tuple[frozenset[int], ...]
    told: History  # newest commit that any user was told of
    crashed: bool
    base: Base | None
    agreed: bool  # all ranks may leave restore
    lost: frozenset[int]  # nodes lost since the run was protected last
    left: Budget
    zombie: tuple[int, int] | None  # (rank, slot) that a process of the past may still write to


Pair = tuple[Slot | None, Slot | None]


class State(NamedTuple):
    own: tuple[Pair, ...]
    rep: tuple[Pair, ...]  # rep[r]: replicas of shard r, in the memory of r's holder
    ranks: tuple[Rank, ...]
    shared: Shared


class Move(NamedTuple):
    """A step of the search. `live` is false for what the protocol cannot count on: failures and time-outs."""

    text: str
    state: State | None  # None: the violation that `text` names
    live: bool = True


class Verdict(NamedTuple):
    violation: str | None
    trace: list[str]
    states: int
    seconds: float
    complete: bool


def put(pairs: tuple[Pair, ...], rank: int, index: int, slot: Slot | None) -> tuple[Pair, ...]:
    """`pairs` with one slot of one rank replaced."""
    first, second = pairs[rank]
    pair = (slot, second) if index == 0 else (first, slot)
    return (*pairs[:rank], pair, *pairs[rank + 1 :])


def find(pair: Pair, history: int, step: int, marks: str = "TS") -> int:
    """Index of the slot that holds that step of that history, -1 if none does."""
    for index, slot in enumerate(pair):
        if slot and slot.history == history and slot.step == step and slot.mark in marks:
            return index
    return -1


def unwritten_first(pair: Pair, free: list[int]) -> int:
    """Of the free slots the one to take: torn before sealed, then the oldest; -1 if there is none."""
    slots = [(slot.mark == "S", slot.history, slot.step, i) for i in free if (slot := pair[i])]
    return min(slots)[-1] if slots else -1


@dataclass
class Model:
    """One row of the table: a world, how far it trains, its misfortunes and its rules."""

    world: World = field(default_factory=lambda: World.ring(2))
    steps: int = 3
    budget: Budget = field(default_factory=Budget)
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        w = self.world
        assert all(w.node[w.holder[r]] != w.node[r] for r in range(len(w.node)))
        self.size = len(w.node)
        self.clients = [[q for q in range(self.size) if w.holder[q] == r] for r in range(self.size)]

    def start(self) -> State:
        """Nothing saved, everybody runs."""
        none: tuple[Pair, ...] = ((None, None),) * self.size
        open_, votes = self._no_outcomes()
        shared = Shared(1, 1, open_, votes, (0, 0), False, None, True, frozenset(), self.budget, None)
        return State(none, none, (Rank("R", 0, None, "I"),) * self.size, shared)

    def _no_outcomes(self) -> tuple[tuple[str, ...], tuple[frozenset[int], ...]]:
        n = self.steps + 1
        return ("?",) * n, (frozenset[int](),) * n

    # -- decisions that the code under test takes as well ----------------------------------------------------

    def pick(self, pair: Pair, known: History | None) -> int:
        """The slot that a new snapshot takes, given the newest commit known here; -1: none is free."""
        for index, slot in enumerate(pair):
            if slot is None:
                return index
        held = [(i, slot) for i, slot in enumerate(pair) if slot]
        if self.rules.slots == "pinned":
            free = [i for i, x in held if not (known and (x.history, x.step) == known and x.mark == "S")]
            return unwritten_first(pair, free)
        if self.rules.slots == "oldest":
            free = [i for i, x in held if (x.mark == "S" and known and (x.history, x.step) <= known) or not known]
            return min(((pair[i][1:3], i) for i in free), default=(None, -1))[1]  # type: ignore[index]
        return next((i for i, x in held if known and (x.history, x.step) < known), -1)

    def free_for_base(self, pair: Pair, base: Base) -> int:
        """The slot that a restore may write: never the base or the fall-back."""
        for index, slot in enumerate(pair):
            if slot is None:
                return index
        pinned = (base[1:3], base.fallback)
        free = [i for i, x in enumerate(pair) if x and (x.mark != "S" or (x.history, x.step) not in pinned)]
        assert free, (pair, base)
        return unwritten_first(pair, free)

    def plan(self, state: State) -> tuple[Base | None, set[int]]:
        """What a recovery would take: the newest step, newest generation first, of which every shard is sealed
        somewhere.

        Also the histories that its snapshots come from; more than one is a mixed checkpoint.
        """
        shards: list[dict[tuple[int, int], set[int]]] = []
        for own, rep in zip(state.own, state.rep, strict=True):
            found: dict[tuple[int, int], set[int]] = {}
            for slot in own + rep:
                if slot and slot.mark == "S":
                    found.setdefault((slot.generation if self.rules.generations else 0, slot.step), set()).add(
                        slot.history
                    )
            shards.append(found)
        candidates = set(shards[0]).intersection(*shards[1:])
        if not candidates:
            return None, set()

        def histories(key: tuple[int, int]) -> set[int]:
            return set().union(*[shard[key] for shard in shards])

        best = max(candidates)
        older = max((key for key in candidates if key < best), default=None)
        fallback = (max(histories(older)), older[1]) if older and self.rules.fallback else None
        return Base(best[0], max(histories(best)), best[1], fallback), histories(best)

    # -- moves -----------------------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that can happen next."""
        for r, rank in enumerate(state.ranks):
            if rank.mode == "R":
                yield from self._capture(state, r)
                yield from self._hold(state, r)
                yield from self._vote(state, r)
                yield from self._learn(state, r)
                yield from self._misjudge(state, r)
                yield from self._close(state, r)
            elif rank.mode in "LP":
                yield from self._restore(state, r)
            yield from self._crash(state, r)
        yield from self._agree(state)
        yield from self._lose_nodes(state)
        if state.shared.crashed:
            yield from self._relaunch(state)

    @staticmethod
    def _with(state: State, r: int, rank: Rank | None = None, /, **changes: object) -> State:
        """`state` with rank r, slots or shared fields replaced."""
        own, rep = changes.pop("own", state.own), changes.pop("rep", state.rep)
        ranks = (*state.ranks[:r], rank, *state.ranks[r + 1 :]) if rank else state.ranks
        shared = state.shared._replace(**changes) if changes else state.shared  # type: ignore[arg-type]
        return State(own, rep, ranks, shared)  # type: ignore[arg-type]

    @staticmethod
    def _spend(shared: Shared, name: str) -> Budget:
        return shared.left._replace(**{name: getattr(shared.left, name) - 1})

    @staticmethod
    def _outcome(shared: Shared, step: int, outcome: str) -> tuple[str, ...]:
        return (*shared.outcome[:step], outcome, *shared.outcome[step + 1 :])

    def _capture(self, state: State, r: int) -> Iterator[Move]:
        rank, shared = state.ranks[r], state.shared
        if rank.phase == "I" and rank.step < self.steps:
            index, step = self.pick(state.own[r], rank.known), rank.step + 1
            if index >= 0:
                own = put(state.own, r, index, Slot(shared.generation, shared.history, step, "T"))
                yield Move(
                    f"rank {r} captures step {step} into own slot {index} (was {state.own[r][index]})",
                    self._with(state, r, rank._replace(step=step, phase="C"), own=own),
                )
        if rank.phase == "C":
            index, step = find(state.own[r], shared.history, rank.step), rank.step
            if index >= 0:
                own = put(state.own, r, index, Slot(shared.generation, shared.history, step, "S"))
                yield Move(f"rank {r} seals {step}", self._with(state, r, rank._replace(phase="S"), own=own))
            if shared.left.noes and shared.outcome[step] != "y":
                changes: dict[str, object] = {"outcome": self._outcome(shared, step, "n")}
                changes["left"] = self._spend(shared, "noes")
                yield Move(
                    f"rank {r} finds {step} torn, votes no", self._with(state, r, rank._replace(phase="N"), **changes)
                )

    def _hold(self, state: State, r: int) -> Iterator[Move]:
        """The holder's side of rank r's snapshot."""
        rank, shared, h = state.ranks[r], state.shared, self.world.holder[r]
        step, holder = rank.step, state.ranks[h]
        if rank.phase not in "CS" or holder.mode != "R" or shared.outcome[step] == "n":
            return
        index = find(state.rep[r], shared.history, step)
        if index < 0:
            index = self.pick(state.rep[r], max((x for x in (holder.known, rank.known) if x), default=None))
            if index >= 0:
                rep = put(state.rep, r, index, Slot(shared.generation, shared.history, step, "T"))
                was = state.rep[r][index]
                text = f"rank {h} starts to receive {step} of rank {r} into replica slot {index} (was {was})"
                yield Move(text, self._with(state, r, rep=rep))
        elif state.rep[r][index].mark == "T" and rank.phase == "S":  # type: ignore[union-attr]
            rep = put(state.rep, r, index, Slot(shared.generation, shared.history, step, "S"))
            yield Move(f"rank {h} seals the replica of {step} of rank {r}", self._with(state, r, rep=rep))
            if shared.left.noes and shared.outcome[step] == "?":
                changes: dict[str, object] = {"outcome": self._outcome(shared, step, "n")}
                changes["left"] = self._spend(shared, "noes")
                yield Move(f"rank {h} finds {step} of rank {r} corrupt, votes no", self._with(state, r, **changes))

    def _vote(self, state: State, r: int) -> Iterator[Move]:
        rank, shared = state.ranks[r], state.shared
        step = rank.step
        if rank.phase != "S" or r in shared.votes[step] or shared.outcome[step] != "?":
            return
        if self.rules.vote == "holder":
            ready = all(find(state.rep[q], shared.history, step, "S") >= 0 for q in self.clients[r])
        else:
            ready = find(state.rep[r], shared.history, step, "S" if self.rules.vote == "ack" else "TS") >= 0
        if ready:
            ballot = shared.votes[step] | {r}
            votes = (*shared.votes[:step], ballot, *shared.votes[step + 1 :])
            outcome = self._outcome(shared, step, "y") if len(ballot) == self.size else shared.outcome
            yield Move(f"rank {r} votes yes on {step}", self._with(state, r, votes=votes, outcome=outcome))

    def _learn(self, state: State, r: int) -> Iterator[Move]:
        rank, shared = state.ranks[r], state.shared
        step = rank.step
        if rank.phase in "SN" and shared.outcome[step] == "y":
            commit = (shared.history, step)
            protected = self.rules.protected_from == "commit" and not shared.crashed
            yield Move(
                f"rank {r} learns that {step} is committed and tells its user",
                self._with(
                    state,
                    r,
                    rank._replace(known=commit, phase="I"),
                    told=max(shared.told, commit),
                    lost=frozenset() if protected else shared.lost,
                ),
            )
        if rank.phase in "SNC" and shared.outcome[step] == "n":
            # Freed where slots are a pool; where they are not, the seal goes and the slot stays taken.
            mark = None if self.rules.slots == "pinned" else Slot(shared.generation, shared.history, step, "T")
            own, rep = self._drop(state, r, mark)
            yield Move(
                f"rank {r} learns no on {step}", self._with(state, r, rank._replace(phase="I"), own=own, rep=rep)
            )

    def _drop(self, state: State, r: int, mark: Slot | None) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
        """Slots after rank r let go of its current step, its own and the replicas it holds."""
        history, step, own, rep = state.shared.history, state.ranks[r].step, state.own, state.rep
        if (index := find(own[r], history, step)) >= 0:
            own = put(own, r, index, mark)
        for q in self.clients[r]:
            if (index := find(rep[q], history, step)) >= 0:
                rep = put(rep, q, index, mark)
        return own, rep

    def _misjudge(self, state: State, r: int) -> Iterator[Move]:
        """A rank that takes an error or a time-out for a no, where the rules let it."""
        rank, shared = state.ranks[r], state.shared
        step, late = rank.step, self.rules.on_deadline
        if shared.crashed and self.rules.on_error == "drop" and rank.phase in "SN":
            own, rep = self._drop(state, r, None)
            dead = rank._replace(mode="D", phase="I")
            yield Move(
                f"rank {r} gets an error in the vote on {step}, drops it, stops",
                self._with(state, r, dead, own=own, rep=rep),
            )
        if (
            shared.left.deadlines
            and rank.phase == "S"
            and ((late == "drop" and r in shared.votes[step]) or (late == "late" and shared.outcome[step] == "y"))
        ):
            own, rep = self._drop(state, r, None)
            yield Move(
                f"the deadline of rank {r} passes on {step}; it drops it and trains on",
                self._with(state, r, rank._replace(phase="I"), own=own, rep=rep, left=self._spend(shared, "deadlines")),
                live=False,
            )

    def _close(self, state: State, r: int) -> Iterator[Move]:
        rank = state.ranks[r]
        if state.shared.left.closes and self.rules.close == "own" and rank.step == self.steps and rank.phase == "I":
            own, rep = put(put(state.own, r, 0, None), r, 1, None), state.rep
            for q in self.clients[r]:
                rep = put(put(rep, q, 0, None), q, 1, None)
            yield Move(
                f"rank {r} closes and wipes its memory", self._with(state, r, rank._replace(mode="Z"), own=own, rep=rep)
            )

    def _restore(self, state: State, r: int) -> Iterator[Move]:
        rank, shared = state.ranks[r], state.shared
        base = shared.base
        sealed = base and Slot(base.generation, base.history, base.step, "S")
        if rank.mode == "L":
            own = state.own
            if base and find(own[r], base.history, base.step, "S") < 0 and self.rules.store_fetched:
                own = put(own, r, self.free_for_base(own[r], base), sealed)
            yield Move(
                f"rank {r} loads {base}", self._with(state, r, rank._replace(mode="P", step=0, phase="I"), own=own)
            )
            return
        h = self.world.holder[r]
        if (
            self.rules.recommit
            and base
            and not shared.agreed
            and find(state.rep[r], base.history, base.step, "S") < 0
            and state.ranks[h].mode in "LP"
        ):
            rep = put(state.rep, r, self.free_for_base(state.rep[r], base), sealed)
            yield Move(f"the replica of rank {r} is rebuilt on rank {h}", self._with(state, r, rep=rep))
        if shared.agreed:
            step, known = (base.step, (base.history, base.step)) if base else (0, None)
            last = all(q.mode == "R" for i, q in enumerate(state.ranks) if i != r)
            protected = self.rules.protected_from == "restore" and last
            yield Move(
                f"rank {r} returns from restore at {step}",
                self._with(
                    state,
                    r,
                    Rank("R", step, known, "I"),
                    lost=frozenset() if protected else shared.lost,
                    told=max(shared.told, known) if known and self.rules.recommit else shared.told,
                ),
            )

    def _crash(self, state: State, r: int) -> Iterator[Move]:
        rank, shared = state.ranks[r], state.shared
        if shared.left.processes and rank.mode in "RLP":
            dead = rank._replace(mode="D", phase="I")
            yield Move(
                f"rank {r} PROCESS CRASH",
                self._with(state, r, dead, left=self._spend(shared, "processes"), crashed=True),
                live=False,
            )
        if shared.zombie and shared.zombie[0] == r:
            slot = state.own[r][shared.zombie[1]]
            if slot and slot.mark == "S" and slot.history == shared.history:
                own = put(state.own, r, shared.zombie[1], slot._replace(mark="C"))
                yield Move(
                    f"a zombie of rank {r} writes into own slot {shared.zombie[1]}",
                    self._with(state, r, own=own, zombie=None),
                    live=False,
                )

    def _agree(self, state: State) -> Iterator[Move]:
        shared, base = state.shared, state.shared.base
        if shared.agreed or any(rank.mode != "P" for rank in state.ranks):
            return
        if (
            not self.rules.recommit
            or not base
            or all(
                find(pairs[r], base.history, base.step, "S") >= 0
                for pairs in (state.own, state.rep)
                for r in range(self.size)
            )
        ):
            yield Move("restore is agreed by all", self._with(state, 0, agreed=True))

    def _lose_nodes(self, state: State) -> Iterator[Move]:
        shared, w, ranks = state.shared, self.world, range(self.size)
        if not shared.left.nodes or all(rank.mode == "Z" for rank in state.ranks):
            return
        for node in range(max(w.node) + 1):
            beyond = any(node in group and shared.lost & group for group in w.sets)  # more than the redundancy covers
            if node in shared.lost or beyond:
                continue
            none: Pair = (None, None)
            yield Move(
                f"NODE {node} CRASH",
                State(
                    tuple(none if w.node[r] == node else state.own[r] for r in ranks),
                    tuple(none if w.node[w.holder[r]] == node else state.rep[r] for r in ranks),
                    tuple(
                        q._replace(mode="D", phase="I") if w.node[r] == node else q for r, q in enumerate(state.ranks)
                    ),
                    shared._replace(
                        left=self._spend(shared, "nodes"),
                        crashed=True,
                        lost=shared.lost | {node},
                        zombie=None if shared.zombie and w.node[shared.zombie[0]] == node else shared.zombie,
                    ),
                ),
                live=False,
            )

    def _relaunch(self, state: State) -> Iterator[Move]:
        shared, told = state.shared, state.shared.told
        base, histories = self.plan(state)
        if base is None:
            if told > (0, 0):
                yield Move(f"I1: told {told}, but recovery finds nothing", None)
                return
        elif len(histories) > 1:
            yield Move(f"I2: step {base.step} mixes histories {histories}", None)
            return
        elif (base.history, base.step) < told:
            yield Move(f"I1: told {told}, but recovery finds only {(base.history, base.step)}", None)
            return
        outcome, votes = self._no_outcomes()
        fresh = shared._replace(
            history=shared.history + 1,
            generation=shared.generation + 1,
            outcome=outcome,
            votes=votes,
            crashed=False,
            base=base,
            agreed=False,
        )
        ranks = (Rank("L", 0, None, "I"),) * self.size
        yield Move(f"RELAUNCH, base {base}", State(state.own, state.rep, ranks, fresh))
        if shared.left.zombies and self.rules.zombies == "free":
            for r, rank in enumerate(state.ranks):
                if rank.mode == "R" and rank.phase == "C":
                    zombie = (r, find(state.own[r], shared.history, rank.step))
                    haunted = fresh._replace(zombie=zombie, left=self._spend(shared, "zombies"))
                    yield Move(
                        f"RELAUNCH, base {base}, a zombie of rank {r} lives on",
                        State(state.own, state.rep, ranks, haunted),
                    )

    # -- search ----------------------------------------------------------------------------------------------

    def done(self, state: State) -> bool:
        """Whether everybody has trained to the end."""
        return all((q.step >= self.steps and q.phase == "I") or q.mode == "Z" for q in state.ranks)

    def check(self, max_states: int = 3_000_000, seconds: float = 120.0) -> Verdict:
        """Search breadth first, so that a violation comes with its shortest trace."""
        begin, start, expanded = time.monotonic(), self.start(), 0
        parents: dict[State, tuple[State, str] | None] = {start: None}
        queue = deque([start])

        def verdict(violation: str | None, trace: Iterable[str], complete: bool) -> Verdict:
            return Verdict(violation, list(trace), expanded, time.monotonic() - begin, complete)

        while queue:
            state = queue.popleft()
            expanded += 1
            stuck = True
            for text, after, live in self.moves(state):
                stuck = stuck and not live
                if after is None:
                    return verdict(text, [*self._trace(parents, state), text], True)
                if after not in parents:
                    parents[after] = (state, text)
                    queue.append(after)
            if stuck and not self.done(state):
                return verdict("I5: deadlock", self._trace(parents, state), True)
            if expanded % 1024 == 0 and (len(parents) > max_states or time.monotonic() - begin > seconds):
                return verdict(None, [], False)
        return verdict(None, [], True)

    @staticmethod
    def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        texts = []
        while parent := parents[state]:
            state, text = parent
            texts.append(text)
        return texts[::-1]


RING2, RING3 = World.ring(2), World.ring(3)
TWO_SETS = World((0, 1, 2, 3), (1, 0, 3, 2), (frozenset({0, 1}), frozenset({2, 3})))
TWO_PER_NODE = World((0, 0, 1, 1), (2, 3, 0, 1), (frozenset({0, 1}),))


@dataclass(frozen=True)
class Row:
    """A model and the violation that is expected of it (the beginning of its text), None: none."""

    model: Model
    violation: str | None


def _row(violation: str | None, world: World, steps: int, budget: Budget, rules: Rules | None = None) -> Row:
    return Row(Model(world, steps, budget, rules or Rules()), violation)


#: P rows leave one rule out each and must be violated; F rows are the protocol (or a variant as good) and must not be.
TABLE: dict[str, Row] = {
    "P1-unprotected-base": _row("I1", RING2, 3, Budget(1, 1), Rules(recommit=False)),
    "P2-second-node": _row("I1", RING2, 2, Budget(0, 2), Rules(recommit=False)),
    "P3-no-generation": _row("I2", RING2, 3, Budget(1, 1), Rules(generations=False)),
    "P3b-no-generation-ring3": _row("I2", RING3, 2, Budget(1, 1), Rules(generations=False)),
    "P4-error-drops": _row("I1", RING2, 2, Budget(0, 1), Rules(on_error="drop")),
    "P5-deadline-drops": _row("I5", RING2, 3, Budget(1, 0, deadlines=1), Rules(on_deadline="drop")),
    "P5b-deadline-drops-late": _row("I1", RING2, 3, Budget(1, 0, deadlines=1), Rules(on_deadline="late")),
    "P6-oldest-slot-only": _row("I1", RING2, 3, Budget(1, 0, noes=1), Rules(slots="oldest")),
    "P7-newer-commit-only": _row("I5", RING2, 3, Budget(0, 0, noes=1), Rules(slots="newer")),
    "P7b-newer-commit-only-crash": _row("I5", RING2, 3, Budget(1, 0), Rules(slots="newer")),
    "P8-early-vote": _row("I1", RING2, 2, Budget(0, 1), Rules(vote="early")),
    "P9-zombie": _row("I1", RING2, 3, Budget(1, 1, zombies=1), Rules(zombies="free")),
    "P10-close-wipes-alone": _row("I1", RING2, 1, Budget(0, 1, closes=1), Rules(close="own")),
    "P12-no-fallback-pin": _row("I1", RING2, 3, Budget(1, 1, noes=1), Rules(fallback=False)),
    "F1-honest-window": _row(None, RING2, 3, Budget(0, 2), Rules(recommit=False, protected_from="commit")),
    "F2-ring2": _row(None, RING2, 3, Budget(1, 1, noes=1)),
    "F2b-ring2-two-of-each": _row(None, RING2, 2, Budget(2, 2)),
    "F2c-ring2-honest-window": _row(None, RING2, 3, Budget(0, 2, noes=1), Rules(protected_from="commit")),
    "F2d-ring2-vote-by-ack": _row(None, RING2, 3, Budget(1, 2, noes=1), Rules(vote="ack")),
    "F3-ring3-node": _row(None, RING3, 2, Budget(0, 1)),
    "F3b-ring3-two-nodes": _row(None, RING3, 1, Budget(0, 2)),
    "F3c-ring3-process-and-node": _row(None, RING3, 1, Budget(1, 1, noes=1)),
    "F4-two-sets": _row(None, TWO_SETS, 2, Budget(0, 2)),
    "F4b-two-per-node": _row(None, TWO_PER_NODE, 2, Budget(1, 1)),
}


def main() -> None:
    """Print the verdict of each row named (all by default), and the trace of what it violates."""
    names, seconds = sys.argv[1:], 60.0
    if names and names[0].startswith("-t"):
        seconds = float(names.pop(0)[2:])
    for name in names or TABLE:
        verdict = TABLE[name].model.check(seconds=seconds)
        text = verdict.violation or f"no violation ({'complete' if verdict.complete else 'cut off'})"
        print(f"{name:30s} {text:55s} {verdict.states:>9d} states {verdict.seconds:6.1f} s", flush=True)
        for line in verdict.trace:
            print("      ", line)


if __name__ == "__main__":
    main()
