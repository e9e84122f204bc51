"""Ranks that save what they have in common in parts: less on each, and each gets back exactly what it had."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memckpt
from memckpt.comm.local import LocalComm
from tests.ranks import fake_nodes, raise_errors, run_ranks

NODES = ["a", "b", "c", "d"]
WIDTH = 512


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shm").mkdir(mode=0o700)
    with fake_nodes(str(tmp_path / "shm")):
        yield tmp_path


class Replica:
    """One rank of data-parallel training: equal parameters and moments, and if wanted an expert of its own."""

    def __init__(self, rank: int, seed: int, *, expert: bool = False) -> None:
        random = torch.Generator().manual_seed(seed)
        self.rank, self.expert = rank, expert
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
        for p in self.model.parameters():
            torch.nn.init.normal_(p, generator=random)
        if expert:
            self.model.add_module("expert", torch.nn.Linear(WIDTH, WIDTH))
            own = torch.Generator().manual_seed(seed + 1000 + rank)
            for p in self.model[2].parameters():
                torch.nn.init.normal_(p, generator=own)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, n: int) -> None:
        random = torch.Generator().manual_seed(n)
        own = torch.Generator().manual_seed(1000 * n + self.rank)
        for name, p in self.model.named_parameters():
            p.grad = torch.randn(p.shape, generator=own if name.startswith("2") else random)
        self.optimizer.step()
        self.model[1].running_mean += torch.randn(WIDTH, generator=own)  # each rank's own, as without SyncBatchNorm

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def bytes(self) -> bytes:
        moments = [t for state in self.optimizer.state.values() for _, t in sorted(state.items())]
        return b"".join(t.detach().numpy().tobytes() for t in [*self.model.state_dict().values(), *moments])


def life(comm: LocalComm, until: int, *, seed: int = 1, expert: bool = False, **options: Any) -> Any:
    """Train to step `until` and end abruptly: report, bytes after the restore, bytes at the end, counters."""
    replica = Replica(comm.rank, seed, expert=expert)
    given = {"name": "run", "every": 1, "on_busy": "wait", "quiet": True, "comm": comm, "deadline": 20.0, "dedup": True}
    ckpt = memckpt.Checkpointer(replica.states(), **{**given, **options})
    try:
        report = ckpt.restore()
        restored = replica.bytes() if report.step else b""
        for n in range(report.step + 1, until + 1):
            replica.step(n)
            ckpt.step(n)
            assert ckpt.wait(persisted=True)
        return report, restored, replica.bytes(), ckpt.stats()
    finally:
        ckpt.abandon()


def lives(until: int, *, nodes: list[str] | None = None, world: int = 4, **options: Any) -> list[Any]:
    return raise_errors(run_ranks(world, lambda c: life(c, until, **options), nodes=nodes or NODES[:world]))


def test_a_world_of_four_copies_and_holds_a_quarter_each() -> None:
    whole = lives(5, name="whole", dedup=False)
    parts = lives(5, name="parts")
    for rank in range(4):
        captured = [r[rank][3].lazy_nbytes + r[rank][3].eager_nbytes for r in (whole, parts)]
        assert captured[1] <= 0.27 * captured[0]
        assert parts[rank][3].memory_nbytes <= 0.27 * whole[rank][3].memory_nbytes
        assert parts[rank][3].failed == 0 and parts[rank][3].commits == 5
        assert parts[rank][2] == whole[rank][2]


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("lost", [None, "b"])
def test_each_rank_gets_back_what_it_had(base: Path, expert: bool, lost: str | None) -> None:
    expected = lives(7, name="whole", dedup=False, expert=expert)
    first = lives(4, expert=expert)
    if expert:  # what differs is not divided
        assert len({r[2] for r in first}) == 4
    if lost is not None:
        shutil.rmtree(base / "shm" / "memckpt-0" / lost)
    nodes = [{lost: "new"}.get(node, node) for node in NODES]
    second = lives(7, nodes=nodes, seed=9, expert=expert)
    for rank, (report, restored, end, stats) in enumerate(second):
        assert (report.step, report.source) == (4, "peer" if lost else "own")
        assert restored == first[rank][2]
        assert end == expected[rank][2]
        assert stats.failed == 0
    third = lives(7, nodes=nodes, seed=5, expert=expert)
    assert [r[1] for r in third] == [r[2] for r in expected]


def test_from_storage(base: Path) -> None:
    first = lives(3, persist=memckpt.Persist(base / "ckpts", every=1, stagger=0))
    assert sum(f.stat().st_size for f in (base / "ckpts").rglob("*.safetensors")) < 3 * 1.5 * len(first[0][2])
    shutil.rmtree(base / "shm")
    (base / "shm").mkdir(mode=0o700)
    second = lives(3, seed=9, persist=str(base / "ckpts"))
    for rank, (report, restored, _, _) in enumerate(second):
        assert (report.step, report.source) == (3, "storage")
        assert restored == first[rank][2]


def test_without_dedup_it_comes_back_all_the_same_and_the_other_way_round() -> None:
    first = lives(2)
    second = lives(4, seed=9, dedup=False)
    third = lives(4, seed=8)
    assert [r[1] for r in second] == [r[2] for r in first]
    assert [r[1] for r in third] == [r[2] for r in second]


def test_another_number_of_ranks_gets_what_was_divided() -> None:
    def equal(comm: LocalComm, seed: int, until: int) -> tuple[int, bytes]:
        shared = {"w": torch.full((50_000,), float(seed)), "b": torch.full((3,), float(seed))}
        ckpt = memckpt.Checkpointer(shared, name="run", every=1, comm=comm, quiet=True, dedup=True, deadline=20.0)
        try:
            step = ckpt.restore().step
            for n in range(step + 1, until + 1):
                shared["w"] += torch.arange(50_000)
                ckpt.step(n, save=True)
                ckpt.wait()
            return step, b"".join(t.numpy().tobytes() for t in shared.values())
        finally:
            ckpt.abandon()

    first = raise_errors(run_ranks(2, lambda c: equal(c, 1, 2), nodes=NODES[:2]))
    for world in (3, 1, 4):
        results = raise_errors(run_ranks(world, lambda c: equal(c, 7, 2), nodes=NODES[:world]))
        assert results == [(2, first[0][1])] * world
        if world == 3:
            break
    results = raise_errors(run_ranks(2, lambda c: equal(c, 7, 3), nodes=NODES[:2]))
    assert results[0] == results[1] and results[0][0] == 2


def test_a_structure_that_changes_is_agreed_on_anew() -> None:
    def work(comm: LocalComm) -> Any:
        state: dict[str, Any] = {"w": torch.zeros(40_000), "more": [torch.zeros(1)]}
        ckpt = memckpt.Checkpointer(
            {"state": state}, name="run", every=1, on_busy="wait", comm=comm, quiet=True, dedup=True, deadline=20.0
        )
        ckpt.restore()
        sizes = []
        for n in range(1, 12):
            state["w"] += n
            if n == 4 and comm.rank == 1:
                state["more"].append(torch.ones(30_000))  # on one rank only: it shares nothing any more
            ckpt.step(n)
            ckpt.wait()
            sizes.append(ckpt.stats().eager_nbytes + ckpt.stats().lazy_nbytes)
        ckpt.abandon()
        return sizes, ckpt.stats(), state["w"].sum().item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = raise_errors(run_ranks(2, work, nodes=["a", "b"]))
    assert any("the structure of the state has changed" in str(w.message) for w in caught)
    for rank, (sizes, stats, _) in enumerate(results):
        assert sizes[2] < 0.55 * 160_000
        assert sizes[-1] > 160_000 + 120_000 * rank
        assert 1 <= stats.failed <= 3 and stats.committed_step == 11

    def again(comm: LocalComm) -> Any:
        state: dict[str, Any] = {"w": torch.ones(40_000), "more": [torch.ones(1)]}
        if comm.rank == 1:
            state["more"].append(torch.zeros(30_000))
        ckpt = memckpt.Checkpointer({"state": state}, name="run", comm=comm, quiet=True, deadline=20.0)
        step = ckpt.restore().step
        ckpt.abandon()
        return step, state["w"].sum().item(), [t.sum().item() for t in state["more"]]

    w = results[0][2]
    assert raise_errors(run_ranks(2, again, nodes=["a", "b"])) == [(11, w, [0.0]), (11, w, [0.0, 30_000.0])]


def test_a_difference_where_there_was_none_is_told_and_from_then_on_saved_by_each() -> None:
    def work(comm: LocalComm) -> Any:
        state = {"w": torch.zeros(40_000)}
        ckpt = memckpt.Checkpointer(
            state, name="run", every=1, on_busy="wait", comm=comm, quiet=True, dedup=True, deadline=20.0
        )
        ckpt.restore()
        for n in range(1, 10):
            state["w"] += n
            if n == 4 and comm.rank == 1:
                state["w"][12_345] += 1  # one bit of one rank
            ckpt.step(n)
            ckpt.wait()
        ckpt.abandon()
        return ckpt.stats(), state["w"].numpy().tobytes()

    with pytest.warns(RuntimeWarning, match="maybe silent data corruption"):
        results = raise_errors(run_ranks(2, work, nodes=["a", "b"]))
    for stats, _ in results:
        assert any("maybe silent data corruption" in text for text in stats.errors)
        assert stats.eager_nbytes + stats.lazy_nbytes >= 160_000

    def again(comm: LocalComm) -> bytes:
        state = {"w": torch.ones(40_000)}
        ckpt = memckpt.Checkpointer(state, name="run", comm=comm, quiet=True, deadline=20.0)
        assert ckpt.restore().step == 9
        ckpt.abandon()
        return state["w"].numpy().tobytes()

    assert raise_errors(run_ranks(2, again, nodes=["a", "b"])) == [w for _, w in results]
