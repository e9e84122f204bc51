"""Wrong arguments: one clear error at the call, before anything happened."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memckpt
from memckpt.comm.local import LocalComm
from tests.ranks import fake_nodes, run_ranks
from tests.training import Training, make


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shm").mkdir(mode=0o700)
    with fake_nodes(str(tmp_path / "shm")):
        yield tmp_path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"every": "soon"}, "every"),
        ({"persist": ""}, "directory or a URL"),
        ({"persist": 5}, "directory or a URL"),
        ({"grace": 0.0}, "grace"),
        ({"grace": "30"}, "grace"),
        ({"on_busy": "x"}, "on_busy"),
        ({"on_error": None}, "on_error"),
        ({"redundancy": memckpt.Mirror(1)}, "needs 2 ranks"),
        ({"deadline": 0.0}, "deadline"),
        ({"deadline": "5"}, "deadline"),
        ({"deadline": None}, "deadline"),
        ({"deadline": float("inf")}, "deadline"),
        ({"bandwidth": "1"}, "bandwidth"),
        ({"bandwidth": 0}, "bandwidth"),
        ({"max_unprotected": 1.5}, "max_unprotected"),
        ({"fresh": 1}, "fresh"),
        ({"name": "a/b"}, "name"),
        ({"name": None}, "name"),
        ({"name": 5}, "name"),
        ({"comm": 5}, "comm"),
    ],
)
def test_options_of_the_wrong_kind(base: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(memckpt.UsageError, match=said):
        make(Training(), **options)
    assert "mpi4py.MPI" not in sys.modules
    assert not [f for f in base.rglob("*") if f.is_file()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deadline": "1"}, "deadline"),
        ({"bandwidth": "1"}, "bandwidth"),
        ({"stagger": -1}, "stagger"),
        ({"every": None}, "every"),
        ({"keep": -1}, "keep"),
    ],
)
def test_options_of_persist_of_the_wrong_kind(options: dict[str, Any], said: str) -> None:
    with pytest.raises(memckpt.UsageError, match=said):
        memckpt.Persist("/tmp/x", **options)


@pytest.mark.parametrize(
    "states", [[torch.zeros(1)], torch.nn.Linear(1, 1), {1: torch.zeros(1)}, {"rng": torch.zeros(1)}, None]
)
def test_states_of_the_wrong_kind(states: Any) -> None:
    with pytest.raises(memckpt.UsageError, match="states"):
        memckpt.Checkpointer(states, name="run", comm=LocalComm())


def test_a_value_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(memckpt.StateError):
        memckpt.Checkpointer({"n": 3}, name="run", comm=LocalComm())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.step(3), r"step\(3\) after step 0"),
        (lambda c: c.step(0), "a step must be a whole number"),
        (lambda c: c.step(1.0), "a step must be a whole number"),
        (lambda c: c.step(True), "a step must be a whole number"),
        (lambda c: c.step("a"), "a step must be a whole number"),
        (lambda c: c.step(1, [1]), "metrics"),
        (lambda c: c.step(1, {"loss": "x"}), "metrics"),
        (lambda c: c.step(1, {5: 1.0}), "metrics"),
        (lambda c: c.step(1, {"loss": True}), "metrics"),
        (lambda c: c.restore(step="a"), "a step must be a whole number"),
        (lambda c: next(c.steps(-3)), "a step must be a whole number"),
    ],
)
def test_calls_with_the_wrong_arguments_change_nothing(call: Callable[[Any], Any], said: str) -> None:
    with make(Training()) as ckpt:
        ckpt.restore()
        with pytest.raises(memckpt.UsageError, match=said):
            call(ckpt)
        ckpt.step(np.int64(1), {"loss": np.float32(0.5), "bad": float("nan")})
        ckpt.wait()
        assert (ckpt.stats().step, ckpt.stats().committed_step) == (1, 1)


def test_nothing_may_be_called_after_the_end() -> None:
    ckpt = make(Training())
    ckpt.restore()
    ckpt.close()
    for call in (lambda: ckpt.step(1), ckpt.restore, ckpt.wait, ckpt.__enter__, lambda: next(ckpt.steps(3))):
        with pytest.raises(memckpt.Closed):
            call()


def test_another_thread_is_told() -> None:
    told: list[BaseException] = []

    def other() -> None:
        try:
            ckpt.step(1)
        except memckpt.UsageError as error:
            told.append(error)

    with make(Training()) as ckpt:
        ckpt.restore()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "another thread" in str(told[0])
        ckpt.step(1)


def test_a_forked_child_is_told() -> None:
    with make(Training()) as ckpt:
        ckpt.restore()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ckpt.step(1)
            except memckpt.UsageError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        ckpt.step(1)


# --- where to persist to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/proc/nope", "file/x", "file"])
def test_a_target_that_cannot_be_written_is_refused_at_the_start_on_all_ranks(base: Path, target: str) -> None:
    (base / "file").write_text("a file")
    results = run_ranks(2, lambda comm: make(Training(), comm=comm, persist=str(base / target)), nodes=["a", "b"])
    assert all(isinstance(r, memckpt.UsageError) and "cannot persist to" in str(r) for r in results), results
    assert (base / "file").read_text() == "a file"


def test_a_storage_that_cannot_be_reached_now_is_no_reason_not_to_train(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memckpt.storage.posix import PosixStorage

    def fail(self: PosixStorage) -> None:
        raise TimeoutError(110, "injected: timed out")

    monkeypatch.setattr(PosixStorage, "prepare", fail)
    with pytest.warns(RuntimeWarning, match="cannot be reached now.*timed out"):
        make(Training(), persist=str(base / "ckpts")).abandon()


def test_a_target_means_the_same_wherever_the_program_goes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base / "home"))
    monkeypatch.chdir(base)
    home, here = memckpt.Persist("~/ckpts"), memckpt.Persist("ckpts")
    monkeypatch.chdir("/")
    assert (home.target, here.target) == (str(base / "home" / "ckpts"), str(base / "ckpts"))
    assert memckpt.Persist("s3://bucket/~x").target == "s3://bucket/~x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(Training(), persist=home).abandon()
    assert (base / "home" / "ckpts").is_dir()
