"""The lock file by which a process holds a run's memory on a node, and by whose beat others see that it runs.

The lock is an `fcntl` record lock, which the kernel drops with the process and never gives to a fork. Record locks
belong to a process, not to a file descriptor: closing *any* descriptor of the file drops them, so this module keeps a
registry and never opens a lock file of its own process a second time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from memckpt.errors import MemckptError, RunInUse
from memckpt.memory import files
from memckpt.memory.process import ProcessInfo, remove_scratch

if TYPE_CHECKING:
    from memckpt.format.seal import Generation

LOCK_NBYTES = 4096
_BEAT_OFFSET = LOCK_NBYTES - 8
_FLOCK = struct.Struct("@hhqqi0q")

_mutex = threading.Lock()
_held: dict[str, ProcessLock] = {}  # path of the lock file -> the lock, for this process only


class ProcessLock:
    """This process's own lock file in a run's `procs` directory; made by `take`. Usable from any thread."""

    def __init__(self, path: str, fd: int, info: ProcessInfo) -> None:
        self.path, self.info = path, info
        self._fd = fd
        self._guard = threading.Lock()  # a beat must never write to a number that another file has taken over
        self._last_ns = time.monotonic_ns()
        self._pauses: deque[tuple[int, int]] = deque(maxlen=16)  # (end, length) in ns of this process's own standstills

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def beat(self) -> None:
        """Say that this process runs. Called every fraction of a second by its background thread. Local."""
        with self._guard:
            now = time.monotonic_ns()
            if now - self._last_ns > 200_000_000:
                self._pauses.append((now, now - self._last_ns))
            self._last_ns = now
            if self._fd >= 0:
                os.pwrite(self._fd, now.to_bytes(8, "little"), _BEAT_OFFSET)

    def was_paused(self, age_s: float) -> bool:
        """Whether this process itself stood still for half of `age_s` in the last `age_s`: others may have, too."""
        now, age = time.monotonic_ns(), int(age_s * 1e9)
        with self._guard:
            pauses = [*self._pauses, (now, now - self._last_ns)]
        return any(length > age // 2 and now - end < age for end, length in pauses)

    def update(self, generation: Generation) -> None:
        """Note the generation that this process has entered. Local."""
        with self._guard:
            self.info = msgspec.structs.replace(self.info, generation=generation.counter, generation_id=generation.id)
            if self._fd >= 0:
                os.pwrite(self._fd, _encode(self.info), 0)

    def release(self) -> None:
        """Remove the lock file and drop the lock; idempotent. Memory stays. Local."""
        with _mutex, self._guard:
            _held.pop(self.path, None)
            if self._fd < 0:
                return
            try:
                if os.stat(self.path, follow_symlinks=False).st_ino == os.fstat(self._fd).st_ino:
                    os.unlink(self.path)
            except FileNotFoundError:
                pass
            os.close(self._fd)
            self._fd = -1

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's, so close the inherited descriptor and touch nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._guard = -1, threading.Lock()


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.Lock()
    for lock in _held.values():
        lock._forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Holder(msgspec.Struct, frozen=True):
    """A lock file as another process sees it: `info` is None when it says nothing valid, `pid` is the kernel's word."""

    path: str
    held: bool
    pid: int
    info: ProcessInfo | None
    beat_ns: int


def _encode(info: ProcessInfo) -> bytes:
    text = msgspec.json.encode(info)
    if len(text) > _BEAT_OFFSET - 1:
        raise MemckptError("the names in a lock file are too long", run=info.run)
    return text.ljust(_BEAT_OFFSET - 1) + b"\n"


def take(directory: str, info: ProcessInfo) -> ProcessLock:
    """Make and lock this process's lock file in `directory`. Local.

    Raises
    ------
    RunInUse
        Another process (of another pid namespace) holds a lock of that name, or another thread that of the same rank.
    OSError
        The file cannot be made (ENOSPC, ENOENT when the run was removed meanwhile).
    """
    path = os.path.join(directory, info.lock_name)
    scratch = os.path.join(directory, f".tmp-{info.pid}-{info.start_time}-{secrets.token_hex(4)}")
    with _mutex:
        if path in _held:
            raise RunInUse("this process already holds the lock of that rank", pid=info.pid, run=info.run, path=path)
        fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                os.fchmod(fd, 0o600)
                os.pwrite(fd, _encode(info) + time.monotonic_ns().to_bytes(8, "little"), 0)
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The final name appears complete and locked, so an unlocked lock file is always a dead one's.
                _link(scratch, path, info)
            finally:
                os.unlink(scratch)
        except BaseException:
            os.close(fd)
            raise
        lock = _held[path] = ProcessLock(path, fd, info)
        return lock


def _link(scratch: str, path: str, info: ProcessInfo) -> None:
    try:
        os.link(scratch, path)
    except FileExistsError:
        holder = _examine(path)
        if holder is not None and (holder.held or not _unlink_dead(path)):
            raise RunInUse("another process holds this lock", pid=holder.pid, run=info.run, path=path) from None
        os.link(scratch, path)


def _holder_pid(fd: int) -> int:
    """Pid of the process that keeps `fd`'s file locked, 0 for none, -1 for one that this pid namespace cannot see."""
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return 0 if kind == fcntl.F_UNLCK else (pid or -1)


def _examine(path: str) -> Holder | None:
    """Read one lock file of *another* process; None when it has vanished. `_mutex` is held."""
    try:
        fd = files.open_checked(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        pid = _holder_pid(fd)
        data = os.pread(fd, LOCK_NBYTES, 0)
    finally:
        os.close(fd)
    info: ProcessInfo | None = None
    if len(data) == LOCK_NBYTES:
        try:
            info = msgspec.json.decode(data[:_BEAT_OFFSET], type=ProcessInfo)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            info = None
    if info is not None and info.lock_name != os.path.basename(path):
        info = None
    return Holder(path, pid != 0, pid, info, int.from_bytes(data[_BEAT_OFFSET:], "little"))


def _lock_files(directory: str) -> Iterator[str]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    yield from (os.path.join(directory, name) for name in names if name.endswith(".lock"))


def holders(directory: str) -> list[Holder]:
    """Every lock file in `directory`, this process's own included, dead ones too. Local.

    Raises
    ------
    ForeignMemory
        A lock file that is not a regular file of ours.
    """
    found: list[Holder] = []
    with _mutex:
        for path in _lock_files(directory):
            mine = _held.get(path)
            if mine is not None:
                found.append(Holder(path, True, mine.info.pid, mine.info, mine._last_ns))
            elif (holder := _examine(path)) is not None:
                found.append(holder)
    return found


def _unlink_dead(path: str) -> bool:
    """Remove a lock file that nobody holds; False when somebody does. `_mutex` is held."""
    try:
        fd = files.open_checked(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
            os.unlink(path)
        return True
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    finally:
        os.close(fd)


def remove_dead(directory: str) -> None:
    """Remove the lock files that nobody holds, and scratch files of processes that are gone. Local."""
    with _mutex:
        for path in _lock_files(directory):
            if path not in _held:
                _unlink_dead(path)
    remove_scratch(directory)


def holds(directory: str) -> bool:
    """Whether this process holds a lock in `directory`. Local."""
    with _mutex:
        return any(os.path.dirname(path) == directory for path in _held)


def own_locks(directory: str) -> list[ProcessLock]:
    """The locks that this process holds in `directory`, one per rank that it runs. Local."""
    with _mutex:
        return [lock for path, lock in _held.items() if os.path.dirname(path) == directory]
