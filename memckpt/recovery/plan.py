"""Which snapshots a restore takes, from where, into which slots: a pure function of what lies where.

The rules are those of the protocol's model; leaving one out loses a committed step or mixes histories. Those about
histories are in `lineage`. Beside them: an explicitly wanted step is taken exactly, or the restore fails and says what
there is; base and fall-back (what would be next) stay pinned, every other slot is free for one rank (`division`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from memckpt.errors import NothingToRestore
from memckpt.format.seal import Base, Generation
from memckpt.recovery.division import Carrier, Division, Pinned, RankPlan, Rebuild
from memckpt.recovery.inventory import Listing, Place
from memckpt.recovery.lineage import Known, Where, name
from memckpt.recovery.placement import Holders, place

__all__ = ["Carrier", "Pinned", "Plan", "RankPlan", "Rebuild", "make"]


class Plan(msgspec.Struct, frozen=True):
    """The whole answer, the same for every rank.

    Attributes
    ----------
    generation : Generation
        The new one, that begins with this restore.
    base, fallback : Base or None
        The snapshot set to load, and the next one that could be.
    holders : tuple of tuple of int
        Placement of the replicas.
    ranks : tuple of RankPlan
        By rank.
    rebuild : tuple of Rebuild
        Replicas of the base to be made.
    rejected : tuple of str
        What was newer than the base and why it was not taken.
    existed : bool
        Whether there was any snapshot of this run.
    crashing : bool
        Some complete step was stepped over since the program only failed after it was restored.
    damaged : bool
        Something that was whole once is not any more.
    world : int
        Number of ranks that saved the base.
    carriers : tuple of Carrier
        By shard, where that is another number than there are now; then no rank has a snapshot of its own to load.
    """

    generation: Generation
    base: Base | None
    fallback: Base | None
    holders: Holders
    ranks: tuple[RankPlan, ...]
    rebuild: tuple[Rebuild, ...]
    rejected: tuple[str, ...]
    existed: bool
    crashing: bool = False
    damaged: bool = False
    world: int = 0
    carriers: tuple[Carrier, ...] = ()


def make(
    listings: Iterable[Listing],
    places: Sequence[Place],
    copies: int,
    *,
    new_id: str,
    wanted_step: int | None = None,
    start_over: bool = False,
    excluded: Mapping[Where, str] | None = None,
    stored: Listing | None = None,
) -> Plan:
    """Decide a restore. Local, pure: the order of the listings does not matter.

    Parameters
    ----------
    listings : iterable of Listing
        One for each node; nodes on which no rank runs cannot be read and do not count.
    places : sequence of Place
        Where each rank runs.
    copies : int
        Replicas of each snapshot beside the rank's own.
    new_id : str
        Random id of the generation that begins.
    wanted_step : int, optional
        Take exactly this step.
    start_over : bool
        Take none: the generation that begins grows from nothing, and what there is becomes a history that was left.
    excluded : mapping of (node, slot) to str, optional
        Slots whose bytes turned out not to match their seal, and what was found.
    stored : Listing, optional
        What lies in storage. Of one step memory is taken before storage, shard by shard.

    Raises
    ------
    NothingToRestore
        `wanted_step` cannot be had; the message lists what can.
    """
    nodes = {p.node for p in places}
    reached = sorted((x for x in listings if x.node in nodes), key=attrgetter("node"))
    known = Known(reached if stored is None else [*reached, stored], excluded or {})
    base = None if start_over else _choose(known, wanted_step)
    world = len(places) if base is None else known.world(base)
    resharded = world != len(places)
    fallback = None
    if base is not None:
        older = [c for c in known.history(base) if c != base]
        newest = [c for c in known.history(None) if c != base]
        fallback = next(iter(older + newest), None)
    division = Division(known, places, base, fallback)
    holders = place([p.path for p in places], copies, None if resharded else division.held())
    ranks, rebuild = division.divide(holders, whole=not resharded)
    counters = [s.generation.counter for s in known.seals] + [s.base.generation.counter for s in known.seals if s.base]
    counters += [listing.newest for listing in known.listings]
    return Plan(
        generation=Generation(counter=max(counters, default=0) + 1, id=new_id),
        base=base,
        fallback=fallback,
        holders=holders,
        ranks=ranks,
        rebuild=rebuild,
        rejected=tuple(known.rejected(base)),
        existed=bool(known.seals),
        crashing=any(c in known.crashing for c in known.complete),
        damaged=known.damaged,
        world=world,
        carriers=division.carriers() if resharded else (),
    )


def _choose(known: Known, wanted_step: int | None) -> Base | None:
    automatic = known.history(None)
    if wanted_step is None:
        return automatic[0] if automatic else None
    left = [c for c in known.complete if c not in automatic]
    for candidate in automatic + left:
        if candidate.step == wanted_step:
            return candidate
    there = "; ".join(name(c) for c in automatic + left) or "no complete step"
    why = "".join(f"\n  {line}" for line in known.rejected(None))
    raise NothingToRestore(f"step {wanted_step} cannot be restored; there is: {there}{why}", step=wanted_step)
