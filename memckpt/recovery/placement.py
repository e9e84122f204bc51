"""Who keeps the replicas of whom: a pure function of where the ranks run.

A *domain* is the path of the failure domains that a rank lies in, outermost first and ending with its node, such as
``"rack2/node7"`` (or just ``"node7"``). A replica goes as far away as there is somewhere to go: to another outermost
domain, else to another node, else to another rank. Next in weight is that replicas that lie in such a place already
stay there, then that all ranks hold equally many.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from memckpt.errors import UsageError

Holders = tuple[tuple[int, ...], ...]
Unit = TypeVar("Unit", int, str)


def place(domains: Sequence[str], copies: int, held: Sequence[Collection[str]] | None = None) -> Holders:
    """Choose the ranks that hold the replicas of each rank. Local, pure, the same answer wherever it is asked.

    Parameters
    ----------
    domains : sequence of str
        Domain path of each rank, outermost first, the node last.
    copies : int
        Replicas of each snapshot beside the rank's own; at most ``world - 1`` are placed.
    held : sequence of collections of str, optional
        For each rank the domain paths of the nodes on which a replica of it lies already; kept where that is as safe as
        any other place.

    Returns
    -------
    tuple of tuple of int
        For each rank its holders: never itself, all different, ``min(copies, world - 1)`` of them.

    Raises
    ------
    UsageError
        `copies` is negative.
    """
    if copies < 0:
        raise UsageError(f"copies must not be negative, not {copies}")
    world = len(domains)
    copies = min(copies, max(world - 1, 0))
    kept = held if held is not None else [()] * world
    if not any(kept):
        turned = _rotate(domains, copies)
        if turned is not None:
            return turned
    return _Search(domains, copies, kept).run()


def unprotected(domains: Sequence[str], holders: Holders) -> tuple[int, ...]:
    """List the ranks that no holder protects against the loss of their node. Local, pure."""
    return tuple(r for r, hs in enumerate(holders) if all(domains[h] == domains[r] for h in hs))


def survives(domains: Sequence[str], holders: Holders) -> int:
    """Number of nodes that may be lost, whichever they are, without losing a shard. Local, pure."""
    apart = [len({domains[h] for h in hs} - {domains[r]}) for r, hs in enumerate(holders)]
    return min(apart, default=0)


def _rotate(domains: Sequence[str], copies: int) -> Holders | None:
    """Perfectly balanced placement, where there is one of this simple kind.

    With the ranks in domain order and m in the largest domain, ranks that are m, 2m, ... further on (cyclically) lie in
    different domains as long as (copies + 1) m fits into the world, and a rotation gives every rank equally many.
    """
    world = len(domains)
    order = sorted(range(world), key=lambda r: (domains[r].split("/"), r))
    outer = [domains[r].split("/")[0] for r in order]
    shift = max((outer.count(d) for d in set(outer)), default=1)
    if len(set(domains)) == 1:
        shift = 1
    if (copies + 1) * shift > world:
        return None
    holders: list[tuple[int, ...]] = [()] * world
    for i, r in enumerate(order):
        holders[r] = tuple(order[(i + j * shift) % world] for j in range(1, copies + 1))
    return tuple(holders)


class _Search:
    """The general case, node by node: the safest places first, then balance by moving along improving paths.

    Loads are counted per node, since ranks of one node are equal for safety. The moves are those of an optimal
    semi-matching (Harvey, Ladner, Lovasz, Tamir, "Semi-matchings for bipartite graphs and load balancing", 2006).
    """

    def __init__(self, domains: Sequence[str], copies: int, held: Sequence[Collection[str]]) -> None:
        self.domains, self.copies, self.held = domains, copies, held
        self.ranks: dict[str, list[int]] = {}
        for r, d in enumerate(domains):
            self.ranks.setdefault(d, []).append(r)
        self.nodes = sorted(self.ranks, key=lambda d: d.split("/"))
        self.path = {d: d.split("/") for d in self.nodes}
        self.place_of = {d: i for i, d in enumerate(self.nodes)}
        self.count = dict.fromkeys(self.nodes, 0)
        self.items: list[list[str]] = [[] for _ in domains]  # nodes chosen for each rank
        self.fixed: set[tuple[int, int]] = set()  # (rank, index) that is kept where it lies
        self.known: dict[tuple[str, ...], list[str]] = {}

    def closeness(self, node: str, others: Iterable[str]) -> tuple[int, ...]:
        """How much a node shares with the places a rank's copies lie in already; smaller is safer."""
        path, shared = self.path[node], []
        for other in others:
            n = 0
            for a, b in zip(path, self.path[other], strict=False):
                if a != b:
                    break
                n += 1
            shared.append(n + (node == other))
        return tuple(sorted(shared, reverse=True))

    def room(self, rank: int, node: str, taken: Sequence[str]) -> bool:
        return taken.count(node) + (node == self.domains[rank]) < len(self.ranks[node])

    def safest(self, rank: int, others: Sequence[str]) -> list[str]:
        """Nodes that are equally good for one more copy of `rank`, given where its other copies go."""
        key = (self.domains[rank], *others)
        if key not in self.known:
            open_nodes = [n for n in self.nodes if self.room(rank, n, others)]
            rated = [(self.closeness(n, key), n) for n in open_nodes]
            best = min(c for c, _ in rated)
            self.known[key] = [n for c, n in rated if c == best]
        return self.known[key]

    def run(self) -> Holders:
        world = range(len(self.domains))
        order = sorted(world, key=lambda r: (self.place_of[self.domains[r]], r))
        for _ in range(self.copies):  # what is kept comes first, so that the rest is balanced around it
            for r in order:
                if len(self.items[r]) < self.copies:
                    stays = [n for n in self.safest(r, self.items[r]) if n in self.held[r]]
                    if stays:
                        self.fixed.add((r, len(self.items[r])))
                        self.take(r, self.lightest(r, stays))
        for _ in range(self.copies):
            for r in order:
                if len(self.items[r]) < self.copies:
                    self.take(r, self.lightest(r, self.safest(r, self.items[r])))
        sizes = {node: len(ranks) for node, ranks in self.ranks.items()}
        _balance(self.items, self.equals, sizes, self.fixed)
        return self.to_ranks(order)

    def take(self, rank: int, node: str) -> None:
        self.items[rank].append(node)
        self.count[node] += 1

    def lightest(self, rank: int, nodes: Sequence[str]) -> str:
        here, total = self.place_of[self.domains[rank]], len(self.nodes)
        return min(nodes, key=lambda n: (self.count[n] / len(self.ranks[n]), (self.place_of[n] - here) % total))

    def equals(self, rank: int, index: int) -> list[str]:
        """Where else a chosen replica might lie just as safely, all else staying where it is; itself among them."""
        chosen = self.items[rank]
        equal = self.safest(rank, chosen[:index] + chosen[index + 1 :])
        return equal if chosen[index] in equal else [chosen[index]]

    def to_ranks(self, order: Sequence[int]) -> Holders:
        """Share the replicas of each node out among its ranks, as evenly as it goes."""
        load = [0] * len(self.domains)
        holders: list[list[int]] = [[] for _ in self.domains]
        for i in range(self.copies):
            for r in order:
                free = [h for h in self.ranks[self.items[r][i]] if h != r and h not in holders[r]]
                h = min(free, key=lambda h: (load[h], (h - r) % len(load)))
                load[h] += 1
                holders[r].append(h)

        def equals(rank: int, index: int) -> list[int]:
            taken = {rank, *holders[rank]} - {holders[rank][index]}
            return [h for h in self.ranks[self.items[rank][index]] if h not in taken]

        _balance(holders, equals, dict.fromkeys(range(len(load)), 1), set())
        return tuple(map(tuple, holders))


def _balance(
    items: list[list[Unit]],
    equals: Callable[[int, int], list[Unit]],
    sizes: Mapping[Unit, int],
    fixed: AbstractSet[tuple[int, int]],
) -> None:
    """Even out, in place, how many items lie in each unit, per member of it, by moving them along improving paths."""
    count = Counter(unit for chosen in items for unit in chosen)
    units = sorted(sizes)

    def improve(start: Unit) -> bool:
        goal = -(-count[start] // sizes[start]) - 2
        if goal < min(count[u] // sizes[u] for u in units):
            return False
        came: dict[Unit, tuple[int, int, Unit] | None] = {start: None}
        queue = deque([start])
        while queue:
            unit = queue.popleft()
            if count[unit] // sizes[unit] <= goal:
                while (link := came[unit]) is not None:
                    rank, index, source = link
                    items[rank][index] = unit
                    count[unit] += 1
                    count[source] -= 1
                    unit = source
                return True
            moved = set()  # a rank moves once in a path: its copies are only safe in view of where the others lie now
            back = unit
            while (link := came[back]) is not None:
                moved.add(link[0])
                back = link[2]
            for rank, chosen in enumerate(items):
                for index, at in enumerate(chosen):
                    if at == unit and rank not in moved and (rank, index) not in fixed:
                        for other in equals(rank, index):
                            if other not in came:
                                came[other] = (rank, index, unit)
                                queue.append(other)
        return False

    while any(improve(u) for u in sorted(units, key=lambda u: (-(count[u] // sizes[u]), u))):
        pass
