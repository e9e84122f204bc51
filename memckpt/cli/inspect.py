"""``memckpt inspect``: seals and tensors of a run's snapshots in memory; see also `stored.inspect`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from memckpt.cli import common, contents
from memckpt.cli.stored import find
from memckpt.errors import MemckptError, UsageError
from memckpt.memory.arena import Arena, Found
from memckpt.memory.budget import format_nbytes

if TYPE_CHECKING:
    pass


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser("inspect", help="show seals and tensors of a run's snapshots")
    common.add_options(parser, run=True)
    parser.add_argument("--slot", help="show the tensors of this slot, too")
    find.add_options(parser)
    parser.add_argument("--shard", type=int, help="show the tensors of this shard in storage, too")
    parser.set_defaults(run=run)


def _slot_dict(arena: Arena, found: Found, *, with_entries: bool) -> dict[str, Any]:
    says: dict[str, Any] = {
        "node": arena.node,
        "slot": found.slot,
        "path": arena.data_path(found.slot),
        "nbytes": found.nbytes,
        "reason": found.reason,
        "seal": None if found.seal is None else contents.seal_dict(found.seal),
    }
    if with_entries and found.seal is not None:
        try:
            says |= contents.of_slot(arena, found.slot, found.seal.nbytes)
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
        "NODE", "SLOT", "STEP", "SHARD", "WORLD", "GENERATION", "BASE", "BYTES", "CHUNKS", "LAYOUT", "",
        right=("STEP", "SHARD", "WORLD", "BYTES", "CHUNKS"),
    )  # fmt: skip
    for slot in slots:
        seal = slot["seal"]
        if seal is None:
            row = ["-", "-", "-", "-", "-", format_nbytes(slot["nbytes"]), "-", "-", escape(slot["reason"] or "")]
        else:
            base = seal["base"]
            row = [
                str(seal["step"]),
                str(seal["shard"]),
                str(seal["world"]),
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
            contents.show(out, slot)
    return 0
