"""A run's memory on one node: a directory of slots under /dev/shm that outlives the processes which write it.

In ``<base>/memckpt-<uid>/<node>/<name>[@<job>]/`` lie ``run.json`` (identity), ``procs/`` (lock files), slots
(``s-<16 hex>.safetensors``) with their seals (``s-<16 hex>.seal.json``), and ``finished`` (the run ended normally and
its memory was kept); ``crash-*`` files say from which restored step the program failed by itself. Every directory is
0700 and every file 0600 and ours; anything else is refused, never reused or removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from memckpt import _native, faults
from memckpt.errors import BudgetError, ForeignMemory, RunInUse, UsageError
from memckpt.format.seal import Base, Generation, Seal
from memckpt.memory import fence, files, lock, process
from memckpt.memory.lock import ProcessLock
from memckpt.memory.process import ProcessInfo
from memckpt.memory.slotfile import DATA, SEAL, Found, Slot, data_path, examine, file_id, read_seal, seal_path, slot_of

__all__ = ["DEFAULT_BASE", "Arena", "Found", "RunId", "Slot", "default_base", "default_node"]

DEFAULT_BASE = "/dev/shm"
_FINISHED, _IDENTITY, _PROCS = "finished", "run.json", "procs"
_CRASH = re.compile(r"crash-([0-9]{1,18})-([0-9a-f]{16})-([0-9]{1,18})-([0-9a-f]{16})")


def _component(value: str, what: str, *, extra: str = "") -> str:
    """`value` if it can be a directory's name, else UsageError."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a string, not {value!r}")
    bad = [c for c in value if c in "/\\\0" + extra or not c.isprintable()]
    if not value or value.startswith(".") or bad or len(value.encode()) > 100:
        raise UsageError(
            f"{what} {value!r} cannot name a directory: 1 to 100 bytes, printable, not starting with a dot, "
            f"without a slash{' or ' + extra if extra else ''}"
        )
    return value


class RunId(msgspec.Struct, frozen=True):
    """What makes memory ours: the run's name, the job it belongs to (may be empty) and the user."""

    name: str
    job: str
    uid: int

    @property
    def directory(self) -> str:
        """Name of the run's directory; a name holds no "@", so two runs never share one."""
        return f"{self.name}@{self.job}" if self.job else self.name


class _Identity(msgspec.Struct, frozen=True):
    run: str
    job: str
    uid: int
    node: str
    format: int = 1
    created: float = 0.0


def default_base() -> str:
    """Where memory lies: MEMCKPT_SHM, else /dev/shm."""
    return os.environ.get("MEMCKPT_SHM") or DEFAULT_BASE


def default_node() -> str:
    """This node's name: MEMCKPT_NODE, else the host name."""
    return os.environ.get("MEMCKPT_NODE") or socket.gethostname()


def _let_go(slot: Slot) -> None:
    """Close a slot; after a failure a send that never ended may still read from it, and keeps it mapped."""
    with contextlib.suppress(BufferError):
        slot.close()


class Arena:
    """The memory of one run on one node. Made by `open`. Local; usable from any thread.

    Attributes
    ----------
    path : Path
        The run's directory.
    base, node : str
        Where it lies, and the node's name.
    run : RunId
        Whose it is.
    """

    def __init__(self, base: str, node: str, run: RunId) -> None:
        self.base, self.node, self.run = base, node, run
        self._root = os.path.join(base, f"memckpt-{run.uid}")
        self._dir = os.path.join(self._root, node, run.directory)
        self._procs = os.path.join(self._dir, _PROCS)
        self._parked: dict[str, Slot] = {}
        self.path = Path(self._dir)

    @classmethod
    def open(
        cls, name: str, *, job: str | None = None, node: str | None = None, base: str | None = None, create: bool = True
    ) -> Arena:
        """Find or make the run's directory on this node.

        Parameters
        ----------
        name : str
            Name of the run.
        job, node, base : str, optional
            Default to MEMCKPT_JOB (else none), MEMCKPT_NODE (else the host name) and MEMCKPT_SHM (else /dev/shm).
        create : bool
            Whether to make it when it is not there.

        Raises
        ------
        UsageError
            A name that cannot be a directory's, or a base that is none.
        ForeignMemory
            Something is there that is not ours, or is another run's.
        FileNotFoundError
            Not there, and `create` is False.
        """
        job = os.environ.get("MEMCKPT_JOB", "") if job is None else job
        run = RunId(
            _component(name, "the run's name", extra="@"), _component(job, "the job id") if job else "", os.getuid()
        )
        base = os.path.abspath(base or default_base())
        arena = cls(base, _component(node or default_node(), "the node's name"), run)
        files.check_base(base)
        for attempt in range(20):
            try:
                arena._prepare(create)
                return arena
            except FileNotFoundError:
                # Another process may be removing this directory's last run; then it is made again.
                if not create or attempt == 19:
                    raise
                time.sleep(0.005)
        raise AssertionError("unreachable")

    def _prepare(self, create: bool) -> None:
        try:
            for path in (self._root, os.path.dirname(self._dir), self._dir):
                files.directory(path, create=create)
            if create:
                files.directory(self._procs, create=True)
            try:
                data = files.read(os.path.join(self._dir, _IDENTITY), 65536)
            except FileNotFoundError:
                if not create:
                    raise
                if self._slot_names():
                    raise ForeignMemory("slots without a run.json; nobody can say whose", path=self._dir) from None
                self._write_identity()
                data = files.read(os.path.join(self._dir, _IDENTITY), 65536)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._no_space(4096) from None
            raise
        try:
            found = msgspec.json.decode(data, type=_Identity)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ForeignMemory(f"run.json cannot be read: {error}", path=self._dir) from None
        if (found.run, found.job, found.uid, found.node) != (self.run.name, self.run.job, self.run.uid, self.node):
            raise ForeignMemory(
                f"run.json says run {found.run!r}, job {found.job!r}, uid {found.uid}, node {found.node!r}; "
                f"wanted is run {self.run.name!r}, job {self.run.job!r}, uid {self.run.uid}, node {self.node!r}",
                run=self.run.name, path=self._dir,
            )  # fmt: skip

    def _write_identity(self) -> None:
        identity = _Identity(self.run.name, self.run.job, self.run.uid, self.node, created=time.time())
        scratch = process.scratch_name(_IDENTITY)
        files.write(self._dir, scratch, msgspec.json.encode(identity))
        path = os.path.join(self._dir, scratch)
        try:
            os.link(path, os.path.join(self._dir, _IDENTITY))  # the first of several ranks wins
        except FileExistsError:
            pass
        finally:
            files.unlink(path)

    # --- processes

    def lock(self, generation: Generation | None = None, rank: int | None = None) -> ProcessLock:
        """Take this process's lock, without which it may not write here. One per (process, rank).

        Raises
        ------
        RunInUse
            That lock is taken.
        BudgetError
            There is no room for the lock file.
        """
        info = self._describe(generation, -1 if rank is None else rank)
        for attempt in range(20):
            try:
                self._prepare(create=True)
                return lock.take(self._procs, info)
            except FileNotFoundError:
                if attempt == 19:
                    raise
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise self._no_space(lock.LOCK_NBYTES) from None
                raise
        raise AssertionError("unreachable")

    def _describe(self, generation: Generation | None = None, rank: int = -1) -> ProcessInfo:
        return process.describe(run=self.run.name, job=self.run.job, node=self.node, rank=rank, generation=generation)

    def fence_past(
        self,
        members: Collection[tuple[int, int]],
        generation: Generation | None,
        deadline_s: float,
        *,
        on_wait: Callable[[str], object] | None = None,
    ) -> list[ProcessInfo]:
        """End what is left of the run's past on this node; see `memckpt.memory.fence.fence_past`. Local.

        Raises
        ------
        RunInUse
            A process that is no member still holds this run at the deadline.
        """
        ended = fence.fence_past(self._procs, self._describe(), members, generation, deadline_s, on_wait=on_wait)
        process.remove_scratch(self._dir)
        return ended

    def processes(self) -> list[ProcessInfo]:
        """The processes that hold this run's memory here now, this one included. Local."""
        return [h.info for h in lock.holders(self._procs) if h.held and h.info is not None]

    def live_pids(self) -> list[int]:
        """Pids of every process that holds a lock here, also of one whose lock file cannot be read. Local."""
        return sorted({h.info.pid if h.info is not None else h.pid for h in lock.holders(self._procs) if h.held})

    def newest_generation(self) -> int:
        """Highest generation counter in any lock file here, dead or alive; 0 for none. Local."""
        return max((h.info.generation for h in lock.holders(self._procs) if h.info is not None), default=0)

    def frozen(self, age_s: float) -> list[ProcessInfo]:
        """Other processes of this run on this node whose last beat is older than `age_s` though they hold their lock.

        Empty while this process itself has just stood still (a paused machine stops everybody's beats). Local.
        """
        if any(mine.was_paused(age_s) for mine in lock.own_locks(self._procs)):
            return []
        own, now = process.identity(), time.monotonic_ns()
        return [
            h.info
            for h in lock.holders(self._procs)
            if h.held and h.info is not None and h.info.identity != own and now - h.beat_ns > age_s * 1e9
        ]

    def kill(self, info: ProcessInfo, deadline_s: float = 10.0) -> bool:
        """SIGKILL a process of this run once it is sure that it is the one meant; see `process.kill_if_ours`. Local."""
        return process.kill_if_ours(info, run=self.run.name, job=self.run.job, deadline_s=deadline_s)

    def _require_lock(self, what: str) -> None:
        if not lock.holds(self._procs):
            raise UsageError(f"{what} needs this process's lock of the run (Arena.lock)", run=self.run.name)

    # --- slots

    def create_slot(self, nbytes: int, *, threads: int = 2, populate: bool = True) -> Slot:
        """Make a slot of `nbytes` bytes, reserved, and populated unless said otherwise. Needs the lock.

        Raises
        ------
        BudgetError
            No room; nothing is left behind.
        """
        self._require_lock("create_slot")
        if nbytes <= 0:
            raise UsageError(f"a slot of {nbytes} bytes")
        name = f"s-{os.urandom(8).hex()}"
        path = data_path(self._dir, name)
        started = time.monotonic()
        try:
            memory = _native.SharedMemory.create(path, nbytes)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._no_space(nbytes) from None
            raise
        try:
            if populate:
                memory.populate(threads)
        except BaseException as error:
            memory.close()
            files.unlink(path)
            if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise self._no_space(nbytes) from error
            raise
        faults.point("slot_created")
        return Slot(
            self._dir, name, memory, self._require_lock,
            file=file_id(os.lstat(path)), populate_s=time.monotonic() - started, mapped=populate,
        )  # fmt: skip

    def open_slot(self, name: str, *, writable: bool) -> Slot:
        """Open an existing slot. Writable needs the lock.

        Raises
        ------
        FileNotFoundError
            It is not there (any more).
        ForeignMemory
            Not a regular file of ours with mode 0600.
        """
        if writable:
            self._require_lock("a writable slot")
        parked = self._parked.pop(name, None)
        if parked is not None:
            if parked.is_current():
                return parked
            _let_go(parked)
        path = data_path(self._dir, name)
        fd = files.open_checked(path)
        try:
            memory = _native.SharedMemory.open(path, writable=writable)
            return Slot(self._dir, name, memory, self._require_lock, file=file_id(os.fstat(fd)))
        finally:
            os.close(fd)

    def park(self, slot: Slot) -> None:
        """Keep a slot that its user is done with for the next `open_slot` of that name: mapping a slot anew costs as
        much as copying it. Local.
        """
        if slot.memory.writable and slot.name not in self._parked:
            self._parked[slot.name] = slot
        else:
            _let_go(slot)

    def close_parked(self) -> None:
        """Let go of the mappings that nobody came for. Local."""
        while self._parked:
            _let_go(self._parked.popitem()[1])

    def remove_slot(self, name: str) -> None:
        """Remove a slot, its seal first; nothing happens when it is not there. Needs the lock. Mappings stay valid.

        Raises
        ------
        ForeignMemory
            One of the two files is not ours; it is left.
        """
        self._require_lock("remove_slot")
        if (parked := self._parked.pop(name, None)) is not None:
            _let_go(parked)
        for path in (seal_path(self._dir, name), data_path(self._dir, name)):
            try:
                files.check(path, os.lstat(path), directory=False)
            except FileNotFoundError:
                continue
            files.unlink(path)

    def inventory(self) -> list[Found]:
        """Every slot on this node, whoever wrote it, with its seal where the seal can be believed. Local.

        Reads only; files may vanish or change meanwhile. Chunk checksums are not read here.
        """
        return [found for name in self._slot_names() if (found := self.find(name)) is not None]

    def data_path(self, name: str) -> str:
        """Path of a slot's bytes. Local."""
        return data_path(self._dir, name)

    def read_seal(self, name: str) -> Seal | None:
        """A slot's seal by itself, not compared with the file; see `Slot.read_seal`. Local."""
        return read_seal(seal_path(self._dir, name))

    def slots_nbytes(self) -> int:
        """Bytes of every slot file of the run on this node, sealed or not. Local."""
        total = 0
        for file in os.listdir(self._dir):
            if file.endswith(DATA) and slot_of(file) is not None:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(self._dir, file)).st_size
        return total

    def find(self, name: str) -> Found | None:
        """Like `inventory`, for one slot; None when it is not there. Local."""
        return examine(self._dir, name, self.run.name, self.run.job)

    def _slot_names(self) -> list[str]:
        return sorted({name for file in os.listdir(self._dir) if (name := slot_of(file)) is not None})

    def _no_space(self, nbytes: int) -> BudgetError:
        status = os.statvfs(self.base)
        free = status.f_bavail * status.f_frsize
        return BudgetError(
            f"no room for {nbytes} bytes in {self.base}, where {free} bytes are free; fewer copies, a larger file "
            f"system (mount -o remount,size=... {self.base}) or another place (MEMCKPT_SHM)",
            needed=nbytes, free=free, run=self.run.name, path=self._dir,
        )  # fmt: skip

    # --- the run as a whole

    @property
    def finished(self) -> bool:
        """Whether the run ended normally and its memory was kept."""
        return os.path.lexists(os.path.join(self._dir, _FINISHED))

    def mark_finished(self, finished: bool = True) -> None:
        """Note that the run ended normally (or, with False, that it goes on). Needs the lock."""
        self._require_lock("mark_finished")
        if finished:
            files.write(self._dir, _FINISHED, b"")
        else:
            files.unlink(os.path.join(self._dir, _FINISHED))

    def note_crash(self, base: Base, generation: Generation) -> None:
        """Note that the program failed by an error of its own in `generation`, before anything was saved after the
        restore of `base`. Needs the lock.
        """
        self._require_lock("note_crash")
        g = base.generation
        files.write(self._dir, f"crash-{g.counter}-{g.id}-{base.step}-{generation.id}", b"")

    def crashes(self) -> list[tuple[Base, str]]:
        """What `note_crash` noted on this node: restored step, and id of the generation that failed. Local."""
        found = [match for file in os.listdir(self._dir) if (match := _CRASH.fullmatch(file))]
        return [(Base(Generation(int(m[1]), m[2]), int(m[3])), m[4]) for m in found]

    def remove_all(self, members: Collection[tuple[int, int]] = ()) -> None:
        """Remove the run's memory on this node: seals, then slots, then the directory. Several members may at once.

        Parameters
        ----------
        members : collection of (int, int)
            (pid, start time) of processes that have agreed to this; their lock files stay until they let go.

        Notes
        -----
        While this process holds the run, one that has entered no generation waits for it to end, and is no obstacle:
        it finds an empty run.

        Raises
        ------
        RunInUse
            Another process holds the run; nothing was removed.
        ForeignMemory
            Something in the directory is not ours; that is left, the rest is removed.
        """
        allowed = {*members, process.identity()}
        others = [h for h in lock.holders(self._procs) if h.held and (not h.info or h.info.identity not in allowed)]
        for holder in others:
            if holder.info is None or holder.info.generation > 0 or not lock.holds(self._procs):
                pid = holder.pid if holder.info is None else holder.info.pid
                raise RunInUse(f"pid {pid} holds this run's memory", pid=pid, run=self.run.name, path=self._dir)
        left: list[str] = []
        names = self._files()
        for suffix in (SEAL, DATA, ""):
            for name in (f for f in names if f.endswith(suffix) and f != _IDENTITY):
                path = os.path.join(self._dir, name)
                try:
                    files.check(path, os.lstat(path), directory=False)
                    files.unlink(path)
                except FileNotFoundError:
                    continue
                except ForeignMemory:
                    left.append(path)
            names = [f for f in names if not f.endswith(suffix) or f == _IDENTITY]
        lock.remove_dead(self._procs)
        if not left and not others:
            files.unlink(os.path.join(self._dir, _IDENTITY))
        self.tidy()
        if left:
            raise ForeignMemory(f"{len(left)} files are not ours and were left", run=self.run.name, path=left[0])

    def _files(self) -> list[str]:
        try:
            names = os.listdir(self._dir)
        except FileNotFoundError:
            return []
        known = (_FINISHED, _IDENTITY)
        return [
            f for f in names
            if f in known or f.startswith(".tmp-") or slot_of(f) is not None or _CRASH.fullmatch(f)
        ]  # fmt: skip

    def tidy(self) -> None:
        """Remove the empty directories of a run that was removed; call it after `ProcessLock.release`."""
        if not os.path.lexists(os.path.join(self._dir, _IDENTITY)):
            for path in (self._procs, self._dir, os.path.dirname(self._dir), self._root):
                if not files.rmdir(path):
                    return
