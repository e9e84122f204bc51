"""The storage benchmark runs and reports in the agreed shape; and what a disk that hides the cost of fsync hides, too:
one persist is one pass over the bytes, flushed in the order that a power cut cannot break.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memckpt.comm.local import LocalComm
from memckpt.storage import posix
from tests.mpi.harness import mpirun, needs_mpi
from tests.powercut import Disk
from tests.ranks import fake_nodes
from tests.training import Training, make

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_persist.py"
DATA, SEAL, MARKER = "rank-00000.safetensors", "rank-00000.seal.json", "checkpoint.json"
PERSIST = [
    *(("write", DATA), ("fsync", DATA), ("write", SEAL), ("fsync", SEAL), ("rename", DATA), ("rename", SEAL)),
    *(("fsync", "step"), ("fsync", "run"), ("fsync", "ckpts")),
    *(("write", MARKER), ("fsync", MARKER), ("rename", MARKER)),
    *(("fsync", "step"), ("fsync", "run"), ("fsync", "ckpts")),
]
PRUNE = [("unlink", MARKER), ("fsync", "step")]  # then the rest of the older one, in any order


@needs_mpi
@pytest.mark.mpi
def test_smoke(tmp_path: Path) -> None:
    done = mpirun(2, SCRIPT, "--json", "--quick", "--directory", str(tmp_path), timeout_s=110)
    assert done.rc == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"] == "persist"
    assert [r["name"] for r in found["results"]] == [
        *("persist", "persist_torch", "persist_dcp", "blocked_persist", "added_persist"),
        *("restore_storage", "restore_storage_raw", "restore_storage_cached", "restore_storage_new_node"),
        *("persist_many", "persist_many_torch", "persist_many_dcp"),
    ]
    for r in found["results"]:
        assert set(r) == {"name", "value", "unit", "against", "ratio"}
        assert r["unit"] == "ms" or min(r["value"], r["ratio"]) > 0
        assert r["against"]
    assert not [*tmp_path.iterdir()]


def persist_twice(base: Path) -> None:
    """Persist steps 1 and 2 of a state that takes several writes, and keep the last."""
    import memckpt

    training = Training(width=1500)
    persist = memckpt.Persist(base / "ckpts", every=1, keep=1)
    with fake_nodes(str(base / "shm")), make(training, comm=LocalComm(), persist=persist) as checkpointer:
        checkpointer.restore()
        for n in (1, 2):
            training.step()
            checkpointer.step(n)
            checkpointer.wait(persisted=True)


def in_order(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The calls with the names of what they touch, and writes of a file that follow each other as one."""
    named: list[tuple[str, str]] = []
    for call, path in calls:
        name = re.sub(r"^\.tmp-[0-9a-f]+-", "", path)
        name = re.sub(r"^step-\d+-[0-9a-f]+$", "step", name)
        if call in ("write", "fsync", "rename", "unlink") and (call != "write" or named[-1:] != [("write", name)]):
            named.append((call, name))
    return named


def check_order(calls: list[tuple[str, str]]) -> None:
    named = in_order(calls)
    assert named[: len(PERSIST)] == PERSIST
    second = named[len(PERSIST) :]
    assert second[: len(PERSIST)] == PERSIST
    then = second[len(PERSIST) :]
    assert then[: len(PRUNE)] == PRUNE
    assert {("unlink", DATA), ("unlink", SEAL)} <= {*then[len(PRUNE) :]}


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "shm").mkdir(mode=0o700)
    disk = Disk(tmp_path / "ckpts")
    monkeypatch.setattr(posix, "os", disk)
    persist_twice(tmp_path)
    check_order(disk.calls)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_order_of_system_calls_and_one_pass_over_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir(mode=0o700)
    trace = tmp_path / "trace"
    code = (
        f"import pathlib; from tests.test_bench_persist import persist_twice as p; p(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [
            *("strace", "-f", "-y", "--seccomp-bpf", "-s", "0", "-o", str(trace)),
            *(
                "-e",
                "trace=/^(p?writev?(64|2)?|f(data)?sync|rename(at2?)?|unlink(at)?|sendfile|copy_file_range|splice)$",
            ),
            *(sys.executable, "-c", code),
        ],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    files = re.escape(str(tmp_path / "ckpts"))
    calls: list[tuple[str, str]] = []
    written: dict[str, list[int]] = {}
    for line in trace.read_text().splitlines():
        found = re.match(rf'\d+ +(\w+)\(.*[<"]{files}/?(?:[^<>"]*/)?([^<>"/]*)[>"]', line)
        if found is None:
            continue
        call, name = found[1], found[2] or "ckpts"
        calls.append((call, name))
        if call == "write":
            count = re.search(r", (\d+)(?:\) += \d+| <unfinished)", line)
            assert count is not None, line
            written.setdefault(name, []).append(int(count[1]))
    check_order(calls)
    assert {call for call, _ in calls} == {"write", "fsync", "rename", "unlink"}
    (data,) = (tmp_path / "ckpts").rglob(DATA)
    of_data = [sizes for name, sizes in written.items() if name.endswith(DATA)]
    assert [sum(sizes) for sizes in of_data] == [data.stat().st_size] * 2  # each byte is written once
    assert len(of_data[0]) > 1
