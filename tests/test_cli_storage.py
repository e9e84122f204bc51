"""The command line on storage: what an argument means, what is told, what goes and what never does."""

from __future__ import annotations

import json
import os
import shutil
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch

import memckpt
from memckpt import storage
from memckpt.cli import main
from memckpt.cli.stored.verify import check, data_nbytes
from memckpt.memory.arena import Arena
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import scan
from memckpt.storage.marker import versions
from tests.test_storage_checkpoints import NBYTES, SECOND, at, disk, flip, save, write
from tests.training import Training, make

__all__ = ["disk"]  # a fixture


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path_factory.mktemp("shm")
    base.chmod(0o700)
    monkeypatch.setenv("MEMCKPT_SHM", str(base))
    monkeypatch.setenv("MEMCKPT_NODE", "node0")
    monkeypatch.delenv("MEMCKPT_JOB", raising=False)
    return base


@pytest.fixture
def root(disk: Storage, tmp_path: Path) -> Path:
    """Complete steps 4, 6 and, after a rollback, 5; an incomplete 7; a stray directory and a stray file."""
    for step in (4, 6):
        save(disk, step)
    save(disk, 5, SECOND)
    write(disk, 7, SECOND)
    (tmp_path / "gpt" / "old").mkdir()
    (tmp_path / "gpt" / "old" / "model.pt").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = main([str(word) for word in argv])
    return code, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code, out = run(capsys, *argv, "--json")
    said: dict[str, Any] = json.loads(out)
    return code, said


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What the command says when it cannot be carried out."""
    assert main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def steps(root: Path, run_name: str = "gpt") -> list[int]:
    return [s.step for s in scan(storage.open(root), run_name) if s.complete]


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_tells_complete_incomplete_and_strays_apart(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at(root, 4) / "rank-00001.safetensors").unlink()
    before = content(root)
    code, said = run_json(capsys, "ls", root)
    assert code == 0
    assert said["storage"] == str(root)
    rows = {Path(r["path"]).name: r for r in said["checkpoints"]}
    gone, six, five, seven = (rows[at(root, *key).name] for key in [(4,), (6,), (5, SECOND), (7, SECOND)])
    assert (gone["state"], gone["reason"]) == ("incomplete", "rank-00001.safetensors is missing")
    assert (gone["world"], gone["shards"], gone["checked"]) == (2, [0], None), "what the marker lists need not be there"
    assert (six["state"], six["reason"], six["newest"]) == ("complete", None, False)
    assert (six["step"], six["generation"], six["generation_id"]) == (6, 1, "a" * 16)
    assert (six["world"], six["shards"], six["created"]) == (2, [0, 1], 1006.0)
    assert six["nbytes"] == sum(p.stat().st_size for p in at(root, 6).iterdir())
    assert six["age_s"] > 1e9
    assert five["newest"], "a generation that began later is newer, though its step is smaller"
    assert (seven["state"], seven["reason"], seven["shards"], seven["world"]) == (
        "incomplete",
        "no marker",
        [0, 1],
        None,
    )
    assert rows["old"]["state"] == rows["notes.txt"]["state"] == "stray"
    assert rows["old"]["reason"].startswith("stray")
    assert (said["complete"], said["incomplete"], said["stray"]) == (2, 2, 2)
    code, out = run(capsys, "ls", root)
    assert code == 0
    for text in (
        "complete, newest",
        "all 2",
        "1 of 2: 0",
        "2 of ?: 0-1",
        "2 (bbbbbbbb)",
        "no marker",
        "notes.txt",
        "left alone",
    ):
        assert text in out
    assert content(root) == before


@pytest.mark.parametrize("how", ["root", "run's directory", "checkpoint", "option", "file URL", "relative", "step"])
def test_a_storage_is_named_in_many_ways(
    root: Path, how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    argv = {
        "root": [root, "--run", "gpt"],
        "run's directory": [root / "gpt"],
        "checkpoint": [at(root, 6)],
        "option": ["gpt", "--storage", root],
        "file URL": [f"file://{root}/gpt"],
        "relative": [root.name, "--run", "gpt"],
        "step": [root, "--step", 6, "--generation", "AA"],
    }[how]
    said = run_json(capsys, "ls", *argv)[1]
    assert said["storage"] == str(root)
    assert {r["run"] for r in said["checkpoints"]} == {"gpt"}
    found = [r["step"] for r in said["checkpoints"] if r["step"] is not None]
    assert found == ([6] if how in ("checkpoint", "step") else [4, 5, 6, 7])


def test_a_bare_name_is_a_run_in_memory_unless_it_is_a_directory_here(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, ours = Arena.open("other"), Arena.open("gpt")
    assert [r["name"] for r in run_json(capsys, "ls")[1]["runs"]] == ["gpt", "other"]
    assert [r["name"] for r in run_json(capsys, "ls", "gpt")[1]["runs"]] == ["gpt"]
    monkeypatch.chdir(root)
    assert "both" not in refused(capsys, "ls", "nothing")
    for command in ("ls", "inspect", "verify", "rm"):
        assert "is a directory here and a run in memory" in refused(capsys, command, "gpt")
    assert [r["name"] for r in run_json(capsys, "ls", "gpt@")[1]["runs"]] == ["gpt"]
    assert run_json(capsys, "ls", "./gpt")[1]["storage"] == str(root)
    ours.remove_all()
    ours.tidy()
    assert run_json(capsys, "ls", "gpt")[1]["storage"] == str(root)
    other.remove_all()


def test_what_names_nothing_is_status_2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "inspect", "verify", "rm", "prune"):
        more = ("--keep", 1) if command == "prune" else ()
        assert "there is no directory" in refused(capsys, command, root / "none", *more)
        assert "is of run 'gpt', not of 'x'" in refused(capsys, command, root / "gpt", "--run", "x", *more)
    for command in ("inspect", "verify", "rm"):
        assert "name a run in memory, or a directory" in refused(capsys, command)
        assert "no such checkpoint" in refused(capsys, command, root / "gpt", "--step", 9)
        assert "--step is for storage" in refused(capsys, command, "gpt", "--step", 4)
    assert "--run is for storage" in refused(capsys, "ls", "--run", "gpt")
    assert "cannot name a directory" in refused(capsys, "rm", "../gpt", "--storage", root, "--yes")
    assert "--shard is for storage" in refused(capsys, "inspect", "gpt", "--shard", 0)
    assert "two runs are named" in refused(capsys, "ls", "gpt", "--storage", root, "--run", "x")
    for command in ("inspect", "verify"):
        assert "--slot is for memory" in refused(capsys, command, root, "--slot", "x")
    empty = root / "empty"
    empty.mkdir()
    assert run(capsys, "ls", empty) == (0, f"no checkpoints in {empty}\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert "Permission denied" in refused(capsys, "ls", tmp_path / "closed")


def test_an_error_of_the_storage_is_status_2(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error", "/disk")

    monkeypatch.setattr("memckpt.storage.checkpoints.scan", broken)
    assert "Input/output error: '/disk'" in refused(capsys, "ls", root)


def test_a_url_is_a_storage_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    url = "memory://bucket/cli"
    remote = storage.open(url)
    for step in (1, 2):
        save(remote, step)
    said = run_json(capsys, "ls", url)[1]
    assert (said["storage"], [r["step"] for r in said["checkpoints"]]) == (url, [1, 2])
    assert run_json(capsys, "ls", f"{url}/gpt")[1]["storage"] == url
    assert run_json(capsys, "verify", f"{url}/gpt")[0] == 0
    code, said = run_json(capsys, "prune", url, "--keep", 1, "--yes")
    assert (code, len(said["removed"])) == (0, 1)
    assert [s.step for s in scan(remote)] == [2]
    assert run_json(capsys, "rm", f"{url}/gpt", "--yes")[0] == 0
    assert scan(remote) == []


# --- inspect ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run that persisted steps 2 and 4 of a real training."""
    torch.manual_seed(1)
    training = Training()
    with make(training, persist=memckpt.Persist(tmp_path / "ckpts", every=2)) as ckpt:
        for _ in ckpt.steps(4):
            training.step()
            ckpt.wait(persisted=True)
    return tmp_path / "ckpts"


def test_inspect_shows_marker_versions_and_the_tensors_of_a_shard(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run_json(capsys, "inspect", trained, "--shard", 0)
    assert code == 0
    [newest] = said["checkpoints"]
    marker = newest["marker"]
    assert (newest["step"], newest["newest"], marker["step"], marker["world"]) == (4, True, 4, 1)
    assert marker["versions"] == versions()

    [shard] = marker["shards"]
    contents = newest["contents"]
    seal = contents["seal"]
    assert (seal["step"], seal["nbytes"], seal["layout"]) == (4, shard["nbytes"], shard["layout"])
    [weight] = [r for r in contents["entries"] if r["key"].endswith("2.weight") and "model" in r["key"]]
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [4, 32], 512)
    code, out = run(capsys, "inspect", trained, "--shard", 0)
    assert code == 0
    for text in ("step 4", "complete", f"memckpt {memckpt.__version__}", "rank-00000.safetensors", "[4, 32]"):
        assert text in out
    said = run_json(capsys, "inspect", trained, "--step", 2)[1]
    assert [(c["step"], "contents" in c) for c in said["checkpoints"]] == [(2, False)]


def test_inspect_of_what_is_broken_says_why(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [shard] = (trained / "run").glob("step-000000004-*/rank-00000.safetensors")
    flip(shard, 3)
    [newest] = run_json(capsys, "inspect", trained, "--shard", 0)[1]["checkpoints"]
    assert "header says" in newest["contents"]["reason"]
    assert "header says" in run(capsys, "inspect", trained, "--shard", 0)[1]
    shard.unlink()
    said = run_json(capsys, "inspect", trained, "--step", 4)[1]["checkpoints"]
    assert [c["reason"] for c in said] == ["rank-00000.safetensors is missing"]
    assert [c["step"] for c in run_json(capsys, "inspect", trained)[1]["checkpoints"]] == [2]
    assert "is missing" in run(capsys, "inspect", shard.parent)[1]


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_reads_every_byte(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_json(capsys, "verify", root)
    assert (code, said["ok"], said["damaged"], said["incomplete"]) == (0, 3, 0, 1)
    for where in (0, NBYTES // 2, NBYTES - 1):
        flip(at(root, 6) / "rank-00001.safetensors", where)
        code, said = run_json(capsys, "verify", root)
        [bad] = [r for r in said["checkpoints"] if r["status"] == "damaged"]
        assert (code, bad["step"]) == (1, 6)
        [place] = bad["bad"]
        assert (place["shard"], place["chunk"]) == (1, where // 1000)
        assert place["path"].endswith("rank-00001.safetensors")
        assert run_json(capsys, "verify", root, "--step", 4)[0] == 0
        code, out = run(capsys, "verify", root)
        assert code == 1
        assert f"rank-00001.safetensors: chunk {where // 1000} differs from its checksum" in out
        flip(at(root, 6) / "rank-00001.safetensors", where)


def test_progress_adds_up_to_what_was_announced(root: Path, disk: Storage) -> None:
    for stored in scan(disk, "gpt"):
        if not stored.stray:
            seen: list[int] = []
            check(disk, stored, threads=2, progress=seen.append)
            assert sum(seen) == data_nbytes(stored) == (2 * NBYTES if stored.complete else 0)


@pytest.mark.parametrize("damage", ["file", "seal", "marker"])
def test_a_missing_file_is_damage_a_missing_marker_is_not(
    root: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"file": "rank-00000.safetensors", "seal": "rank-00000.seal.json", "marker": "checkpoint.json"}
    (at(root, 6) / names[damage]).unlink()
    code, said = run_json(capsys, "verify", root)
    assert code == (0 if damage == "marker" else 1)
    assert said["damaged"] == (0 if damage == "marker" else 1)
    assert run_json(capsys, "verify", at(root, 6))[0] == 1, "what was asked for is not there in full"


def test_a_marker_that_is_no_good_is_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(at(root, 6) / "checkpoint.json", 20)
    code, said = run_json(capsys, "verify", root)
    assert (code, said["damaged"]) == (1, 1)


def test_what_is_pruned_while_it_is_read_is_not_damaged(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memckpt.storage import reading

    real = reading.read_seal

    def pruned(storage: Storage, stored: Any, rank: int) -> Any:
        if stored.step == 6:
            shutil.rmtree(at(root, 6), ignore_errors=True)
        return real(storage, stored, rank)

    monkeypatch.setattr(reading, "read_seal", pruned)
    code, said = run_json(capsys, "verify", root)
    assert code == 0
    assert [r["status"] for r in said["checkpoints"]] == ["ok", "ok", "removed", "incomplete"]


# --- rm ---------------------------------------------------------------------------------------------------------------


def test_rm_removes_one_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(root)
    code, said = run_json(capsys, "rm", root / "gpt", "--step", 6)
    assert (code, [r["step"] for r in said["removed"]], said["refused"]) == (0, [6], [])
    left = {name: data for name, data in before.items() if at(root, 6).name not in name}
    assert content(root) == left
    assert not at(root, 6).exists()
    assert said["removed"][0]["nbytes"] == sum(len(d) for n, d in before.items() if n not in left)
    assert "removed gpt/step-000000004" in run(capsys, "rm", at(root, 4))[1]


def test_rm_refuses_to_take_the_last_complete_one_unless_sure(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (4, 6):
        assert run_json(capsys, "rm", root / "gpt", "--step", step)[0] == 0
    before = content(root)
    for argv in ([root / "gpt", "--step", 5], [root / "gpt"], [at(root, 5, SECOND)], [root, "--run", "gpt", "--force"]):
        code, said = run_json(capsys, "rm", *argv)
        assert (code, said["removed"]) == (1, [])
        assert any("last complete" in r["reason"] for r in said["refused"])
        assert content(root) == before
    assert run_json(capsys, "rm", root / "gpt", "--step", 5, "--yes")[0] == 0
    assert steps(root) == []


def test_rm_of_a_whole_run_says_of_each_why_it_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_later = at(root, 7, SECOND).rename(at(root, 3))  # of the first generation: no job writes it any more
    before = content(root)
    code, said = run_json(capsys, "rm", root / "gpt")
    reasons = {r["path"].rpartition("/")[2]: r["reason"] for r in said["refused"]}
    assert (code, said["removed"], content(root)) == (1, [], before)
    assert reasons[at(root, 5, SECOND).name] == "the last complete checkpoint of the run; --yes removes it"
    older = "older than the last complete checkpoint, and named together with the last complete one; --yes removes it"
    assert reasons[at(root, 4).name] == reasons[at(root, 6).name] == older
    assert reasons[write_later.name] == "incomplete, and named together with the last complete one; --yes removes it"
    assert reasons["old"] == "stray: not a checkpoint's name; left alone"
    write(storage.open(root), 8, SECOND)
    [eight] = [r for r in run_json(capsys, "rm", root / "gpt")[1]["refused"] if r["step"] == 8]
    assert "may be being written; --yes" in eight["reason"]


@pytest.mark.parametrize("what", ["run", "step"])
def test_rm_leaves_no_empty_directory_of_a_run(
    root: Path, disk: Storage, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(root / "gpt")
    save(disk, 4)
    argv = ["--run", "gpt"] if what == "run" else ["--run", "gpt", "--step", 4]
    assert run_json(capsys, "rm", root, *argv, "--yes") == (
        0, {"storage": str(root), "removed": [
            {"run": "gpt", "step": 4, "path": f"gpt/{at(root, 4).name}", "nbytes": unittest.mock.ANY}
        ], "refused": []},
    )  # fmt: skip
    assert os.listdir(root) == ["notes.txt"]
    save(disk, 4)
    (root / "gpt" / "mine").mkdir()
    assert run_json(capsys, "rm", root, "--run", "gpt", "--yes")[0] == 1
    assert os.listdir(root / "gpt") == ["mine"], "what is not memckpt's stays, be it empty"


def test_a_directory_that_cannot_be_removed_is_told(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(root / "gpt" / "old")
    real = os.rmdir

    def rmdir(path: str) -> None:
        if Path(path).name == "gpt":
            raise PermissionError(13, "Permission denied", path)
        real(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    code, said = run_json(capsys, "rm", root / "gpt", "--yes")
    assert (code, len(said["removed"])) == (1, 4)
    [left] = said["refused"]
    assert (left["path"], left["state"]) == ("gpt", "empty")
    assert "Permission denied" in left["reason"]


def test_rm_of_a_whole_run_leaves_strays_and_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at(root, 4) / "README").write_text("mine")
    code, said = run_json(capsys, "rm", root, "--run", "gpt", "--yes")
    assert code == 1
    assert sorted(r["step"] for r in said["removed"]) == [5, 6, 7]
    reasons = {Path(r["path"]).name: r["reason"] for r in said["refused"]}
    assert reasons["old"].startswith("stray")
    assert "none of memckpt's are left in it: README" in reasons[at(root, 4).name]
    names = ["gpt/old/model.pt", f"gpt/{at(root, 4).name}/README", "notes.txt"]
    assert sorted(content(root)) == sorted(names)


def test_rm_wants_a_run_and_one_step(root: Path, disk: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(root)
    assert "name the run (--run NAME)" in refused(capsys, "rm", root)
    assert "name the run (--run NAME)" in refused(capsys, "rm", root, "--step", 4, "--yes")
    assert "goes with --step" in refused(capsys, "rm", root / "gpt", "--generation", "aa", "--yes")
    assert "no such checkpoint" in refused(capsys, "rm", root / "gpt", "--step", 8)
    assert run_json(capsys, "rm", root / "gpt", "--step", 8, "--force") == (
        0, {"storage": str(root), "removed": [], "refused": []},
    )  # fmt: skip
    assert content(root) == before
    save(disk, 6, SECOND)
    assert "several generations" in refused(capsys, "rm", root / "gpt", "--step", 6)
    assert run_json(capsys, "rm", root / "gpt", "--step", 6, "--generation", "a")[0] == 0
    assert not at(root, 6).exists()
    assert at(root, 6, SECOND).exists()


def test_rm_refuses_what_a_job_may_be_writing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_json(capsys, "rm", root / "gpt", "--step", 7)
    assert code == 1
    assert "may be being written" in said["refused"][0]["reason"]
    assert at(root, 7, SECOND).exists()
    assert main(["rm", str(root / "gpt"), "--step", "7"]) == 1
    assert "not removed: gpt/step-000000007" in capsys.readouterr().err
    assert run_json(capsys, "rm", root / "gpt", "--step", 7, "--yes")[0] == 0
    assert not at(root, 7, SECOND).exists()
