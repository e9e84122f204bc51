"""What ``memckpt ls`` and ``inspect`` look into in a storage, and what they say of what they did not look at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from memckpt.cli.stored import glance
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import write_marker, write_shard
from tests.test_cli_storage import content, memory, root, run, run_json
from tests.test_storage_checkpoints import NBYTES, SECOND, at, disk, flip, marker_of, seal_of

__all__ = ["disk", "memory", "root"]  # fixtures


@pytest.mark.parametrize("what", ["header", "seal", "two shards"])
def test_ls_and_inspect_see_damage_at_the_beginning(root: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "seal":
        flip(at(root, 6) / "rank-00001.seal.json", 30)
    else:
        flip(at(root, 6) / "rank-00001.safetensors", 20)
    if what == "two shards":
        flip(at(root, 6) / "rank-00000.safetensors", 20)
    before = content(root)
    code, said = run_json(capsys, "ls", root)
    rows = {r["step"]: r for r in said["checkpoints"] if r["step"] is not None}
    assert code == 0
    assert [(rows[n]["state"], rows[n]["complete"]) for n in (4, 5, 6)] == [
        ("complete", True), ("complete", True), ("damaged", False),
    ]  # fmt: skip
    assert (said["complete"], said["damaged"], said["incomplete"]) == (2, 1, 1)
    reason = {
        "seal": "rank-00001.safetensors: the seal is not the one that the marker speaks of",
        "header": "rank-00001.safetensors: chunk 0, with its header, differs from its checksum",
        "two shards": "rank-00000.safetensors: chunk 0, with its header, differs from its checksum, and 1 more shards "
        "are bad",
    }[what]
    assert rows[6]["reason"] == reason
    assert "damaged" in run(capsys, "ls", root)[1]
    [looked] = run_json(capsys, "inspect", root, "--step", 6)[1]["checkpoints"]
    assert (looked["state"], looked["reason"]) == ("damaged", reason)
    assert "step 6: damaged" in run(capsys, "inspect", root, "--step", 6)[1]
    assert content(root) == before


def test_ls_says_what_it_did_not_look_at(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(at(root, 5, SECOND) / "rank-00001.safetensors", NBYTES - 1)  # behind what ls reads
    out = run(capsys, "ls", root)[1]
    assert "complete: every file is there in its size, and every seal and first chunk is good." in out
    assert "memckpt verify reads every byte" in out
    monkeypatch.setattr(glance, "MAX_SHARDS", 2)
    said = run_json(capsys, "ls", root)[1]["checkpoints"]
    assert {r["step"]: r["checked"] for r in said if r["complete"]} == {4: "sizes", 5: "first chunks", 6: "sizes"}
    assert "seals and first chunks were read of the newest 1 of 3" in run(capsys, "ls", root)[1]
    monkeypatch.setattr(glance, "MAX_SHARDS", 1)
    assert "no seal and no first chunk was read" in run(capsys, "ls", root)[1]


def test_the_newest_of_each_run_is_looked_at_first(
    root: Path, disk: Storage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "gpt", root / "aaa")  # markers of another run: nothing of it is complete
    for step in (1, 2):
        data = b"other"
        seal = seal_of(data, 0, step, run="zzz", world=1)
        write_marker(disk, "zzz", marker_of([write_shard(disk, "zzz", seal, data)], step, run="zzz"))
    monkeypatch.setattr(glance, "MAX_SHARDS", 3)
    said = run_json(capsys, "ls", root)[1]["checkpoints"]
    looked = [(r["run"], r["step"]) for r in said if r["checked"] == "first chunks"]
    assert looked == [("gpt", 5), ("zzz", 2)]


def test_what_is_removed_while_ls_reads_is_not_damaged(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memckpt.storage import reading

    real = reading.read_seal

    def pruned(storage: Storage, stored: Any, rank: int) -> Any:
        if stored.step == 6:
            shutil.rmtree(at(root, 6), ignore_errors=True)
        return real(storage, stored, rank)

    monkeypatch.setattr(reading, "read_seal", pruned)
    said = run_json(capsys, "ls", root)[1]
    [six] = [r for r in said["checkpoints"] if r["step"] == 6]
    assert (six["state"], six["reason"], said["damaged"]) == ("incomplete", "removed while it was read", 0)


def test_ls_says_where_runs_further_down_lie(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "top" / "a").mkdir(parents=True)
    shutil.copytree(root / "gpt", tmp_path / "top" / "sub" / "gpt")
    shutil.copytree(root / "gpt", tmp_path / "top" / "a" / "b" / "gpt")
    shutil.copytree(root / "gpt", tmp_path / "top" / "a" / "b" / "gpt-2")
    (tmp_path / "top" / "sub" / "mine").mkdir()
    top = tmp_path / "top"
    code, said = run_json(capsys, "ls", top)
    rows = {r["path"]: r for r in said["checkpoints"]}
    assert (code, said["deeper"], said["stray"], said["complete"]) == (0, 2, 1, 0)
    assert (rows["sub/gpt"]["state"], rows["sub/gpt"]["runs"]) == ("deeper", [f"{top}/sub/gpt"])
    assert rows["sub/gpt"]["reason"] == f"a run lies further down: memckpt ls {top}/sub/gpt"
    assert rows["a/b"]["runs"] == [f"{top}/a/b/gpt", f"{top}/a/b/gpt-2"]
    assert (rows["sub/mine"]["state"], rows["sub/mine"]["runs"]) == ("stray", [])
    out = run(capsys, "ls", top)[1]
    assert "(and 1 more beside it)" in " ".join(out.split())
    for where in (rows["sub/gpt"]["runs"] + rows["a/b"]["runs"])[:2]:
        assert run_json(capsys, "ls", where)[1]["checkpoints"][0]["run"] == "gpt", "it is there that one has to look"


def test_ls_looks_further_down_in_a_run_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(at(root, 6), root / "gpt" / "old" / at(root, 6).name)
    for where in (root, root / "gpt"):
        [old] = [r for r in run_json(capsys, "ls", where)[1]["checkpoints"] if r["path"] == "gpt/old"]
        assert (old["state"], old["runs"]) == ("deeper", [f"{root}/gpt/old"])
