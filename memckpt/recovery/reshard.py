"""One attempt to load a step that another number of ranks saved: each rank puts its part together from all shards.

Every shard has one rank that reads it, from its node's memory or from storage, and verifies it in full; headers go to
everyone, then just the bytes that a rank wants, with a checksum of their own. Nothing live changes before every rank
has all of its bytes. The old shards stay where they are, pinned, until the new ranks have committed a step of their
own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from memckpt import _native, faults
from memckpt.comm import allgather
from memckpt.comm.base import FIRST_TAG, Communicator, Request
from memckpt.errors import CorruptSnapshot, LayoutMismatch, MemckptError, ProtocolError
from memckpt.format.layout import Layout
from memckpt.format.seal import Base
from memckpt.recovery.assembly import RNG, Assembly, Range, assemble, differences, digests
from memckpt.recovery.fetch import WINDOW, Offer, Steps, drive, open_offer
from memckpt.recovery.inventory import STORAGE
from memckpt.recovery.lineage import Where, name
from memckpt.recovery.phases import damaged, timed
from memckpt.recovery.plan import Carrier, Plan
from memckpt.recovery.session import Session
from memckpt.recovery.stored import load_stored
from memckpt.recovery.verdict import Verdict, describe, settle
from memckpt.state.chunks import Wanted
from memckpt.state.restore import Targets, prepare
from memckpt.state.state import State

if TYPE_CHECKING:
    from memckpt.memory.slotfile import Slot

_MAX_HEADERS_NBYTES = 1 << 30
_TAG = FIRST_TAG + 16  # behind those of `fetch`


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What the carrier of a shard says of it to all: its header and the checksums of what is no chunk."""

    shard: int
    header: bytes
    crcs: list[int]


class Reshard:
    """This rank's part in loading a planned step of another number of ranks; used like `Attempt`.

    Parameters
    ----------
    session, state : Session, State
    plan : Plan
        With a base and carriers.
    seconds : dict of str to float
        Where the time of each phase is added.
    leave : frozenset of str
        Names of objects that are not restored.

    Attributes
    ----------
    touched : bool
        Whether the live state may have changed, on this rank or another.
    fetched, slot, removed
        As in `Attempt`; there is none, since nothing is kept of what was put together.
    """

    fetched: Slot | None = None
    slot: Slot | None = None
    removed: tuple[str, ...] = ()

    def __init__(
        self,
        session: Session,
        state: State,
        plan: Plan,
        seconds: dict[str, float],
        leave: frozenset[str] = frozenset(),
    ) -> None:
        assert plan.base is not None
        self._session, self._state, self._plan, self._seconds = session, state, plan, seconds
        self._base: Base = plan.base
        self._comm, self._rank = session.comm, session.rank
        # A rank that there was not before keeps the generators it has: two ranks must not draw the same numbers.
        self._leave = leave | ({RNG} if session.rank >= plan.world else frozenset())
        slow = any(carrier.node == STORAGE for carrier in plan.carriers)
        self._deadline_s = session.deadline_s + (session.storage_deadline_s if slow else 0.0)
        self._mine = [carrier for carrier in plan.carriers if carrier.rank == session.rank]
        self._offers: dict[int, Offer] = {}
        self._data: dict[int, memoryview] = {}
        self._assembly: Assembly | None = None
        self._targets: Targets | None = None
        self.touched = False

    def run(self) -> dict[Where, str]:
        """Check, fetch and load. Collective; returns and raises as `Attempt.run`."""
        step = self._base.step
        try:
            with timed(self._seconds, "fetch"):
                bad = self._settle(self._open(), "shards")
            if bad:
                return bad
            with timed(self._seconds, "check"):
                self._settle(self._compare(), "structure check")
            faults.point("recover.checked", self._rank, step)
            with timed(self._seconds, "fetch"):
                bad = self._settle(self._exchange(), "parts of shards")
            if bad:
                return bad
            faults.point("recover.fetched", self._rank, step)
            with timed(self._seconds, "load"):
                self.touched = True
                self._settle(self._load(), "end of the load")
            faults.point("recover.loaded", self._rank, step)
            return {}
        finally:
            for data in self._data.values():
                data.release()
            for offer in self._offers.values():
                offer.head.release()
                if offer.slot is not None:
                    self._session.arena.park(offer.slot)

    def _settle(self, mine: Verdict, what: str) -> dict[Where, str]:
        return settle(self._comm, mine, self._deadline_s, what, self._session.run)

    def _bad(self, carrier: Carrier, why: str) -> tuple[str, str, str]:
        where = "in storage" if carrier.node == STORAGE else f"in slot {carrier.slot} on {carrier.node}"
        return carrier.node, carrier.slot, f"{name(self._base)}: the snapshot of rank {carrier.shard} {where}: {why}"

    # -- the shards that this rank carries -----------------------------------------------------------------------------

    def _open(self) -> Verdict:
        """Open and verify them."""
        bad = []
        for carrier in self._mine:
            try:
                self._open_one(carrier)
            except (OSError, CorruptSnapshot, ProtocolError) as error:
                why = error.message if isinstance(error, MemckptError) else str(error)
                bad.append(self._bad(carrier, why))
        return Verdict(bad=tuple(bad))

    def _open_one(self, carrier: Carrier) -> None:
        arena, storage = self._session.arena, self._session.storage
        if carrier.node == STORAGE:
            assert storage is not None
            seal, data = load_stored(storage, carrier.slot, self._deadline_s)
        else:
            offer = self._offers[carrier.shard] = open_offer(arena, carrier.slot)
            if offer.seal is None or offer.slot is None:
                raise CorruptSnapshot(offer.reason)
            if (offer.seal.run, offer.seal.job) != (arena.run.name, arena.run.job):
                raise CorruptSnapshot(f"it was sealed by run {offer.seal.run!r} of job {offer.seal.job!r}")
            seal, data = offer.seal, memoryview(offer.slot.memory)[: offer.seal.nbytes]
        self._data[carrier.shard] = data
        says = (seal.shard, seal.world, Base(generation=seal.generation, step=seal.step), seal.nbytes)
        if says != (carrier.shard, self._plan.world, self._base, carrier.nbytes):
            raise CorruptSnapshot(f"its seal says {says}")
        for chunk, crc in enumerate(seal.crcs):
            with data[chunk * _native.CHUNK_BYTES : (chunk + 1) * _native.CHUNK_BYTES] as octets:
                if _native.crc32c(octets) != crc:
                    raise CorruptSnapshot(f"chunk {chunk} differs from its checksum")

    def _heads(self) -> list[_Head]:
        """Header and checksums of every shard, by shard. Collective."""
        mine = []
        for shard, data in self._data.items():
            layout = Layout.parse(data)
            with data[: layout.data_offset] as header:
                mine.append(_Head(shard, bytes(header), digests(layout, data)))
        said = allgather(
            self._comm, msgspec.msgpack.encode(mine), self._deadline_s, limit=_MAX_HEADERS_NBYTES, what="headers"
        )
        heads = [head for payload in said for head in msgspec.msgpack.decode(payload, type=list[_Head])]
        return sorted(heads, key=lambda head: head.shard)

    # -- what this rank wants of them ----------------------------------------------------------------------------------

    def _compare(self) -> Verdict:
        """Plan this rank's snapshot and compare it with the live state. Changes nothing; collective."""
        heads = self._heads()
        try:
            layouts = [Layout.parse(head.header) for head in heads]
            ranks = self._session.world
            crcs = [head.crcs for head in heads]
            if ranks != self._plan.world and (rows := differences(layouts, crcs, ranks=ranks, leave=self._leave)):
                raise _different(rows, self._plan.world, self._session.world)
            self._assembly = assemble(layouts, self._rank, self._session.world, Wanted(self._state).chunk)
            self._targets = prepare(self._state, self._assembly.layout, leave=self._leave)
        except MemckptError as error:
            return Verdict(problem=describe(error, self._rank))
        return Verdict()

    def _exchange(self) -> Verdict:
        """Bring this rank's bytes together, and give the others theirs. Collective."""
        assert self._assembly is not None
        ranges = self._assembly.ranges
        said = allgather(
            self._comm, msgspec.msgpack.encode(ranges), self._deadline_s, limit=_MAX_HEADERS_NBYTES, what="wanted bytes"
        )
        wanted = [msgspec.msgpack.decode(payload, type=list[Range]) for payload in said]
        carried_by = {carrier.shard: carrier.rank for carrier in self._plan.carriers}
        transfers: list[Steps[str]] = []
        for peer, theirs in enumerate(wanted):
            if peer == self._rank:
                continue
            if serve := [r for r in theirs if carried_by[r.shard] == self._rank]:
                transfers.append(self._send(serve, peer))
            if take := [i for i, r in enumerate(ranges) if carried_by[r.shard] == peer]:
                transfers.append(self._receive(take, peer))
        for i, r in enumerate(ranges):
            if carried_by[r.shard] == self._rank:
                with self._data[r.shard][r.begin : r.begin + r.nbytes] as data:
                    self._assembly.put(i, data)
        wrong = [why for why in drive(transfers, self._deadline_s, "parts of shards") if why]
        if wrong:
            return Verdict(problem=describe(ProtocolError(wrong[0], run=self._session.run), self._rank))
        changed = [c for c in self._mine if not self._offers.get(c.shard, Offer()).unchanged()]
        return Verdict(bad=tuple(self._bad(c, "its seal changed while it was read") for c in changed))

    def _send(self, ranges: Sequence[Range], peer: int) -> Steps[str]:
        """All ranges as one stream in messages of a chunk each, then its checksum."""
        return send(self._comm, (self._data[r.shard][r.begin : r.begin + r.nbytes] for r in ranges), peer)

    def _receive(self, take: Sequence[int], peer: int) -> Steps[str]:
        assert self._assembly is not None
        assembly = self._assembly
        total = sum(assembly.ranges[i].nbytes for i in take)

        def put(stream: memoryview) -> None:
            at = 0
            for i in take:
                nbytes = assembly.ranges[i].nbytes
                with stream[at : at + nbytes] as data:
                    assembly.put(i, data)
                at += nbytes

        return receive(self._comm, total, peer, put)

    # -- load ----------------------------------------------------------------------------------------------------------

    def _load(self) -> Verdict:
        """Into the live tensors; every rank has all of its bytes by now, and they are good."""
        targets, assembly = self._targets, self._assembly
        assert targets is not None
        assert assembly is not None
        try:
            assembly.finish()
            address = assembly.file.ctypes.data
            for target, nbytes, offset in zip(
                targets.targets.tolist(), targets.nbytes.tolist(), targets.offsets.tolist(), strict=True
            ):
                ctypes.memmove(target, address + offset, nbytes)
            targets.apply()
        except Exception as error:  # whatever it is, the state is in between
            wrapped = error if isinstance(error, MemckptError) else damaged(repr(error), self._session.run)
            return Verdict(problem=describe(wrapped, self._rank))
        return Verdict()


def _different(rows: list[tuple[str, str, str]], saved: int, wanted: int) -> LayoutMismatch:
    lines = "".join(f"\n  {key}: {says}" for key, says, _ in rows[:50])
    more = f"\n  and {len(rows) - 50} more" if len(rows) > 50 else ""
    return LayoutMismatch(
        f"a snapshot of {saved} ranks cannot be given to {wanted}: what is no part of a global tensor has to be the "
        f"same on all ranks, or named in restore(leave=...); nothing was changed{lines}{more}",
        rows,
    )


def send(comm: Communicator, parts: Iterator[memoryview], peer: int) -> Steps[str]:
    """Send bytes, given in parts, as one stream in messages of one chunk, and the checksum of it all at the end."""
    crc = 0
    window: list[Request] = []
    for message in _messages(parts):
        crc = _native.crc32c(message, crc)
        if len(window) == WINDOW:
            yield window.pop(0).test
        window.append(comm.isend(message, peer, _TAG))
    window.append(comm.isend(crc.to_bytes(4, "little"), peer, _TAG + 1))
    for request in window:
        yield request.test
    return ""


def _messages(parts: Iterator[memoryview]) -> Iterator[bytearray]:
    message = bytearray()
    for part in parts:
        with part:
            at = 0
            while at < len(part):
                with part[at : at + _native.CHUNK_BYTES - len(message)] as piece:
                    message += piece
                    at += len(piece)
                if len(message) == _native.CHUNK_BYTES:
                    yield message
                    message = bytearray()
    if message:
        yield message


def receive(comm: Communicator, nbytes: int, peer: int, put: Callable[[memoryview], None]) -> Steps[str]:
    """Receive what `send` sends, `nbytes` in all, and hand it on whole; what is wrong with it, or nothing."""
    stream = memoryview(bytearray(nbytes))
    starts = range(0, nbytes, _native.CHUNK_BYTES)
    window: list[tuple[int, Request]] = []
    crc = 0
    posted = 0
    while posted < len(starts) or window:
        while posted < len(starts) and len(window) < WINDOW:
            start = starts[posted]
            window.append((start, comm.irecv(stream[start : start + _native.CHUNK_BYTES], peer, _TAG)))
            posted += 1
        start, request = window.pop(0)
        yield request.test
        crc = _native.crc32c(stream[start : start + _native.CHUNK_BYTES], crc)
    says = bytearray(4)
    yield comm.irecv(says, peer, _TAG + 1).test
    if int.from_bytes(says, "little") != crc:
        return f"{nbytes} bytes from rank {peer} differ from their checksum"
    put(stream)
    return ""
