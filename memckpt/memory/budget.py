"""Whether the snapshots will fit, asked before training: too little memory is one clear error, no SIGBUS or OOM kill.

Pages of a tmpfs are RAM, count against the file system's own size, and are charged to the memory cgroup of whoever
touches them first and to all its ancestors. So each of these is a limit, and the tightest one decides.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from memckpt.comm import Communicator, allgather
from memckpt.errors import BudgetError, MemckptError, ProtocolError, UsageError
from memckpt.memory.arena import Arena

KEPT_FREE = 0.1
"""Part of each limit that is left to others."""

T = TypeVar("T")

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned int64


@dataclass(frozen=True)
class Need:
    """What one rank will hold, in bytes.

    Attributes
    ----------
    rank : int
        Logical rank.
    own_nbytes, replica_nbytes : int
        Slots for its own snapshots, and for those of its peers; predicted optimizer state included by the caller.
    """

    rank: int
    own_nbytes: int
    replica_nbytes: int = 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes that lie in files."""
        return self.own_nbytes + self.replica_nbytes


@dataclass(frozen=True)
class Limit:
    """One limit on memory: `name` as an administrator knows it, where it is read, its size and what is free, in bytes.

    `files_only`: memory outside of slots does not count against it (the file system's size).
    """

    name: str
    path: str
    total: int
    free: int
    files_only: bool = False

    def room(self, kept_free: float = KEPT_FREE) -> int:
        """Bytes that may be used."""
        return max(0, self.free - int(self.total * kept_free))


class Probe(ABC):
    """Where limits come from."""

    @abstractmethod
    def limits(self, base: str) -> list[Limit]:
        """Every limit on memory in files under `base` for this process."""


class FixedProbe(Probe):
    """Limits that are given: for tests, and for "would it fit there?"."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = list(limits)

    def limits(self, base: str) -> list[Limit]:
        """The given ones."""
        return list(self._limits)


class SystemProbe(Probe):
    """The limits of this machine: RAM, the file system, and the memory cgroup with all its ancestors (v1 and v2).

    Parameters
    ----------
    root : str
        Prefix of /proc and of cgroup mounts; another than "/" reads a made-up tree (without the file system's limit).
    """

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def limits(self, base: str) -> list[Limit]:
        """RAM, file system, cgroups from the outermost in."""
        found = [*self._ram(), *self._cgroups()]
        if self._root == "/":
            status = os.statvfs(base)
            size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
            found.insert(1, Limit("file system size", base, size, free, files_only=True))
        return found

    def _read(self, path: str) -> str | None:
        try:
            return Path(self._root, path.lstrip("/")).read_text("utf-8", "replace")
        except OSError:
            return None

    def _ram(self) -> Iterator[Limit]:
        fields = dict(line.split(":", 1) for line in (self._read("/proc/meminfo") or "").splitlines() if ":" in line)
        try:
            total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        except (KeyError, ValueError):
            return
        yield Limit("RAM (MemAvailable)", "/proc/meminfo", total, free)

    def _cgroups(self) -> Iterator[Limit]:
        for line in (self._read("/proc/self/cgroup") or "").splitlines():
            _, controllers, group = [*line.split(":", 2), "", ""][:3]
            if controllers == "" or "memory" in controllers.split(","):
                mount, inside = self._mount(controllers == "")
                if mount:
                    yield from self._chain(mount, inside, group, v2=controllers == "")

    def _mount(self, v2: bool) -> tuple[str, str]:
        """Mount point of the memory hierarchy, and the cgroup that is its root there (a container sees a part only)."""
        for line in (self._read("/proc/self/mountinfo") or "").splitlines():
            left, _, right = line.partition(" - ")
            fields, kind = left.split(), right.split()
            if len(fields) < 5 or len(kind) < 3:
                continue
            if kind[0] == "cgroup2" if v2 else kind[0] == "cgroup" and "memory" in kind[2].split(","):
                return fields[4], fields[3]
        return "", ""

    def _chain(self, mount: str, inside: str, group: str, *, v2: bool) -> Iterator[Limit]:
        """Limits of `group` and its ancestors as far as they can be seen."""
        relative = os.path.relpath(group, inside) if inside != "/" and group.startswith(inside) else group.lstrip("/")
        parts = [p for p in relative.split("/") if p not in ("", ".", "..")]
        if self._read(os.path.join(mount, *parts, "cgroup.procs")) is None:
            parts = []  # a cgroup namespace hides the way down; the mount's root is what holds for us
        for depth in range(len(parts) + 1):
            directory = os.path.join(mount, *parts[:depth])
            yield from self._v2(directory) if v2 else self._v1(directory)

    def _number(self, path: str) -> int | None:
        text = (self._read(path) or "").strip()
        return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None

    def _stat(self, directory: str) -> dict[str, int]:
        lines = (self._read(f"{directory}/memory.stat") or "").splitlines()
        return {k: int(v) for k, _, v in (line.partition(" ") for line in lines) if v.isdecimal()}

    def _v2(self, directory: str) -> Iterator[Limit]:
        used, stat = self._number(f"{directory}/memory.current"), self._stat(directory)
        for name in ("memory.max", "memory.high"):  # above "high" a cgroup is throttled to a crawl
            total = self._number(f"{directory}/{name}")
            if total is not None and used is not None:
                cache = _reclaimable(stat.get("inactive_file", 0), stat.get("active_file", 0))
                cache += stat.get("slab_reclaimable", 0) // 2
                yield Limit(f"cgroup {name}", f"{directory}/{name}", total, max(0, total - max(0, used - cache)))

    def _v1(self, directory: str) -> Iterator[Limit]:
        total = self._number(f"{directory}/memory.limit_in_bytes")
        used, stat = self._number(f"{directory}/memory.usage_in_bytes"), self._stat(directory)
        if total is not None and used is not None:
            cache = _reclaimable(stat.get("total_inactive_file", 0), stat.get("total_active_file", 0))
            path = f"{directory}/memory.limit_in_bytes"
            yield Limit("cgroup memory.limit_in_bytes", path, total, max(0, total - max(0, used - cache)))


def _reclaimable(inactive: int, active: int) -> int:
    # The file LRU holds page cache that can be dropped; tmpfs pages are on the anonymous LRU, so they are not in it.
    # Of the cache in active use half is counted, as the kernel does for MemAvailable.
    return inactive + active // 2


@dataclass(frozen=True)
class Fit:
    """How a need stands to one limit: `needed` bytes of `room`."""

    limit: Limit
    needed: int
    room: int

    @property
    def over(self) -> int:
        """Bytes that are missing; negative where room is left."""
        return self.needed - self.room


def check(
    needs: Sequence[Need],
    *,
    base: str,
    adopted_nbytes: int = 0,
    kept_free: float = KEPT_FREE,
    probe: Probe | None = None,
    node: str = "",
    run: str | None = None,
) -> Fit:
    """Whether what the ranks of this node need will fit. Local; reads only.

    Parameters
    ----------
    needs : sequence of Need
        One for each rank of this node.
    base : str
        Where slots lie.
    adopted_nbytes : int
        Bytes of slots of this run that exist on this node already and will be used again (or removed first).
    kept_free : float
        Part of each limit that is left to others.
    probe : Probe, optional
        Default: this machine.

    Returns
    -------
    Fit
        Of the tightest limit.

    Raises
    ------
    BudgetError
        It does not fit: bytes per rank and for the node, the tightest limit, what can be done.
    """
    if adopted_nbytes < 0 or not needs:
        raise UsageError("a budget of no ranks, or of less than nothing adopted")
    in_files = max(0, sum(n.slot_nbytes for n in needs) - adopted_nbytes)
    limits = (SystemProbe() if probe is None else probe).limits(base)
    fits = [Fit(limit, in_files, limit.room(kept_free)) for limit in limits]
    if not fits:
        raise UsageError("no limit on memory could be read; memckpt needs /proc", path="/proc/meminfo")
    worst = max(fits, key=lambda fit: fit.over)
    if worst.over > 0:
        text = _explain(needs, fits, worst, base=base, adopted_nbytes=adopted_nbytes, kept_free=kept_free, node=node)
        raise BudgetError(text, needed=worst.needed, free=worst.room, run=run, path=worst.limit.path)
    return worst


class _Verdict(msgspec.Struct, frozen=True):
    """What the first rank of a node found out."""

    text: str = ""
    needed: int = 0
    free: int = 0
    path: str = ""


def check_together(
    comm: Communicator,
    *,
    arena: Arena,
    node_of: Sequence[str],
    need_nbytes: int,
    deadline_s: float,
    replica_nbytes: int = 0,
    probe: Probe | None = None,
) -> None:
    """Check the budget of every node, with one answer for all ranks. Collective.

    Parameters
    ----------
    comm : Communicator
        Every rank of the job.
    arena : Arena
        This node's memory of the run; its slots count as adopted.
    node_of : sequence of str
        Node of each rank.
    need_nbytes, replica_nbytes : int
        Bytes of all slots of this rank, and how many of them are for replicas.
    deadline_s : float
        Longest wait for a peer.

    Raises
    ------
    BudgetError
        On every rank, when one node has too little.
    PeerLost, DeadlineExceeded, ProtocolError
        From the exchange.
    """
    mine = Need(comm.rank, need_nbytes - replica_nbytes, replica_nbytes)
    needs = _exchange(comm, mine, Need, deadline_s)
    here = [need for need, node in zip(needs, node_of, strict=True) if node == arena.node]
    verdict = _Verdict()
    if here[0].rank == comm.rank:
        try:
            check(here, base=arena.base, adopted_nbytes=arena.slots_nbytes(), probe=probe, node=arena.node)
        except BudgetError as error:
            verdict = _Verdict(error.message, error.needed, error.free, error.path or "")
        except (MemckptError, OSError) as error:
            verdict = _Verdict(f"the budget of node {arena.node} could not be checked: {error}")
    failed = [v for v in _exchange(comm, verdict, _Verdict, deadline_s) if v.text]
    if failed:
        text = "\n".join(v.text for v in failed[:4])
        worst = max(failed, key=lambda v: v.needed - v.free)
        raise BudgetError(text, needed=worst.needed, free=worst.free, run=arena.run.name, path=worst.path)


def _exchange(comm: Communicator, mine: T, kind: type[T], deadline_s: float) -> list[T]:
    try:
        said = allgather(comm, msgspec.msgpack.encode(mine), deadline_s)
        return [msgspec.msgpack.decode(data, type=kind) for data in said]
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a rank runs another version of memckpt: {error}") from error


def format_nbytes(nbytes: int) -> str:
    """`nbytes` for people: "1.50 GiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def _explain(
    needs: Sequence[Need],
    fits: Sequence[Fit],
    worst: Fit,
    *,
    base: str,
    adopted_nbytes: int,
    kept_free: float,
    node: str,
) -> str:
    size, limit = format_nbytes, worst.limit
    lines = [
        f"the snapshots do not fit into memory on node {node or socket.gethostname()}: "
        f"{size(worst.needed)} ({worst.needed} bytes) are needed, {size(worst.room)} ({worst.room} bytes) may be used"
    ]
    lines += [
        f"  rank {need.rank}: {size(need.slot_nbytes)} "
        f"({size(need.own_nbytes)} for its own snapshots, {size(need.replica_nbytes)} for replicas)"
        for need in needs[:8]
    ]
    if len(needs) > 8:
        lines.append(f"  and {len(needs) - 8} more ranks")
    total = sum(n.slot_nbytes for n in needs)
    there = f", of which {size(adopted_nbytes)} are there already" if adopted_nbytes else ""
    lines.append(f"  node: {size(total)} for {len(needs)} ranks{there}")
    for fit in sorted((f for f in fits if f.over > 0), key=lambda f: -f.over):
        mark = "tightest limit" if fit is worst else "also too small"
        lines.append(
            f"  {mark}: {fit.limit.name} at {fit.limit.path}: {size(fit.limit.total)}, {size(fit.limit.free)} free, "
            f"{kept_free:.0%} kept free; {size(fit.over)} missing"
        )
    lines.append("options:")
    replicas = sum(n.replica_nbytes for n in needs)
    if replicas:
        enough = all(fit.needed - replicas <= fit.room for fit in fits)
        lines.append(
            f"  - fewer copies (redundancy=): replicas take {size(replicas)}; without any it would "
            f"{'fit, unprotected against the loss of a node' if enough else 'not fit either'}"
        )
    over_files = [f for f in fits if f.limit.files_only and f.over > 0]
    over_memory = [f for f in fits if not f.limit.files_only and f.over > 0]
    if over_files:
        used = over_files[0].limit.total - over_files[0].limit.free
        want = int((over_files[0].needed + used) / (1 - kept_free)) // (1 << 20) + 1
        lines.append(
            f"  - a larger file system: mount -o remount,size={want}m {base} (containers: --shm-size, or a "
            "memory-backed volume with a larger size)"
        )
    if over_memory:
        lines.append(
            f"  - more memory: raise {limit.name if not limit.files_only else over_memory[0].limit.name} "
            "(Slurm: --mem; containers: the memory limit), or run fewer ranks on a node"
        )
    lines.append("  - another place for slots: MEMCKPT_SHM=<directory on a larger tmpfs>")
    return "\n".join(lines)
