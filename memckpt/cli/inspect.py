"""``memckpt inspect``: seals and tensors of a run's snapshots in memory; see also `stored.inspect`."""

from __future__ import annotations

import argparse
import mmap
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from memckpt.cli import common
from memckpt.cli.stored import find
from memckpt.errors import MemckptError, UsageError
from memckpt.format.seal import Seal
from memckpt.memory import files
from memckpt.memory.arena import Arena, Found
from memckpt.memory.budget import format_nbytes

if TYPE_CHECKING:
    from memckpt.format.header import Parsed


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser("inspect", help="show seals and tensors of a run's snapshots")
    common.add_options(parser, run=True)
    parser.add_argument("--slot", help="show the tensors of this slot, too")
    find.add_options(parser)
    parser.add_argument("--shard", type=int, help="show the tensors of this shard in storage, too")
    parser.set_defaults(run=run)


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


def contents_of(arena: Arena, slot: str, nbytes: int) -> dict[str, Any]:
    """What lies in a slot, as `contents` says it. Local.

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
    return contents(parsed)


def contents(parsed: Parsed) -> dict[str, Any]:
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


def _slot_dict(arena: Arena, found: Found, *, with_entries: bool) -> dict[str, Any]:
    says: dict[str, Any] = {
        "node": arena.node,
        "slot": found.slot,
        "path": arena.data_path(found.slot),
        "nbytes": found.nbytes,
        "reason": found.reason,
        "seal": None if found.seal is None else seal_dict(found.seal),
    }
    if with_entries and found.seal is not None:
        try:
            says |= contents_of(arena, found.slot, found.seal.nbytes)
        except (MemckptError, OSError) as error:
            says["reason"] = str(error)
    return says


def run(args: argparse.Namespace) -> int:
    """Carry the command out. Local."""
    target = find.target(args)
    if target is not None:
        from memckpt.cli.stored import inspect

        return inspect.run(args, target)
    slots = [
        _slot_dict(arena, found, with_entries=args.slot is not None)
        for arena in common.find_or_fail(args)
        for found in arena.inventory()
        if args.slot in (None, found.slot)
    ]
    if args.slot is not None and not slots:
        raise UsageError(f"no slot {args.slot!r} of this run on this node", run=args.name)
    if args.json:
        common.print_json({"run": args.name, "slots": slots})
        return 0
    out = common.console()
    table = common.table(
        "NODE", "SLOT", "STEP", "SHARD", "GENERATION", "BASE", "BYTES", "CHUNKS", "LAYOUT", "",
        right=("STEP", "BYTES", "CHUNKS"),
    )  # fmt: skip
    for slot in slots:
        seal = slot["seal"]
        if seal is None:
            row = ["-", "-", "-", "-", format_nbytes(slot["nbytes"]), "-", "-", escape(slot["reason"] or "")]
        else:
            base = seal["base"]
            row = [
                str(seal["step"]),
                f"{seal['shard']} of {seal['world']}",
                f"{seal['generation']} ({escape(seal['generation_id'][:8])})",
                "-" if base is None else f"{base['generation']}, step {base['step']}",
                format_nbytes(seal["nbytes"]),
                str(seal["chunks"]),
                escape(seal["layout"][:12]),
                escape(slot["reason"] or ""),
            ]
        table.add_row(escape(slot["node"]), slot["slot"], *row)
    out.print(table)
    for slot in slots:
        if "entries" in slot:
            out.print()
            show_contents(out, slot)
    return 0


def show_contents(out: Console, says: dict[str, Any]) -> None:
    """A table of the tensors that `contents` told, or the reason why there is none. Local."""
    if "entries" not in says:
        out.print(escape(says["reason"]), soft_wrap=True)
        return
    tensors = common.table("KEY", "DTYPE", "SHAPE", "BYTES", "SHARES", right=("BYTES",))
    for entry in says["entries"]:
        shape = str(entry["shape"])
        if entry["global_shape"] is not None:
            shape += f" at {entry['offsets']} of {entry['global_shape']}"
        tensors.add_row(
            escape(entry["key"]),
            entry["dtype"],
            escape(shape),
            str(entry["nbytes"]),
            escape(entry["shares"] or ""),
        )
    out.print(tensors)
    out.print(f"{len(says['entries'])} tensors, {says['plain_nbytes']} bytes of plain values")
