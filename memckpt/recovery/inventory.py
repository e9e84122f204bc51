"""What lies where: the slots of every node as their seals describe them, small enough to be sent around. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from memckpt.errors import ProtocolError
from memckpt.format.seal import Base, Generation

if TYPE_CHECKING:
    from memckpt.memory.slotfile import Found

CHUNK_NBYTES = 4 << 20
STORAGE = "storage/"
"""Stands for a node in the listing of what lies in storage; no node can have a name with a slash."""

_REASON_LENGTH = 200


class Place(msgspec.Struct, frozen=True):
    """Where a rank runs.

    Attributes
    ----------
    node : str
        What dies at once, and shares one pool of slots.
    domain : str
        Failure domain the node lies in, outermost first ("row1/rack2"); empty, or the node itself, when that is all.
    """

    node: str
    domain: str = ""

    @property
    def path(self) -> str:
        """Domain path that ends with the node, as `placement` wants it."""
        return self.node if self.domain in ("", self.node) else f"{self.domain}/{self.node}"


class Sealed(msgspec.Struct, frozen=True):
    """What a seal says of its slot, without the checksums."""

    shard: int
    world: int
    generation: Generation
    base: Base | None
    step: int
    layout: str


class Item(msgspec.Struct, frozen=True):
    """One slot of a node.

    Attributes
    ----------
    slot : str
        Its name.
    nbytes : int
        Its size in bytes.
    sealed : Sealed or None
        What it holds; None when that is no snapshot of this run.
    reason : str or None
        Why it is none, where that is more than a missing seal.
    damaged : bool
        It was whole once and is not any more, as `reason` says; otherwise it never came to an end.
    """

    slot: str
    nbytes: int
    sealed: Sealed | None = None
    reason: str | None = None
    damaged: bool = False


class Listing(msgspec.Struct, frozen=True):
    """Every slot of the run on one node, and the highest generation counter that was ever in use there.

    `crashes`: restored steps, each with the id of a generation in which the program then failed by itself.
    """

    node: str
    items: tuple[Item, ...]
    newest: int = 0
    crashes: tuple[tuple[Base, str], ...] = ()


def list_node(
    node: str,
    found: Iterable[Found],
    *,
    run: str,
    job: str,
    newest: int = 0,
    crashes: Iterable[tuple[Base, str]] = (),
) -> Listing:
    """Describe the slots found on a node, in the order of their names. Local, pure.

    What is not a file of ours is left out: nobody may write it.
    """
    items = []
    for f in sorted(found, key=lambda f: f.slot):
        seal, reason = f.seal, f.reason
        if f.nbytes == 0:
            continue
        if seal is None:
            reason = None if reason == "no seal" else reason
        elif (seal.run, seal.job) != (run, job):
            reason = f"sealed by run {seal.run!r} of job {seal.job!r}"
        elif seal.nbytes != f.nbytes:
            reason = f"the slot has {f.nbytes} bytes, its seal says {seal.nbytes}"
        elif not 0 <= seal.shard < seal.world:
            reason = f"shard {seal.shard} of a world of {seal.world}"
        elif seal.chunk_nbytes != CHUNK_NBYTES:
            reason = f"checksums of chunks of {seal.chunk_nbytes} bytes"
        if seal is None or reason is not None:
            reason = reason[:_REASON_LENGTH] if reason else None
            items.append(Item(f.slot, f.nbytes, reason=reason, damaged=reason is not None))
            continue
        sealed = Sealed(seal.shard, seal.world, seal.generation, seal.base, seal.step, seal.layout)
        items.append(Item(f.slot, f.nbytes, sealed))
    return Listing(node, tuple(items), newest, tuple(crashes))


def encode(listing: Listing) -> bytes:
    """Bytes to send. Local."""
    return msgspec.msgpack.encode(listing)


def decode(payload: bytes) -> Listing:
    """Read what `encode` wrote. Local.

    Raises
    ------
    ProtocolError
        The bytes are no listing.
    """
    try:
        return msgspec.msgpack.decode(payload, type=Listing)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a node sent no valid inventory: {error}") from error
