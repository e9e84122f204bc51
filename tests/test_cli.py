"""The command line, on real snapshots, with living and killed processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memckpt import _native
from memckpt.cli import checks, common, main, mpicheck
from memckpt.format.layout import Layout
from memckpt.format.seal import Base, Generation, Seal
from memckpt.memory.arena import Arena
from memckpt.state.state import State
from tests.mpi.harness import needs_mpi

GENERATION = Generation(3, "0123456789abcdef")
MIB = 1 << 20


def snapshot(
    arena: Arena,
    tensors: dict[str, torch.Tensor],
    *,
    shard: int = 0,
    step: int = 7,
    generation: Generation = GENERATION,
) -> tuple[str, Layout]:
    """Write one sealed snapshot, as a save does."""
    collected = State(tensors).collect()
    layout = Layout.build(collected, run=arena.run.name, shard=shard, world=2)
    head = layout.header(collected.plain, step)
    pieces = layout.pieces(collected)
    with arena.create_slot(layout.file_nbytes) as slot:
        memoryview(slot.memory)[: len(head)] = head
        job = _native.gather(
            pieces.sources, pieces.nbytes, pieces.offsets, slot.memory, layout.file_nbytes, keep=pieces
        )
        assert job.wait(30.0)
        seal = Seal(
            run=arena.run.name, job=arena.run.job, shard=shard, world=2, generation=generation,
            base=Base(Generation(2, "f" * 16), 5), step=step, layout=layout.hash, nbytes=layout.file_nbytes,
            chunk_nbytes=_native.CHUNK_BYTES, crcs=job.crcs().tolist(), created=time.time(),
        )  # fmt: skip
        slot.seal(seal)
    return slot.name, layout


def tensors() -> dict[str, torch.Tensor]:
    return {
        "big": torch.arange(5 * MIB, dtype=torch.uint8),
        "weight": torch.randn(3, 5, dtype=torch.bfloat16),
        "[odd] name": torch.zeros(1, 0, 2),
    }


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMCKPT_SHM", str(tmp_path))
    monkeypatch.setenv("MEMCKPT_NODE", "node0")
    monkeypatch.delenv("MEMCKPT_JOB", raising=False)
    return tmp_path


@pytest.fixture
def arena(base: Path) -> Iterator[Arena]:
    opened = Arena.open("gpt")
    held = opened.lock()
    yield opened
    held.release()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code, out = run(capsys, *argv, "--json")
    said: dict[str, Any] = json.loads(out)
    return code, said


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_shows_what_is_held_and_by_whom(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot(arena, tensors(), shard=0, step=7)
    snapshot(arena, tensors(), shard=1, step=7)
    snapshot(arena, tensors(), shard=1, step=6)
    arena.create_slot(1000).close()
    other = Arena.open("other", job="9", node="node1")
    code, said = run_json(capsys, "ls")
    assert code == 0
    gpt, empty = said["runs"]
    assert [(s["step"], s["generation"], s["shards"]) for s in gpt["snapshots"]] == [(7, 3, [0, 1]), (6, 3, [1])]
    assert (gpt["name"], gpt["job"], gpt["node"], gpt["slots"], gpt["unsealed"]) == ("gpt", "", "node0", 4, 1)
    assert gpt["bytes"] == arena.slots_nbytes()
    assert gpt["live_pids"] == [os.getpid()]
    assert not gpt["finished"]
    assert gpt["problems"] == []
    assert (empty["name"], empty["job"], empty["node"], empty["live_pids"]) == ("other", "9", "node1", [])
    code, out = run(capsys, "ls")
    assert code == 0
    assert "7, 6" in out
    assert "all 2; 1 of 2: 1 " in out, "of step 6 not all shards are there"
    assert f"{os.getpid()}" in out
    assert "left behind" in out
    assert [r["name"] for r in run_json(capsys, "ls", "--node", "node1")[1]["runs"]] == ["other"]
    other.remove_all()


def test_ls_of_nothing_and_of_what_is_not_ours(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ls")[1] == f"no runs in {base}\n"
    arena = Arena.open("gpt")
    (arena.path / "run.json").chmod(0)
    code, said = run_json(capsys, "ls")
    assert code == 0
    assert said["runs"] == []
    assert "0000" in said["refused"][0]["problem"]
    assert "refused" in run(capsys, "ls")[1]
    assert arena.path.exists()


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_shows_seals_and_tensors(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    slot, layout = snapshot(arena, tensors())
    code, said = run_json(capsys, "inspect", "gpt")
    assert code == 0
    seal = said["slots"][0]["seal"]
    assert (seal["shard"], seal["world"], seal["step"], seal["generation"]) == (0, 2, 7, 3)
    assert seal["base"] == {"generation": 2, "generation_id": "f" * 16, "step": 5}
    assert (seal["layout"], seal["nbytes"], seal["chunks"]) == (layout.hash, layout.file_nbytes, 2)
    assert "entries" not in said["slots"][0]
    code, said = run_json(capsys, "inspect", "gpt", "--slot", slot)
    rows = {r["key"]: r for r in said["slots"][0]["entries"]}
    assert set(rows) == set(layout.names)
    weight = next(r for k, r in rows.items() if "weight" in k)
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("bfloat16", [3, 5], 30)
    code, out = run(capsys, "inspect", "gpt", "--slot", slot)
    assert code == 0
    for text in (slot, "bfloat16", "[3, 5]", "[odd]", "3 (01234567)"):
        assert text in out
    header, row = out.splitlines()[:2]
    fields = dict(zip(header.split(), row.split(), strict=False))
    assert (fields["SHARD"], fields["WORLD"]) == ("0", "2"), "not '0 of 2', which reads as none"


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_names_the_bad_chunk_and_the_tensors_in_it(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    good, _ = snapshot(arena, tensors(), shard=0)
    bad, layout = snapshot(arena, tensors(), shard=1)
    assert run(capsys, "verify", "gpt")[0] == 0
    entry = next(e for e in layout.entries if "big" in e.key)
    with arena.open_slot(bad, writable=True) as slot:
        memoryview(slot.memory)[entry.offset + entry.nbytes - 1] ^= 1
    code, said = run_json(capsys, "verify", "gpt")
    assert code == 1
    assert said["damaged"] == 1
    results = {r["slot"]: r for r in said["slots"]}
    assert results[good]["status"] == "ok"
    (chunk,) = results[bad]["chunks"]
    assert (chunk["index"], chunk["first"], chunk["end"]) == (1, 4 * MIB, layout.file_nbytes)
    assert entry.key in chunk["keys"]
    assert not chunk["header"]
    code, out = run(capsys, "verify", "gpt")
    assert code == 1
    assert f"{bad}: chunk 1" in out
    assert entry.key in out
    assert run(capsys, "verify", "gpt", "--slot", good)[0] == 0


@pytest.mark.parametrize("where", ["header", "identity", "seal", "truncated"])
def test_verify_finds_other_damage(arena: Arena, capsys: pytest.CaptureFixture[str], where: str) -> None:
    slot, _ = snapshot(arena, tensors())
    path = Path(arena.data_path(slot))
    data = bytearray(path.read_bytes())
    if where == "header":
        data[20] ^= 0xFF
        path.write_bytes(data)
    elif where == "identity":
        at = data.index(b"gpt")
        data[at] ^= 1
        path.write_bytes(data)
    elif where == "truncated":
        path.write_bytes(data[: 4 * MIB])
    else:
        seal = path.with_name(f"{slot}.seal.json")
        seal.write_bytes(seal.read_bytes().replace(b'"step":7', b'"step":8'))
    code, said = run_json(capsys, "verify", "gpt")
    assert code == 1
    (result,) = said["slots"]
    assert result["status"] == "damaged"
    assert result["reason"]
    if where in ("header", "identity"):
        assert [(c["index"], c["header"]) for c in result["chunks"]] == [(0, True)]


def test_verify_leaves_unsealed_slots_alone(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    arena.create_slot(5000).close()
    code, said = run_json(capsys, "verify", "gpt")
    assert code == 0
    assert [r["status"] for r in said["slots"]] == ["unsealed"]


def test_verify_agrees_with_itself_on_any_chunk_size(arena: Arena) -> None:
    from memckpt.cli.verify import bad_chunks

    with arena.create_slot(10000) as slot:
        memoryview(slot.memory)[:] = np.arange(10000, dtype=np.uint8).tobytes()
        crcs = [_native.crc32c(memoryview(slot.memory)[i : i + 4096]) for i in range(0, 10000, 4096)]
        seal = Seal(
            run="gpt", shard=0, world=1, generation=GENERATION, step=1, layout="0", nbytes=10000, chunk_nbytes=4096,
            crcs=[crcs[0], crcs[1] ^ 1, crcs[2]], created=0.0,
        )  # fmt: skip
        assert bad_chunks(slot.memory, seal, 2) == [1]


# --- rm ---------------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from memckpt.memory.arena import Arena
arena = Arena.open("gpt")
held = arena.lock()
arena.create_slot(4096).close()
print(flush=True)
while True:
    held.beat()
    time.sleep(0.05)
"""


@pytest.mark.parametrize("force", [False, True])
def test_rm_refuses_a_live_run_and_removes_a_dead_one(
    base: Path, capsys: pytest.CaptureFixture[str], force: bool
) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        argv = ("rm", "gpt", "--force") if force else ("rm", "gpt")
        code, said = run_json(capsys, *argv)
        assert code == 1
        assert [r["pid"] for r in said["refused"]] == [child.pid]
        assert said["removed"] == []
        assert len(Arena.open("gpt").inventory()) == 1
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        code, said = run_json(capsys, *argv)
        assert code == 0
        assert said["removed"][0]["bytes"] == 4096
        assert os.listdir(base) == []
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_rm_leaves_what_is_not_ours(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    slot, _ = snapshot(arena, tensors())
    Path(arena.data_path(slot)).chmod(0o644)
    for lock in list(arena.path.glob("procs/*.lock")):
        assert lock.exists()
    from memckpt.memory import lock as locks

    for held in locks.own_locks(str(arena.path / "procs")):
        held.release()
    code, said = run_json(capsys, "rm", "gpt")
    assert code == 1
    assert said["refused"][0]["pid"] is None
    assert Path(arena.data_path(slot)).exists()


def test_rm_of_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "gpt"]) == 2
    assert "no run 'gpt'" in capsys.readouterr().err
    assert main(["rm", "gpt", "--force"]) == 0
    assert os.listdir(base) == []


# --- which run --------------------------------------------------------------------------------------------------------


def test_a_name_may_need_its_job(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in ("1", "2", ""):
        Arena.open("r", job=job)
    Arena.open("r", job="1", node="node1")
    assert main(["verify", "r"]) == 2
    assert "r@1, r@2" in capsys.readouterr().err
    said = run_json(capsys, "rm", "r@1")[1]
    assert sorted(r["node"] for r in said["removed"]) == ["node0", "node1"]
    assert [r["job"] for r in run_json(capsys, "rm", "r@")[1]["removed"]] == [""]
    monkeypatch.setenv("MEMCKPT_JOB", "2")
    assert [r["job"] for r in run_json(capsys, "rm", "r")[1]["removed"]] == ["2"]
    assert os.listdir(base) == []


@pytest.mark.parametrize("argv", [["inspect", "x"], ["verify", "x"], ["rm", "x"], ["ls", "x"]])
def test_unknown_runs_are_status_2(base: Path, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("memckpt: no run")


def test_numbers_in_short() -> None:
    assert [common.numbers(x) for x in ([], [3], [0, 1, 2, 5], [7, 6, 1])] == ["", "3", "0-2, 5", "1, 6-7"]


def test_which_shards_are_there_cannot_be_read_as_how_many() -> None:
    said = [common.shards(there, of) for there, of in (([0], 1), ([0, 1], 2), ([0], 2), ([2, 1, 7], 8), ([], 3))]
    assert said == ["all 1", "all 2", "1 of 2: 0", "3 of 8: 1-2, 7", "none of 3"]
    assert [common.shards(there, None) for there in ([0], [])] == ["1 of ?: 0", "none of ?"]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["inspect", "x"], 2, "no run 'x'"),
        (["verify", "x"], 2, "no run 'x'"),
        (["rm", "x"], 2, "no run 'x'"),
        (["ls", "x"], 2, "no run 'x'"),
        (["ls", "/none/at/all"], 2, "there is no directory"),
        (["prune", "/none/at/all", "--keep", "1"], 2, "there is no directory"),
        (["ls", "--node"], 2, "expected one argument"),
        (["doctor", "--bogus"], 2, "unrecognized arguments: --bogus"),
    ],
)
def test_with_json_an_error_is_one_object_too(
    base: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, says: str
) -> None:
    try:
        got = main([argv[0], "--json", *argv[1:]])
    except SystemExit as stop:
        got = stop.code
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert (got, [*said], err) == (code, ["error"], "")
    assert says in said["error"]


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(5, "Input/output error", "/disk"), 2), (KeyboardInterrupt(), 130)]
)
def test_with_json_what_breaks_off_is_one_object_too(
    base: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(common, "places", broken)
    got, said = run_json(capsys, "ls")
    assert (got, [*said]) == (code, ["error"])


def test_module_runs_and_does_not_load_mpi(base: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "memckpt", "ls"], capture_output=True, text=True, check=True)
    assert done.stdout == f"no runs in {base}\n"
    code = "import sys, memckpt.cli; memckpt.cli.main(['ls']); print('mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_this_machine(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_json(capsys, "doctor", "--no-mpi")
    by_name = {c["name"]: c for c in said["checks"]}
    assert {c["status"] for c in said["checks"]} <= {"ok", "warn"}
    assert code == 0
    assert by_name["processor"]["found"].startswith("copy path")
    assert os.uname().release in by_name["kernel"]["found"]
    assert "a process crash" in by_name["what memory survives"]["found"]
    assert os.listdir(base) == []
    assert "copy path" in run(capsys, "doctor", "--no-mpi")[1]


def test_doctor_fails_where_no_slot_can_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_json(capsys, "doctor", "--no-mpi", "--base", str(tmp_path / "none"))
    assert code == 1
    assert said["status"] == "fail"
    assert any("MEMCKPT_SHM" in c["advice"] for c in said["checks"] if c["status"] == "fail")


def test_doctor_tells_of_memory_left_behind(arena: Arena, base: Path) -> None:
    from memckpt.cli.doctor import left_over

    arena.create_slot(MIB).close()
    assert left_over(str(base)).found == "none"  # this process holds it
    from memckpt.memory import lock as locks

    for held in locks.own_locks(str(arena.path / "procs")):
        held.release()
    found = left_over(str(base))
    assert "1.00 MiB of 1 runs" in found.found
    assert (found.status, found.advice) == ("ok", "")


def test_doctor_suggests_to_remove_segments_only_where_they_matter(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / "vader_segment.old").write_bytes(bytes(4096))
    few = checks.forsaken_segments(str(base))
    assert (few.status, few.advice) == ("ok", "")
    assert few.found.startswith("1 files, 4.00 KiB")
    with (base / "vader_segment.large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (256 << 20) + 1)
    many = checks.forsaken_segments(str(base))
    (base / "vader_segment.large").unlink()
    assert (many.status, many.advice.split(" while")[0]) == ("warn", f"rm {base}/vader_segment.*")
    said = run_json(capsys, "doctor", "--no-mpi")[1]
    assert [c for c in said["checks"] if c["status"] == "ok" and c["advice"]] == []


@pytest.mark.parametrize("columns", [None, 80])
def test_doctor_keeps_to_the_width(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    found = checks.Check("memory for slots (/a/long/way/down)", "warn", "much is said of it, " * 20, "do this, " * 30)
    monkeypatch.setattr("memckpt.cli.doctor.examine", lambda *_, **__: [found])
    if columns is not None:  # as on a terminal of that width
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
    code, out = run(capsys, "doctor")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert code == 0
    assert 60 < max(map(len, lines)) <= (columns or 120)
    assert sum(line.count("said") for line in lines) == 20, "nothing is cut off"


@needs_mpi
def test_doctor_tries_mpi() -> None:
    found = {c.name: c for c in mpicheck.checks(60.0)}
    assert found["MPI"].status == "ok"
    assert found["ULFM"].status in ("ok", "warn")
    assert found["MPI thread level"].status == "ok"


def test_a_hanging_or_broken_mpirun_is_a_finding(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho out of order >&2; exit 3\n")
    fake.chmod(0o755)
    answer = mpicheck.start(str(fake), [], "plain", 10.0)
    assert answer.says is None
    assert answer.why == "exit status 3: out of order"
    fake.write_text("#!/bin/sh\ntrap '' TERM\nsleep 60\n")
    began = time.monotonic()
    answer = mpicheck.start(str(fake), [], "plain", 0.5)
    assert "did not end within" in answer.why
    assert time.monotonic() - began < 30
    assert mpicheck.start(str(tmp_path / "none"), [], "plain", 1.0).why.startswith("cannot be started")


def test_mounts_are_told_apart() -> None:
    text = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:23 / /dev/shm rw - tmpfs tmpfs rw\n"
        "3 2 0:27 / /dev/shm rw - tmpfs job rw\nbroken\n"
    )
    assert checks.mount_of("/dev/shm/x", text) == ("tmpfs", "0:27")
    assert checks.mount_of("/dev/shmx", text) == ("ext4", "8:1")


def test_what_survives_depends_on_where_it_runs() -> None:
    slurm = checks.survival("/dev/shm", {"SLURM_JOB_ID": "1"})
    assert "Slurm requeue" in slurm.found
    pod = checks.survival("/dev/shm", {"KUBERNETES_SERVICE_HOST": "1"})
    assert pod.status == "warn"
    assert "emptyDir" in pod.advice
