"""Who runs which logical rank after a failure: a pure function of what the living members say of themselves.

Every member computes the same answer from the same list, so nobody has to be told, and nobody can be the wrong one to
die.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from memckpt.errors import MemckptError, ProtocolError

MEMBER_NBYTES = 1024
"""Size of one encoded member in the exchange; longer texts are cut."""

REASON_CHARS = 400
NAME_CHARS = 128

SPARE = -1
"""Logical rank of a member that waits to take a lost one's place."""


class RunFailed(MemckptError):
    """`run` ends on every rank, for the same reason; snapshots stay in memory for a relaunch."""


class Place(msgspec.Struct, frozen=True):
    """Where a logical rank runs: node (what dies at once) and failure domain."""

    node: str
    domain: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a living member says of itself when members regroup.

    Attributes
    ----------
    logical : int
        Logical rank, or `SPARE`.
    place : Place
        Where it runs.
    host : str
        What its pid is valid in: host and pid namespace.
    pid, start : int
        Its process, and when that started (clock ticks since boot).
    state : str
        "waiting" (a spare), "finished", "interrupted" (by the loss of a peer) or "failed" (by an error of its own).
    reason : str
        What ended its training.
    generation : int
        The last one it took part in.
    progress : int
        Steps that its training has reported as done; -1 for none.
    """

    logical: int
    place: Place
    host: str = ""
    pid: int = 0
    start: int = 0
    state: str = "waiting"
    reason: str = ""
    generation: int = 0
    progress: int = -1


class Loss(msgspec.Struct, frozen=True):
    """One member that was lost: its logical rank, and where it ran."""

    logical: int
    place: Place


class Decision(msgspec.Struct, frozen=True):
    """What the members do next.

    Attributes
    ----------
    kind : str
        "train", "finish" or "fail".
    roster : tuple of int
        Position in the list of members of each logical rank; empty unless `kind` is "train".
    lost : tuple of Loss
        Logical ranks without a living member, in order.
    reason : str
        Why training was interrupted, or why it cannot go on.
    rank : int or None
        Logical rank on which the cause of "fail" lies.
    """

    kind: str
    roster: tuple[int, ...] = ()
    lost: tuple[Loss, ...] = ()
    reason: str = ""
    rank: int | None = None


def encode(member: Member) -> bytes:
    """`member` in exactly `MEMBER_NBYTES` bytes. Local."""
    place = Place(member.place.node[:NAME_CHARS], member.place.domain[:NAME_CHARS])  # what is compared, is cut alike
    reason = " ".join(member.reason.split()).encode("ascii", "replace").decode()[:REASON_CHARS]
    data = msgspec.json.encode(msgspec.structs.replace(member, place=place, reason=reason))
    if len(data) > MEMBER_NBYTES:  # only names of other scripts, or a reason full of quotes, get this far
        data = msgspec.json.encode(msgspec.structs.replace(member, place=place, reason=""))
    return data.ljust(MEMBER_NBYTES)


def decode(data: bytes) -> Member:
    """Inverse of `encode`. Raises ProtocolError. Local."""
    try:
        return msgspec.json.decode(data, type=Member)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a member of the run sent no valid description of itself: {error}") from error


def first_roster(places: Sequence[Place], active: int) -> tuple[int, ...]:
    """Positions of the active members at the start: in order, with the spares spread over the nodes. Local."""
    chosen = list(range(len(places)))
    while len(chosen) > active:
        load = Counter(places[i].node for i in chosen)
        chosen.remove(max(chosen, key=lambda i: (load[places[i].node], i)))
    return tuple(chosen)


def fill(lost: Sequence[Loss], spares: Sequence[tuple[int, Place]]) -> dict[int, int]:
    """Position of the spare for each lost logical rank: the same node first, then the same domain, then the emptiest
    place.

    Nobody takes a spare from another's node while it has another choice, hence one pass for each kind of nearness.
    Local.
    """
    free = dict(spares)
    chosen: dict[int, int] = {}
    for near in ("node", "domain"):
        for loss in lost:
            fits = [i for i in free if getattr(free[i], near) == getattr(loss.place, near)]
            if loss.logical not in chosen and fits:
                chosen[loss.logical] = fits[0]
                del free[fits[0]]
    for loss in lost:
        if loss.logical not in chosen and free:
            room = Counter(place.node for place in free.values())
            best = max(free, key=lambda i: (room[free[i].node], -i))
            chosen[loss.logical] = best
            del free[best]
    return chosen


def decide(members: Sequence[Member], active: int, before: Sequence[Place]) -> Decision:
    """What to do next, the same on every member. Local.

    Parameters
    ----------
    members : sequence of Member
        The living, in the order of their communicator.
    active : int
        Logical ranks that training needs.
    before : sequence of Place
        Where each logical rank ran, from the last decision; empty at the start.
    """
    if not before:
        if len(members) < active:
            return Decision("fail", reason=f"{active} active ranks are wanted and {len(members)} processes are there")
        return Decision("train", first_roster([m.place for m in members], active))
    at: dict[int, int] = {}
    for position, member in enumerate(members):
        if member.logical != SPARE:
            if member.logical in at or not 0 <= member.logical < active:
                raise ProtocolError(f"two members claim rank {member.logical}, or there is no such rank")
            at[member.logical] = position
    lost = tuple(Loss(rank, before[rank]) for rank in range(active) if rank not in at)
    for rank, position in sorted(at.items()):
        if members[position].state == "failed":
            return Decision("fail", lost=lost, rank=rank, reason=members[position].reason)
    if not lost and all(members[position].state == "finished" for position in at.values()):
        return Decision("finish")
    spares = [(i, m.place) for i, m in enumerate(members) if m.logical == SPARE]
    if len(lost) > len(spares):
        ranks = ", ".join(str(loss.logical) for loss in lost)
        return Decision(
            "fail",
            lost=lost,
            reason=f"not enough spares: rank {ranks} lost, {len(spares)} spare left; start the same program again "
            "to go on from the snapshots in memory",
        )
    at |= fill(lost, spares)
    reasons = [members[i].reason for _, i in sorted(at.items()) if members[i].reason]
    return Decision("train", tuple(at[rank] for rank in range(active)), lost, reasons[0] if reasons else "")
