"""The budget: limits read from real and made-up trees, and the one error that says what to do."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from memckpt.comm import LocalGroup
from memckpt.errors import BudgetError, UsageError
from memckpt.memory.arena import Arena
from memckpt.memory.budget import FixedProbe, Limit, Need, SystemProbe, check, check_together, format_nbytes

MIB, GIB = 1 << 20, 1 << 30


def tree(root: Path, files: dict[str, object]) -> SystemProbe:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return SystemProbe(str(root))


MEMINFO = "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:    8388608 kB\n"


def test_this_machine_has_ram_and_a_file_system() -> None:
    limits = SystemProbe().limits("/dev/shm")
    assert [limit.name for limit in limits[:2]] == ["RAM (MemAvailable)", "file system size"]
    for limit in limits:
        assert 0 <= limit.free <= limit.total < 1 << 50


def test_cgroup_v2_every_ancestor_counts_and_cache_is_given_back(tmp_path: Path) -> None:
    group = "/sys/fs/cgroup/slurm/job_7"
    probe = tree(
        tmp_path,
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "0::/slurm/job_7/step_0\n",
            "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "/sys/fs/cgroup/cgroup.procs": "",
            f"{group}/memory.max": 4 * GIB,
            f"{group}/memory.high": "max",
            f"{group}/memory.current": 3 * GIB,
            f"{group}/memory.stat": f"anon 5\nfile {GIB}\nshmem {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
            f"{group}/step_0/cgroup.procs": "",
            f"{group}/step_0/memory.max": "max",
            f"{group}/step_0/memory.high": 5 * GIB,
            f"{group}/step_0/memory.current": 2 * GIB,
        },
    )
    limits = probe.limits("/dev/shm")
    assert [(x.name, x.path, x.total, x.free) for x in limits] == [
        ("RAM (MemAvailable)", "/proc/meminfo", 16 * GIB, 8 * GIB),
        ("cgroup memory.max", f"{group}/memory.max", 4 * GIB, 4 * GIB - (3 * GIB - GIB - GIB // 2)),
        ("cgroup memory.high", f"{group}/step_0/memory.high", 5 * GIB, 3 * GIB),
    ]


def test_cgroup_v1_in_a_container_that_sees_only_its_part(tmp_path: Path) -> None:
    mount = "/sys/fs/cgroup/memory"
    probe = tree(
        tmp_path,
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc/inner\n0::/\n",
            "/proc/self/mountinfo": f"35 31 0:32 /docker/abc {mount} rw - cgroup cgroup rw,memory\n",
            f"{mount}/memory.limit_in_bytes": 2 * GIB,
            f"{mount}/memory.usage_in_bytes": GIB,
            f"{mount}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n",
            f"{mount}/inner/cgroup.procs": "",
            f"{mount}/inner/memory.limit_in_bytes": 9223372036854771712,
            f"{mount}/inner/memory.usage_in_bytes": GIB,
        },
    )
    assert [(x.name, x.free) for x in probe.limits("/dev/shm")[1:]] == [
        ("cgroup memory.limit_in_bytes", GIB + GIB // 2)
    ]


@pytest.mark.parametrize("group", ["/", "/gone/away", "/../../other"])
def test_a_cgroup_namespace_that_hides_the_way_down(tmp_path: Path, group: str) -> None:
    probe = tree(
        tmp_path,
        {
            "/proc/meminfo": MEMINFO,
            "/proc/self/cgroup": f"0::{group}\n",
            "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "/sys/fs/cgroup/cgroup.procs": "",
            "/sys/fs/cgroup/memory.max": GIB,
            "/sys/fs/cgroup/memory.current": MIB,
        },
    )
    assert [x.path for x in probe.limits("/dev/shm")[1:]] == ["/sys/fs/cgroup/memory.max"]


def test_nonsense_in_proc_is_no_limit(tmp_path: Path) -> None:
    probe = tree(tmp_path, {"/proc/meminfo": "MemTotal: x\n::\n", "/proc/self/cgroup": "\n:\n0::/\n4:memory"})
    assert probe.limits("/dev/shm") == []
    with pytest.raises(UsageError):
        check([Need(0, 1)], base="/dev/shm", probe=probe)


RAM = Limit("RAM (MemAvailable)", "/proc/meminfo", 100 * MIB, 60 * MIB)
SHM = Limit("file system size", "/dev/shm", 40 * MIB, 30 * MIB, files_only=True)
GROUP = Limit("cgroup memory.max", "/sys/fs/cgroup/x/memory.max", 50 * MIB, 20 * MIB)


def test_ten_percent_is_kept_free_to_the_byte() -> None:
    probe = FixedProbe([SHM])
    fit = check([Need(0, 26 * MIB)], base="/dev/shm", probe=probe)
    assert (fit.limit, fit.over) == (SHM, 0)
    with pytest.raises(BudgetError) as caught:
        check([Need(0, 26 * MIB + 1)], base="/dev/shm", probe=probe)
    assert (caught.value.needed, caught.value.free, caught.value.path) == (26 * MIB + 1, 26 * MIB, "/dev/shm")


def test_the_tightest_limit_decides() -> None:
    needs = [Need(0, 6 * MIB, 6 * MIB), Need(1, 5 * MIB, 3 * MIB)]
    assert check(needs, base="/dev/shm", probe=FixedProbe([SHM])).needed == 20 * MIB
    assert check(needs, base="/dev/shm", probe=FixedProbe([RAM, SHM])).limit == SHM
    with pytest.raises(BudgetError) as caught:
        check(needs, base="/dev/shm", probe=FixedProbe([RAM, SHM, GROUP]))
    assert caught.value.path == GROUP.path


def test_slots_that_exist_are_not_counted_twice() -> None:
    needs = [Need(0, 26 * MIB, 14 * MIB)]
    assert check(needs, base="/dev/shm", adopted_nbytes=14 * MIB, probe=FixedProbe([SHM])).over == 0
    assert check(needs, base="/dev/shm", adopted_nbytes=90 * MIB, probe=FixedProbe([SHM])).needed == 0
    with pytest.raises(UsageError):
        check(needs, base="/dev/shm", adopted_nbytes=-1, probe=FixedProbe([SHM]))


def test_the_error_says_numbers_and_options() -> None:
    needs = [Need(rank, 16 * MIB, 16 * MIB) for rank in (0, 1)]
    with pytest.raises(BudgetError) as caught:
        check(needs, base="/dev/shm", adopted_nbytes=MIB, probe=FixedProbe([SHM, GROUP, RAM]), node="n7", run="r")
    text = str(caught.value)
    for part in (
        "node n7",
        "rank 0: 32.00 MiB (16.00 MiB for its own snapshots, 16.00 MiB for replicas)",
        "rank 1: ",
        "node: 64.00 MiB for 2 ranks, of which 1.00 MiB are there already",
        "tightest limit: cgroup memory.max at /sys/fs/cgroup/x/memory.max: 50.00 MiB, 20.00 MiB free, 10% kept free",
        "also too small: file system size at /dev/shm",
        "fewer copies (redundancy=): replicas take 32.00 MiB; without any it would not fit either",
        "mount -o remount,size=82m /dev/shm",
        "--mem",
        "MEMCKPT_SHM=",
        "run=r",
    ):
        assert part in text, part
    assert caught.value.needed == 63 * MIB
    assert caught.value.free == 15 * MIB
    with pytest.raises(BudgetError, match="fit, unprotected"):
        check([Need(0, 16 * MIB, 16 * MIB)], base="/dev/shm", probe=FixedProbe([SHM]))
    many = [Need(rank, MIB) for rank in range(100)]
    with pytest.raises(BudgetError, match="and 92 more ranks") as caught:
        check(many, base="/dev/shm", probe=FixedProbe([SHM]))
    assert "fewer copies" not in str(caught.value)


def test_a_small_file_system_is_refused_before_anything_is_written(tmp_path: Path) -> None:  # C39
    mount = tmp_path / "small"
    mount.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(BudgetError) as caught:
            check([Need(0, 16 * MIB)], base=str(mount))
        assert caught.value.needed == 16 * MIB
        assert caught.value.free == 8 * MIB - int(0.8 * MIB)
        assert caught.value.path == str(mount)
        assert os.listdir(mount) == []
        # What the error advises is enough.
        advice = next(word for word in str(caught.value).split() if word.startswith("remount,size="))
        subprocess.run(["mount", "-o", advice, str(mount)], check=True)
        check([Need(0, 16 * MIB)], base=str(mount))
        arena = Arena.open("r", base=str(mount), node="n")
        held = arena.lock()
        arena.create_slot(16 * MIB).close()
        arena.remove_all()
        held.release()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_bytes_for_people() -> None:
    assert [format_nbytes(n) for n in (0, 1023, 1024, 3 * MIB // 2, GIB, 5 << 50)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "1.00 GiB", "5120.00 TiB",
    ]  # fmt: skip


def test_one_answer_on_every_rank(tmp_path: Path) -> None:
    nodes = ["a", "a", "b"]
    arenas = [Arena.open("r", base=str(tmp_path), node=node) for node in nodes]
    held = [arena.lock(rank=rank) for rank, arena in enumerate(arenas)]
    arenas[0].create_slot(6 * MIB, populate=False).close()  # node a has something to use again
    small = FixedProbe([Limit("file system size", "/x", 40 * MIB, 30 * MIB, files_only=True)])

    def ask(need: int) -> list[BudgetError | None]:
        group = LocalGroup(3)
        answers: list[BudgetError | None] = [None] * 3

        def work(rank: int) -> None:
            try:
                check_together(
                    group.comms[rank], arena=arenas[rank], node_of=nodes, need_nbytes=need, deadline_s=10.0,
                    replica_nbytes=need // 2, probe=small,
                )  # fmt: skip
            except BudgetError as error:
                answers[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return answers

    assert ask(16 * MIB) == [None] * 3
    refused = ask(17 * MIB)
    assert len({str(error) for error in refused}) == 1
    assert refused[2] is not None
    assert (refused[2].needed, refused[2].free) == (28 * MIB, 26 * MIB)
    assert "node a" in str(refused[2])
    assert "node b" not in str(refused[2])
    for lock in held:
        lock.release()
