"""Divides the slots of every node among its ranks: each slot has one rank that keeps it or may write it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import msgspec

from memckpt.format.seal import Base
from memckpt.recovery.inventory import STORAGE, Item, Place
from memckpt.recovery.lineage import Known, age, order
from memckpt.recovery.placement import Holders


class Pinned(msgspec.Struct, frozen=True):
    """A slot that must be kept until the base is committed again, and what it holds."""

    slot: str
    shard: int
    snapshot: Base


class RankPlan(msgspec.Struct, frozen=True):
    """What one rank does.

    Attributes
    ----------
    source : str
        Where its snapshot comes from: "own" (its node's memory), "peer", "storage", or "none" (there is no base).
    server : int
        The rank that reads the snapshot from its node's memory; this rank itself for "own" and "storage".
    slot : str
        The slot on the server's node, or the place in storage; empty for "none".
    nbytes : int
        Size of the snapshot in bytes.
    target : str or None
        Free slot of the right size to fetch it into; None to make one.
    free : tuple of str
        Slots of its node that this rank, and no other, may write; in the order in which they are best used.
    pinned : tuple of Pinned
        Slots of its node that this rank keeps, and no other does.
    """

    source: str
    server: int
    slot: str
    nbytes: int
    target: str | None
    free: tuple[str, ...]
    pinned: tuple[Pinned, ...]


class Rebuild(msgspec.Struct, frozen=True):
    """A replica of the base that is missing: rank `from_rank` (whose shard it is) sends it to rank `to_rank`.

    `slot` is a free slot of that rank of the right size, None where one has to be made.
    """

    shard: int
    from_rank: int
    to_rank: int
    slot: str | None
    nbytes: int


class Carrier(msgspec.Struct, frozen=True):
    """The rank that reads one shard of a base of another number of ranks, for all: from a slot of its node, or a place
    in storage (`node` is `memckpt.recovery.inventory.STORAGE` then).
    """

    shard: int
    rank: int
    node: str
    slot: str
    nbytes: int


class Division:
    """Divides the slots of every node among its ranks: each slot has exactly one rank that keeps or may write it."""

    def __init__(self, known: Known, places: Sequence[Place], base: Base | None, fallback: Base | None) -> None:
        self.places, self.base = places, base
        self.ranks: dict[str, list[int]] = {}
        for r, p in enumerate(places):
            self.ranks.setdefault(p.node, []).append(r)
        self.copies: dict[int, list[tuple[str, Item]]] = {}
        if base is not None:
            self.copies = known.copies[base]
        self.keep: dict[str, list[Pinned]] = {node: [] for node in self.ranks}
        self.spare: dict[str, list[Item]] = {node: [] for node in self.ranks}
        for listing in known.listings:
            if listing.node not in self.ranks:  # storage has no slots to give away
                continue
            for item in listing.items:
                s = item.sealed
                snapshot = Base(generation=s.generation, step=s.step) if s else None
                whole = (listing.node, item.slot) not in known.excluded
                if s is not None and snapshot is not None and whole and snapshot in (base, fallback):
                    self.keep[listing.node].append(Pinned(item.slot, s.shard, snapshot))
                else:
                    self.spare[listing.node].append(item)
            self.spare[listing.node].sort(key=lambda i: _worth(i, (listing.node, i.slot) not in known.excluded))
        self.pinned: list[list[Pinned]] = [[] for _ in places]
        self.free: list[list[str]] = [[] for _ in places]
        self.sizes: dict[int, int] = {shard: there[0][1].nbytes for shard, there in self.copies.items()}

    def held(self) -> list[set[str]]:
        """For each rank the domain paths of the nodes that hold a replica of the base, beside its own copy."""
        paths = {p.node: p.path for p in self.places}
        held: list[set[str]] = []
        for r, p in enumerate(self.places):
            nodes = [node for node, _ in self.copies.get(r, []) if node in paths]
            if p.node in nodes:
                nodes.remove(p.node)
            held.append({paths[node] for node in nodes})
        return held

    def divide(self, holders: Holders, *, whole: bool = True) -> tuple[tuple[RankPlan, ...], tuple[Rebuild, ...]]:
        """The part of each rank, and the replicas of the base that are missing.

        Parameters
        ----------
        whole : bool
            Each rank loads a shard of its own; else the base is one of another number of ranks, which only has to be
            kept.
        """
        have = self._pin(holders)
        if not whole:
            self._share_rest(holders)
            kept = zip(self.free, self.pinned, strict=True)
            source = "storage" if any(c.node == STORAGE for c in self.carriers()) else "peer"
            return tuple(RankPlan(source, r, "", 0, None, tuple(f), tuple(p)) for r, (f, p) in enumerate(kept)), ()
        serve = self._sources()
        targets = [
            self._take(p.node, r, self.sizes[r]) if serve[r][0] in ("peer", "storage") else None
            for r, p in enumerate(self.places)
        ]
        rebuild = []
        for shard, nbytes in sorted(self.sizes.items()):
            for holder in holders[shard] if shard < len(holders) else ():
                if (shard, holder) not in have:
                    slot = self._take(self.places[holder].node, holder, nbytes)
                    rebuild.append(Rebuild(shard, shard, holder, slot, nbytes))
        self._share_rest(holders)
        ranks = []
        for r, (source, server, slot) in enumerate(serve):
            nbytes = self.sizes[r] if source != "none" else 0
            free, pinned = tuple(self.free[r]), tuple(self.pinned[r])
            ranks.append(RankPlan(source, server, slot, nbytes, targets[r], free, pinned))
        return tuple(ranks), tuple(rebuild)

    def carriers(self) -> tuple[Carrier, ...]:
        """A rank for each shard of the base that reads it for all: from memory where it can, evenly by bytes."""
        load = [0] * len(self.places)
        chosen = []
        for shard, there in sorted(self.copies.items()):
            near = [(r, node, item) for node, item in there for r in self.ranks.get(node, ())]
            far = [(r, node, item) for node, item in there for r in range(len(load)) if node not in self.ranks]
            rank, node, item = min(near or far, key=lambda c: (load[c[0]], c[0], c[2].slot))
            load[rank] += item.nbytes
            chosen.append(Carrier(shard, rank, node, item.slot, item.nbytes))
        return tuple(chosen)

    def _pin(self, holders: Holders) -> set[tuple[int, int]]:
        """Give every pinned slot to a rank of its node; the result says which rank holds a replica of which shard."""
        have = set()
        for node, ranks in self.ranks.items():
            here: dict[tuple[int, Base], list[Pinned]] = {}
            for p in self.keep[node]:
                here.setdefault((p.shard, p.snapshot), []).append(p)
            for (shard, snapshot), pins in sorted(here.items(), key=lambda kv: (kv[0][0], order(kv[0][1]))):
                takers = [r for r in ranks if r == shard]
                takers += [h for h in holders[shard] if h in ranks] if shard < len(holders) else []
                for i, pin in enumerate(sorted(pins, key=attrgetter("slot"))):
                    if i < len(takers):
                        r = takers[i]
                        if r != shard and snapshot == self.base:
                            have.add((shard, r))
                    else:  # superfluous, but not to be let go before the base is committed again
                        r = min(takers or ranks, key=lambda r: (len(self.pinned[r]), r))
                    self.pinned[r].append(pin)
        return have

    def _sources(self) -> list[tuple[str, int, str]]:
        """Source, serving rank and slot for each rank; every node's ranks share the serving evenly, by bytes."""
        load = [0] * len(self.places)
        serve = []
        for r in range(len(self.places)):
            there = sorted(self.copies.get(r, []), key=lambda c: (c[0], c[1].slot))
            own = [pin.slot for pin in self.pinned[r] if (pin.shard, pin.snapshot) == (r, self.base)]
            if not there:
                serve.append(("none", r, ""))
            elif own:
                serve.append(("own", r, own[0]))
            elif not (servers := [(s, item) for node, item in there for s in self.ranks.get(node, ())]):
                serve.append(("storage", r, there[0][1].slot))
            else:
                server, item = min(servers, key=lambda s: (load[s[0]], s[0], s[1].slot))
                load[server] += item.nbytes
                serve.append(("peer", server, item.slot))
        return serve

    def _take(self, node: str, rank: int, nbytes: int) -> str | None:
        """A free slot of exactly this size for `rank`, or None."""
        for item in self.spare[node]:
            if item.nbytes == nbytes:
                self.spare[node].remove(item)
                self.free[rank].append(item.slot)
                return item.slot
        return None

    def _share_rest(self, holders: Holders) -> None:
        """The other free slots go to who will need that size, else to whose shard they held, else evenly."""
        clients: dict[int, list[int]] = {r: [r] for r in range(len(self.places))}
        for shard, hs in enumerate(holders):
            for h in hs:
                clients[h].append(shard)
        for node, ranks in self.ranks.items():
            need = {r: [self.sizes[s] for s in clients[r] if s in self.sizes] for r in ranks}
            for item in self.spare[node]:
                shard = item.sealed.shard if item.sealed else -1
                r = min(
                    ranks,
                    key=lambda r: (
                        -need[r].count(item.nbytes),
                        shard not in clients[r],
                        shard != r,
                        len(self.free[r]),
                        r,
                    ),
                )
                if item.nbytes in need[r]:
                    need[r].remove(item.nbytes)
                self.free[r].append(item.slot)


def _worth(item: Item, whole: bool) -> tuple[bool, int, str, int, str]:
    """Order in which free slots are used: unsealed ones first, then the oldest."""
    s = item.sealed
    if s is None or not whole:
        return False, 0, "", 0, item.slot
    return True, *age(s.generation), s.step, item.slot
