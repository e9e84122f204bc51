"""Who a process is, beyond doubt: a pid alone names nobody for long, so it is (pid namespace, pid, start time)."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memckpt.errors import MemckptError

if TYPE_CHECKING:
    from memckpt.format.seal import Generation

_LAUNCHERS = frozenset(
    ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy", "slurmstepd", "torchrun")
)
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID")


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a lock file says of the process that holds it. `start_time` is in clock ticks since boot."""

    host: str
    node: str
    run: str
    job: str
    uid: int
    pid: int
    start_time: int
    pidns: int
    generation: int = 0
    generation_id: str = ""
    rank: int = -1
    launch: str = ""  # id of the launch (PMIx namespace or Slurm step), empty when started by hand
    launcher_pid: int = 0  # the launcher above this process on this host, 0 when started by hand
    launcher_start: int = 0

    @property
    def identity(self) -> tuple[int, int]:
        """(pid, start time): what the members of a job exchange."""
        return self.pid, self.start_time

    @property
    def lock_name(self) -> str:
        return f"{self.pid}-{self.start_time}{'' if self.rank < 0 else f'-{self.rank}'}.lock"

    def __str__(self) -> str:
        rank = "" if self.rank < 0 else f", rank {self.rank}"
        return f"pid {self.pid} on {self.host}{rank}, generation {self.generation}"


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on (state first); the second may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Start of process `pid` in clock ticks since boot; None when there is none, or only its corpse. Local."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def stopped(pid: int) -> bool:
    """Whether `pid` was stopped by a signal (SIGSTOP) or a debugger. Local."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] in "Tt"


def alive(pid: int, started: int) -> bool:
    """Whether the process that had `pid` and this start time still runs. Local."""
    return start_time(pid) == started


def pid_namespace() -> int:
    """Inode of this process's pid namespace. Local."""
    return os.stat("/proc/self/ns/pid").st_ino


def age_s() -> float:
    """Seconds since this process was started. Local."""
    started: float = identity()[1] / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def identity() -> tuple[int, int]:
    """(pid, start time) of this process. Local."""
    pid = os.getpid()
    started = start_time(pid)
    if started is None:
        raise MemckptError("/proc/self/stat cannot be read; memckpt needs /proc", path="/proc")
    return pid, started


def find_launcher(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(pid, start time) of the launcher above this process, (0, 0) when it was started by hand. Local.

    The nearest ancestor with a launcher's name, since a shell may stand between; else the parent.
    """
    environ = os.environ if environ is None else environ
    if not any(name in environ for name in _LAUNCHED):
        return 0, 0
    parent = pid = os.getppid()
    for _ in range(16):
        fields = _stat_fields(pid)
        if fields is None or pid <= 1:
            break
        try:
            if Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip() in _LAUNCHERS:
                return pid, int(fields[19])
        except OSError:
            break
        pid = int(fields[1])
    return parent, start_time(parent) or 0


def describe(*, run: str, job: str, node: str, rank: int = -1, generation: Generation | None = None) -> ProcessInfo:
    """What this process is to say of itself in a lock file. Local."""
    pid, started = identity()
    launch = os.environ.get("PMIX_NAMESPACE", "")
    if not launch and "SLURM_STEP_ID" in os.environ:
        launch = f"slurm-{os.environ.get('SLURM_JOB_ID', '')}.{os.environ['SLURM_STEP_ID']}"
    launcher_pid, launcher_start = find_launcher()
    return ProcessInfo(
        host=socket.gethostname(), node=node, run=run, job=job, uid=os.getuid(), pid=pid, start_time=started,
        pidns=pid_namespace(), rank=rank, launch=launch, launcher_pid=launcher_pid, launcher_start=launcher_start,
        generation=0 if generation is None else generation.counter,
        generation_id="" if generation is None else generation.id,
    )  # fmt: skip


def _real_uid(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def kill_if_ours(info: ProcessInfo, *, run: str, job: str, deadline_s: float = 10.0) -> bool:
    """SIGKILL the process that `info` names and wait for its end. Local.

    Parameters
    ----------
    info : ProcessInfo
        From a lock file of this run on this host.
    run, job : str
        The caller's own run and job.
    deadline_s : float
        Seconds to wait for the end; a process in an uninterruptible wait may outlast it.

    Returns
    -------
    bool
        True when that process is gone (also when it was gone before); False when it is not ours (another uid, run, job
        or pid namespace, or this process itself) and was left alone, or has not ended in time.
    """
    ours = (os.getuid(), run, job, pid_namespace())
    if (info.uid, info.run, info.job, info.pidns) != ours or info.pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(info.pid)
    except ProcessLookupError:
        return True
    try:
        # The handle names one process for good; only if that one has the recorded start is it the one meant.
        if not alive(info.pid, info.start_time):
            return True
        if _real_uid(info.pid) != info.uid:
            return False
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        # Readable once the process has ended; its files, and with them its record locks, are gone by then.
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline_s) * 1e3))
    finally:
        os.close(handle)


def scratch_name(what: str) -> str:
    """A file name for something half written, from which others see whose it is. Local."""
    pid, started = identity()
    return f".tmp-{pid}-{started}-{secrets.token_hex(4)}-{what}"


def remove_scratch(directory: str) -> None:
    """Remove half-written files of processes that are gone. Local."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        parts = name.split("-")
        ours = name.startswith(".tmp-") and len(parts) >= 4 and parts[1].isdecimal() and parts[2].isdecimal()
        if ours and not alive(int(parts[1]), int(parts[2])):
            try:
                os.unlink(os.path.join(directory, name))
            except FileNotFoundError:
                pass
