"""The facade on one rank: what is saved is what was, and what fails says so."""

from __future__ import annotations

import gc
import os
import resource
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
from tests.ranks import fake_nodes
from tests.training import Training, make, train


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    with fake_nodes(str(tmp_path)):
        yield tmp_path
    faults.arm(None)


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


@pytest.mark.parametrize("concurrent", [True, False])
def test_the_copy_goes_on_while_training_calls_nothing(concurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a background thread and, where there can be none, from `step` on."""
    training = Training()
    monkeypatch.setattr(LocalComm, "concurrent", concurrent)
    ckpt = make(training)
    ckpt.restore()
    for n in (1, 2, 3):
        training.step()
        ckpt.step(n)
    assert ckpt.stats().lazy_nbytes > 0
    assert ckpt._capture._open is not None and ckpt._capture._open.job is not None
    end = time.monotonic() + 10
    while not ckpt._capture._open.job.done():
        assert time.monotonic() < end
        time.sleep(0.001)
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

    ckpt = memckpt.Checkpointer(names, name="iso", comm=LocalComm(), every=1, on_busy="wait", quiet=True)
    ckpt.restore()
    for n in range(1, 21):
        fill(n)
        ckpt.step(n)
        fill(n + 1)  # at once
    assert ckpt.wait()
    ckpt.abandon()
    fill(77)
    ckpt = memckpt.Checkpointer(names, name="iso", comm=LocalComm(), every=1, quiet=True)
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
    options: dict[str, Any] = {"name": "grow", "comm": LocalComm(), "every": 1, "on_busy": "wait", "quiet": True}
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
    options: dict[str, Any] = {"name": "flat", "comm": LocalComm(), "every": 1, "on_busy": "wait", "quiet": True}

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
