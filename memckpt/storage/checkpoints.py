"""Checkpoints in a storage: written so that a complete one is always there, found by looking, removed marker first.

The order is that of a database's log: data, flush, seal, flush, rename both, flush of the directory; when every rank
has done so the marker in the same way; and only then is an older checkpoint pruned. So at every instant, a kill and a
power cut included, what has a valid marker is complete, and what has none is no checkpoint.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import Buffer

from memckpt import _native, faults
from memckpt.errors import CorruptSnapshot, MemckptError, ProtocolError, SaveFailed, UsageError
from memckpt.format.seal import MAX_NBYTES, Base, Generation, Seal
from memckpt.format.seal import decode as decode_seal
from memckpt.format.seal import encode as encode_seal
from memckpt.policy.preserve import CheckpointInfo
from memckpt.storage import marker as names
from memckpt.storage.base import Part, Storage
from memckpt.storage.marker import MARKER, Marker, ShardRecord

PIECE_NBYTES = 8 << 20
POINTS = (
    "storage.staged",
    "storage.data_piece",
    "storage.data_written",
    "storage.data_synced",
    "storage.seal_written",
    "storage.seal_synced",
    "storage.data_named",
    "storage.seal_named",
    "storage.seal_durable",
    "storage.marker_written",
    "storage.marker_synced",
    "storage.marker_named",
    "storage.marker_durable",
    "storage.unmarked",
    "storage.removed",
    "storage.pruned",
)
"""The die-here points of a checkpoint's life, in order. "durable" means that the directory is flushed as well."""


@dataclass(frozen=True)
class Stored:
    """What one entry of a run's directory in a storage is.

    Attributes
    ----------
    run : str
        The run.
    step : int
        As the name says; -1 for a stray, which is nothing of ours.
    generation_id : str
        As the name says, 16 hex digits; "" for a stray.
    path : str
        Below the storage's root.
    complete : bool
        It has a valid marker, and every file that the marker names is there in its size. `verify` reads the bytes.
    reason : str
        Why it is not complete; "" where it is.
    marker : Marker or None
        Where there is a valid one.
    nbytes : int
        Size of all its files.
    crashes : tuple of str
        Ids of the generations in which the program failed by itself right after restoring it.
    damaged : bool
        It has a marker, so it was complete once, and it is not any more.
    """

    run: str
    step: int
    generation_id: str
    path: str
    complete: bool
    reason: str
    marker: Marker | None
    nbytes: int
    crashes: tuple[str, ...] = ()
    damaged: bool = False

    @property
    def info(self) -> CheckpointInfo:
        """What a preserve policy is told of it; only of a complete one."""
        assert self.marker is not None
        return CheckpointInfo(
            step=self.step,
            created_s=self.marker.created,
            nbytes=self.nbytes,
            tier="storage",
            generation=self.marker.generation.counter,
            metrics=self.marker.metrics,
        )

    @property
    def stray(self) -> bool:
        """Not ours: never read, never removed."""
        return self.step < 0

    @property
    def generation(self) -> Generation | None:
        """The generation, where a marker says it."""
        return self.marker.generation if self.marker else None

    @property
    def created(self) -> float | None:
        """Unix time in seconds, where a marker says it."""
        return self.marker.created if self.marker else None


def write_shard(
    storage: Storage,
    run: str,
    seal: Seal,
    memory: Buffer,
    *,
    pace: Callable[[int], None] | None = None,
    piece_nbytes: int = PIECE_NBYTES,
) -> ShardRecord:
    """Write one shard and its seal, straight from a sealed slot, in one pass. Local; one writer per shard and name.

    Every chunk is compared with its checksum just before it is written: older checkpoints will be pruned for this one,
    so what memory has lost must not become the last that is left.

    Parameters
    ----------
    storage : Storage
        Where to.
    run : str
        The run.
    seal : Seal
        Of the snapshot; whose shard it is, is the seal's affair (a buddy writes a lost owner's).
    memory : buffer
        The bytes, at least ``seal.nbytes`` of them; read only, and not held afterwards.
    pace : callable, optional
        Called with the number of bytes before each piece is written; may sleep, or raise to give up.
    piece_nbytes : int
        Bytes per write.

    Returns
    -------
    ShardRecord
        For the marker. Data and seal are durable then.

    Raises
    ------
    FileExistsError
        There is a complete checkpoint of this step and generation; nothing was written.
    CorruptSnapshot
        The memory is not what the seal says.
    OSError
        It could not be written; ``errno`` and ``filename`` say why and what. Nothing half written is left, and the
        same shard may be written again.
    """
    if seal.run != run:
        raise UsageError(f"a seal of run {seal.run!r} in run {run!r}", run=run, step=seal.step, rank=seal.shard)
    directory = f"{names.run_directory(run)}/{names.directory_name(seal.step, seal.generation.id)}"
    found = examine(storage, directory)
    if found is not None and found.complete:
        raise FileExistsError(
            errno.EEXIST, "a complete checkpoint, which is never written again", f"{storage.url}/{directory}"
        )
    encoded = encode_seal(seal)
    with memoryview(memory) as view, view.cast("B") as octets:
        if len(octets) < seal.nbytes:
            raise UsageError(f"a seal for {seal.nbytes} bytes, {len(octets)} are there", run=run, step=seal.step)
        pieces = _pieces(octets, seal, pace, piece_nbytes)
        faults.point("storage.staged", seal.shard, seal.step)
        try:
            storage.put(
                [
                    Part(f"{directory}/{names.data_name(seal.shard)}", seal.nbytes, pieces),
                    Part(f"{directory}/{names.seal_name(seal.shard)}", len(encoded), [encoded]),
                ],
                _reached(seal.shard, seal.step),
            )
        finally:
            pieces.close()  # an error's traceback would hold its views, and with them the mapping
    return names.record(seal, encoded)


def _pieces(
    octets: memoryview, seal: Seal, pace: Callable[[int], None] | None, piece_nbytes: int
) -> Generator[memoryview, None, None]:
    crc = 0
    for start in range(0, seal.nbytes, piece_nbytes):
        end = min(start + piece_nbytes, seal.nbytes)
        if pace is not None:
            pace(end - start)
        at = start
        while at < end:
            chunk = at // seal.chunk_nbytes
            chunk_end = min((chunk + 1) * seal.chunk_nbytes, seal.nbytes)
            with octets[at : min(chunk_end, end)] as part:
                crc = _native.crc32c(part, crc)
                at += len(part)
            if at == chunk_end:
                if crc != seal.crcs[chunk]:
                    raise CorruptSnapshot(
                        f"chunk {chunk} in memory differs from its seal; it is not written",
                        run=seal.run,
                        step=seal.step,
                        rank=seal.shard,
                    )
                crc = 0
        with octets[start:end] as piece:
            yield piece
        faults.point("storage.data_piece", seal.shard, seal.step)


def _reached(shard: int, step: int) -> Callable[[str, str], None]:
    def reached(stage: str, path: str) -> None:
        name = path.rpartition("/")[2]
        kind = "marker" if name == MARKER else "data" if name == names.data_name(shard) else "seal"
        faults.point(f"storage.{kind}_{stage}", shard, step)

    return reached


def shards_there(
    storage: Storage, seal: Seal, *, known: Mapping[int, ShardRecord] | None = None
) -> dict[int, ShardRecord]:
    """The shards of one checkpoint that are written, each with its record for the marker. Local, reads only.

    Their names may not be durable yet. `write_marker` makes them so, by flushing their directory, before it returns.

    Parameters
    ----------
    storage : Storage
        Where to look.
    seal : Seal
        Of any shard of the checkpoint.
    known : mapping, optional
        What was found before; not looked at again.

    Returns
    -------
    dict of int to ShardRecord
        By shard, `known` included. A shard whose seal cannot be read, or is of another checkpoint, is not in it.
    """
    directory = f"{names.run_directory(seal.run)}/{names.directory_name(seal.step, seal.generation.id)}"
    found = {**(known or {})}
    sizes = _sizes(storage, directory)
    for shard in range(seal.world):
        data, sealed = names.data_name(shard), names.seal_name(shard)
        if shard in found or data not in sizes or not 0 < sizes.get(sealed, 0) <= MAX_NBYTES:
            continue
        encoded = bytearray(sizes[sealed])
        try:
            storage.get(f"{directory}/{sealed}", 0, memoryview(encoded))
            says = decode_seal(bytes(encoded))
        except (CorruptSnapshot, ProtocolError, FileNotFoundError):
            continue
        if (
            says.shard == shard
            and says.nbytes == sizes[data]
            and names.checkpoint_of(says) == names.checkpoint_of(seal)
        ):
            found[shard] = names.record(says, bytes(encoded))
    return found


def write_marker(storage: Storage, run: str, marker: Marker) -> None:
    """Make a checkpoint of what `write_shard` wrote on all ranks. Local; one rank does it, after all have told.

    Raises
    ------
    FileExistsError
        It has a valid marker already; nothing was written.
    SaveFailed
        A file that it lists is not there in its size (on a network file system perhaps not yet to be seen from here).
    OSError
        It could not be written.
    """
    if marker.run != run:
        raise UsageError(f"a marker of run {marker.run!r} in run {run!r}", run=run, step=marker.step)
    data = names.encode(marker)
    directory = marker.directory
    sizes = _sizes(storage, directory)
    missing = _missing(marker, sizes)
    if missing:
        raise SaveFailed(f"no marker: {missing}", run=run, step=marker.step, path=f"{storage.url}/{directory}")
    found = _stored(storage, directory, sizes)
    if found.complete:
        raise FileExistsError(
            errno.EEXIST, "it has a marker already, which is never written again", f"{storage.url}/{directory}"
        )
    storage.put([Part(f"{directory}/{MARKER}", len(data), [data])], _reached(-1, marker.step))


def scan(storage: Storage, run: str | None = None) -> list[Stored]:
    """Everything in a run's directory, or in those of all runs; by run, then by step. Local, reads only.

    Looks at names, sizes and markers. Nothing points to the latest: a pointer could lie.
    """
    prefix, depth = ("", 3) if run is None else (names.run_directory(run), 2)
    found: dict[str, dict[str, int]] = {}
    for path, nbytes in storage.entries(prefix, depth):
        directory = "/".join(path.split("/")[:2])
        if not directory.endswith("/"):  # else a run's directory without anything in it
            found.setdefault(directory, {})[path[len(directory) :].removeprefix("/")] = nbytes
    stored = [_stored(storage, directory, sizes) for directory, sizes in found.items()]
    return sorted(stored, key=lambda s: (s.run, s.step, s.created or 0.0, s.path))


def _sizes(storage: Storage, directory: str) -> dict[str, int]:
    """Names in a directory, and their sizes."""
    return {path[len(directory) + 1 :]: nbytes for path, nbytes in storage.entries(directory, 1)}


def examine(storage: Storage, directory: str) -> Stored | None:
    """One checkpoint, by its path; None when there is nothing. Local, reads only."""
    sizes = _sizes(storage, directory)
    return _stored(storage, directory, sizes) if sizes else None


def _stored(storage: Storage, directory: str, sizes: dict[str, int]) -> Stored:
    run, _, name = directory.partition("/")
    says = names.parse_directory(name)
    nbytes = sum(sizes.values())
    if says is None or sizes.get(""):  # a name that is none of ours, or a file in place of a directory
        return Stored(run, -1, "", directory, False, "stray: not a checkpoint's name; left alone", None, nbytes)
    marker, reason = None, ""
    try:
        marker = _read_marker(storage, directory, sizes)
        reason = _missing(marker, sizes)
    except (MemckptError, OSError) as error:
        reason = error.message if isinstance(error, MemckptError) else str(error)
    prefix = names.crash_name("")
    crashes = tuple(sorted(name.removeprefix(prefix) for name in sizes if name.startswith(prefix)))
    return Stored(run, *says, directory, not reason, reason, marker, nbytes, crashes, MARKER in sizes and bool(reason))


def note_crash(storage: Storage, run: str, base: Base, generation: Generation) -> None:
    """Note that the program failed by an error of its own in `generation`, before anything was saved after the restore
    of `base`; nothing where that is not in this storage. Local.
    """
    directory = f"{names.run_directory(run)}/{names.directory_name(base.step, base.generation.id)}"
    if MARKER in _sizes(storage, directory):
        storage.put([Part(f"{directory}/{names.crash_name(generation.id)}", 0, [])])


def _read_marker(storage: Storage, directory: str, sizes: dict[str, int]) -> Marker:
    if MARKER not in sizes:
        half = sum(name.startswith(names.SCRATCH) for name in sizes)
        raise CorruptSnapshot("no marker" + (f"; {half} files are half written" if half else ""))
    if sizes[MARKER] > MAX_NBYTES:
        raise CorruptSnapshot(f"marker: longer than {MAX_NBYTES} bytes")
    data = bytearray(sizes[MARKER])
    got = storage.get(f"{directory}/{MARKER}", 0, memoryview(data))
    marker = names.decode(bytes(data[:got]))
    if f"{marker.run}/{names.directory_name(marker.step, marker.generation.id)}" != directory:
        raise CorruptSnapshot(f"marker: it is of run {marker.run!r}, step {marker.step}, not of this directory")
    return marker


def _missing(marker: Marker, sizes: dict[str, int]) -> str:
    """The first file that the marker lists and that is not there as it says; empty where all are."""
    for shard in marker.shards:
        wanted = {names.data_name(shard.shard): shard.nbytes, names.seal_name(shard.shard): shard.seal_nbytes}
        for name, nbytes in wanted.items():
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != nbytes:
                return f"{name} has {sizes[name]} bytes instead of {nbytes}"
    return ""


def prune(storage: Storage, remove: Iterable[Stored], *, running: str | None = None) -> list[Stored]:
    """Remove checkpoints: the marker first, durably, then the rest. Local; one rank does it.

    A crash on the way leaves something incomplete, which another prune removes. Never removed are strays, files that
    are none of ours, what is incomplete and of the running generation, and what has become complete meanwhile.

    Parameters
    ----------
    storage : Storage
        Where they are.
    remove : iterable of Stored
        From `scan`.
    running : str, optional
        Id of the generation that is being written to.

    Returns
    -------
    list of Stored
        What was removed.

    Raises
    ------
    OSError
        One could not be removed; those before it are gone.
    """
    removed = []
    for stored in remove:
        if stored.stray or (not stored.complete and stored.generation_id == running):
            continue
        sizes = _sizes(storage, stored.path)
        if not stored.complete and _stored(storage, stored.path, sizes).complete:
            continue
        storage.remove([f"{stored.path}/{MARKER}"])
        faults.point("storage.unmarked", step=stored.step)
        storage.remove(_one_by_one(stored, [name for name in sizes if name != MARKER and names.is_ours(name)]))
        faults.point("storage.pruned", step=stored.step)
        removed.append(stored)
    return removed


def _one_by_one(stored: Stored, files: list[str]) -> Iterator[str]:
    for name in files:
        yield f"{stored.path}/{name}"
        faults.point("storage.removed", step=stored.step)
    yield f"{stored.path}/"
