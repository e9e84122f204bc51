"""The facade on one rank and on ranks as threads: what is saved is what was, and what fails says so."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
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


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    with fake_nodes(str(tmp_path)):
        yield tmp_path
    faults.arm(None)


class Training:
    """A small model that trains deterministically."""

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)
        )
        for p in self.model.parameters():
            torch.nn.init.normal_(p, generator=self.random)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.progress: dict[str, Any] = {"losses": [], "seen": 0}

    def states(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def step(self) -> None:
        loss = self.model(torch.randn(8, self.model[0].in_features)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress["losses"].append(loss.item())
        self.progress["seen"] += 8

    def digest(self) -> str:
        h = hashlib.sha256(repr(self.progress).encode())
        moments = [self.optimizer.state[p][k] for p in self.model.parameters() for k in sorted(self.optimizer.state[p])]
        for t in [*self.model.state_dict().values(), *moments]:
            h.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        h.update(torch.get_rng_state().numpy().tobytes())
        return h.hexdigest()


def make(training: Training, **options: Any) -> memckpt.Checkpointer:
    defaults: dict[str, Any] = {"name": "run", "on_busy": "wait", "quiet": True, "comm": LocalComm(), "deadline": 20.0}
    return memckpt.Checkpointer(training.states(), **{**defaults, **options})


def train(total: int) -> str:
    """Digest after `total` uninterrupted steps."""
    torch.manual_seed(1)
    training = Training()
    for _ in range(total):
        training.step()
    return training.digest()


@pytest.mark.parametrize("stop", [1, 2, 5, 9])
def test_training_goes_on_bit_for_bit(stop: int) -> None:
    expected = train(12)
    torch.manual_seed(1)
    first = Training()
    ckpt = make(first)
    for index in ckpt.steps(12):
        first.step()
        if index == stop:
            break
    if stop == 1:
        ckpt.wait()  # the only save there is; without it the second life would rightly start afresh
    ckpt.abandon()

    torch.manual_seed(99)
    second = Training(seed=5)
    with make(second) as ckpt:
        done = []
        for index in ckpt.steps(12):
            done.append(index)
            second.step()
        # The step that was under way when training stopped, and the one whose fence had not come, are done again.
        assert done[0] in (stop - 1, stop) and done[-1] == 11
    assert second.digest() == expected


def test_resumed_state_is_the_state_that_was_saved() -> None:
    torch.manual_seed(1)
    first = Training()
    ckpt = make(first)
    ckpt.restore()
    digests = {0: first.digest()}
    for n in range(1, 6):
        first.step()
        digests[n] = first.digest()
        ckpt.step(n)
    assert ckpt.wait()
    assert ckpt.stats().committed_step == 5
    ckpt.abandon()
    second = Training(seed=7)
    ckpt = make(second)
    report = ckpt.restore()
    assert (report.step, report.source) == (5, "own")
    assert second.digest() == digests[5]
    ckpt.close()


def test_lazy_and_eager_bytes_are_told_apart() -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    training.step()
    ckpt.step(1)
    assert ckpt.stats().lazy_nbytes == 0  # nothing is known yet of when the optimizer steps
    training.step()
    ckpt.step(2)
    stats = ckpt.stats()
    parameters = sum(p.nbytes for p in training.model.parameters())
    assert stats.lazy_nbytes == 3 * parameters + 4 * len(list(training.model.parameters()))
    buffers = sum(b.nbytes for b in training.model.buffers())
    assert stats.eager_nbytes == buffers
    ckpt.close()


def test_a_step_without_the_hook_is_captured_eagerly() -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    for n in range(1, 4):
        with torch.no_grad():  # a foreign loop that steps no optimizer of ours
            for p in training.model.parameters():
                p.add_(1)
        ckpt.step(n)
        assert ckpt.stats().lazy_nbytes == 0
    assert ckpt.wait() and ckpt.stats().commits == 3
    ckpt.close()


def test_a_change_under_the_copy_is_caught_named_and_not_committed() -> None:
    training = Training(width=512)
    ckpt = make(training, on_error="raise")
    ckpt.restore()
    for n in range(1, 4):
        training.step()
        ckpt.step(n)
    assert ckpt._capture._open is not None and ckpt._capture._open.job is not None
    ckpt._capture._open.job.wait(None)
    # Training promised not to touch parameters before the optimizer's step, and does.
    with torch.no_grad():
        training.model[0].weight.view(-1)[7] = 1e9
    with pytest.raises(memckpt.SaveFailed, match=r"step 3 .*changed while it was copied: model.*0.weight"):
        ckpt.wait()
    assert ckpt.stats().committed_step == 2
    training.step()
    digest = training.digest()
    ckpt.step(4)  # the tensor is copied at once from now on
    with torch.no_grad():
        training.model[0].weight.view(-1)[7] = 2e9
    assert ckpt.wait() and ckpt.stats().committed_step == 4
    ckpt.abandon()
    second = Training(seed=3, width=512)
    ckpt = make(second)
    assert ckpt.restore().step == 4
    assert second.digest() == digest
    ckpt.close()


def test_step_before_the_hook_settles_by_comparing() -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    for n in (1, 2):
        training.step()
        ckpt.step(n)
    ckpt.step(3)  # no optimizer step since 2: the copy of 2 is compared with its sources, which are as they were
    ckpt.step(4)
    assert ckpt.wait() and ckpt.stats().commits == 4
    ckpt.close()


def test_isolation_over_back_to_back_saves() -> None:
    """C03: every snapshot has one value everywhere, its own step, however soon the sources move on."""
    tensors = {str(i): torch.zeros(1000 + i) for i in range(200)}
    box: dict[str, Any] = {"list": [0], "nested": {"n": 0}}
    names = {"tensors": tensors, "box": box}

    def fill(step: int) -> None:
        for t in tensors.values():
            t.fill_(step)
        box["list"][:] = [step] * step
        box["nested"]["n"] = step

    ckpt = memckpt.Checkpointer(names, name="iso", comm=LocalComm(), on_busy="wait", quiet=True)
    ckpt.restore()
    for n in range(1, 21):
        fill(n)
        ckpt.step(n)
        fill(n + 1)  # at once
    assert ckpt.wait()
    ckpt.abandon()
    fill(77)
    ckpt = memckpt.Checkpointer(names, name="iso", comm=LocalComm(), quiet=True)
    assert ckpt.restore().step == 20
    assert {float(v) for t in tensors.values() for v in t.unique()} == {20.0}
    assert box == {"list": [20] * 20, "nested": {"n": 20}}
    ckpt.restore(step=19)
    assert {float(v) for t in tensors.values() for v in t.unique()} == {19.0}
    assert box == {"list": [19] * 19, "nested": {"n": 19}}
    ckpt.close()


def test_an_explicit_rollback_leaves_the_newer_history() -> None:
    """C06 in memory."""
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    for n in range(1, 4):
        training.step()
        ckpt.step(n)
    ckpt.wait()
    with pytest.raises(memckpt.NothingToRestore, match="step 9 cannot be restored; there is: step 3"):
        ckpt.restore(step=9)
    assert ckpt.restore(step=2).step == 2
    training.step()
    ckpt.step(3)
    ckpt.step(4)
    ckpt.wait()
    digest = training.digest()
    ckpt.abandon()
    second = Training(seed=9)
    ckpt = make(second)
    report = ckpt.restore()
    assert (report.step, report.generation) == (4, 3)
    assert second.digest() == digest
    ckpt.close()


def test_layout_may_grow_and_shrink_while_running() -> None:
    state: dict[str, Any] = {"a": torch.arange(10.0)}
    options: dict[str, Any] = {"name": "grow", "comm": LocalComm(), "on_busy": "wait", "quiet": True}
    ckpt = memckpt.Checkpointer({"state": state}, **options)
    ckpt.restore()
    ckpt.step(1)
    state["b"] = torch.full((100_000,), 2.0)
    ckpt.step(2)
    state["c"] = "x" * 100_000  # outgrows the header
    ckpt.step(3)
    del state["b"]
    state["a"] = torch.arange(5, dtype=torch.int16)
    ckpt.step(4)
    assert ckpt.wait() and ckpt.stats().commits == 4
    ckpt.abandon()
    wanted = {"a": torch.zeros(5, dtype=torch.int16)}
    ckpt = memckpt.Checkpointer({"state": wanted}, **options)
    ckpt.restore()
    assert wanted["a"].tolist() == [0, 1, 2, 3, 4] and wanted["c"] == "x" * 100_000  # type: ignore[comparison-overlap]
    ckpt.close()


def test_memory_stays_flat_over_many_saves(base: Path) -> None:
    """C44: success, a failure every third save; two slots for the shard and nothing more, and nothing after the end."""
    state = {"a": torch.zeros(2 * 1024 * 1024)}
    options: dict[str, Any] = {"name": "flat", "comm": LocalComm(), "on_busy": "wait", "quiet": True}

    def fail(point: str, rank: int, step: int) -> None:
        if point == "commit.seal" and step % 3 == 0:
            raise OSError("injected: no seal")

    def used() -> tuple[int, int]:
        gc.collect()
        files = sum(f.stat().st_size for f in base.rglob("*") if f.is_file())
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize(), files

    ckpt = memckpt.Checkpointer(state, **options)
    ckpt.restore()
    faults.arm(fail)
    marks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(1, 101):
            state["a"].fill_(n)
            ckpt.step(n)
            ckpt.wait()
            if n in (20, 100):
                marks.append(used())
        stats = ckpt.stats()
    assert (stats.commits, stats.failed) == (67, 33)
    assert any("step 3 was not committed: rank 0: the seal could not be written" in str(w.message) for w in caught)
    (rss_early, files_early), (rss_late, files_late) = marks
    assert abs(rss_late - rss_early) < 1 << 20
    assert abs(files_late - files_early) < 64 and files_late < 2.1 * state["a"].nbytes
    ckpt.close()
    assert not [f for f in base.rglob("*") if f.is_file()]


def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C39 at the facade, with the limits of a small container."""
    from memckpt.memory import budget

    limit = budget.Limit("cgroup memory.max", "/sys/fs/cgroup/memory.max", 64 << 20, 40 << 20)
    monkeypatch.setattr(budget.SystemProbe, "limits", lambda self, base: [limit])
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = memckpt.Checkpointer({"model": model}, name="fits", comm=LocalComm(), quiet=True)
    ckpt.restore()
    ckpt.close()
    # With Adam's moments, which are not there yet, two slots are 24 MiB more than may be used.
    ckpt = memckpt.Checkpointer(
        {"model": model, "optimizer": optimizer, "more": torch.zeros(2 << 20)}, name="big", comm=LocalComm(), quiet=True
    )
    with pytest.raises(memckpt.BudgetError) as refused:
        ckpt.restore()
    assert refused.value.needed > 40 << 20 and refused.value.free < 40 << 20
    assert "memory.max" in str(refused.value) and "MEMCKPT_SHM" in str(refused.value)
    assert not list(base.rglob("*.safetensors"))
    ckpt.abandon()


def test_wrong_calls_are_one_clear_error_each() -> None:
    training = Training()
    for options, said in [
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"persist": "dir"}, "durable tier"),
        ({"on_busy": "x"}, "on_busy"),
        ({"redundancy": memckpt.Mirror(1)}, "needs 2 ranks"),
        ({"deadline": 0.0}, "deadline"),
        ({"name": "a/b"}, "name"),
    ]:
        with pytest.raises(memckpt.UsageError, match=said):
            make(training, **options)
    ckpt = make(training)
    ckpt.restore()
    with pytest.raises(memckpt.UsageError, match=r"step\(3\) after step 0"):
        ckpt.step(3)
    ckpt.abandon()
    with pytest.raises(memckpt.Closed):
        ckpt.step(4)
    with pytest.raises(memckpt.StateError):
        memckpt.Checkpointer({"n": 3}, name="run", comm=LocalComm())


def test_stepping_over_memory_that_was_not_restored_is_refused() -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    ckpt.step(1)
    ckpt.wait()
    ckpt.abandon()
    ckpt = make(training)
    with pytest.raises(memckpt.UsageError, match="restore"):
        ckpt.step(1)
    ckpt.abandon()
    with make(training, fresh=True) as ckpt:
        assert ckpt.restore().step == 0
        ckpt.step(1)


def test_a_restart_that_finds_nothing_does_not_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ckpt = make(Training())
    with pytest.raises(memckpt.NothingToRestore):
        ckpt.restore()
    ckpt.abandon()
    with make(Training(), fresh=True) as ckpt:
        assert ckpt.restore().step == 0


def test_close_keeps_or_removes(base: Path) -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    training.step()
    ckpt.step(1)
    ckpt.close(keep=True)
    ckpt.close()
    assert list(base.rglob("finished"))
    with make(Training(seed=4)) as ckpt:
        assert ckpt.restore().step == 1
    assert not [f for f in base.rglob("*") if f.is_file()]


def test_an_exception_keeps_what_was_accepted(base: Path) -> None:
    training = Training()
    with pytest.raises(KeyboardInterrupt), make(training) as ckpt:
        ckpt.restore()
        training.step()
        ckpt.step(1)
        training.step()
        ckpt.step(2)
        raise KeyboardInterrupt
    with make(Training(seed=4)) as ckpt:
        assert ckpt.restore().step == 2


def test_a_forgotten_checkpointer_ends_its_thread() -> None:
    import threading

    training = Training()
    ckpt = make(training)
    ckpt.restore()
    ckpt.step(1)
    assert [t for t in threading.enumerate() if t.name == "memckpt-engine"]
    del ckpt
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "memckpt-engine"]


# -- two ranks and more ------------------------------------------------------------------------------------------------


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
        ckpt = memckpt.Checkpointer({"state": state}, name="pair", comm=comm, quiet=True)
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
        options: dict[str, Any] = {"name": "two", "redundancy": memckpt.Mirror(2), "quiet": True, "on_busy": "wait"}
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
        ckpt = memckpt.Checkpointer({"tiny": tiny, "large": large}, name="c38", comm=comm, quiet=True, on_busy="wait")
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
        assert "every: 1 on rank 0, 2 on rank 1" in str(error)


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


def test_a_forked_child_leaves_the_parent_alone() -> None:
    training = Training()
    ckpt = make(training)
    ckpt.restore()
    for n in (1, 2):
        training.step()
        ckpt.step(n)
    pid = os.fork()
    if pid == 0:
        try:
            training.optimizer.step()  # its hook is the parent's business
            ckpt.abandon()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    training.step()
    ckpt.step(3)
    assert ckpt.wait()
    assert ckpt.stats().commits == 3
    ckpt.close()


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
    # Usually the one that left says why first; a holder of its replica may have been quicker to say what it lacks.
    [said] = results[1].errors
    assert said.startswith("step 3: ")
    assert "this rank has closed its Checkpointer" in said or "rank 0 did not seal its snapshot" in said
