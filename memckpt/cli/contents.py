"""What a snapshot contains, for the commands of both tiers: its seal and its tensors."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from memckpt.cli import common
from memckpt.format.seal import Seal
from memckpt.memory import files
from memckpt.memory.arena import Arena

if TYPE_CHECKING:
    from memckpt.format.header import Parsed


def seal_dict(seal: Seal) -> dict[str, Any]:
    """A seal for people and programs; checksums are only counted. Local."""
    base = seal.base
    return {
        "shard": seal.shard,
        "world": seal.world,
        "step": seal.step,
        "generation": seal.generation.counter,
        "generation_id": seal.generation.id,
        "base": None
        if base is None
        else {"generation": base.generation.counter, "generation_id": base.generation.id, "step": base.step},
        "layout": seal.layout,
        "nbytes": seal.nbytes,
        "chunks": len(seal.crcs),
        "chunk_nbytes": seal.chunk_nbytes,
        "created": seal.created,
    }


def of_slot(arena: Arena, slot: str, nbytes: int) -> dict[str, Any]:
    """What lies in a slot, as `tensors` says it. Local.

    Raises
    ------
    CorruptSnapshot, ProtocolError
        The header is not that of a snapshot.
    """
    from memckpt.format.header import parse  # imports torch, which the other commands can do without

    fd = files.open_checked(arena.data_path(slot))
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view, view[:nbytes] as whole:
            parsed = parse(whole, nbytes)
    finally:
        os.close(fd)
    return tensors(parsed)


def tensors(parsed: Parsed) -> dict[str, Any]:
    """Every named tensor ("entries"), the first byte of the data, and the bytes of plain values. Local."""
    rows = [
        {
            "key": named.key,
            "dtype": named.dtype,
            "shape": list(named.shape),
            "nbytes": entry.nbytes,
            "offset": entry.offset,
            "global_shape": None if entry.global_shape is None else list(entry.global_shape),
            "offsets": None if entry.offsets is None else list(entry.offsets),
            "shares": None if named.key == entry.key else entry.key,
        }
        for entry in parsed.entries
        for named in entry.names()
    ]
    return {"entries": rows, "data_offset": parsed.data_offset, "plain_nbytes": len(parsed.plain)}


def show(out: Console, says: dict[str, Any]) -> None:
    """A table of the tensors that `tensors` told, or the reason why there is none. Local."""
    if "entries" not in says:
        out.print(escape(says["reason"]), soft_wrap=True)
        return
    rows = common.table("KEY", "DTYPE", "SHAPE", "BYTES", "SHARES", right=("BYTES",))
    for entry in says["entries"]:
        shape = str(entry["shape"])
        if entry["global_shape"] is not None:
            shape += f" at {entry['offsets']} of {entry['global_shape']}"
        rows.add_row(
            escape(entry["key"]),
            entry["dtype"],
            escape(shape),
            str(entry["nbytes"]),
            escape(entry["shares"] or ""),
        )
    out.print(rows)
    out.print(f"{len(says['entries'])} tensors, {says['plain_nbytes']} bytes of plain values")
