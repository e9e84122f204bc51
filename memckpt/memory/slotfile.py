"""A slot: one memory-backed file, and the seal beside it that says whose snapshot it is, if any."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from memckpt import _native, faults
from memckpt.errors import Closed, CorruptSnapshot, ForeignMemory, MemckptError, UsageError
from memckpt.format.seal import Seal, decode, encode
from memckpt.memory import files

MAX_SEAL_NBYTES = 64 << 20
MAX_HEADER_NBYTES = 100_000_000  # the safetensors library reads no longer one
DATA, SEAL = ".safetensors", ".seal.json"
_NAME = re.compile(r"s-[0-9a-f]{16}\Z")


def slot_of(file: str) -> str | None:
    """Name of the slot that a file of this name belongs to; None for any other file."""
    for suffix in (DATA, SEAL):
        if file.endswith(suffix) and _NAME.match(file[: -len(suffix)]):
            return file[: -len(suffix)]
    return None


def data_path(directory: str, name: str) -> str:
    """Path of a slot's bytes; UsageError when `name` cannot be a slot's."""
    if not _NAME.match(name):
        raise UsageError(f"{name!r} is no slot's name")
    return os.path.join(directory, name + DATA)


def seal_path(directory: str, name: str) -> str:
    """Path of a slot's seal."""
    return data_path(directory, name)[: -len(DATA)] + SEAL


def read_seal(path: str) -> Seal | None:
    """A seal, None when there is none; CorruptSnapshot or ForeignMemory when it cannot be believed."""
    try:
        return decode(files.read(path, MAX_SEAL_NBYTES))
    except FileNotFoundError:
        return None


class Found(msgspec.Struct, frozen=True):
    """One slot file on this node; without a seal, or with a `reason` not to trust it, it is no snapshot.

    Attributes
    ----------
    slot : str
        Name for `Arena.open_slot`.
    seal : Seal or None
        The seal, where it is valid and agrees with the file.
    nbytes : int
        Size of the slot in bytes.
    reason : str or None
        Why there is no snapshot although there is something ("no seal" for a free or torn slot).
    """

    slot: str
    seal: Seal | None
    nbytes: int
    reason: str | None


def examine(directory: str, name: str, run: str, job: str) -> Found | None:
    """What one slot holds for this run and job; None when it is not there (any more). Reads only."""
    path = data_path(directory, name)
    try:
        fd = files.open_checked(path)
    except FileNotFoundError:
        orphan = os.path.lexists(seal_path(directory, name)) and not os.path.lexists(path)
        return Found(name, None, 0, "a seal without a slot") if orphan else None
    except ForeignMemory as error:
        return Found(name, None, 0, f"foreign: {error.message}")
    try:
        nbytes = os.fstat(fd).st_size
        try:
            seal = read_seal(seal_path(directory, name))
            if seal is None:
                return Found(name, None, nbytes, "no seal")
            _agree(seal, fd, nbytes, run, job)
        except MemckptError as error:
            return Found(name, None, nbytes, error.message)
        return Found(name, seal, nbytes, None)
    finally:
        os.close(fd)


def _agree(seal: Seal, fd: int, nbytes: int, run: str, job: str) -> None:
    """CorruptSnapshot unless the seal is this run's and the file's own header says the same of itself."""
    if (seal.run, seal.job) != (run, job):
        raise CorruptSnapshot(f"its seal is of run {seal.run!r}, job {seal.job!r}")
    if nbytes < seal.nbytes:
        raise CorruptSnapshot(f"truncated: the seal says {seal.nbytes} bytes, the slot has {nbytes}")
    says = read_header(fd, seal.nbytes)
    pairs = {
        "run": (seal.run, says.run),
        "shard": (seal.shard, says.shard),
        "world": (seal.world, says.world),
        "step": (seal.step, says.step),
        "layout": (seal.layout, says.layout),
    }
    for name, (said, found) in pairs.items():
        if said != found:
            raise CorruptSnapshot(f"the seal says {name} {said!r}, the file's header {found!r}")


class HeaderSays(msgspec.Struct, frozen=True):
    """What a file's own header says of its identity."""

    run: str
    shard: int
    world: int
    layout: str
    step: int = -1


class _Metadata(msgspec.Struct):
    memckpt: str
    step: str = msgspec.field(name="memckpt.step")


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def read_header(fd: int, nbytes: int) -> HeaderSays:
    """The identity in the header of a file of `nbytes` bytes; a quick look, `header.parse` checks all of it.

    Raises
    ------
    CorruptSnapshot
        It has no header of a snapshot.
    """
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= size <= min(nbytes - 8, MAX_HEADER_NBYTES):
        raise CorruptSnapshot(f"the file's header says that it is {size} bytes long, in a file of {nbytes}")
    try:
        metadata = msgspec.json.decode(os.pread(fd, size, 8), type=_Header).metadata
        says = msgspec.json.decode(metadata.memckpt, type=HeaderSays)
        if not (metadata.step.isascii() and metadata.step.isdigit() and len(metadata.step) <= 19):
            raise CorruptSnapshot("the step in the file's header is no number")
        return msgspec.structs.replace(says, step=int(metadata.step))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CorruptSnapshot(f"the file's header cannot be read: {error}") from None


def file_id(status: os.stat_result) -> tuple[int, int]:
    """What tells one file from another of the same name."""
    return status.st_dev, status.st_ino


class Slot:
    """One memory-backed file. Made by `Arena.create_slot` and `Arena.open_slot`.

    Attributes
    ----------
    name : str
        Name in the arena.
    memory : _native.SharedMemory
        The mapping.
    nbytes : int
        Size in bytes.
    populate_s : float
        Seconds that reserving and populating took (0 for an opened slot).
    mapped : bool
        Its pages are in this process's page tables, so that no access meets a fault.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        memory: _native.SharedMemory,
        require_lock: Callable[[str], None],
        *,
        file: tuple[int, int],
        populate_s: float = 0.0,
        mapped: bool = False,
    ) -> None:
        self.name, self.memory, self.populate_s, self.mapped = name, memory, populate_s, mapped
        self._file = file
        self.nbytes = memory.nbytes
        self.path = data_path(directory, name)
        self._seal_path = seal_path(directory, name)
        self._require_lock = require_lock
        self._closed = False

    def map(self, threads: int) -> None:
        """Take the page faults of the whole slot now, with `threads` threads; nothing to do where that was done. Local.

        Raises
        ------
        OSError
            There is no memory for the pages.
        """
        if not self.mapped:
            self.memory.populate(threads)
            self.mapped = True

    def is_current(self) -> bool:
        """Whether the file of that name is still the one that is mapped here. Local."""
        try:
            return not self._closed and file_id(os.lstat(self.path)) == self._file
        except FileNotFoundError:
            return False

    def seal(self, seal: Seal) -> None:
        """Write the seal, which makes this slot's bytes a snapshot. The bytes must be complete. Needs the lock.

        Raises
        ------
        OSError
            It could not be written; the slot stays unsealed.
        """
        self._writing("seal")
        if seal.nbytes > self.nbytes:
            raise UsageError(f"a seal for {seal.nbytes} bytes on a slot of {self.nbytes}", path=self.path)
        faults.point("before_seal", seal.shard, seal.step)
        directory, file = os.path.split(self._seal_path)
        files.write(directory, file, encode(seal))
        faults.point("after_seal", seal.shard, seal.step)

    def unseal(self) -> None:
        """Remove the seal; before the first byte is written again. Needs the lock."""
        self._writing("unseal")
        files.unlink(self._seal_path)

    def read_seal(self) -> Seal | None:
        """The seal as it is now; None when there is none.

        Raises
        ------
        CorruptSnapshot, ForeignMemory
            There is one that cannot be believed.
        """
        return read_seal(self._seal_path)

    def _writing(self, what: str) -> None:
        if self._closed:
            raise Closed(f"{what} of a closed slot", path=self.path)
        if not self.memory.writable:
            raise UsageError(f"{what} of a slot opened for reading", path=self.path)
        self._require_lock(what)

    def close(self) -> None:
        """Let go of the mapping; the file stays. Idempotent. BufferError while a copy still uses it."""
        if self._closed:
            return
        for attempt in range(10):
            try:
                self.memory.close()
                break
            except BufferError:
                # A thread of the pool may hold on to a job for an instant after its end was told.
                if attempt == 9:
                    raise
                time.sleep(0.002 * attempt)
        self._closed = True

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
