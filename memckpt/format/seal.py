"""The small record that makes a snapshot whole: no seal, no snapshot. ``docs/format.md`` specifies the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from memckpt import _native
from memckpt.errors import CorruptSnapshot, MemckptError, ProtocolError

if TYPE_CHECKING:
    from memckpt.format.layout import Layout

FORMAT = 1
MAX_NBYTES = 64 << 20
_MAX = (1 << 63) - 1
_CRC_MEMBER = b',"crc":'


class Generation(msgspec.Struct, frozen=True, order=True):
    """What is saved between two starts or restores: ordered by `counter`, then by `id` (16 hex digits)."""

    counter: int
    id: str


class Base(msgspec.Struct, frozen=True):
    """The snapshot set that a generation grew from."""

    generation: Generation
    step: int


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Identity and digest of one snapshot.

    Attributes
    ----------
    format : int
        Version of the format.
    run, job : str
        Name of the run and of the job ("" if it has none).
    shard, world : int
        Logical rank and number of ranks.
    generation : Generation
        Snapshots combine only when generation and step are equal.
    base : Base or None
        What the generation grew from.
    step : int
        Optimizer steps completed when the state was taken.
    layout : str
        `Layout.hash` of the file.
    nbytes : int
        Size of the file.
    chunk_nbytes : int
        Size of a chunk; the last one may be shorter.
    crcs : list of int
        CRC32C of each chunk of the file from byte 0.
    created : float
        Unix time in seconds.
    crc : int
        CRC32C of the seal itself; set by `encode`, checked by `decode`.
    """

    format: int = FORMAT
    run: str
    job: str = ""
    shard: int
    world: int
    generation: Generation
    base: Base | None = None
    step: int
    layout: str
    nbytes: int
    chunk_nbytes: int
    crcs: list[int]
    created: float
    crc: int = 0


class _Format(msgspec.Struct):
    format: int


def encode(seal: Seal) -> bytes:
    """The bytes of a seal: one JSON object whose last member is the CRC32C of it without that member. Local."""
    text = msgspec.json.encode(seal)
    body = text[: text.rindex(_CRC_MEMBER)] + b"}"
    return body[:-1] + b"%b%d}" % (_CRC_MEMBER, _native.crc32c(body))


def decode(data: bytes) -> Seal:
    """Read and check a seal. Everything in it is taken as hostile. Local.

    Raises
    ------
    CorruptSnapshot
        The bytes are no seal, or not those that were written.
    ProtocolError
        A seal of another format version.
    """
    try:
        return _decode(bytes(data))
    except MemckptError:
        raise
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptSnapshot(f"seal: {error}") from error


def _decode(data: bytes) -> Seal:
    if len(data) > MAX_NBYTES:
        raise CorruptSnapshot(f"seal: longer than {MAX_NBYTES} bytes")
    at = data.rfind(_CRC_MEMBER)
    if at < 0:
        raise CorruptSnapshot("seal: no checksum")
    crc = _native.crc32c(data[:at] + b"}")
    if data[at:] != b"%b%d}" % (_CRC_MEMBER, crc):
        raise CorruptSnapshot("seal: its own checksum is wrong")
    version = msgspec.json.decode(data, type=_Format).format
    if version != FORMAT:
        raise ProtocolError(f"seal of format {version}; this memckpt reads {FORMAT}")
    seal = msgspec.json.decode(data, type=Seal)
    generations = [seal.generation] + ([seal.base.generation] if seal.base else [])
    numbers = [seal.step, seal.nbytes, *(g.counter for g in generations), *([seal.base.step] if seal.base else [])]
    if not 0 <= seal.shard < seal.world <= _MAX or any(not 0 <= n <= _MAX for n in numbers):
        raise CorruptSnapshot("seal: a number out of bounds")
    if any(len(g.id) != 16 or not {*g.id} <= {*"0123456789abcdef"} for g in generations):
        raise CorruptSnapshot("seal: a generation's id is not 16 hex digits")
    if not 1 <= seal.chunk_nbytes <= _MAX or -(-seal.nbytes // seal.chunk_nbytes) != len(seal.crcs):
        raise CorruptSnapshot("seal: size and number of checksums do not belong together")
    if seal.crcs and not 0 <= min(seal.crcs) <= max(seal.crcs) < 1 << 32:
        raise CorruptSnapshot("seal: a checksum out of bounds")
    return seal


def agree(seal: Seal, layout: Layout) -> None:
    """Check that a seal and the header of its file speak of the same snapshot. Local.

    Raises
    ------
    CorruptSnapshot
        They do not: it is no snapshot.
    """
    pairs = {
        "run": (seal.run, layout.run),
        "shard": (seal.shard, layout.shard),
        "world": (seal.world, layout.world),
        "step": (seal.step, layout.step),
        "layout": (seal.layout, layout.hash),
        "size": (seal.nbytes, layout.file_nbytes),
    }
    for name, (said, found) in pairs.items():
        if said != found:
            raise CorruptSnapshot(f"seal says {name} {said}, the file {found}", run=seal.run, step=seal.step)
