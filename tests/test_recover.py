"""Recover, with ranks as threads on fake nodes: the right bytes on every rank, or the same error on every rank."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memckpt import _native, faults
from memckpt.comm.local import LocalGroup
from memckpt.errors import (
    BudgetError,
    LayoutMismatch,
    NothingToRestore,
    PeerLost,
    StateDamaged,
    UsageError,
)
from memckpt.format.seal import Base
from memckpt.memory.arena import Arena
from memckpt.memory.slotfile import Slot
from memckpt.recovery.recover import Recovery
from memckpt.state.state import State
from tests.memory import BIG, FIRST, SECOND, Cluster, Model, Rank

CHUNK = _native.CHUNK_BYTES


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, 2)


@pytest.fixture
def big(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, 2, nbytes=BIG)


# -- where it comes from ----------------------------------------------------------------------------------------------


def test_own_memory(big: Cluster) -> None:
    big.save(10)
    big.save(20)
    before = big.sealed()
    results, states = big.restore()
    big.check(results, states, 20)
    assert results[0].sources == ("own", "own")
    assert results[0].fallback == Base(generation=FIRST, step=10)
    assert results[0].generation.counter == 2
    assert results[0].rebuild == ()
    assert set(results[0].seconds) == {"inventory", "plan", "check", "load", "total"}
    assert big.sealed() == before


def test_c26_a_new_node_asks_the_buddies(big: Cluster) -> None:
    big.save(30)
    big.wipe("n1")
    before = big.sealed()
    results, states = big.restore(["n0", "n7"])
    big.check(results, states, 30)
    assert results[0].sources == ("own", "peer")
    assert [(b.shard, b.to_rank) for b in results[0].rebuild] == [(0, 1)]
    assert "fetch" in results[1].seconds
    after = big.sealed()
    assert before.items() <= after.items()
    (new,) = after.keys() - before.keys()
    assert "/n7/" in new
    assert after[new] in before.values()  # seal and bytes, as the buddy has them


def test_c26_hosts_swapped(cluster: Cluster) -> None:
    cluster.save(30)
    results, states = cluster.restore(["n1", "n0"])
    cluster.check(results, states, 30)
    assert results[0].sources == ("own", "own")


def test_every_rank_serves_and_fetches_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4, nbytes=BIG, copies=0)
    cluster.save(5)
    results, states = cluster.restore(["n1", "n2", "n3", "n0"])
    cluster.check(results, states, 5)
    assert results[0].sources == ("peer",) * 4


def test_a_free_slot_of_the_right_size_is_used_again(cluster: Cluster) -> None:
    cluster.save(10)
    cluster.save(20)
    cluster.save(30)
    cluster.lose("n0", 0, 30)
    count = len(list(cluster.path.rglob("s-*.safetensors")))
    results, states = cluster.restore()
    cluster.check(results, states, 30)
    assert len(list(cluster.path.rglob("s-*.safetensors"))) == count
    assert results[0].own.name in (cluster.slots["n0", 0, 10], cluster.slots["n0", 1, 10])


def test_two_ranks_on_one_node_get_different_slots(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 4)
    cluster.nodes = ["a", "a", "b", "b"]
    for step in (1, 2, 3):
        cluster.save(step)
    cluster.wipe("b")
    results, states = cluster.restore()
    cluster.check(results, states, 3)
    for pair in (results[:2], results[2:]):
        names = [n for r in pair for n in (*r.free, *(p.slot for p in r.pinned))]
        assert len(names) == len(set(names))


# -- nothing there ----------------------------------------------------------------------------------------------------


def test_nothing_there(cluster: Cluster) -> None:
    live = [cluster.rank() for _ in range(2)]
    for r, state in enumerate(live):
        state.set(r, 99)
    results, states = cluster.restore(live=live)
    for r, result in enumerate(results):
        assert (result.base, result.own, result.existed, result.sources) == (None, None, False, ("none", "none"))
        assert states[r].bytes() == cluster.want(r, 99)
    results, _ = cluster.restore(require=True)
    assert [type(result) for result in results] == [NothingToRestore] * 2


def test_c26_no_silent_fresh_start(cluster: Cluster) -> None:
    cluster.save(30)
    cluster.wipe("n0")
    cluster.lose("n1", 0, 30)
    results, _ = cluster.restore(require=True)
    assert [type(result) for result in results] == [NothingToRestore] * 2
    assert "step 30 of generation 1: no whole snapshot of shard 0" in str(results[1])
    results, _ = cluster.restore()
    assert results[0].base is None
    assert results[0].existed
    assert len(results[0].rejected) == 1


def test_starting_over_and_refusing(cluster: Cluster) -> None:
    cluster.save(30)
    results, states = cluster.restore(start_over=True)
    assert results[0].base is None
    assert states[0].bytes() == cluster.rank().bytes()
    assert results[0].free
    results, _ = cluster.restore(refuse_existing=True)
    assert all(isinstance(r, UsageError) and "step 30 of generation 1" in str(r) for r in results)


def test_c04_different_wishes_are_refused_with_both_numbers(cluster: Cluster) -> None:
    cluster.save(10)
    results, states = cluster.restore(by_rank={0: {"wanted_step": 20}, 1: {"wanted_step": 10}})
    for result in results:
        assert isinstance(result, UsageError)
        assert "20" in str(result)
        assert "10" in str(result)
    assert states[0].bytes() == cluster.rank().bytes()


def test_c04_largest_step_that_everyone_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, copies=0)
    cluster.save(10)
    cluster.write("n0", 0, 20)
    results, states = cluster.restore()
    cluster.check(results, states, 10)
    results, _ = cluster.restore(wanted_step=20)
    assert all(isinstance(r, NothingToRestore) and "there is: step 10" in str(r) for r in results)


def test_c06_exactly_the_wanted_step(cluster: Cluster) -> None:
    cluster.save(100)
    cluster.save(200)
    results, states = cluster.restore(wanted_step=100)
    cluster.check(results, states, 100)
    results, _ = cluster.restore(wanted_step=150)
    assert all(isinstance(r, NothingToRestore) and "step 200" in str(r) and "step 100" in str(r) for r in results)
    results, states = cluster.restore()
    cluster.check(results, states, 200)
    cluster.save(110, SECOND, Base(generation=FIRST, step=100))
    results, states = cluster.restore()
    cluster.check(results, states, 110)
    assert results[0].base == Base(generation=SECOND, step=110)


# -- bad bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [100, CHUNK + 5, -1])
def test_c01_a_flipped_byte_in_the_buddys_copy(big: Cluster, at: int) -> None:
    """Never loaded: the next older step is, on both ranks, and rank, step and place are named."""
    big.save(20)
    big.save(30)
    big.lose("n0", 0, 30)
    big.flip("n1", 0, 30, at)
    results, states = big.restore()
    big.check(results, states, 20)
    told = "\n".join(results[0].rejected)
    assert "step 30" in told
    assert "rank 0" in told
    assert f"chunk {at // CHUNK if at > 0 else 2}" in told
    broken = [path for path in big.sealed() if not big.whole(Path(path))]
    assert broken == [str(big.file("n1", big.slots["n1", 0, 30]))], "what came from it was sealed again"


@pytest.mark.parametrize("what", [b"model/w", b"module"])
@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_flipped_byte_in_the_header_is_damage_and_no_mismatch(cluster: Cluster, node: str, what: bytes) -> None:
    cluster.save(20)
    cluster.save(30)
    content = cluster.file(node, cluster.slots[node, 0, 30]).read_bytes()
    cluster.flip(node, 0, 30, content.index(what) + len(what) - 1)
    if node == "n1":
        cluster.lose("n0", 0, 30)
    results, states = cluster.restore()
    cluster.check(results, states, 30 if node == "n0" else 20)
    assert "header" in results[0].rejected[-1]


def test_a_flipped_byte_in_the_own_copy_is_found_while_loading(big: Cluster) -> None:
    """The other holder has a good copy, so no step is lost; key and chunk are named."""
    big.save(20)
    big.save(30)
    big.flip("n0", 0, 30, CHUNK + 100)
    results, states = big.restore()
    big.check(results, states, 30)
    assert results[0].sources == ("peer", "own")
    assert "chunk 1 (key 'model/w')" in results[0].rejected[0]
    assert "rank 0" in results[0].rejected[0]


def test_c25_primary_gone_and_buddy_corrupt(cluster: Cluster) -> None:
    cluster.save(30)
    cluster.lose("n0", 0, 30)
    results, states = cluster.restore()
    cluster.check(results, states, 30)
    cluster.wipe("n0")
    cluster.flip("n1", 0, 30)
    before = cluster.sealed()
    results, states = cluster.restore(require=True)
    for result in results:
        assert isinstance(result, NothingToRestore)
        assert "no whole snapshot of shard 0 on n0, n1" in str(result)
        assert "chunk 0" in str(result)
    assert all(state.bytes() == cluster.rank().bytes() for state in states)
    assert cluster.sealed().items() >= before.items()


def test_damaged_when_nothing_good_is_left_after_loading_began(big: Cluster) -> None:
    big.save(30)
    big.flip("n0", 0, 30, CHUNK + 100)
    big.flip("n1", 0, 30, CHUNK + 100)
    results, _ = big.restore()
    assert [type(result) for result in results] == [StateDamaged] * 2
    assert "chunk 1" in str(results[1])


def test_a_wanted_step_is_not_replaced_by_another(big: Cluster) -> None:
    big.save(20)
    big.save(30)
    big.flip("n0", 0, 30, CHUNK + 100)
    big.flip("n1", 0, 30, CHUNK + 100)
    results, _ = big.restore(wanted_step=30)
    assert [type(result) for result in results] == [StateDamaged] * 2
    assert "there is: step 20" in str(results[0])


def test_a_seal_that_changes_meanwhile_is_not_believed(big: Cluster) -> None:
    """A zombie that reseals a slot while it is read: what was read is not used."""
    big.save(20)
    big.save(30)
    big.lose("n0", 0, 30)
    seal = Path(str(big.file("n1", big.slots["n1", 0, 30])).replace(".safetensors", ".seal.json"))

    def remove_it(name: str, rank: int, step: int) -> None:
        if name == "recover.serve" and step == 30:
            seal.unlink(missing_ok=True)

    faults.arm(remove_it)
    try:
        results, states = big.restore()
    finally:
        faults.arm(None)
    big.check(results, states, 20)
    assert "its seal changed while it was read" in results[0].rejected[-1]


# -- structure --------------------------------------------------------------------------------------------------------


def test_a_mismatch_on_one_rank_stops_all_and_changes_nothing(cluster: Cluster) -> None:
    cluster.save(30)
    cluster.lose("n0", 0, 30)
    live = [cluster.rank(), Rank(Model(800))]
    live[0].set(0, 5)
    live[1].set(1, 5)
    before = [r.bytes() for r in live], cluster.sealed()
    results, states = cluster.restore(live=live)
    for result in results:
        assert isinstance(result, LayoutMismatch)
        (row,) = result.rows
        assert "float32[100]" in row[1]
        assert "float32[200]" in row[2]
    assert ([r.bytes() for r in states], cluster.sealed()) == before


@pytest.mark.parametrize("nodes", [["n0"], ["n0", "n1", "n2"]])
def test_state_of_each_rank_is_not_given_to_another_number_of_ranks(cluster: Cluster, nodes: list[str]) -> None:
    cluster.save(30)
    before = cluster.sealed()
    results, states = cluster.restore(nodes)
    for result in results:
        assert isinstance(result, LayoutMismatch) and "a snapshot of 2 ranks cannot be given to" in str(result)
        assert [row[0] for row in result.rows] == ["model/b", "model/count", "model/w"]
    assert all(state.bytes() == cluster.rank().bytes() for state in states)
    assert cluster.sealed() == before


def test_no_room_is_told_on_every_rank(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.save(30)
    cluster.wipe("n0")

    def full(self: Arena, nbytes: int, **_: Any) -> Slot:
        raise BudgetError("no room", needed=nbytes, free=1)

    monkeypatch.setattr(Arena, "create_slot", full)
    live = [cluster.rank() for _ in range(2)]
    results, states = cluster.restore(live=live)
    for result in results:
        assert isinstance(result, BudgetError)
        assert (result.rank, result.free) == (0, 1)
    assert all(state.bytes() == cluster.rank().bytes() for state in states)


def test_a_users_load_state_dict_that_fails_damages_the_state(cluster: Cluster) -> None:
    class Loader:
        def __init__(self) -> None:
            self.broken = False

        def state_dict(self) -> dict[str, int]:
            return {"at": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("not today")

    class WithLoader(Rank):
        loader = Loader()

        @property
        def state(self) -> State:
            return State({"model": self.model, "progress": self.progress, "loader": self.loader})

    cluster.rank = lambda: WithLoader(Model(cluster.nbytes))  # type: ignore[method-assign]
    cluster.save(30)
    results, _ = cluster.restore()
    assert all(isinstance(r, StateDamaged) and "not today" in str(r) for r in results)


# -- peers that die ---------------------------------------------------------------------------------------------------

POINTS = [
    "recover.inventoried",
    "recover.planned",
    "recover.checked",
    "recover.serve",
    "recover.chunk",
    "recover.fetched",
    "recover.sealed",
    "recover.loaded",
    "recover.agreed",
]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_at_any_point_loses_nothing(big: Cluster, point: str, victim: int) -> None:
    """The survivor hears of it or is done; everything sealed stays as it was, and a new start finds the same step."""
    big.write("n0", 1, 10)  # a free slot of the right size, whose seal must go before it is written again
    big.save(20)
    big.save(30)
    big.lose("n0", 0, 30)
    before = {path: held for path, held in big.sealed().items() if big.slots["n0", 1, 10] not in path}
    group = LocalGroup(2, seed=hash(point) % 1000, max_delay_s=0.002)

    def kill(name: str, rank: int, step: int) -> None:
        if name == point and rank == victim:
            group.kill(victim)
            group.check(victim)

    faults.arm(kill)
    try:
        results, _ = big.restore(group=group, deadline_s=5.0)
    finally:
        faults.arm(None)
    survivor = results[1 - victim]
    assert isinstance(survivor, (PeerLost, Recovery))
    assert before.items() <= big.sealed().items()
    assert all(big.whole(Path(path)) for path in big.sealed())
    results, states = big.restore()
    big.check(results, states, 30)


def test_a_peer_that_stops_is_noticed_by_the_deadline(big: Cluster) -> None:
    big.save(30)
    big.lose("n0", 0, 30)
    group = LocalGroup(2)

    def stop(name: str, rank: int, step: int) -> None:
        if name == "recover.serve" and rank == 1:
            group.hold(1)
            threading.Timer(1.5, group.kill, [1]).start()
            group.check(1)

    faults.arm(stop)
    started = time.monotonic()
    try:
        results, _ = big.restore(group=group, deadline_s=0.5)
    finally:
        faults.arm(None)
    assert isinstance(results[0], PeerLost)
    assert time.monotonic() - started < 5


# -- at random --------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_losses_and_corruption(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is lost or changed: all ranks get the newest step of which every shard has a good copy, or none."""
    world = data.draw(st.integers(1, 4), label="world")
    cluster = Cluster(tmp_path_factory.mktemp("memory"), world)
    for step in (10, 20):
        cluster.save(step)
    flipped = False
    for (node, shard, step), _ in sorted(cluster.slots.items()):
        fate = data.draw(st.sampled_from(["keep", "keep", "lose", "flip"]), label=f"{node} shard {shard} step {step}")
        if fate == "lose":
            cluster.lose(node, shard, step)
        elif fate == "flip":
            flipped = True
            cluster.flip(node, shard, step, data.draw(st.sampled_from([0, 50, -1, -300])))
    nodes = data.draw(st.permutations([*cluster.nodes, "new"]), label="nodes")[:world]
    reached = {
        step: {
            shard
            for (node, shard, at), slot in cluster.slots.items()
            if at == step and node in nodes and cluster.there(node, slot)
        }
        for step in (10, 20)
    }
    want = next((step for step in (20, 10) if reached[step] == set(range(world))), None)
    group = LocalGroup(world, seed=data.draw(st.integers(0, 99)), max_delay_s=0.001)
    results, states = cluster.restore(list(nodes), group=group)
    if want is not None:
        cluster.check(results, states, want)
        return
    kinds = {type(result) for result in results}
    assert len(kinds) == 1
    if kinds == {Recovery}:
        assert {result.base for result in results} == {None}
        assert all(state.bytes() == cluster.rank().bytes() for state in states)
    else:
        assert kinds <= {StateDamaged, NothingToRestore} and len(kinds) == 1
        assert flipped


@pytest.mark.parametrize("seed", range(50))
def test_c05_random_wipes_never_hang_or_disagree(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(tmp_path, 2)
    for step in (10, 15):
        cluster.save(step)
    left = {10: set(), 15: set()}
    for (node, shard, step), _ in sorted(cluster.slots.items()):
        if rng.random() < 0.35:
            cluster.lose(node, shard, step)
        else:
            left[step].add(shard)
    want = next((step for step in (15, 10) if left[step] == {0, 1}), None)
    results, states = cluster.restore()
    if want is None:
        assert [result.base for result in results] == [None, None]
    else:
        cluster.check(results, states, want)
