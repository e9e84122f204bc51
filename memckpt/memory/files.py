"""Files and directories of ours: 0600 and 0700, our uid, no links; anything else is refused, not removed."""

from __future__ import annotations

import errno
import os
import stat

from memckpt.errors import CorruptSnapshot, ForeignMemory, UsageError
from memckpt.memory import process


def check(path: str, status: os.stat_result, *, directory: bool) -> None:
    """ForeignMemory unless `status` is that of a directory (or file) as we make them."""
    want = "directory" if directory else "regular file"
    mode = stat.S_IMODE(status.st_mode)
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(status.st_mode):
        problem = f"is no {want}"
    elif status.st_uid != os.getuid():
        problem = f"belongs to uid {status.st_uid}, not to uid {os.getuid()}"
    elif mode != (0o700 if directory else 0o600):
        problem = f"has mode {mode:04o}, not {0o700 if directory else 0o600:04o}"
    else:
        return
    raise ForeignMemory(f"this {problem}, so it is not memory that memckpt made; it is left as it is", path=path)


def open_checked(path: str, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a file of ours; FileNotFoundError when there is none, ForeignMemory when it is not ours."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ForeignMemory(f"cannot be opened ({error.strerror}); it is left as it is", path=path) from None
    try:
        check(path, os.fstat(fd), directory=False)
    except ForeignMemory:
        os.close(fd)
        raise
    return fd


def read(path: str, limit: int) -> bytes:
    """All of a file of ours; CorruptSnapshot when it is longer than `limit` bytes."""
    fd = open_checked(path)
    with open(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CorruptSnapshot(f"larger than the limit of {limit} bytes", path=path)
    return data


def write(directory: str, name: str, data: bytes) -> None:
    """Write a whole file under a temporary name and rename it: there is never half a file of that name."""
    scratch = os.path.join(directory, process.scratch_name(name))
    fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(data)
        os.rename(scratch, os.path.join(directory, name))
    except BaseException:
        unlink(scratch)
        raise


def unlink(path: str) -> None:
    """Remove a file; nothing happens when it is not there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def rmdir(path: str) -> bool:
    """Remove an empty directory; False when something is in it."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return error.errno == errno.ENOENT
    return True


def check_base(base: str) -> None:
    """UsageError when `base` is no directory, ForeignMemory when others could put theirs in place of ours there."""
    try:
        status = os.stat(base)
    except OSError as error:
        raise UsageError(f"MEMCKPT_SHM: {error.strerror}", path=base) from None
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError("MEMCKPT_SHM is no directory", path=base)
    others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if others_write or status.st_uid not in (0, os.getuid()):
        raise ForeignMemory("others may rename what lies in this directory (not sticky, or not ours)", path=base)


def directory(path: str, *, create: bool) -> None:
    """Make sure of one directory of ours; FileNotFoundError when it is not there and not to be made."""
    if create:
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # whatever the umask
        except FileExistsError:
            pass
    check(path, os.lstat(path), directory=True)
