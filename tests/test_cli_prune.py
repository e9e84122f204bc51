"""`memckpt prune`: the rules one by one and together, what never goes, and that looking changes nothing."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path
from typing import Any

import pytest

from memckpt.cli import prune as command
from memckpt.errors import UsageError
from memckpt.format.seal import Generation
from memckpt.storage import checkpoints
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import write_marker
from tests.test_cli_storage import content, memory, refused, root, run, run_json, steps
from tests.test_storage_checkpoints import FIRST, SECOND, at, disk, marker_of, save, seal_of, write

__all__ = ["disk", "memory", "root"]  # fixtures
THIRD = Generation(3, "c" * 16)
HOUR = 3600.0


def measured(disk: Storage, losses: dict[int, float | None]) -> None:
    """A checkpoint of each step, an hour apart, with its loss."""
    for step, loss in losses.items():
        shards = list(write(disk, step).shards)
        metrics = None if loss is None else {"loss": loss, "a:b": -loss}
        write_marker(disk, "gpt", marker_of(shards, step, metrics=metrics, created=step * HOUR))


LOSSES = {1: 5.0, 2: 1.0, 3: None, 4: 2.0, 5: 3.0, 6: 4.0}


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        ("--keep 2", [5, 6]),
        ("--keep 100", [1, 2, 3, 4, 5, 6]),
        ("--keep-every 3", [3, 6]),
        ("--keep-every 4", [4, 6]),
        ("--keep-every 100", [6]),
        ("--keep-best loss:min:2", [2, 3, 4, 6]),
        ("--keep-best loss:max:1", [1, 3, 6]),
        ("--keep-best a:b:max:1", [2, 3, 6]),
        ("--keep-for 2h", [4, 5, 6]),
        ("--keep-for 90min", [5, 6]),
        ("--keep 1 --keep-every 4 --keep-best loss:max:1 --keep-every 5", [1, 3, 4, 5, 6]),
    ],
)
def test_what_any_rule_keeps_stays(
    disk: Storage, tmp_path: Path, words: str, stays: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(disk, LOSSES)
    before = content(tmp_path)
    code, said = run_json(capsys, "prune", tmp_path, *words.split())
    assert code == 0
    assert said["dry_run"] is True
    assert (said["removed"], content(tmp_path)) == ([], before)
    assert [r["step"] for r in said["checkpoints"] if not r["remove"]] == stays
    code, said = run_json(capsys, "prune", tmp_path / "gpt", *words.split(), "--yes")
    assert code == 0
    assert said["dry_run"] is False
    assert steps(tmp_path) == stays
    gone = {f"gpt/{at(tmp_path, step).name}" for step in set(LOSSES) - set(stays)}
    assert set(said["removed"]) == gone
    left = {name: data for name, data in before.items() if name.rpartition("/")[0] not in gone}
    assert content(tmp_path) == left
    assert said["removed_nbytes"] == sum(len(data) for name, data in before.items() if name not in left)


def test_every_one_is_told_why(disk: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(disk, LOSSES)
    words = ("prune", tmp_path, "--keep", 1, "--keep-every", 2, "--keep-best", "loss:min:1")
    why = {r["step"]: r["why"] for r in run_json(capsys, *words)[1]["checkpoints"]}
    assert why == {
        1: ["no rule keeps it"],
        2: ["--keep-every 2", "--keep-best loss:min:1"],
        3: ["--keep-best loss:min:1"],
        4: ["--keep-every 2"],
        5: ["no rule keeps it"],
        6: ["--keep 1", "--keep-every 2", "the newest complete one"],
    }
    code, out = run(capsys, *words, "--dry-run")
    assert code == 0
    assert "would remove 2 of 6" in out
    assert "nothing was removed" in out
    assert "no rule keeps it" in out
    assert "loss=1" in out
    assert "removed 2 of 6" in run(capsys, *words, "--yes")[1]
    assert "nothing to remove" in run(capsys, *words)[1]


def test_the_newest_of_the_newest_history_stays_in_each_run(
    root: Path, disk: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    seal = seal_of(b"x", 0, 9, run="other", world=1)
    record = checkpoints.write_shard(disk, "other", seal, b"x")
    write_marker(disk, "other", marker_of([record], 9, run="other"))
    assert run_json(capsys, "prune", root, "--keep", 1, "--yes")[0] == 0
    assert steps(root) == [5]
    assert steps(root, "other") == [9]


def test_strays_and_foreign_files_stay(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at(root, 4) / "README").write_text("mine")
    code, said = run_json(capsys, "prune", root, "--keep", 1, "--incomplete", "--yes")
    assert code == 1
    assert ["README" in r["reason"] for r in said["refused"]] == [True]
    assert steps(root) == [5]
    left = content(root)
    assert {"gpt/old/model.pt", "notes.txt", f"gpt/{at(root, 4).name}/README"} <= set(left)
    assert {r["state"] for r in said["checkpoints"] if r["why"][0].startswith("stray")} == {"stray"}


# --- what never became complete ---------------------------------------------------------------------------------------


def unmark(root: Path, step: int, generation: Generation = FIRST) -> Path:
    (at(root, step, generation) / "checkpoint.json").unlink()
    return at(root, step, generation)


def test_incomplete_ones_go_only_when_asked_for_and_dead(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead, alive = unmark(root, 6), at(root, 7, SECOND)
    assert run_json(capsys, "prune", root, "--keep", 9, "--yes")[1]["removed"] == []
    said = run_json(capsys, "prune", root, "--incomplete")[1]
    why = {Path(r["path"]).name: (r["remove"], r["why"][0]) for r in said["checkpoints"]}
    assert why[dead.name] == (True, "incomplete: no marker")
    assert why[alive.name] == (False, "newer than the newest complete one, so it may be being written")
    assert why[at(root, 4).name] == (False, "complete, and no --keep rule was given")
    assert run_json(capsys, "prune", root, "--incomplete", "--yes")[1]["removed"] == [f"gpt/{dead.name}"]
    assert not dead.exists()
    assert alive.exists()
    assert steps(root) == [4, 5]


def test_nothing_goes_while_nothing_is_complete(
    disk: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        write(disk, step)
    before = content(tmp_path)
    code, said = run_json(capsys, "prune", tmp_path, "--keep", 1, "--incomplete", "--yes")
    assert (code, said["removed"]) == (0, [])
    assert content(tmp_path) == before


def test_a_smaller_step_is_not_dead_for_that(root: Path, disk: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that was rolled back writes smaller steps than those complete; its first has no seal for a while."""
    write(disk, 2, THIRD)
    half = at(root, 2, THIRD)
    assert run_json(capsys, "prune", root, "--incomplete", "--yes")[1]["removed"] == []
    for path in half.glob("*.seal.json"):
        path.unlink()
    said = run_json(capsys, "prune", root, "--incomplete", "--yes")[1]
    assert said["removed"] == []
    [row] = [r for r in said["checkpoints"] if r["path"].endswith(half.name)]
    assert "how old its generation is" in row["why"][0]
    save(disk, 3, THIRD)
    assert run_json(capsys, "prune", root, "--incomplete", "--yes")[1]["removed"][0] == f"gpt/{half.name}"


def test_what_becomes_complete_meanwhile_stays(
    root: Path, disk: Storage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = (at(root, 6) / "checkpoint.json").read_bytes()
    late = unmark(root, 6)
    real = checkpoints.prune

    def after_it_was_marked(*args: Any, **more: Any) -> Any:
        (late / "checkpoint.json").write_bytes(marker)
        return real(*args, **more)

    monkeypatch.setattr(checkpoints, "prune", after_it_was_marked)
    code, said = run_json(capsys, "prune", root, "--incomplete", "--yes")
    assert (code, said["refused"][0]["reason"]) == (1, "it has become complete meanwhile")
    assert 6 in steps(root)


def test_what_cannot_be_removed_is_told_and_the_rest_goes(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints.prune

    def busy(to: Storage, remove: Any, **more: Any) -> Any:
        if remove[0].step == 4:
            raise OSError(errno.EBUSY, "Device or resource busy", "x")
        return real(to, remove, **more)

    monkeypatch.setattr(checkpoints, "prune", busy)
    code, said = run_json(capsys, "prune", root, "--keep", 1, "--yes")
    assert code == 1
    assert "busy" in said["refused"][0]["reason"]
    assert said["removed"] == [f"gpt/{at(root, 6).name}"]
    assert steps(root) == [4, 5]


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "say what to keep"),
        ("--keep 0", "must be a whole number, at least 1"),
        ("--keep-every 0", "must be a whole number, at least 1"),
        ("--keep-best loss", "METRIC:min:N"),
        ("--keep-best loss:least:2", "METRIC:min:N"),
        ("--keep-best loss:min:x", "METRIC:min:N"),
        ("--keep-best :min:2", "METRIC:min:N"),
        ("--keep-best loss:min:0", "must be a whole number, at least 1"),
        ("--keep-for 7", "takes a time"),
        ("--keep-for auto", "takes a time"),
        ("--keep 1 --run none", "no such checkpoint"),
    ],
)
def test_rules_that_mean_nothing_are_refused(
    root: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(root)
    assert says in refused(capsys, "prune", root, *words.split(), "--yes")
    assert content(root) == before


def test_prune_is_not_for_one_checkpoint_and_not_both_dry_and_sure(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "memckpt rm removes one checkpoint" in refused(capsys, "prune", at(root, 4), "--keep", 1, "--yes")
    with pytest.raises(SystemExit):
        run(capsys, "prune", root, "--keep", 1, "--yes", "--dry-run")
    assert steps(root) == [4, 5, 6]


def test_a_time_has_its_unit() -> None:
    def seconds(text: str) -> float:
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        [(option, policy)] = command.rules_of(parser.parse_args(["prune", "x", "--keep-for", text]))
        assert option == f"--keep-for {text}"
        return float(policy.seconds)  # type: ignore[attr-defined]

    assert [seconds(text) for text in ("90s", "30min", "12h", "7d")] == [90.0, 1800.0, 12 * HOUR, 7 * 24 * HOUR]
    with pytest.raises(UsageError, match="takes a time"):
        seconds("1w")
