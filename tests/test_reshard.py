"""Another number of ranks than saved it, ranks as threads: state that all ranks share comes back on each of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memckpt
from memckpt import faults
from memckpt.comm.local import Killed, LocalComm
from memckpt.recovery import reshard
from tests.ranks import fake_nodes, raise_errors, run_ranks
from tests.training import Training, make

pytestmark = pytest.mark.filterwarnings("ignore:step .* is not persisted", "ignore:damaged snapshots")
NODES = ["a", "b", "c", "d", "e", "f"]


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shm").mkdir(mode=0o700)
    with fake_nodes(str(tmp_path / "shm")):
        yield tmp_path
    faults.arm(None)


def life(comm: LocalComm, until: int, **options: Any) -> tuple[memckpt.RestoreReport, str, str]:
    """Train the same on every rank to step `until`, save each, and end abruptly; the report, the digest after the
    restore, and at the end.
    """
    training = Training(seed=100 + comm.rank if options.pop("alien", False) else 0)
    leave = options.pop("leave", ())
    ckpt = make(training, **{"comm": comm, "deadline": 20.0, **options})
    try:
        return train(comm, training, ckpt, until, leave)
    finally:
        ckpt.abandon()


def train(
    comm: LocalComm, training: Training, ckpt: memckpt.Checkpointer, until: int, leave: tuple[str, ...]
) -> tuple[memckpt.RestoreReport, str, str]:
    report = ckpt.restore(leave=leave)
    restored = training.digest(rng=False) if report.step else ""
    for n in range(report.step + 1, until + 1):
        training.random.manual_seed(n)  # the same on every rank, whatever the others' threads draw
        x = torch.randn(8, 32, generator=training.random)
        training.optimizer.zero_grad()
        training.model(x).square().mean().backward()
        training.optimizer.step()
        training.progress["seen"] = n
        ckpt.step(n)
        assert ckpt.wait(persisted=True)
    return report, restored, training.digest(rng=False)


def lives(world: int, until: int, nodes: list[str] | None = None, **options: Any) -> list[Any]:
    chosen = (nodes or NODES)[:world]
    return raise_errors(run_ranks(world, lambda c: life(c, until, **options), nodes=chosen, timeout_s=60.0))


@pytest.mark.parametrize(("saved", "wanted"), [(4, 2), (2, 5), (3, 1), (1, 3)])
def test_what_all_ranks_share_comes_back_and_training_goes_on_and_back_again(saved: int, wanted: int) -> None:
    first = lives(saved, 3)
    nodes = ["a", "b"] if saved == 4 and wanted == 2 else NODES
    if saved == 4:  # two ranks on each of two nodes, so that two ranks find everything
        shutil.rmtree(Path(memckpt.memory.arena.default_base()) / "memckpt-0", ignore_errors=True)
        first = lives(saved, 3, ["a", "a", "b", "b"])
    if saved == 3:
        shutil.rmtree(Path(memckpt.memory.arena.default_base()) / "memckpt-0", ignore_errors=True)
        first = lives(saved, 3, ["a", "a", "a"])
    second = lives(wanted, 5, nodes, alien=True)
    for report, restored, _ in second:
        assert (report.step, report.source, report.saved_by, report.protected) == (3, "peer", saved, False)
        assert report.nbytes > 0
        assert restored == first[0][2]
    assert len({digest for _, _, digest in second}) == 1
    third = lives(wanted, 5, nodes, alien=True)
    for report, restored, _ in third:
        assert (report.step, report.saved_by) == (5, wanted)
        assert restored == second[0][2]


def test_a_failure_before_the_first_new_commit_finds_the_old_shards_again() -> None:
    first = lives(2, 3, ["a", "b"])

    def die(point: str, rank: int, step: int) -> None:
        if point == "capture.slot" and step == 4:
            raise Killed

    faults.arm(die)
    run_ranks(3, lambda c: life(c, 5, alien=True, deadline=2.0), nodes=NODES[:3], timeout_s=60.0)
    faults.arm(None)
    for world in (3, 2):
        for report, restored, _ in lives(world, 3, alien=True):
            assert (report.step, report.saved_by) == (3, 2)
            assert restored == first[0][2]


def spoil(base: Path, node: str, step: int) -> None:
    """Flip a byte of a node's copy of shard 1 of a step."""
    spoilt = 0
    for found in memckpt.memory.arena.Arena.open("run", node=node, base=str(base), create=False).inventory():
        if found.seal is not None and (found.seal.shard, found.seal.step) == (1, step):
            (path,) = base.rglob(f"{found.slot}.safetensors")
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            spoilt += 1
    assert spoilt == 1


def test_a_damaged_shard_is_read_from_its_replica_else_from_an_older_step(base: Path) -> None:
    first = lives(2, 3, ["a", "b"])
    spoil(base / "shm", "b", 3)  # whose own rank reads it, as the other's reads another
    for report, restored, _ in lives(3, 3, alien=True):
        assert report.step == 3 and any("differs from its checksum" in line for line in report.rejected)
        assert restored == first[0][2]
    spoil(base / "shm", "a", 3)
    for report, restored, _ in lives(3, 2, alien=True):
        assert report.step == 2
        assert restored != first[0][2]


@pytest.mark.parametrize("wanted", [1, 3])
def test_from_storage(base: Path, wanted: int) -> None:
    persist = memckpt.Persist(base / "ckpts", every=1, stagger=0)
    first = lives(2, 3, persist=persist)
    shutil.rmtree(base / "shm")
    (base / "shm").mkdir(mode=0o700)
    second = lives(wanted, 4, alien=True, persist=persist)
    for report, restored, _ in second:
        assert (report.step, report.source, report.saved_by) == (3, "storage", 2)
        assert restored == first[0][2]
    shutil.rmtree(base / "shm")
    (base / "shm").mkdir(mode=0o700)
    for report, restored, _ in lives(2, 4, alien=True, persist=persist):
        assert (report.step, report.source, report.saved_by) == (4, "storage", wanted)
        assert restored == second[0][2]


def test_what_belongs_to_one_rank_is_refused_unless_it_is_left(base: Path) -> None:
    def private(comm: LocalComm, leave: tuple[str, ...]) -> Any:
        shared, own = torch.zeros(3), {"t": torch.full((3,), 10.0 + comm.rank), "n": comm.rank}
        states = {"shared": shared, "own": own, "words": {"n": comm.rank}}
        ckpt = memckpt.Checkpointer(states, name="run", every=1, comm=comm, quiet=True, deadline=20.0)
        try:
            report = ckpt.restore(leave=leave)
            if not report.step:
                shared += 5
                ckpt.step(1)
                ckpt.wait()
            return report.step, shared[0].item(), own["t"][0].item(), states["words"]["n"]
        finally:
            ckpt.abandon()

    raise_errors(run_ranks(2, lambda c: private(c, ()), nodes=["a", "b"]))
    for result in run_ranks(3, lambda c: private(c, ()), nodes=NODES[:3]):
        assert isinstance(result, memckpt.LayoutMismatch)
        assert [row[0] for row in result.rows] == ["own", "own/t", "words"]
        assert "restore(leave=...)" in str(result)
    results = raise_errors(run_ranks(3, lambda c: private(c, ("own", "words")), nodes=NODES[:3]))
    assert results == [(1, 5.0, 10.0 + r, r) for r in range(3)]


def test_an_object_may_be_left_by_as_many_ranks_too() -> None:
    state = {"a": torch.ones(2), "b": {"n": 1}}
    ckpt = memckpt.Checkpointer(state, name="run", every=1, comm=LocalComm(), quiet=True)
    ckpt.restore()
    ckpt.step(1)
    ckpt.close(keep=True)
    fresh = {"a": torch.zeros(2), "b": {"n": 7}, "c": torch.zeros(1)}
    for leave, error in [("b", memckpt.UsageError), (["x"], memckpt.UsageError), (["b"], memckpt.LayoutMismatch)]:
        ckpt = memckpt.Checkpointer(fresh, name="run", every=1, comm=LocalComm(), quiet=True)
        with pytest.raises(error):
            ckpt.restore(leave=leave)
        ckpt.abandon()
    with memckpt.Checkpointer(fresh, name="run", every=1, comm=LocalComm(), quiet=True) as ckpt:
        assert ckpt.restore(leave=["b", "c"]).step == 1
    assert fresh["a"].tolist() == [1, 1] and fresh["b"] == {"n": 7}


def test_bytes_that_change_on_the_way_are_told_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    lives(1, 2)

    def damaged(comm: LocalComm, parts: Iterator[memoryview], peer: int) -> Any:
        for message in reshard._messages(parts):
            yield comm.isend(message, peer, reshard._TAG).test
        yield comm.isend(bytes(4), peer, reshard._TAG + 1).test
        return ""

    monkeypatch.setattr(reshard, "send", damaged)
    for result in run_ranks(2, lambda c: life(c, 2, alien=True), nodes=NODES[:2]):
        assert isinstance(result, memckpt.ProtocolError) and "differ from their checksum" in str(result)
