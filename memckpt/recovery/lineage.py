"""Which complete steps there are, and to which history each belongs. Pure.

- Snapshots combine only when generation and step are equal.
- The newest generation seen anywhere comes first, then its newest step. Of an older generation only steps up to the
  base that its successor grew from may be taken, so that a history once left stays left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memckpt.format.seal import Base, Generation
from memckpt.recovery.inventory import STORAGE, Item, Listing, Sealed

Where = tuple[str, str]  # node and slot

_ATTEMPTS = 2  # restores after which a step that fails the program every time is stepped over
_TOLD = 32  # steps about which a report says why they were not taken


def name(snapshot: Base) -> str:
    """A snapshot set in words. Local."""
    return f"step {snapshot.step} of generation {snapshot.generation.counter}"


class Known:
    """What can be said about histories and complete steps, from the seals of all nodes.

    Attributes
    ----------
    seals : list of Sealed
        Of all nodes.
    copies : dict
        By snapshot set and shard: where it lies.
    complete : list of Base
        Snapshot sets with a copy of every shard, best first.
    crashing : set of Base
        Those that the program only failed after.
    damaged : bool
        Something that was whole once is not any more.
    """

    def __init__(self, listings: Sequence[Listing], excluded: Mapping[Where, str]) -> None:
        self.listings, self.excluded = listings, excluded
        self.seals: list[Sealed] = []
        self.copies: dict[Base, dict[int, list[tuple[str, Item]]]] = {}
        self._worlds: dict[Base, set[int]] = {}
        self._grew_from: dict[Generation, Base | None] = {}
        self._broken: list[str] = []
        self.damaged = bool(excluded)
        for listing in listings:
            for item in listing.items:
                self.damaged |= item.damaged
                if item.sealed is None:
                    if item.reason:
                        what = item.slot if listing.node == STORAGE else f"slot {item.slot} on {listing.node}"
                        self._broken.append(f"{what}: {item.reason}")
                    continue
                s = item.sealed
                self.seals.append(s)
                self._grew_from.setdefault(s.generation, s.base)
                snapshot = Base(generation=s.generation, step=s.step)
                shards = self.copies.setdefault(snapshot, {})
                self._worlds.setdefault(snapshot, set()).add(s.world)
                if (listing.node, item.slot) not in excluded:
                    shards.setdefault(s.shard, []).append((listing.node, item))
        crashed: dict[Base, set[str]] = {}
        for base, generation in (crash for listing in listings for crash in listing.crashes):
            crashed.setdefault(base, set()).add(generation)
        self.crashing = {base for base, generations in crashed.items() if len(generations) >= _ATTEMPTS}
        self.complete = [c for c in newest_first(self.copies) if not self.missing(c)]

    def world(self, snapshot: Base) -> int:
        return max(self._worlds[snapshot])

    def missing(self, snapshot: Base) -> list[int]:
        """Shards of which there is no whole copy."""
        return [shard for shard in range(self.world(snapshot)) if shard not in self.copies[snapshot]]

    def _limits(self, start: Base | None) -> dict[Generation, float]:
        """Newest step that may be taken, of each generation on the way back from `start` (from the newest one seen)."""
        limits: dict[Generation, float] = {}
        at = start
        if at is None and self.seals:
            newest = max(self._grew_from, key=age)
            limits[newest] = float("inf")
            at = self._grew_from[newest]
        while at is not None and at.generation not in limits:
            limits[at.generation] = at.step
            at = self._grew_from.get(at.generation)
        return limits

    def history(self, start: Base | None) -> list[Base]:
        """Complete steps that may be taken, best first: all (None), or those of `start` and its past; none from which
        the program only fails.
        """
        limits = self._limits(start)
        return [c for c in self.complete if c.step <= limits.get(c.generation, -1) and c not in self.crashing]

    def rejected(self, base: Base | None) -> list[str]:
        """Why what is newer than `base` was not taken, and which slots turned out to be broken."""
        lines = []
        limits = self._limits(None)
        for snapshot in newest_first(self.copies):
            if base is not None and order(snapshot) <= order(base):
                continue
            if missing := self.missing(snapshot):
                looked = ", ".join(listing.node for listing in self.listings)
                shards = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                lines.append(f"{name(snapshot)}: no whole snapshot of shard {shards} on {looked}")
            elif snapshot.step > limits.get(snapshot.generation, -1):
                lines.append(f"{name(snapshot)}: belongs to a history that was left")
            elif snapshot in self.crashing:
                lines.append(f"{name(snapshot)}: the program failed {_ATTEMPTS} times right after it was restored")
            elif base is not None:
                lines.append(f"{name(snapshot)}: complete, but step {base.step} was wanted")
        lines += self._broken
        told = lines[:_TOLD] + ([f"and {len(lines) - _TOLD} more"] if len(lines) > _TOLD else [])
        return [*told, *(self.excluded[where] for where in sorted(self.excluded))]


def age(generation: Generation) -> tuple[int, str]:
    return generation.counter, generation.id


def order(snapshot: Base) -> tuple[int, str, int]:
    return *age(snapshot.generation), snapshot.step


def newest_first(snapshots: Iterable[Base]) -> list[Base]:
    return sorted(snapshots, key=order, reverse=True)
