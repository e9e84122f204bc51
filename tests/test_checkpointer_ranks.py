"""The facade on ranks as threads: what a lost node brings back, and what a failure of one rank does to all."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memckpt
from memckpt import faults
from memckpt.comm.local import LocalComm
from tests.ranks import fake_nodes, raise_errors, run_ranks
from tests.training import Training, make


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    with fake_nodes(str(tmp_path)):
        yield tmp_path
    faults.arm(None)


def odd_state(rank: int, step: int) -> dict[str, torch.Tensor]:
    """C01: entries of every make, their values a function of rank and step."""
    g = torch.Generator().manual_seed(1000 * rank + step)
    base = torch.randn(12, 10, generator=g)
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16) if rank == 0 else base.bfloat16()
    return {
        "contiguous": base.clone(),
        "transposed": base.clone().t(),
        "sliced": base.clone()[2:9, 1:8],
        "expanded": base[:1].clone().expand(5, 10),
        "bf16": half,
        "float8": base.clone().to(torch.float8_e4m3fn),
    }


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def two_lives(base: Path, nodes: list[str], between: Any, second: list[str] | None = None) -> list[Any]:
    """Ranks save steps 1 and 2, end without a word; `between` happens to the memory; they restore and report."""

    def life(comm: LocalComm, restoring: bool) -> Any:
        state = odd_state(comm.rank, 77 if restoring else 0)
        options: dict[str, Any] = {"on_busy": "wait", "quiet": True, "deadline": 20.0}
        ckpt = memckpt.Checkpointer({"state": state}, name="pair", comm=comm, every=100 if restoring else 1, **options)
        report = ckpt.restore()
        if restoring:
            result = (report, {k: raw(t) for k, t in state.items()})
            ckpt.wait()
            if not ckpt.stats().protected:
                ckpt.step(report.step + 1)  # on every rank: the first try ended in no on every rank
                ckpt.step(report.step + 2)
                ckpt.wait()
            assert ckpt.stats().protected
            ckpt.abandon()
            return result
        for n in (1, 2):
            for key, value in odd_state(comm.rank, n).items():
                live = state[key]
                if key == "expanded":
                    live[:1].copy_(value[:1])
                else:
                    live.view(torch.int8 if live.dtype.itemsize == 1 else live.dtype).copy_(
                        value.view(torch.int8 if live.dtype.itemsize == 1 else value.dtype)
                    )
            ckpt.step(n)
        ckpt.wait()
        assert ckpt.stats().commits == 2
        ckpt.abandon()
        return None

    raise_errors(run_ranks(len(nodes), lambda c: life(c, False), nodes=nodes))
    between(base)
    second = second or nodes
    return raise_errors(run_ranks(len(second), lambda c: life(c, True), nodes=second))


def wipe(node: str) -> Any:
    def between(base: Path) -> None:
        import shutil

        shutil.rmtree(next(base.glob(f"memckpt-*/{node}")))

    return between


def flip(node: str, shard: int, *, wiping: bool = True) -> Any:
    """Flip one byte in `node`'s newest snapshot of `shard`, and wipe the other node."""

    def between(base: Path) -> None:
        from memckpt.format.seal import decode

        for seal in base.glob(f"memckpt-*/{node}/pair/*.seal.json"):
            found = decode(seal.read_bytes())
            if found.shard == shard and found.step == 2:
                data = seal.with_name(seal.name.replace(".seal.json", ".safetensors"))
                with open(data, "r+b") as f:
                    f.seek(-3, os.SEEK_END)
                    byte = f.read(1)
                    f.seek(-3, os.SEEK_END)
                    f.write(bytes([byte[0] ^ 16]))
        for other in "ab":
            if wiping and other != node:
                wipe(other)(base)

    return between


def expect(results: list[Any], step: int, sources: tuple[str, ...]) -> None:
    for rank, (report, found) in enumerate(results):
        assert (report.step, report.sources) == (step, sources)
        assert found == {k: raw(t) for k, t in odd_state(rank, step).items()}


def test_a_lost_node_comes_back_from_its_buddy_byte_for_byte(base: Path) -> None:
    expect(two_lives(base, ["a", "b"], wipe("a")), 2, ("peer", "own"))


def test_a_flipped_byte_in_the_replica_is_never_loaded(base: Path) -> None:
    """C01: rejected, named, and the next older good copy is used, on both ranks."""
    with pytest.warns(RuntimeWarning, match="(?s)damaged snapshots.*step 2"):
        results = two_lives(base, ["a", "b"], flip("b", 0))
    expect(results, 1, ("peer", "own"))
    said = "\n".join(results[1][0].rejected)
    assert "step 2" in said and "chunk 0" in said and "0" in said


def test_a_damaged_replica_is_found_before_it_is_counted_on(base: Path) -> None:
    """The owner's copy is good, so nothing but a look at the replica shows that its loss could not be survived."""

    def flip_only(base: Path) -> None:
        flip("b", 0, wiping=False)(base)

    with pytest.warns(RuntimeWarning, match=r"not protected yet.*rank 1: its replica of rank 0 differs .* chunk 0"):
        expect(two_lives(base, ["a", "b"], flip_only), 2, ("own", "own"))
    wipe("a")(base)

    def life(comm: LocalComm) -> Any:
        state = odd_state(comm.rank, 77)
        ckpt = memckpt.Checkpointer({"state": state}, name="pair", comm=comm, every=1, quiet=True)
        report = ckpt.restore()
        ckpt.abandon()
        return report, {k: raw(t) for k, t in state.items()}

    expect(raise_errors(run_ranks(2, life, nodes=["a", "b"])), 2, ("peer", "own"))


def test_ranks_swapped_over_the_nodes_find_their_shards(base: Path) -> None:
    """C26: each rank finds its shard as the replica on its new node, or asks for it."""
    results = two_lives(base, ["a", "b"], lambda base: None, ["b", "a"])
    expect(results, 2, ("own", "own"))


def test_a_new_node_asks_the_buddies(base: Path) -> None:
    expect(two_lives(base, ["a", "b"], wipe("b"), ["a", "c"]), 2, ("own", "peer"))


def test_mirror_2_survives_two_nodes(base: Path) -> None:
    def life(comm: LocalComm, restoring: bool) -> Any:
        state = {"x": torch.full((1000,), float(comm.rank))}
        options: dict[str, Any] = {
            "name": "two",
            "redundancy": memckpt.Mirror(2),
            "quiet": True,
            "every": 1,
            "on_busy": "wait",
        }
        ckpt = memckpt.Checkpointer({"state": state}, comm=comm, **options)
        report = ckpt.restore()
        if not restoring:
            state["x"].add_(10)
            ckpt.step(1)
            ckpt.wait()
        ckpt.abandon()
        return report.step, state["x"].unique().tolist()

    raise_errors(run_ranks(3, lambda c: life(c, False), nodes=["a", "b", "c"]))
    wipe("a")(base)
    wipe("c")(base)
    results = raise_errors(run_ranks(3, lambda c: life(c, True), nodes=["a", "b", "c"]))
    assert results == [(1, [10.0]), (1, [11.0]), (1, [12.0])]


def test_many_tiny_tensors_and_a_file_of_several_chunks_reach_the_buddy(base: Path) -> None:
    """C38: 10,000 tiny tensors, and a file of three chunks and a byte."""

    def life(comm: LocalComm, restoring: bool) -> Any:
        tiny = {str(i): torch.full((1 + i % 3,), float(i + comm.rank)) for i in range(10_000)}
        large = torch.arange(3 * 4 * 1024 * 1024 + 1, dtype=torch.int64).to(torch.uint8) + comm.rank
        if restoring:
            large.zero_()
            for t in tiny.values():
                t.zero_()
        ckpt = memckpt.Checkpointer(
            {"tiny": tiny, "large": large}, name="c38", comm=comm, quiet=True, every=1, on_busy="wait"
        )
        report = ckpt.restore()
        if not restoring:
            ckpt.step(1)
            ckpt.wait()
        h = hashlib.sha256(large.numpy().tobytes() + b"".join(t.numpy().tobytes() for t in tiny.values()))
        ckpt.abandon()
        return report.sources, h.hexdigest()

    saved = raise_errors(run_ranks(2, lambda c: life(c, False), nodes=["a", "b"]))
    wipe("b")(base)
    restored = raise_errors(run_ranks(2, lambda c: life(c, True), nodes=["a", "b"]))
    assert [h for _, h in saved] == [h for _, h in restored]
    assert restored[0][0] == ("own", "peer")


def test_different_settings_are_named_on_every_rank() -> None:
    def work(comm: LocalComm) -> None:
        make(Training(), comm=comm, every=1 + comm.rank)

    for error in run_ranks(2, work):
        assert isinstance(error, memckpt.UsageError)
        assert "every: EveryNSteps(n=1) on rank 0, EveryNSteps(n=2) on rank 1" in str(error)


def test_ranks_at_different_steps_are_told_both_numbers() -> None:
    def work(comm: LocalComm) -> None:
        ckpt = make(Training(), comm=comm)
        ckpt.restore()
        ckpt.step(1)
        ckpt.step(2 + comm.rank)
        ckpt.step(3 + comm.rank)

    for error in run_ranks(2, work, nodes=["a", "b"]):
        assert isinstance(error, memckpt.StepMismatch)
        assert "from 2 to 3" in str(error)


def test_state_that_cannot_be_saved_is_raised_after_the_no(base: Path) -> None:
    def work(comm: LocalComm) -> Any:
        training = Training()
        ckpt = make(training, comm=comm)
        ckpt.restore()
        training.step()
        ckpt.step(1)
        ckpt.wait()
        if comm.rank == 1:
            training.progress["socket"] = object()
            with pytest.raises(memckpt.StateError, match=r"progress.*socket"):
                ckpt.step(2)
            del training.progress["socket"]
        else:
            ckpt.step(2)
        ckpt.step(3)
        ckpt.wait()
        errors, commits = ckpt.stats().errors, ckpt.stats().commits
        ckpt.abandon()
        return errors, commits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = raise_errors(run_ranks(2, work, nodes=["a", "b"]))
    for errors, commits in results:
        assert commits == 2
        assert "step 2: rank 1: StateError" in errors[0]


def test_a_rank_that_cannot_save_stops_nobody(base: Path) -> None:
    """A failure of one rank: the step is committed nowhere, every rank learns rank and cause, the next save works."""

    def fail(point: str, rank: int, step: int) -> None:
        if (point, rank, step) == ("capture.slot", 1, 2):
            raise OSError("injected: no room")

    faults.arm(fail)

    def work(comm: LocalComm) -> Any:
        training = Training()
        ckpt = make(training, comm=comm, on_error="raise")
        ckpt.restore()
        said = ""
        for n in range(1, 5):
            training.step()
            try:
                ckpt.step(n)
                ckpt.wait()
            except memckpt.SaveFailed as error:
                said += str(error)
        stats = ckpt.stats()
        ckpt.close()
        return said, stats.commits, stats.failed

    for said, commits, failed in raise_errors(run_ranks(2, work, nodes=["a", "b"])):
        assert "step 2 was not committed: rank 1" in said and "no room" in said
        assert (commits, failed) == (3, 1)


def test_a_rank_that_closes_early_says_no_and_all_may_end(base: Path) -> None:
    def work(comm: LocalComm) -> Any:
        training = Training()
        ckpt = make(training, comm=comm)
        ckpt.restore()
        for n in range(1, 3 if comm.rank == 0 else 6):
            training.step()
            ckpt.step(n)
        ckpt.close()
        return ckpt.stats()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = raise_errors(run_ranks(3, work, nodes=["a", "b", "c"]))
    assert {stats.commits for stats in results} == {2}
    # Whoever was first to say no, the cause is told, and whose it is.
    assert {stats.errors[0] for stats in results} == {"step 3: rank 0: this rank has closed its Checkpointer"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_background_thread_that_ends_without_a_word_is_an_error_within_the_deadline(base: Path) -> None:  # C23
    def end_engine(point: str, rank: int, step: int) -> None:
        if (point, rank) == ("replicate.chunk", 1) and threading.current_thread().name == "memckpt-engine":
            raise SystemExit

    faults.arm(end_engine)

    def work(comm: LocalComm) -> None:
        ckpt = make(Training(), comm=comm)
        try:
            ckpt.restore()
            ckpt.step(1)
            ckpt.wait()
        finally:
            ckpt.abandon()

    begin = time.monotonic()
    lost, culprit = run_ranks(2, work, nodes=["a", "b"])
    assert time.monotonic() - begin < 10
    assert isinstance(lost, memckpt.PeerLost)
    assert isinstance(culprit, memckpt.SaveFailed) and "ended without a word" in str(culprit)
