"""The storage tier on ranks as threads: what is written, what comes back from there, and who hears of an error."""

from __future__ import annotations

import errno
import shutil
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
from memckpt.policy import preserve, save
from memckpt.saving import persist as persisting
from memckpt.storage import checkpoints, open, reading
from tests.ranks import fake_nodes, raise_errors, run_ranks
from tests.training import Training, make, train

pytestmark = pytest.mark.filterwarnings("ignore:step .* is not persisted")


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shm").mkdir(mode=0o700)
    with fake_nodes(str(tmp_path / "shm")):
        yield tmp_path
    faults.arm(None)


def forget(base: Path) -> None:
    """Every node loses its memory."""
    shutil.rmtree(base / "shm")
    (base / "shm").mkdir(mode=0o700)


def steps_in(base: Path) -> dict[int, bool]:
    return {s.step: s.complete for s in checkpoints.scan(open(str(base / "ckpts")), "run")}


def life(
    comm: LocalComm, base: Path, until: int, *, ending: str = "close", seed: int = 0, **options: Any
) -> tuple[memckpt.RestoreReport, str, memckpt.Stats]:
    """Train to step `until` and end in some way; the report of the restore, the digest of the state, the counters."""
    training = Training(seed=seed + comm.rank)
    persist = memckpt.Persist(base / "ckpts", every=2, stagger=0)
    ckpt = make(training, **{"comm": comm, "persist": persist, "deadline": 30.0, **options})
    report = ckpt.restore()
    for n in range(report.step + 1, until + 1):
        training.step()
        ckpt.step(n)
        ckpt.wait(persisted=True)
    digest = training.digest(rng=False)
    ckpt.close() if ending == "close" else ckpt.abandon()
    return report, digest, ckpt.stats()


def test_what_was_persisted_comes_back_bit_for_bit_when_all_memory_is_lost(base: Path) -> None:
    torch.manual_seed(1)
    expected = train(6)
    torch.manual_seed(1)
    first = Training()
    persist = memckpt.Persist(base / "ckpts", every=2)
    with make(first, persist=persist) as ckpt:
        for _ in ckpt.steps(4):
            ckpt.wait(persisted=True)
            first.step()
    assert steps_in(base) == {2: True, 4: True}
    forget(base)
    second = Training(seed=9)
    with make(second, persist=persist) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.source) == (4, "storage")
        for _ in ckpt.steps(6):
            second.step()
    assert second.digest() == expected


def test_two_ranks_write_one_checkpoint_each_its_own_shard(base: Path) -> None:
    results = raise_errors(run_ranks(2, lambda c: life(c, base, 4), nodes=["a", "b"]))
    assert all(stats.persisted_step == 4 for _, _, stats in results)
    storage = open(str(base / "ckpts"))
    [two, four] = checkpoints.scan(storage, "run")
    assert four.complete and four.marker is not None and [s.shard for s in four.marker.shards] == [0, 1]
    assert reading.verify(storage, two) == reading.verify(storage, four) == []
    forget(base)
    again = raise_errors(run_ranks(2, lambda c: life(c, base, 4, seed=5), nodes=["a", "b"]))
    for (_, saved, _), (report, restored, _) in zip(results, again, strict=True):
        assert report.sources == ("storage", "storage")
        assert restored == saved


def test_memory_is_taken_before_storage_shard_by_shard(base: Path) -> None:
    """Node b is lost with the only copies of its shard, which lies in storage; rank 0 reads its own from memory."""
    options = {"redundancy": memckpt.Mirror(0)}
    saved = raise_errors(run_ranks(2, lambda c: life(c, base, 4, ending="abandon", **options), nodes=["a", "b"]))
    shutil.rmtree(next((base / "shm").glob("memckpt-*/b")))
    again = raise_errors(run_ranks(2, lambda c: life(c, base, 4, seed=5, **options), nodes=["a", "b"]))
    for (_, before, _), (report, after, _) in zip(saved, again, strict=True):
        assert (report.step, report.sources) == (4, ("own", "storage"))
        assert after == before


def test_an_explicit_step_is_that_step_and_a_history_once_left_stays_left(base: Path) -> None:  # C06
    saved = life(LocalComm(), base, 5, ending="abandon")
    assert saved[2].committed_step == 5
    ckpt = make(Training(seed=3), persist=memckpt.Persist(base / "ckpts", every=2))
    with pytest.raises(memckpt.NothingToRestore, match=r"step 3 cannot be restored; there is: step 5 .*step 4"):
        ckpt.restore(step=3)
    report = ckpt.restore(step=2)
    assert (report.step, report.source) == (2, "storage")
    training = Training(seed=4)
    ckpt.abandon()
    ckpt = make(training, persist=memckpt.Persist(base / "ckpts", every=2))
    assert ckpt.restore().step == 5, "nothing was saved after the rollback, which is forgotten with it"
    assert ckpt.restore(step=2).step == 2
    training.step()
    ckpt.step(3)
    assert ckpt.wait()
    ckpt.abandon()
    ckpt = make(Training(), persist=memckpt.Persist(base / "ckpts", every=2))
    report = ckpt.restore()
    assert report.step == 3, report
    ckpt.close()


def test_a_damaged_checkpoint_is_stepped_over_on_all_ranks_and_said(base: Path) -> None:  # C20
    raise_errors(run_ranks(2, lambda c: life(c, base, 4), nodes=["a", "b"]))
    [shard] = (base / "ckpts" / "run").glob("step-000000004-*/rank-00001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-2] ^= 4
    shard.write_bytes(data)
    forget(base)
    with pytest.warns(RuntimeWarning, match="(?s)damaged snapshots.*step 4.*differs from its checksum"):
        results = raise_errors(run_ranks(2, lambda c: life(c, base, 2, seed=5), nodes=["a", "b"]))
    for report, _, _ in results:
        assert (report.step, report.source) == (2, "storage")
        assert any("step 4" in line and "differs from its checksum" in line for line in report.rejected)


def test_an_error_of_one_writer_reaches_every_rank_and_the_next_save_works(base: Path) -> None:  # C23
    def fail(point: str, rank: int, step: int) -> None:
        if (point, rank, step) == ("storage.data_piece", 1, 2):
            raise OSError(errno.EACCES, "injected: not allowed")

    faults.arm(fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = raise_errors(run_ranks(2, lambda c: life(c, base, 8), nodes=["a", "b"]))
    for _, _, stats in results:
        assert [e for e in stats.errors if "step 2: not persisted: rank 1: " in e and "not allowed" in e], stats.errors
        assert (stats.persist_failed, stats.failed) == (1, 0)
    told = [str(w.message) for w in caught if "was committed, but not persisted: rank 1" in str(w.message)]
    assert len(told) == 2
    complete = [step for step, whole in steps_in(base).items() if whole]
    assert complete and 2 not in complete and complete[-1] == 8


def test_an_error_is_raised_where_the_user_wants_that(base: Path) -> None:
    def fail(point: str, rank: int, step: int) -> None:
        if point == "storage.marker_written":
            raise OSError(errno.EROFS, "injected")

    faults.arm(fail)
    with pytest.raises(memckpt.SaveFailed, match="step 2 was committed, but not persisted: rank 0") as caught:
        life(LocalComm(), base, 2, on_error="raise")
    assert (caught.value.step, caught.value.rank) == (2, 0)


def test_a_slow_storage_never_delays_memory_and_says_what_it_skips(base: Path) -> None:
    hold = threading.Event()

    def slow(point: str, rank: int, step: int) -> None:
        if point == "storage.staged":
            assert hold.wait(20)

    faults.arm(slow)
    training = Training()
    ckpt = make(training, persist=memckpt.Persist(base / "ckpts", every=2))
    ckpt.restore()
    for n in range(1, 10):
        training.step()
        ckpt.step(n)
    assert ckpt.wait()
    stats = ckpt.stats()
    assert (stats.committed_step, stats.commits, stats.persist_skipped) == (9, 9, 3)
    assert stats.persisted_step == -1 and len(list((base / "shm").rglob("s-*.safetensors"))) == 3
    hold.set()
    assert ckpt.wait(persisted=True)
    training.step()
    ckpt.step(10)
    ckpt.close()
    assert [step for step, whole in steps_in(base).items() if whole] == [2, 10]


def test_leaving_waits_for_what_was_accepted(base: Path) -> None:  # C30
    def slow(point: str, rank: int, step: int) -> None:
        if point == "storage.data_piece":
            time.sleep(0.3)

    faults.arm(slow)
    training = Training()
    with pytest.raises(KeyboardInterrupt), make(training, persist=memckpt.Persist(base / "ckpts", every=1)) as ckpt:
        ckpt.restore()
        training.step()
        ckpt.step(1)
        ckpt.wait()
        raise KeyboardInterrupt
    assert steps_in(base) == {1: True}
    with make(Training(), persist=memckpt.Persist(base / "ckpts", every=1)) as again:
        assert again.restore().step == 1
        again.step(2)
    again.close()
    assert steps_in(base) == {1: True, 2: True}


def test_what_is_kept_follows_the_policy_and_the_metrics(base: Path) -> None:
    keep = preserve.AnyOf(1, preserve.BestN(1, metric="loss"))
    training = Training()
    ckpt = make(training, persist=memckpt.Persist(base / "ckpts", every=2, keep=keep))
    ckpt.restore()
    for n, loss in enumerate([5.0, 5.0, 9.0, 1.0, 0.0, 4.0, 0.0, 3.0], 1):
        training.step()
        ckpt.step(n, metrics={"loss": loss})
        ckpt.wait(persisted=True)
    ckpt.close()
    assert steps_in(base) == {4: True, 8: True}


def test_unreadable_storage_is_never_taken_for_an_empty_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life(LocalComm(), base, 2)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr("memckpt.storage.posix.PosixStorage.entries", broken)
    with pytest.raises(memckpt.NothingToRestore, match="storage cannot be read"):
        life(LocalComm(), base, 2)


def test_ranks_with_different_directories_are_told_at_the_start(base: Path) -> None:  # C34
    def work(comm: LocalComm) -> None:
        make(Training(), comm=comm, persist=str(base / f"ckpts{comm.rank}"))

    for error in run_ranks(2, work):
        assert isinstance(error, memckpt.UsageError)
        assert "ckpts0" in str(error) and "ckpts1" in str(error)


def test_a_rank_that_sees_an_older_listing_waits_until_it_sees_the_step_agreed_on(  # C34
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = raise_errors(run_ranks(2, lambda c: life(c, base, 4), nodes=["a", "b"]))
    forget(base)
    from memckpt.recovery import stored

    real, until = checkpoints.examine, time.monotonic() + 1.5

    def late(storage: Any, path: str) -> Any:
        blind = threading.current_thread().name.endswith("1") and time.monotonic() < until
        return None if blind else real(storage, path)

    monkeypatch.setattr(stored.checkpoints, "examine", late)
    again = raise_errors(run_ranks(2, lambda c: life(c, base, 4, seed=5), nodes=["a", "b"]))
    for (_, before, _), (report, after, _) in zip(saved, again, strict=True):
        assert report.step == 4 and after == before


def test_a_timed_policy_decides_alike_on_ranks_whose_clocks_differ(  # C35
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves are due by the agreed clock: a rank whose monotonic clock runs at double speed decides as the other."""
    from memckpt.saving import generation

    real = time.monotonic

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return 2 * real() if threading.current_thread().name.endswith("1") else real()

    monkeypatch.setattr(generation, "time", Clock)
    results = raise_errors(
        run_ranks(
            2,
            lambda c: life(c, base, 40, every=save.FixedInterval(0.02), persist=None, on_busy="skip"),
            nodes=["a", "b"],
        )
    )
    (_, _, one), (_, _, other) = results
    assert one.saves == other.saves >= 2 and one.commits == other.commits


def test_an_error_before_the_first_step_leaves_nothing_running(base: Path) -> None:
    before = {t.name for t in threading.enumerate()}
    ckpt = make(Training(), persist=str(base / "ckpts"))
    ckpt.restore()
    assert "memckpt-persist" in {t.name for t in threading.enumerate()}
    ckpt.abandon()
    assert {t.name for t in threading.enumerate()} <= before | {"MainThread"}


def crash(base: Path, **options: Any) -> tuple[int, tuple[str, ...]]:
    """Restore, and fail before anything is saved; the step that was restored, and what was rejected."""
    ckpt = make(Training(), persist=memckpt.Persist(base / "ckpts", every=2), **options)
    with pytest.raises(ZeroDivisionError), ckpt:
        report = ckpt.restore()
        raise ZeroDivisionError
    return report.step, report.rejected


@pytest.mark.parametrize("lost", [False, True], ids=["from memory", "from storage"])
def test_a_checkpoint_that_fails_the_program_twice_is_stepped_over_and_said(base: Path, lost: bool) -> None:
    life(LocalComm(), base, 4, ending="abandon")
    steps, refused = [], ""
    for _ in range(7):
        if lost:
            forget(base)
        try:
            step, rejected = crash(base)
        except memckpt.NothingToRestore as error:
            refused = str(error)
            break
        steps.append(step)
        assert len(steps) < 3 or any("step 4" in line and "failed 2 times" in line for line in rejected)
    assert "every step there is" in refused and "restore(step=N)" in refused
    assert steps == ([4, 4, 2, 2] if lost else [4, 4, 3, 3, 2, 2])
    ckpt = make(Training(), persist=memckpt.Persist(base / "ckpts", every=2))
    assert ckpt.restore(step=4).step == 4, "who asks for it gets it"
    ckpt.close()


def test_a_failure_after_a_commit_is_no_reason_to_step_back(base: Path) -> None:
    life(LocalComm(), base, 4, ending="abandon")
    for expected in (4, 5, 6):
        ckpt = make(Training(), persist=memckpt.Persist(base / "ckpts", every=2))
        with pytest.raises(ZeroDivisionError), ckpt:
            assert ckpt.restore().step == expected
            ckpt.step(expected + 1)
            ckpt.wait()
            raise ZeroDivisionError


def test_a_step_that_was_dropped_does_not_go_to_storage(base: Path) -> None:
    def fail(point: str, rank: int, step: int) -> None:
        if (point, rank, step) == ("capture.slot", 1, 4):
            raise OSError("injected: no room")

    faults.arm(fail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = raise_errors(run_ranks(2, lambda c: life(c, base, 6), nodes=["a", "b"]))
    assert {(stats.failed, stats.persist_failed, stats.persisted_step) for _, _, stats in results} == {(1, 0, 6)}
    assert steps_in(base) == {2: True, 6: True}


def test_that_writing_is_tried_again_is_said_and_a_place_that_is_gone_is_told_soon(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persisting, "_FIRST_BACKOFF_S", 0.02)
    tried = {2: 0, 4: 0}

    def fail(point: str, rank: int, step: int) -> None:
        if point == "storage.staged" and step in tried:
            tried[step] += 1
            if step == 4:
                raise FileNotFoundError(errno.ENOENT, "injected: not mounted")
            if tried[step] < 6:
                raise OSError(errno.ETIMEDOUT, "injected: slow")

    faults.arm(fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, _, stats = life(LocalComm(), base, 6)
    said = [str(w.message) for w in caught]
    assert [s for s in said if "step 2 is not persisted yet by rank 0 of run 'run'" in s and "injected: slow" in s], (
        said
    )
    assert [s for s in said if "step 4 was committed, but not persisted" in s and "not mounted" in s], said
    assert steps_in(base) == {2: True, 6: True} and tried == {2: 6, 4: 4}
    assert stats.persist_failed == 1


def test_an_error_is_told_once_while_training_goes_on(base: Path) -> None:
    """The exchange after the one that told says the same once more, since it had begun before."""

    def fail(point: str, rank: int, step: int) -> None:
        if (point, step) == ("storage.staged", 2):
            raise OSError(errno.EACCES, f"injected on {rank}")

    faults.arm(fail)

    def work(comm: LocalComm) -> memckpt.Stats:
        training = Training(seed=comm.rank)
        ckpt = make(training, comm=comm, persist=memckpt.Persist(base / "ckpts", every=2, stagger=0), deadline=30.0)
        ckpt.restore()
        for n in range(1, 60):
            training.step()
            ckpt.step(n)
            time.sleep(0.005)
        ckpt.close()
        return ckpt.stats()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = raise_errors(run_ranks(2, work, nodes=["a", "b"]))
    for stats in results:
        assert sorted(stats.errors) == [
            f"step 2: not persisted: rank {r}: PermissionError: [Errno 13] injected on {r}" for r in (0, 1)
        ]
        assert stats.persist_failed == 2 and stats.persisted_step > 2
