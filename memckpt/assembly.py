"""What a Checkpointer is made of: put together here, checked against the other ranks, and taken apart again."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from memckpt import storage, surroundings
from memckpt.comm import Communicator, allgather, barrier, detect
from memckpt.errors import MemckptError, ProtocolError, UsageError
from memckpt.memory import budget, process
from memckpt.memory.arena import Arena
from memckpt.memory.lock import ProcessLock
from memckpt.options import Options, copies_of
from memckpt.recovery.inventory import Place
from memckpt.recovery.placement import place
from memckpt.recovery.session import Session
from memckpt.redundancy import Mirror
from memckpt.state.rng import RNG
from memckpt.state.state import State
from memckpt.storage.base import HOPELESS
from memckpt.surroundings import Surroundings

_COPY_THREADS = 4
_SCALAR_NBYTES = 256  # a step counter and its place in the header
_STATE_TENSORS = {"adagrad": 1, "rmsprop": 1, "rprop": 2, "asgd": 1, "adafactor": 0, "muon": 1}  # others: 2, as Adam
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "MEMCKPT_RESTART_COUNT")


class Hello(msgspec.Struct, frozen=True):
    """What each rank says of itself at the start.

    Attributes
    ----------
    settings : dict of str to str
        What must be the same everywhere.
    node, domain : str
        Where it runs.
    pid, start_time : int
        Which process it is on that node.
    restarted : bool
        It knows that this run had begun before.
    """

    settings: dict[str, str]
    node: str
    domain: str
    pid: int
    start_time: int
    restarted: bool


@dataclass
class Parts:
    """The parts of one Checkpointer.

    Attributes
    ----------
    session : Session
        What a recovery needs to know.
    decide_comm, engine_comm : Communicator
        Private to the training thread's exchanges and to the background.
    ranks : list of Hello
        By rank.
    context : Surroundings or None
        The job, such as `memckpt.run`, that this happens in.
    """

    run: str
    job: str
    options: Options
    state: State
    arena: Arena
    lock: ProcessLock
    session: Session
    decide_comm: Communicator
    engine_comm: Communicator
    ranks: list[Hello]
    context: Surroundings | None

    def break_off(self) -> None:
        """Revoke the communicators, where the transport can, so that no peer and no thread waits for this rank any
        longer.
        """
        for comm in (self.decide_comm, self.engine_comm, self.session.comm):
            comm.close(abort=True)

    @property
    def leases(self) -> int:
        """Own slots beside the two that a save needs."""
        return 0 if self.session.storage is None else 1

    @property
    def node_ranks(self) -> list[int]:
        """The ranks on this node."""
        return [r for r, hello in enumerate(self.ranks) if hello.node == self.arena.node]

    @property
    def members(self) -> set[tuple[int, int]]:
        """Pid and start time of each process of this run on this node."""
        return {(self.ranks[r].pid, self.ranks[r].start_time) for r in self.node_ranks}


def open_parts(
    states: Mapping[str, object],
    *,
    name: str,
    options: Options,
    redundancy: Mirror | str,
    comm: Any,
    allow_pickle: bool,
) -> Parts:
    """Find the other ranks, agree on the settings, open this node's memory. Collective.

    Raises
    ------
    UsageError
        Ranks were given different settings, or one that is not valid; or there is nowhere to write to.
    RunInUse, ForeignMemory, StateError, PeerLost, DeadlineExceeded
    """
    _check_states(states)
    context = surroundings.current() if comm is None else None
    base = context.communicator() if context is not None else detect(comm)
    if base is comm:
        base = base.dup()  # the caller's own stays the caller's to close
    copies = copies_of(redundancy, base.size)
    state = State({**states, "rng": RNG()}, allow_pickle=allow_pickle)
    arena = Arena.open(name)
    pid, start_time = process.identity()
    settings = {
        "name": name,
        "job": arena.run.job,
        "redundancy": f"Mirror({copies})",
        **options.described(),
    }
    restarted = any(_count(os.environ.get(v)) for v in _RESTART_COUNTS) or (context is not None and context.had_commit)
    domain = os.environ.get("MEMCKPT_DOMAIN", "")
    mine = Hello(settings, arena.node, domain, pid, start_time, restarted)
    ranks = _introduce(base, mine, options.deadline_s)
    on_node = sum(hello.node == arena.node for hello in ranks)
    threads = max(1, min(_COPY_THREADS, len(os.sched_getaffinity(0)) // on_node))
    persist = options.persist
    session = Session(
        comm=base,
        arena=arena,
        run=name,
        rank=base.rank,
        world=base.size,
        places=tuple(Place(hello.node, hello.domain) for hello in ranks),
        copies=copies,
        deadline_s=options.deadline_s,
        threads=threads,
        storage=None if persist is None else storage.open(persist.target, persist.storage_options),
        storage_deadline_s=0.0 if persist is None else persist.deadline_s,
    )
    _check_storage(session)
    lock = arena.lock(rank=base.rank)
    try:
        decide_comm, engine_comm = base.dup(), base.dup()
        parts = Parts(
            name, arena.run.job, options, state, arena, lock, session, decide_comm, engine_comm, ranks, context
        )
        barrier(base, options.deadline_s)  # every rank of this node holds its lock: what else holds one is no member
        arena.fence_past(parts.members, None, options.deadline_s, on_wait=_say if session.is_first_of_node else None)
    except BaseException:
        lock.release()
        raise
    return parts


def _check_states(states: object) -> None:
    if not isinstance(states, Mapping) or not all(isinstance(name, str) for name in states):
        raise UsageError(f"states takes a mapping of names to objects, not {type(states).__name__}")
    if "rng" in states:
        raise UsageError('"rng" is the name of the random number generators in `states`; take another one')


def _check_storage(session: Session) -> None:
    """Make the storage's root on each node, and refuse, on all ranks, what cannot be written to. Collective."""
    storage = session.storage
    if storage is None:
        return
    problem = ""
    if session.is_first_of_node:
        try:
            storage.prepare()
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            if error.errno not in HOPELESS:
                _say(f"{storage.url} cannot be reached now: {problem}")
                problem = ""
    said = allgather(session.comm, problem.encode(), session.deadline_s)
    for rank, text in enumerate(said):
        if text:
            raise UsageError(f"cannot persist to {storage.url}: {text.decode()}", run=session.run, rank=rank)


def _say(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=6)


def _count(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _introduce(comm: Communicator, mine: Hello, deadline_s: float) -> list[Hello]:
    try:
        ranks = [
            msgspec.msgpack.decode(said, type=Hello)
            for said in allgather(comm, msgspec.msgpack.encode(mine), deadline_s)
        ]
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a rank runs another version of memckpt: {error}", run=mine.settings["name"]) from error
    for rank, hello in enumerate(ranks):
        different = [
            f"{key}: {ranks[0].settings.get(key)} on rank 0, {value} on rank {rank}"
            for key, value in hello.settings.items()
            if value != ranks[0].settings.get(key)
        ]
        if different:
            raise UsageError(
                "ranks have different settings: " + "; ".join(different), run=mine.settings["name"], rank=rank
            )
    return ranks


def must_find(parts: Parts) -> bool:
    """Whether a restore that finds nothing is an error. The same on every rank."""
    fresh = parts.options.fresh
    return fresh is False or (fresh == "auto" and any(hello.restarted for hello in parts.ranks))


def check_budget(parts: Parts, shard_nbytes: int) -> None:
    """Refuse a state whose snapshots would not fit into some node's memory, on every rank alike. Collective.

    Parameters
    ----------
    shard_nbytes : int
        Bytes of this rank's snapshot, with what is still to come (optimizer state before its first step).

    Raises
    ------
    BudgetError
        With the numbers of the first node where it does not fit.
    """
    session = parts.session
    said = allgather(session.comm, shard_nbytes.to_bytes(8, "little"), session.deadline_s)
    shards = [int.from_bytes(nbytes, "little") for nbytes in said]
    need = next(n for n in needs(parts, shards) if n.rank == session.rank)
    budget.check_together(
        session.comm,
        arena=parts.arena,
        node_of=[place.node for place in session.places],
        need_nbytes=need.slot_nbytes,
        replica_nbytes=need.replica_nbytes,
        deadline_s=session.deadline_s,
    )


def predicted_nbytes(state: State) -> int:
    """Bytes that optimizers which have not stepped yet will add to the state. Local; an estimate, by kind of
    optimizer.
    """
    total = 0
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            per_parameter = _STATE_TENSORS.get(type(optimizer).__name__.lower(), 2)
            if type(optimizer).__name__ == "SGD":
                per_parameter = 1 if group["momentum"] else 0
            fresh = (p for p in group["params"] if p.requires_grad and p not in optimizer.state)
            total += sum(p.nbytes * per_parameter + _SCALAR_NBYTES for p in fresh)
    return total


def needs(parts: Parts, shards: list[int]) -> list[budget.Need]:
    """What each rank of this node will hold when every rank's snapshot has the size given for it. Local."""
    session = parts.session
    holders = place([p.path for p in session.places], session.copies)
    return [
        budget.Need(
            rank,
            own_nbytes=(2 + parts.leases) * shards[rank],
            replica_nbytes=sum(2 * shards[s] for s, hs in enumerate(holders) if rank in hs),
        )
        for rank in parts.node_ranks
    ]


def close_parts(parts: Parts, *, remove: bool, finished: bool) -> None:
    """Let go of communicators and lock; remove this node's memory, or mark it, where all ranks agreed to end.

    Parameters
    ----------
    remove, finished : bool
        After a normal end: remove the memory (collective), or keep it and mark it as finished.
    """
    try:
        if remove:
            # Every rank has stopped its background by now; nobody makes a slot behind the removal.
            barrier(parts.session.comm, parts.options.deadline_s)
        if parts.session.is_first_of_node:
            if remove:
                parts.arena.remove_all(parts.members)
            elif finished:
                parts.arena.mark_finished()
    finally:
        parts.lock.release()
        parts.arena.close_parked()
        if remove:
            with contextlib.suppress(OSError, MemckptError):
                parts.arena.tidy()
        for comm in (parts.decide_comm, parts.engine_comm, parts.session.comm):
            comm.close()
