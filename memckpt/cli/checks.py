"""What `memckpt doctor` looks at on this machine: memory, limits, processor. Each check says what to do."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memckpt.memory.budget import Limit, SystemProbe, format_nbytes

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding: what was found, and what to do where it is not good. Where it is "ok" there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def read(path: str) -> str:
    """Text of a small file, empty where it cannot be read."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """File system type and device number of the mount that `path` lies in, from the text of a mountinfo file."""
    best, found = "", ("", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or not kind:
            continue
        point = fields[4].rstrip("/") or "/"
        inside = path == point or path.startswith(point if point == "/" else point + "/")
        if inside and len(point) >= len(best):  # the last one of the same place covers the others
            best, found = point, (kind[0], fields[2])
    return found


def memory_place(base: str) -> Check:
    """The file system for slots: there, RAM-backed, large enough, and writable for us."""
    name = f"memory for slots ({base})"
    try:
        status = os.statvfs(base)
    except OSError as error:
        return Check(name, "fail", f"cannot be used: {error.strerror}", "set MEMCKPT_SHM to a directory on a tmpfs")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    kind, _ = mount_of(os.path.realpath(base), read("/proc/self/mountinfo"))
    found = f"{kind or 'unknown file system'}, {format_nbytes(size)}, {format_nbytes(free)} free"
    try:
        _try_slot(base)
    except Exception as error:
        return Check(name, "fail", f"{found}; a test slot failed: {error}", "see the error; or set MEMCKPT_SHM")
    if kind not in ("tmpfs", "hugetlbfs", "ramfs"):
        return Check(
            name, "warn", found, "not RAM: saves go at the speed of that file system; set MEMCKPT_SHM to a tmpfs"
        )
    ram = next((limit.total for limit in SystemProbe().limits(base)), 0)
    if size < ram // 4:
        advice = f"small beside {format_nbytes(ram)} of RAM: mount -o remount,size=75% {base} (containers: --shm-size)"
        return Check(name, "warn", found, advice)
    if free < size // 2:
        return Check(
            name, "warn", found, "half of it is in use; memckpt ls shows what runs left behind, memckpt rm frees it"
        )
    return Check(name, "ok", found)


def _try_slot(base: str) -> None:
    from memckpt.memory.arena import Arena

    arena = Arena.open(f"doctor-{os.getpid()}-{os.urandom(4).hex()}", base=base, job="", node="doctor")
    held = arena.lock()
    try:
        with arena.create_slot(1 << 20) as slot:
            memoryview(slot.memory)[:8] = b"memckpt\0"
    finally:
        arena.remove_all()
        held.release()
        arena.tidy()


def locked_memory() -> Check:
    """Whether slots can be kept from being swapped out, and whether that matters here."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    swap = next((line.split()[1] for line in read("/proc/meminfo").splitlines() if line.startswith("SwapTotal")), "0")
    unlimited = soft == resource.RLIM_INFINITY
    found = f"memlock {'unlimited' if unlimited else format_nbytes(soft)}, swap {format_nbytes(int(swap) * 1024)}"
    if unlimited or swap == "0" or os.geteuid() == 0:
        return Check("locked memory", "ok", found)
    advice = "slots may be swapped out: ulimit -l unlimited (limits.conf: memlock; containers: --ulimit memlock=-1)"
    return Check("locked memory", "warn", found, advice)


def memory_limits(base: str, limits: list[Limit] | None = None) -> Check:
    """The tightest of RAM, file system and cgroups."""
    try:
        limits = SystemProbe().limits(base) if limits is None else limits
    except OSError as error:
        return Check("memory limits", "fail", f"cannot be read: {error.strerror}", "set MEMCKPT_SHM")
    if not limits:
        return Check("memory limits", "fail", "none can be read", "memckpt needs /proc")
    tightest = min(limits, key=lambda limit: limit.room())
    groups = [limit for limit in limits if limit.name.startswith("cgroup")]
    found = f"{format_nbytes(tightest.room())} may be used; tightest is {tightest.name} at {tightest.path}"
    found += f"; {len(groups)} cgroup limits" if groups else "; no cgroup limit"
    if tightest in groups and tightest.room() < tightest.total // 4:
        advice = "nearly used up, and slots are charged to it: raise it (Slurm: --mem) or remove left-over runs"
        return Check("memory limits", "warn", found, advice)
    return Check("memory limits", "ok", found)


def processor() -> Check:
    """The copy path in use."""
    from memckpt import _native

    features = _native.cpu_features()
    path, paths = str(features.get("path")), features.get("paths")
    there = ", ".join(k for k, v in features.items() if v is True)
    found = f"copy path {path}; {os.cpu_count()} processors, {len(os.sched_getaffinity(0))} for this process"
    found += f"; {there}" if there else ""
    best = str(paths[-1]) if isinstance(paths, list) and paths else path
    if path != best:
        return Check("processor", "warn", found, f"MEMCKPT_CPU forces {path}; {best} is faster")
    if path == "scalar":
        return Check("processor", "warn", found, "no SSE4.2: checksums are slow here")
    return Check("processor", "ok", found)


def kernel() -> Check:
    """Calls of the kernel that are used: pidfd, quick population, huge pages."""
    release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Check("kernel", "fail", f"{release}: no pidfd ({error})", "Linux 5.3 or later is needed")
    pages = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    pages = pages.partition("[")[2].partition("]")[0] or "unknown"
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")[:2]]
    found = f"{release}; huge pages for shared memory: {pages}"
    if numbers < [5, 14]:
        return Check("kernel", "warn", found, "before Linux 5.14 new slots are made ready more slowly")
    return Check("kernel", "ok", found)


def cuda() -> Check:
    """Driver and devices, asked of the driver library itself, so that torch need not be loaded."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch and CUDA", "fail", "torch is not installed", "pip install torch")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check("torch and CUDA", "ok", f"torch {torch}; no CUDA driver, so states live in host memory")
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = f"torch {torch}; CUDA driver {version.value // 1000}.{version.value % 1000 // 10}, {count.value} devices"
    if code:
        return Check(
            "torch and CUDA", "warn", f"{found} (error {code})", "a driver without a usable device: nvidia-smi"
        )
    return Check("torch and CUDA", "ok", found)


def forsaken_segments(base: str) -> Check:
    """Open MPI's own files in `base` that no process maps: killed ranks leave them, and they use the same memory."""
    name = "Open MPI's left-over segments"
    segments: dict[str, int] = {}
    for entry in os.scandir(base):
        if entry.name.startswith(("sm_segment.", "vader_segment.")):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == os.getuid():
                segments[entry.path] = status.st_blocks * 512
    for pid in filter(str.isdecimal, os.listdir("/proc") if segments else ()):
        for line in read(f"/proc/{pid}/maps").splitlines():
            segments.pop(line[line.find("/") :] if "/" in line else "", None)
    nbytes = sum(segments.values())
    if not segments:
        return Check(name, "ok", "none")
    found = f"{len(segments)} files, {format_nbytes(nbytes)}, mapped by no process that can be seen from here"
    if nbytes <= 256 << 20:
        return Check(name, "ok", found)
    kinds = sorted({os.path.basename(path).partition(".")[0] for path in segments})
    patterns = " ".join(f"{base}/{kind}.*" for kind in kinds)
    return Check(name, "warn", found, f"rm {patterns} while no MPI job of yours runs on this node")


def survival(base: str, environ: Mapping[str, str] | None = None) -> Check:
    """Which restarts memory survives here, as far as can be told from inside."""
    environ = os.environ if environ is None else environ
    lives, dies, advice = ["a process crash", "a relaunch inside this allocation"], ["a reboot"], []
    path = os.path.realpath(base)
    _, device = mount_of(path, read("/proc/self/mountinfo"))
    outside = read("/proc/1/mountinfo")
    private = bool(outside) and mount_of(path, outside)[1] != device
    if "SLURM_JOB_ID" in environ:
        if private or "job_container" in read("/proc/self/mountinfo"):
            dies.append("a Slurm requeue (this mount is private to the job)")
            advice.append("set MEMCKPT_SHM to a tmpfs outside of job_container/tmpfs, or rely on persisting")
        else:
            lives.append("a Slurm requeue onto the same nodes, unless an epilog empties /dev/shm")
    if "KUBERNETES_SERVICE_HOST" in environ:
        dies.append("a recreated pod")
        advice.append("put MEMCKPT_SHM on a memory-backed emptyDir to survive a container restart")
    elif os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        dies.append("a recreated container")
        advice.append("put MEMCKPT_SHM on a tmpfs of the host")
    if _logind_removes(base):
        dies.append("the end of this user's last login session (systemd RemoveIPC)")
        advice.append("loginctl enable-linger, or RemoveIPC=no in /etc/systemd/logind.conf")
    found = f"survives {', '.join(lives)}; not {', '.join(dies)}"
    return Check("what memory survives", "warn" if advice else "ok", found, "; ".join(advice))


def _logind_removes(base: str) -> bool:
    """Whether systemd-logind empties /dev/shm of this user's files after the last logout."""
    if os.getuid() < 1000 or not os.path.isdir("/run/systemd/seats") or not base.startswith("/dev/shm"):
        return False
    if os.path.exists(f"/var/lib/systemd/linger/{os.environ.get('USER', '')}"):
        return False
    text = read("/etc/systemd/logind.conf")
    for folder in ("/usr/lib/systemd/logind.conf.d", "/etc/systemd/logind.conf.d"):
        for file in sorted(Path(folder).glob("*.conf")):
            text += "\n" + read(str(file))
    said = [
        line.split("=", 1)[1].strip().lower() for line in text.splitlines() if line.strip().startswith("RemoveIPC=")
    ]
    return not said or said[-1] not in ("no", "false", "0", "off")
