"""Reading a checkpoint back: in parallel, straight into memory, every chunk compared with its seal as it lands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from typing_extensions import Buffer

from memckpt import _native
from memckpt.errors import CorruptSnapshot, MemckptError, UsageError
from memckpt.format.seal import MAX_NBYTES, Seal
from memckpt.format.seal import decode as decode_seal
from memckpt.storage import marker as names
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored
from memckpt.storage.marker import Marker, ShardRecord


class Bad(NamedTuple):
    """A place where a checkpoint is not what it should be; `chunk` is None where the whole file is concerned."""

    shard: int
    path: str
    chunk: int | None
    reason: str


def read_seal(storage: Storage, stored: Stored, rank: int) -> Seal:
    """The seal of one shard, checked against the marker. Local.

    Raises
    ------
    CorruptSnapshot
        It is not the one that the marker speaks of.
    OSError
        It could not be read.
    """
    marker, record = _record(stored, rank)
    path = f"{stored.path}/{names.seal_name(rank)}"
    if record.seal_nbytes > MAX_NBYTES:
        raise CorruptSnapshot(f"a seal of {record.seal_nbytes} bytes", path=path)
    data = bytearray(record.seal_nbytes)
    got = storage.get(path, 0, memoryview(data))
    if got != record.seal_nbytes or _native.crc32c(data) != record.seal_crc:
        raise CorruptSnapshot("the seal is not the one that the marker speaks of", path=path)
    seal = decode_seal(bytes(data))
    if names.checkpoint_of(seal) != names.checkpoint_of(marker):
        raise CorruptSnapshot("seal and marker are of different checkpoints", path=path)
    if (seal.shard, seal.nbytes, seal.layout) != (record.shard, record.nbytes, record.layout):
        raise CorruptSnapshot("seal and marker disagree on the shard", path=path)
    return seal


def read_shard(storage: Storage, stored: Stored, rank: int, memory: Buffer, *, threads: int = 4) -> Seal:
    """Read one shard into memory, verified. Local.

    Parameters
    ----------
    storage, stored
        From `scan`.
    rank : int
        The shard.
    memory : buffer
        Writable; its first ``nbytes`` (see the shard's record in ``stored.marker.shards``) are written.
    threads : int
        Reads under way at once.

    Returns
    -------
    Seal
        The seal that the bytes match.

    Raises
    ------
    CorruptSnapshot
        A chunk differs from its checksum, or the file ends early. The memory holds anything then; nothing writes to it
        any more.
    OSError
        It could not be read. Likewise.
    """
    seal = read_seal(storage, stored, rank)
    path = f"{stored.path}/{names.data_name(rank)}"
    with memoryview(memory) as view, view.cast("B") as octets:
        if octets.readonly or len(octets) < seal.nbytes:
            raise UsageError(f"{seal.nbytes} writable bytes are needed, {len(octets)} are there", path=path)

        def read(group: tuple[int, int]) -> None:
            first, end = group
            at = first * seal.chunk_nbytes
            with octets[at : min(end * seal.chunk_nbytes, seal.nbytes)] as target:
                for chunk, reason in _fill(storage, path, seal, first, target):
                    raise CorruptSnapshot(f"chunk {chunk} {reason}", run=seal.run, step=seal.step, rank=rank, path=path)

        # The first error cancels what has not begun, and comes out when what has begun is over.
        with ThreadPoolExecutor(threads, thread_name_prefix="memckpt-read") as pool:
            for _ in pool.map(read, _groups(seal, storage.read_nbytes)):
                pass
    return seal


def verify(
    storage: Storage, stored: Stored, *, threads: int = 4, progress: Callable[[int], None] | None = None
) -> list[Bad]:
    """Read every byte of a checkpoint and compare it with its seals. Local, reads only.

    Parameters
    ----------
    storage, stored
        From `scan`.
    threads : int
        Reads under way at once.
    progress : callable, optional
        Called with numbers of bytes that were read, from any thread.

    Returns
    -------
    list of Bad
        Empty when all is as it should be.
    """
    if stored.marker is None:
        return [Bad(-1, stored.path, None, stored.reason)]
    bad: list[Bad] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="memckpt-verify") as pool:
        for record in stored.marker.shards:
            path = f"{stored.path}/{names.data_name(record.shard)}"
            try:
                seal = read_seal(storage, stored, record.shard)
            except (MemckptError, OSError) as error:
                bad.append(Bad(record.shard, f"{stored.path}/{names.seal_name(record.shard)}", None, _text(error)))
                continue

            def check(first: int, end: int, seal: Seal = seal, path: str = path) -> list[tuple[int | None, str]]:
                nbytes = min(end * seal.chunk_nbytes, seal.nbytes) - first * seal.chunk_nbytes
                found: list[tuple[int | None, str]] = []
                try:
                    found += _fill(storage, path, seal, first, memoryview(bytearray(nbytes)))
                except OSError as error:
                    found.append((None, _text(error)))
                if progress is not None:
                    progress(nbytes)
                return found

            jobs = [pool.submit(check, *group) for group in _groups(seal, storage.read_nbytes)]
            bad += dict.fromkeys(Bad(record.shard, path, chunk, why) for job in jobs for chunk, why in job.result())
    return bad


def _record(stored: Stored, rank: int) -> tuple[Marker, ShardRecord]:
    marker = stored.marker
    if marker is None:
        raise CorruptSnapshot(stored.reason, run=stored.run, step=stored.step, path=stored.path)
    if not 0 <= rank < marker.world:
        raise UsageError(f"shard {rank} of a checkpoint of {marker.world} ranks", run=stored.run, step=stored.step)
    return marker, marker.shards[rank]


def _groups(seal: Seal, nbytes: int) -> Iterator[tuple[int, int]]:
    """Chunks that are read at once, as (first, behind the last)."""
    count = max(1, nbytes // seal.chunk_nbytes)
    for first in range(0, len(seal.crcs), count):
        yield first, min(first + count, len(seal.crcs))


def _fill(storage: Storage, path: str, seal: Seal, first: int, target: memoryview) -> Iterator[tuple[int, str]]:
    """Read chunks from `first` on into `target`; those that are bad, and why."""
    got = storage.get(path, first * seal.chunk_nbytes, target)
    for start in range(0, len(target), seal.chunk_nbytes):
        chunk = first + start // seal.chunk_nbytes
        end = min(start + seal.chunk_nbytes, len(target))
        if got < end:
            yield chunk, "is cut off: the file ends before it does"
            continue
        with target[start:end] as part:
            if _native.crc32c(part) != seal.crcs[chunk]:
                yield chunk, "differs from its checksum"


def _text(error: Exception) -> str:
    return error.message if isinstance(error, MemckptError) else str(error)
