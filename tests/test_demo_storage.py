"""The demonstration's judge, where all memory was lost and the state has to come from storage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memckpt import storage
from memckpt.demo import memory, timeline
from memckpt.demo.history import Comparison, History
from memckpt.demo.verdict import Recovery, Verdict, conclude
from tests.test_demo import KILLED_AT, RANKS, STEPS, life
from tests.test_storage_checkpoints import at, save, write


def judge_from_storage(
    tmp_path: Path,
    *,
    last: int = 3,
    first: int = 3,
    persisted_step: int = 2,
    sources: tuple[str, str] = ("storage",) * 2,
) -> tuple[Verdict, Recovery]:
    """All is killed after step `last`; new processes go on with step `first`."""
    for directory in ("log", "reference"):
        (tmp_path / directory).mkdir()
        for rank in range(RANKS):
            (tmp_path / directory / f"final-{rank}.bin").write_bytes(bytes([rank]) * 9)
    reference = History.of(life(1, 0, 1, STEPS, 50.0) + life(2, 1, 1, STEPS, 50.0))
    before = History.of(life(10, 0, 1, last, 103.0 - last) + life(11, 1, 1, last, 103.0 - last)).lives
    seconds = {"fetch": 0.25, "load": 0.125}
    after = History.of(
        life(20, 0, first, STEPS, 106.0, source=sources[0], seconds=seconds)
        + life(21, 1, first, STEPS, 106.0, source=sources[1], seconds=seconds)
    )
    recovery = Recovery(
        1, 11, KILLED_AT, before, after, tmp_path / "log",
        in_job=False, restarted_at=KILLED_AT + 1.0, persisted_step=persisted_step,
    )  # fmt: skip
    comparison = Comparison()
    comparison.steps(reference.lives, recovery.lives, RANKS, STEPS)
    comparison.finals(reference, tmp_path / "reference", after, tmp_path / "log", RANKS)
    return conclude("x", "storage", 0, STEPS, "SIGKILL", RANKS, recovery, comparison, 1.0), recovery


def test_a_recovery_from_storage_is_proved_and_shown(tmp_path: Path) -> None:
    verdict, recovery = judge_from_storage(tmp_path)
    assert verdict.problems == []
    assert verdict.proved
    assert (verdict.source, verdict.sources) == ("storage", ["storage", "storage"])
    assert (verdict.killed_at_step, verdict.recovered_step, verdict.persisted_step, verdict.lost_steps) == (4, 2, 2, 1)
    assert verdict.seconds["fetch"] == pytest.approx(0.25)
    assert verdict.seconds["detect"] == pytest.approx(1.0)
    read = [(at, who) for at, who, what in timeline.rows(recovery) if what.startswith("has read its snapshot")]
    assert read == [(pytest.approx(2.5 - 0.125), "rank 0"), (pytest.approx(2.5 - 0.125), "rank 1")]
    told = Console(file=io.StringIO(), width=200)
    timeline.show(told, verdict, recovery)
    assert isinstance(told.file, io.StringIO)
    text = told.file.getvalue()
    for words in (
        "the whole job",
        "all memory is gone; step 2 is the newest in storage",
        "in 250.0 ms",
        "from storage",
    ):
        assert words in text


def test_storage_may_be_many_steps_behind_but_no_more_than_it_is(tmp_path: Path) -> None:
    verdict, _ = judge_from_storage(tmp_path, last=5, first=2, persisted_step=1)
    assert (verdict.proved, verdict.lost_steps) == (True, 4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"persisted_step": 3}, "back at step 2, while step 3 was complete in storage"),
        ({"persisted_step": 1}, "back at step 2, while step 1 was complete in storage"),
        ({"sources": ("storage", "own")}, "elsewhere than storage (rank 1: own)"),
        ({"sources": ("peer", "storage")}, "elsewhere than storage (rank 0: peer)"),
        ({"sources": ("none", "none")}, "elsewhere than storage (rank 0: none, rank 1: none)"),
    ],
)
def test_what_does_not_prove_a_recovery_from_storage(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    verdict, _ = judge_from_storage(tmp_path, **more)
    assert not verdict.proved
    assert any(words in problem for problem in verdict.problems), verdict.problems


def test_the_observer_looks_into_storage_itself(tmp_path: Path) -> None:
    assert memory.newest_persisted(tmp_path / "none", "gpt") is None
    disk = storage.open(tmp_path)
    for step in (3, 12):
        save(disk, step)
    write(disk, 15)
    assert memory.newest_persisted(tmp_path, "gpt") == 12
    assert memory.newest_persisted(tmp_path, "other") is None
    (at(tmp_path, 12) / "rank-00001.safetensors").unlink()
    assert memory.newest_persisted(tmp_path, "gpt") == 3
