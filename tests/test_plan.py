"""Plans: never a mixture, never older than need be, never a slot with two writers (C04 C05 C06 C25 C26)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import NothingToRestore
from memckpt.format.seal import Base, Generation
from memckpt.recovery.inventory import Item, Listing, Place, Sealed, decode, encode
from memckpt.recovery.plan import Plan, make

NEW = "f" * 16


def gen(counter: int, letter: str = "a") -> Generation:
    return Generation(counter=counter, id=letter * 16)


@dataclass
class Cluster:
    """Nodes with slots, as a test writes them down."""

    world: int
    nodes: dict[str, list[Item]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    count: int = 0

    def add(
        self, node: str, shard: int, step: int, generation: Generation, base: Base | None = None, world: int = 0
    ) -> str:
        self.count += 1
        slot = f"s-{self.count:016x}"
        sealed = Sealed(shard, world or self.world, generation, base, step, "layout")
        self.nodes.setdefault(node, []).append(Item(slot, self.sizes.get(shard, 100), sealed))
        return slot

    def torn(self, node: str, nbytes: int = 100) -> str:
        self.count += 1
        slot = f"s-{self.count:016x}"
        self.nodes.setdefault(node, []).append(Item(slot, nbytes))
        return slot

    def ring(self, step: int, generation: Generation, base: Base | None = None) -> None:
        """Every shard on its own node and on the next rank's."""
        for r in range(self.world):
            self.add(f"n{r}", r, step, generation, base)
            self.add(f"n{(r + 1) % self.world}", r, step, generation, base)

    def listings(self) -> list[Listing]:
        return [Listing(node, tuple(items)) for node, items in self.nodes.items()]

    def plan(self, places: list[str] | None = None, copies: int = 1, **more: object) -> Plan:
        nodes = places if places is not None else [f"n{r}" for r in range(self.world)]
        return make(self.listings(), [Place(n) for n in nodes], copies, new_id=NEW, **more)  # type: ignore[arg-type]


# -- properties -------------------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, list[str], list[Generation], dict[Generation, Base | None]]:
    """A few histories, each grown from a step of the one before; any subset of their snapshots still lies anywhere."""
    world = draw(st.integers(1, 4))
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 4)))]
    places = [draw(st.sampled_from(nodes)) for _ in range(world)]
    cluster = Cluster(world, sizes={r: draw(st.sampled_from([100, 200])) for r in range(world)})
    generations = [gen(i + 1, "abc"[i]) for i in range(draw(st.integers(1, 3)))]
    grew: dict[Generation, Base | None] = {}
    for i, g in enumerate(generations):
        grew[g] = (
            Base(generation=generations[i - 1], step=draw(st.integers(1, 3))) if i and draw(st.booleans()) else None
        )
        for step in range(1, 4):
            for shard in range(world):
                for node in draw(st.lists(st.sampled_from(nodes), max_size=2)):
                    cluster.add(node, shard, step, g, grew[g])
    for node in draw(st.lists(st.sampled_from(nodes), max_size=4)):
        cluster.torn(node, draw(st.sampled_from([100, 200, 300])))
    return cluster, places, generations, grew


def allowed(cluster: Cluster, places: list[str], grew: dict[Generation, Base | None]) -> list[Base]:
    """The rule, stated independently: complete steps on the way back from the newest generation that left a seal."""
    shards: dict[tuple[Generation, int], set[int]] = {}
    for node in set(places):
        for item in cluster.nodes.get(node, []):
            if item.sealed:
                shards.setdefault((item.sealed.generation, item.sealed.step), set()).add(item.sealed.shard)
    seen = {g for g, _ in shards}
    answer: list[Base] = []
    at, limit = max(seen, key=lambda g: g.counter, default=None), 99
    while at is not None:
        steps = [s for s in range(limit, 0, -1) if shards.get((at, s)) == set(range(cluster.world))]
        answer += [Base(generation=at, step=s) for s in steps]
        base = grew[at] if at in seen else None  # what a generation grew from is known from its seals only
        at, limit = (base.generation, base.step) if base else (None, 0)
    return answer


@given(clusters(), st.integers(0, 2), st.randoms())
@settings(max_examples=300, deadline=None)
def test_plan_properties(drawn: tuple, copies: int, rng: random.Random) -> None:
    cluster, places, _, grew = drawn
    plan = cluster.plan(places, copies)
    best = allowed(cluster, places, grew)
    assert plan.base == (best[0] if best else None)
    assert plan.fallback == (best[1] if len(best) > 1 else None)
    seals = [i.sealed for node in set(places) for i in cluster.nodes.get(node, []) if i.sealed]
    assert plan.generation.counter > max((s.generation.counter for s in seals), default=0)

    shuffled = cluster.listings()
    rng.shuffle(shuffled)
    shuffled = [Listing(x.node, tuple(rng.sample(x.items, len(x.items)))) for x in shuffled]
    assert make(shuffled, [Place(n) for n in places], copies, new_id=NEW) == plan
    check_division(cluster, places, plan)
    check_sources(cluster, places, plan)


def check_division(cluster: Cluster, places: list[str], plan: Plan) -> None:
    """Each slot of a node with ranks belongs to exactly one of them; base and fall-back are pinned, nothing else."""
    for node, items in cluster.nodes.items():
        ranks = [r for r, n in enumerate(places) if n == node]
        free = Counter(s for r in ranks for s in plan.ranks[r].free)
        pinned = Counter(p.slot for r in ranks for p in plan.ranks[r].pinned)
        assert max((free + pinned).values(), default=1) == 1
        by_name = {item.slot: item for item in items}
        if ranks:
            assert set(free) | set(pinned) == set(by_name)
        for slot, item in by_name.items():
            s = item.sealed
            keep = s is not None and Base(generation=s.generation, step=s.step) in (plan.base, plan.fallback)
            assert (slot in pinned) == (keep and bool(ranks))
    for r, rank in enumerate(plan.ranks):
        names = {item.slot: item for item in cluster.nodes.get(places[r], [])}
        assert set(rank.free) <= set(names)
        assert all(p.slot in names for p in rank.pinned)
        assert rank.target is None or (rank.target in rank.free and names[rank.target].nbytes == rank.nbytes)
    used = [(places[b.to_rank], b.slot) for b in plan.rebuild if b.slot]
    used += [(places[r], rank.target) for r, rank in enumerate(plan.ranks) if rank.target]
    assert len(used) == len(set(used)), "one slot is planned for two snapshots"


def check_sources(cluster: Cluster, places: list[str], plan: Plan) -> None:
    """Everybody gets its shard of the base, from its own node where it lies there; missing replicas are rebuilt."""
    for r, rank in enumerate(plan.ranks):
        assert (rank.source == "none") == (plan.base is None)
        if plan.base is None:
            continue
        node = places[rank.server]
        item = next(item for item in cluster.nodes[node] if item.slot == rank.slot)
        assert item.sealed is not None
        assert (item.sealed.shard, item.sealed.generation, item.sealed.step) == (
            r,
            plan.base.generation,
            plan.base.step,
        )
        mine = [i for i in cluster.nodes.get(places[r], []) if i.sealed and i.sealed.shard == r]
        here = any(i.sealed and Base(generation=i.sealed.generation, step=i.sealed.step) == plan.base for i in mine)
        assert (rank.source == "own") == here == (rank.server == r and rank.source != "peer")
    if plan.base is None:
        assert plan.rebuild == ()
        return
    asked = {(b.shard, b.to_rank) for b in plan.rebuild}
    for shard, holders in enumerate(plan.holders):
        for h in holders:
            pins = [p for p in plan.ranks[h].pinned if p.shard == shard and p.snapshot == plan.base]
            assert ((shard, h) in asked) == (not pins)


@pytest.mark.parametrize("seed", range(50))
def test_c05_random_wipes(seed: int) -> None:
    """Whatever memory is lost: the newest step of which every shard is left, for all ranks, or nothing for all."""
    rng = random.Random(seed)
    world = rng.randint(2, 4)
    cluster = Cluster(world)
    for step in (10, 15):
        cluster.ring(step, gen(1))
    for node in list(cluster.nodes):
        cluster.nodes[node] = [item for item in cluster.nodes[node] if rng.random() > 0.3]
    have = {
        step: {i.sealed.shard for items in cluster.nodes.values() for i in items if i.sealed and i.sealed.step == step}
        for step in (10, 15)
    }
    want = next((step for step in (15, 10) if have[step] == set(range(world))), None)
    plan = cluster.plan()
    assert (plan.base.step if plan.base else None) == want
    assert len({rank.source == "none" for rank in plan.ranks}) == 1


# -- named cases ------------------------------------------------------------------------------------------------------


def test_c04_the_largest_step_that_everyone_has() -> None:
    cluster = Cluster(2)
    cluster.add("n0", 0, 10, gen(1))
    cluster.add("n1", 1, 10, gen(1))
    cluster.add("n0", 0, 20, gen(1))
    plan = cluster.plan()
    assert plan.base == Base(generation=gen(1), step=10)
    assert plan.rejected == ("step 20 of generation 1: no whole snapshot of shard 1 on n0, n1",)
    with pytest.raises(NothingToRestore, match=r"step 20 cannot be restored; there is: step 10 of generation 1"):
        cluster.plan(wanted_step=20)


def test_equal_steps_of_two_generations_are_not_combined() -> None:
    cluster = Cluster(2)
    cluster.add("n0", 0, 10, gen(2), Base(generation=gen(1), step=5))
    cluster.add("n1", 1, 10, gen(1))
    cluster.ring(5, gen(1))
    assert cluster.plan().base == Base(generation=gen(1), step=5)
    same_counter = Cluster(2)
    same_counter.add("n0", 0, 10, gen(1, "a"))
    same_counter.add("n1", 1, 10, gen(1, "b"))
    assert same_counter.plan().base is None


def test_c05_replication_off_and_on() -> None:
    off = Cluster(2)
    for r in (0, 1):
        off.add(f"n{r}", r, 10, gen(1))
    off.add("n0", 0, 15, gen(1))
    assert off.plan(copies=0).base == Base(generation=gen(1), step=10)
    off.add("n0", 1, 15, gen(1))
    plan = off.plan()
    assert plan.base == Base(generation=gen(1), step=15)
    assert [r.source for r in plan.ranks] == ["own", "peer"]
    assert plan.ranks[1].server == 0


def test_c06_explicit_rollback() -> None:
    cluster = Cluster(2)
    cluster.ring(100, gen(1))
    cluster.ring(200, gen(1))
    assert cluster.plan().base == Base(generation=gen(1), step=200)
    back = cluster.plan(wanted_step=100)
    assert back.base == Base(generation=gen(1), step=100)
    assert back.generation == Generation(counter=2, id=NEW)
    with pytest.raises(NothingToRestore, match=r"step 200 of generation 1; step 100 of generation 1"):
        cluster.plan(wanted_step=150)
    # Saves of the new history are accepted; 200 does not come back by itself, not even when it is the only whole one.
    base = Base(generation=gen(1), step=100)
    cluster.ring(110, gen(2), base)
    plan = cluster.plan()
    assert plan.base == Base(generation=gen(2), step=110)
    assert plan.fallback == base
    for node in cluster.nodes:
        cluster.nodes[node] = [i for i in cluster.nodes[node] if i.sealed and (i.sealed.step != 110 or node == "n0")]
        cluster.nodes[node] = [
            i for i in cluster.nodes[node] if not (i.sealed and i.sealed.step == 110 and i.sealed.shard)
        ]
    plan = cluster.plan()
    assert plan.base == base
    assert any("step 110 of generation 2: no whole snapshot of shard 1" in line for line in plan.rejected)
    for node in cluster.nodes:
        cluster.nodes[node] = [i for i in cluster.nodes[node] if i.sealed and i.sealed.step != 100]
    assert cluster.plan().base is None
    assert any("step 200 of generation 1: belongs to a history that was left" in x for x in cluster.plan().rejected)
    assert cluster.plan(wanted_step=200).base == Base(generation=gen(1), step=200)  # but on request it does


def test_c25_lost_primary_and_corrupt_buddy() -> None:
    cluster = Cluster(2)
    cluster.ring(20, gen(1))
    cluster.ring(30, gen(1))
    own = next(i for i in cluster.nodes["n0"] if i.sealed and (i.sealed.shard, i.sealed.step) == (0, 30))
    buddy = next(i for i in cluster.nodes["n1"] if i.sealed and (i.sealed.shard, i.sealed.step) == (0, 30))
    cluster.nodes["n0"].remove(own)
    plan = cluster.plan()
    assert plan.base == Base(generation=gen(1), step=30)
    assert (plan.ranks[0].source, plan.ranks[0].server, plan.ranks[0].slot) == ("peer", 1, buddy.slot)
    assert buddy.slot in {p.slot for p in plan.ranks[1].pinned}
    bad = {("n1", buddy.slot): "rank 0, step 30: chunk 3 differs"}
    plan = cluster.plan(excluded=bad)
    assert plan.base == Base(generation=gen(1), step=20)
    assert plan.rejected == ("step 30 of generation 1: no whole snapshot of shard 0 on n0, n1", bad["n1", buddy.slot])
    assert buddy.slot in plan.ranks[1].free
    with pytest.raises(NothingToRestore, match=r"(?s)step 30 cannot be restored.*chunk 3 differs"):
        cluster.plan(excluded=bad, wanted_step=30)


def test_c26_new_node_and_swapped_nodes() -> None:
    cluster = Cluster(2)
    cluster.ring(30, gen(1))
    del cluster.nodes["n1"]
    plan = cluster.plan(["n0", "n9"])
    assert plan.base == Base(generation=gen(1), step=30)
    assert [r.source for r in plan.ranks] == ["own", "peer"]
    assert [(b.shard, b.from_rank, b.to_rank) for b in plan.rebuild] == [(0, 0, 1)]
    swapped = Cluster(2)
    swapped.ring(30, gen(1))
    plan = swapped.plan(["n1", "n0"])
    assert plan.base == Base(generation=gen(1), step=30)
    assert [r.source for r in plan.ranks] == ["own", "own"]
    assert plan.rebuild == ()
    alone = Cluster(2)
    alone.add("n0", 0, 30, gen(1))
    plan = alone.plan(["n0", "n9"])
    assert plan.base is None
    assert plan.existed
    assert plan.rejected == ("step 30 of generation 1: no whole snapshot of shard 1 on n0",)
    assert not Cluster(2).plan().existed


def test_valid_pairs_are_kept_and_only_missing_replicas_rebuilt() -> None:
    cluster = Cluster(4)
    cluster.ring(30, gen(1))
    plan = cluster.plan(["n0", "n1", "n2", "new"])
    assert plan.holders[0] == (1,)
    assert plan.holders[1] == (2,)
    assert [(b.shard, b.to_rank) for b in plan.rebuild] == [(2, plan.holders[2][0])]
    assert plan.holders[3] == (0,)
    odd = Cluster(4)
    for r, holder in enumerate([2, 3, 0, 1]):  # valid, but not what placement would choose by itself
        odd.add(f"n{r}", r, 30, gen(1))
        odd.add(f"n{holder}", r, 30, gen(1))
    plan = odd.plan()
    assert plan.holders == ((2,), (3,), (0,), (1,))
    assert plan.rebuild == ()


def test_serving_is_shared_among_the_ranks_of_a_node() -> None:
    cluster = Cluster(4)
    for shard in range(4):
        cluster.add("a", shard, 5, gen(1))
    plan = cluster.plan(["a", "a", "b", "b"])
    assert [r.source for r in plan.ranks] == ["own", "own", "peer", "peer"]
    assert sorted(r.server for r in plan.ranks[2:]) == [0, 1]


def test_another_number_of_ranks_shares_the_reading_of_the_shards_and_keeps_all_of_them() -> None:
    cluster = Cluster(4)
    cluster.ring(30, gen(1))
    for nodes in (["n0", "n2"], ["n0", "n1", "n2"], ["n0", "n1", "n2", "n3", "n4"]):
        plan = cluster.plan(nodes)
        assert plan.base is not None and (plan.base.step, plan.world) == (30, 4)
        assert [c.shard for c in plan.carriers] == [0, 1, 2, 3]
        assert all(c.node == nodes[c.rank] for c in plan.carriers)
        assert {c.rank for c in plan.carriers} == set(range(min(len(nodes), 4)))
        assert not plan.rebuild
        kept = sorted((nodes[r], p.slot) for r, part in enumerate(plan.ranks) for p in part.pinned)
        there = sorted((x.node, i.slot) for x in cluster.listings() for i in x.items if x.node in nodes)
        assert kept == there
    rest = Cluster(2)
    rest.ring(30, gen(1))
    assert [r.source for r in rest.plan(["n0", "n1", "n2"]).ranks] == ["peer"] * 3
    rest = Cluster(4)
    rest.add("n0", 0, 30, gen(1))
    assert rest.plan(["n0", "n1"]).base is None


def test_starting_over_takes_nothing_and_outranks_all() -> None:
    cluster = Cluster(2)
    cluster.ring(30, gen(7))
    plan = cluster.plan(start_over=True)
    assert (plan.base, plan.generation.counter) == (None, 8)
    assert all(len(r.free) == 2 and not r.pinned for r in plan.ranks)
    cluster.add("n0", 0, 1, plan.generation)
    assert cluster.plan().base is None


def test_new_generation_is_newer_than_any_lock_file() -> None:
    assert make([Listing("n0", (), newest=9)], [Place("n0")], 1, new_id=NEW).generation.counter == 10


def test_fetch_and_rebuild_take_free_slots_of_the_right_size_first() -> None:
    cluster = Cluster(2, sizes={0: 100, 1: 200})
    cluster.ring(30, gen(1))
    del cluster.nodes["n1"]
    small, right = cluster.torn("n9", 100), cluster.torn("n9", 200)
    older = cluster.add("n9", 1, 3, gen(0))
    plan = cluster.plan(["n0", "n9"])
    assert plan.ranks[1].target == right
    assert [(b.shard, b.slot) for b in plan.rebuild] == [(0, small)]
    assert set(plan.ranks[1].free) == {small, right, older}


def test_inventories_travel() -> None:
    cluster = Cluster(2)
    cluster.ring(30, gen(1), Base(generation=gen(0), step=2))
    cluster.torn("n0")
    for listing in cluster.listings():
        assert decode(encode(listing)) == listing
