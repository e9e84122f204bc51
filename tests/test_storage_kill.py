"""SIGKILL at every point between stage, write, seal, rename, marker and prune, with one checkpoint kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memckpt import faults, storage
from memckpt.storage.checkpoints import POINTS, prune, scan
from memckpt.storage.reading import verify
from tests.test_storage_checkpoints import FIRST, SECOND, save
from tests.test_storage_contract import s3  # noqa: F401

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(moto|botocore|aiobotocore|s3fs|werkzeug|flask|fsspec).*"
)


def child(url: str, options: dict[str, Any] | None, nbytes: int, die_at_call: int) -> None:
    """In a process of its own: save step 2, then keep only that; die at the n-th passing of the armed point."""
    armed, calls = os.environ["DIE_AT"], 0

    def hook(name: str, rank: int, step: int) -> None:
        nonlocal calls
        calls += name == armed
        if calls == die_at_call:
            os.kill(os.getpid(), signal.SIGKILL)

    faults.arm(hook)
    disk = storage.open(url, options)
    save(disk, 2, nbytes=nbytes)
    prune(disk, [s for s in scan(disk, "gpt") if s.step < 2], running=FIRST.id)


def run_child(
    point: str, url: object, options: dict[str, Any] | None = None, nbytes: int = 5000, die_at_call: int = 1
) -> None:
    arguments = json.dumps([str(url), options, nbytes, die_at_call])
    code = f"import json; from tests.test_storage_kill import child; child(*json.loads({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"DIE_AT": point}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == -signal.SIGKILL, f"{point} was not reached\n{done.stdout}{done.stderr}"


ONCE = {point for point in POINTS if "mark" in point or point == "storage.pruned"}
MOMENTS = [(point, call) for point in POINTS for call in (1, 2) if call == 1 or point not in ONCE]


@pytest.mark.parametrize(("point", "call"), MOMENTS)
def test_a_kill_leaves_a_complete_checkpoint(tmp_path: Path, point: str, call: int) -> None:
    """The second call of a point is the second shard's, or the second file's that is removed."""
    disk = storage.open(tmp_path / "ckpts")
    save(disk, 1)
    run_child(point, tmp_path / "ckpts", die_at_call=call)

    found = [s for s in scan(disk, "gpt") if s.complete]
    marked = POINTS.index(point) >= POINTS.index("storage.marker_named")
    pruning = POINTS.index(point) >= POINTS.index("storage.unmarked")
    assert [s.step for s in found] == ([2] if pruning else [1, 2] if marked else [1])
    assert all(verify(disk, s) == [] for s in found)

    # What comes after the crash: a new generation, which writes the same step again and tidies up behind the old one.
    save(disk, 2, SECOND)
    prune(disk, [s for s in scan(disk, "gpt") if s.generation != SECOND], running=SECOND.id)
    (kept,) = scan(disk)
    assert (kept.step, kept.generation, verify(disk, kept)) == (2, SECOND, [])
    assert len(disk.entries()) == 5


def test_points_are_passed_in_their_order(tmp_path: Path) -> None:
    passed: list[tuple[str, int, int]] = []
    disk = storage.open(tmp_path)
    save(disk, 1, world=1)
    faults.arm(lambda *what: passed.append(what))
    try:
        save(disk, 2, world=1)
        prune(disk, scan(disk, "gpt")[:1])
    finally:
        faults.arm(None)
    assert [*dict.fromkeys(name for name, _, _ in passed)] == [*POINTS]
    assert {step for name, _, step in passed if "marker" in name or "data" in name} == {2}
    assert {rank for name, rank, _ in passed if "data" in name} == {0}


def test_a_killed_upload_is_never_listed(tmp_path: Path, s3: dict[str, Any]) -> None:  # noqa: F811
    import s3fs

    url, fs = f"s3://bucket/{tmp_path.name}", s3fs.S3FileSystem(**s3)
    remote = storage.open(url, s3)
    save(remote, 1)
    # 50 MB in pieces of 8 MiB and parts of 16: dies when two parts of the first shard are on the server.
    run_child("storage.data_piece", url, s3, nbytes=50_000_000, die_at_call=5)
    assert len(fs.list_multipart_uploads("bucket")) == 1, "it did die in the midst of an upload"
    (found,) = scan(remote)
    assert (found.step, found.complete, verify(remote, found)) == (1, True, [])

    # Between the shards, and before the marker: there is something, and it is no checkpoint.
    for point, call in [("storage.staged", 2), ("storage.marker_written", 1)]:
        run_child(point, url, s3, die_at_call=call)
        older, newer = scan(remote)
        assert (older, newer.step, newer.complete, newer.reason) == (found, 2, False, "no marker")
    save(remote, 2, SECOND)
    prune(remote, [s for s in scan(remote) if s.generation != SECOND], running=SECOND.id)
    (kept,) = scan(remote)
    assert (kept.generation, verify(remote, kept)) == (SECOND, [])
    fs.clear_multipart_uploads("bucket")
