"""What a storage holds is found by looking: complete or not and why; what is pruned, and what is never touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from memckpt import storage
from memckpt.storage import marker as markers
from memckpt.storage.base import Part, Storage
from memckpt.storage.checkpoints import prune, scan, write_marker, write_shard
from memckpt.storage.marker import decode
from tests.test_storage_checkpoints import (
    FIRST,
    NBYTES,
    SECOND,
    at,
    content,
    disk,
    flip,
    marker_of,
    only,
    save,
    seal_of,
    write,
)  # fmt: skip

__all__ = ["disk"]  # a fixture


def damage(directory: Path, kind: str) -> str:
    """Damage a checkpoint as a crash or a hand would; what the reason has to say."""
    data, marker = directory / "rank-00001.safetensors", directory / "checkpoint.json"
    if kind == "shard dropped":
        data.unlink()
        return "rank-00001.safetensors is missing"
    if kind == "seal dropped":
        (directory / "rank-00000.seal.json").unlink()
        return "rank-00000.seal.json is missing"
    if kind == "shard one byte short":
        os.truncate(data, NBYTES - 1)
        return "rank-00001.safetensors has 2499 bytes instead of 2500"
    if kind == "shard empty":
        os.truncate(data, 0)
        return "rank-00001.safetensors has 0 bytes"
    if kind == "no marker":
        marker.unlink()
        return "no marker"
    if kind == "marker empty":
        os.truncate(marker, 0)
        return "marker: its own checksum"
    if kind == "marker flipped":
        flip(marker, 30)
        return "marker: its own checksum"
    if kind == "marker of another":
        marker.write_bytes(markers.encode(marker_of(list(decode(marker.read_bytes()).shards), 4)))
        return "marker: it is of run 'gpt', step 4"
    if kind == "marker lists an absent rank":
        found = decode(marker.read_bytes())
        more = msgspec.structs.replace(found.shards[1], shard=2)
        marker.write_bytes(markers.encode(marker_of([*found.shards, more], 5)))
        return "rank-00002.safetensors is missing"
    assert kind == "half written"
    marker.unlink()
    data.rename(directory / f".tmp-{'0' * 16}-{data.name}")
    return "no marker; 1 files are half written"


KINDS = (
    "shard dropped", "seal dropped", "shard one byte short", "shard empty", "no marker", "marker empty",
    "marker flipped", "marker of another", "marker lists an absent rank", "half written",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_skipped_with_the_reason(disk: Storage, tmp_path: Path, kind: str) -> None:
    save(disk, 3)
    save(disk, 5)
    reason = damage(at(tmp_path), kind)
    older, newer = scan(disk, "gpt")
    assert (older.step, older.complete) == (3, True)
    assert (newer.step, newer.complete) == (5, False)
    assert newer.reason.startswith(reason)
    assert newer.generation_id == FIRST.id
    before = sorted(at(tmp_path).iterdir())
    assert prune(disk, [newer], running=FIRST.id) == []
    assert sorted(at(tmp_path).iterdir()) == before, "the running generation may still be at it"
    assert prune(disk, [newer], running=SECOND.id) == [newer]
    assert not at(tmp_path).exists()
    assert only(disk) == older


def test_an_unreadable_marker_is_a_reason_not_an_end(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    save(disk, 3)
    save(disk, 5)
    real = disk.get

    def get(path: str, offset: int, buffer: memoryview) -> int:
        if "000000005" in path:
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path, offset, buffer)

    monkeypatch.setattr(disk, "get", get)
    older, newer = scan(disk, "gpt")
    assert older.complete
    assert not newer.complete
    assert "Input/output error" in newer.reason


def test_strays_are_told_and_left_alone(disk: Storage, tmp_path: Path) -> None:
    save(disk, 5)
    run = tmp_path / "gpt"
    (run / "checkpoint-abc").mkdir()
    (run / "checkpoint-abc" / "rank-00000.safetensors").write_bytes(b"mine")
    (run / "notes.txt").write_text("mine")
    (run / "step-5-aaaaaaaaaaaaaaaa").mkdir()
    (run / f"step-0000000005-{'a' * 16}").mkdir()  # a zero too many: another name for the same step
    (run / f"step-000000006-{'a' * 16}").write_text("a file of that name")
    (run / "nowhere").symlink_to("/nowhere/at/all")
    found = scan(disk, "gpt")
    strays = [s for s in found if s.stray]
    names = ["checkpoint-abc", "notes.txt", "step-0000000005-" + "a" * 16, "step-000000006-" + "a" * 16]
    assert [s.path.removeprefix("gpt/") for s in strays] == [*names, "step-5-aaaaaaaaaaaaaaaa"]
    assert all(s.reason.startswith("stray") and not s.complete for s in strays)
    before = sorted(tmp_path.rglob("*"))
    assert prune(disk, strays) == []
    assert sorted(tmp_path.rglob("*")) == before
    assert [s.step for s in found if s.complete] == [5]


def test_files_of_others_in_a_checkpoint_survive_it(disk: Storage, tmp_path: Path) -> None:
    save(disk, 5)
    (at(tmp_path) / "README").write_text("mine")
    (at(tmp_path) / f".tmp-{'0' * 16}-rank-00001.safetensors").write_bytes(b"left by a crash")
    found = only(disk)
    assert found.complete
    assert prune(disk, [found]) == [found]
    assert [p.name for p in at(tmp_path).iterdir()] == ["README"]
    assert only(disk).reason == "no marker"


def test_scan_of_all_runs(disk: Storage, tmp_path: Path) -> None:
    save(disk, 5)
    data = content(0, 1)
    record = write_shard(disk, "another", seal_of(data, 0, 1, run="another", world=1), data)
    write_marker(disk, "another", marker_of([record], 1, run="another"))
    (tmp_path / "deep" / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "deep" / "a" / "b" / "c" / "file").write_text("not looked at")
    (tmp_path / "empty").mkdir()
    assert [(s.run, s.step, s.complete) for s in scan(disk)] == [
        ("another", 1, True), ("deep", -1, False), ("gpt", 5, True)
    ]  # fmt: skip
    assert [s.run for s in scan(disk, "another")] == ["another"]
    assert scan(disk, "never-ran") == []
    assert scan(storage.open(tmp_path / "not-there")) == []


def test_a_directory_that_cannot_be_read_is_no_end(
    disk: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(disk, 3)
    save(disk, 5)
    (tmp_path / "lost+found").mkdir()
    real = os.scandir

    def scandir(path: str) -> object:
        if path in (str(tmp_path / "lost+found"), str(at(tmp_path))):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [(s.step, s.complete, s.reason) for s in scan(disk)] == [(3, True, ""), (5, False, "no marker")]
    monkeypatch.setattr(os, "scandir", lambda path: scandir(str(at(tmp_path))))
    with pytest.raises(PermissionError):
        scan(disk)  # the root itself: to say that there is nothing would be a lie


def test_an_empty_directory_is_incomplete_and_goes(disk: Storage, tmp_path: Path) -> None:
    at(tmp_path).mkdir(parents=True)
    found = only(disk)
    assert (found.step, found.complete, found.reason) == (5, False, "no marker")
    assert prune(disk, [found]) == [found]
    assert scan(disk, "gpt") == []
    assert (tmp_path / "gpt").is_dir()


def test_what_has_become_complete_is_not_pruned_as_incomplete(disk: Storage) -> None:
    marker = write(disk, 5)
    seen = only(disk)
    write_marker(disk, "gpt", marker)
    assert not seen.complete
    assert prune(disk, [seen]) == []
    assert only(disk).complete


def test_pruned_is_in_the_order_given(disk: Storage) -> None:
    for step in (1, 2, 3):
        save(disk, step)
    one, two, three = scan(disk, "gpt")
    assert prune(disk, [two, one], running=FIRST.id) == [two, one]
    assert scan(disk, "gpt") == [three]


def test_a_huge_marker_is_not_read_into_memory(disk: Storage, tmp_path: Path) -> None:
    disk.put([Part(f"gpt/{at(tmp_path).name}/checkpoint.json", 1, [b"x"])])
    os.truncate(at(tmp_path) / "checkpoint.json", 1 << 40)
    assert only(disk).reason == f"marker: longer than {markers.MAX_NBYTES} bytes"
