"""Names in the durable tier, and the marker: the record, written last, that makes a directory a checkpoint.

``<run>/step-000001200-<generation id>/`` holds ``rank-00003.safetensors`` and ``rank-00003.seal.json`` for every rank,
and ``checkpoint.json``. The generation's id in the name keeps histories apart, so a name is never written twice.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import re
from collections.abc import Mapping, Sequence

import msgspec

from memckpt import _native
from memckpt.errors import CorruptSnapshot, MemckptError, ProtocolError, UsageError
from memckpt.format.seal import MAX_NBYTES, Base, Generation, Seal

FORMAT = 1
MARKER = "checkpoint.json"
SCRATCH = ".tmp-"
_MAX = (1 << 63) - 1
_CRC_MEMBER = b',"crc":'
_DIRECTORY = re.compile(r"step-([0-9]{9,19})-([0-9a-f]{16})\Z")
_OURS = re.compile(
    r"(\.tmp-[0-9a-f]{16}-)?(rank-[0-9]{5,}\.(safetensors|seal\.json)|checkpoint\.json|crash-[0-9a-f]{16})\Z"
)


def run_directory(run: str) -> str:
    """The directory of a run, which is its name; UsageError for one that cannot be a directory's. Local."""
    bad = any(c in "/\\" or not c.isprintable() for c in run)
    if not run or run.startswith(".") or bad or len(run.encode()) > 100:
        raise UsageError(f"run {run!r} cannot name a directory: 1 to 100 bytes, printable, no slash, no dot first")
    return run


def directory_name(step: int, generation_id: str) -> str:
    """The name of a checkpoint's directory. Local."""
    return f"step-{step:09d}-{generation_id}"


def parse_directory(name: str) -> tuple[int, str] | None:
    """Step and generation id that a directory's name says; None for a name that is none of ours. Local."""
    match = _DIRECTORY.match(name)
    if match is None or directory_name(int(match[1]), match[2]) != name:
        return None
    return int(match[1]), match[2]


def data_name(shard: int) -> str:
    """The name of a shard's file. Local."""
    return f"rank-{shard:05d}.safetensors"


def seal_name(shard: int) -> str:
    """The name of its seal. Local."""
    return f"rank-{shard:05d}.seal.json"


def crash_name(generation_id: str) -> str:
    """The name of the file which says that a generation failed right after it had restored this one. Local."""
    return f"crash-{generation_id}"


def is_ours(name: str) -> bool:
    """Whether a file of this name, in a checkpoint's directory, is one that memckpt wrote, in full or half. Local."""
    return _OURS.match(name) is not None


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the marker says of one shard.

    Attributes
    ----------
    shard : int
        Logical rank.
    nbytes : int
        Size of its file.
    layout : str
        Layout hash.
    seal_nbytes, seal_crc : int
        Size and CRC32C of the bytes of its seal, which in turn holds the checksums of the file.
    """

    shard: int
    nbytes: int
    layout: str
    seal_nbytes: int
    seal_crc: int


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What makes a directory a checkpoint.

    Attributes
    ----------
    format : int
        Version of this record.
    run, job : str
        As in the seals.
    world : int
        Number of ranks.
    generation, base, step
        As in the seals; alike in all of them.
    created : float
        Unix time in seconds.
    shards : tuple of ShardRecord
        One for each rank, in order.
    versions : dict of str to str
        What wrote it; see `versions`.
    metrics : dict of str to float, optional
        What the user said of this step; finite, as JSON has no word for NaN and infinities.
    crc : int
        CRC32C of the record itself; set by `encode`, checked by `decode`.
    """

    format: int = FORMAT
    run: str
    job: str = ""
    world: int
    generation: Generation
    base: Base | None = None
    step: int
    created: float
    shards: tuple[ShardRecord, ...]
    versions: dict[str, str] = {}
    metrics: dict[str, float] | None = None
    crc: int = 0

    @property
    def directory(self) -> str:
        """Its directory below the storage's root."""
        return f"{run_directory(self.run)}/{directory_name(self.step, self.generation.id)}"


class _Format(msgspec.Struct):
    format: int


def checkpoint_of(record: Seal | Marker) -> tuple[object, ...]:
    """What all seals of a checkpoint, and its marker, have to have alike. Local."""
    return record.run, record.job, record.world, record.generation, record.base, record.step


def record(seal: Seal, encoded: bytes) -> ShardRecord:
    """The record of a shard, from its seal and the seal's bytes. Local."""
    return ShardRecord(
        shard=seal.shard,
        nbytes=seal.nbytes,
        layout=seal.layout,
        seal_nbytes=len(encoded),
        seal_crc=_native.crc32c(encoded),
    )


def make(seal: Seal, shards: Sequence[ShardRecord], *, metrics: Mapping[str, float] | None = None) -> Marker:
    """The marker of a checkpoint, of which `seal` is any shard's. Local.

    Metrics that are not finite are left out: a loss that went to NaN must not cost the checkpoint.
    """
    return Marker(
        run=seal.run,
        job=seal.job,
        world=seal.world,
        generation=seal.generation,
        base=seal.base,
        step=seal.step,
        created=seal.created,
        shards=tuple(shards),
        versions=versions(),
        metrics=None if metrics is None else {k: float(v) for k, v in metrics.items() if math.isfinite(v)},
    )


def versions() -> dict[str, str]:
    """The versions of memckpt, torch and Python in this process, without loading torch. Local."""
    from memckpt import __version__

    return {
        "memckpt": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }


def encode(marker: Marker) -> bytes:
    """The bytes of a marker: one JSON object whose last member is the CRC32C of it without that member. Local.

    Raises
    ------
    UsageError
        It would not be read back: a shard is missing or twice, a number is out of bounds.
    """
    problem = _problem(marker)
    if problem:
        raise UsageError(f"marker: {problem}", run=marker.run, step=marker.step)
    text = msgspec.json.encode(marker)
    body = text[: text.rindex(_CRC_MEMBER)] + b"}"
    return body[:-1] + b"%b%d}" % (_CRC_MEMBER, _native.crc32c(body))


def decode(data: bytes) -> Marker:
    """Read and check a marker. Everything in it is taken as hostile. Local.

    Raises
    ------
    CorruptSnapshot
        The bytes are no marker, or not those that were written.
    ProtocolError
        A marker of another format version.
    """
    if len(data) > MAX_NBYTES:
        raise CorruptSnapshot(f"marker: longer than {MAX_NBYTES} bytes")
    try:
        at = data.rfind(_CRC_MEMBER)
        if at < 0 or data[at:] != b"%b%d}" % (_CRC_MEMBER, _native.crc32c(data[:at] + b"}")):
            raise CorruptSnapshot("marker: its own checksum is wrong or lacking")
        version = msgspec.json.decode(data, type=_Format).format
        if version != FORMAT:
            raise ProtocolError(f"marker of format {version}; this memckpt reads {FORMAT}")
        marker = msgspec.json.decode(data, type=Marker)
        problem = _problem(marker)
    except MemckptError:
        raise
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptSnapshot(f"marker: {error}") from error
    if problem:
        raise CorruptSnapshot(f"marker: {problem}")
    return marker


def _problem(marker: Marker) -> str:
    """What makes this no marker; empty where it is one."""
    generations = [marker.generation] + ([marker.base.generation] if marker.base else [])
    numbers = [marker.step, *(g.counter for g in generations), *([marker.base.step] if marker.base else [])]
    numbers += [n for s in marker.shards for n in (s.nbytes, s.seal_nbytes, s.seal_crc)]
    if any(not 0 <= n <= _MAX for n in numbers):
        return "a number out of bounds"
    if any(len(g.id) != 16 or not {*g.id} <= {*"0123456789abcdef"} for g in generations):
        return "a generation's id is not 16 hex digits"
    if not marker.shards or [s.shard for s in marker.shards] != list(range(marker.world)):
        return f"the shards are not those of {marker.world} ranks"
    if not all(math.isfinite(value) for value in [marker.created, *(marker.metrics or {}).values()]):
        return "a time or a metric that is not finite"
    return ""
