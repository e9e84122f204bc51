"""``memckpt ls``: the runs whose memory is on this node; see also `stored.ls`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape

from memckpt.cli import common
from memckpt.cli.stored import find
from memckpt.errors import MemckptError
from memckpt.memory.arena import Arena, default_base
from memckpt.memory.budget import format_nbytes


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser("ls", help="list the runs in this node's memory, or the checkpoints in a storage")
    common.add_options(parser, run=False)
    find.add_options(parser)
    parser.set_defaults(run=run)


def describe(arena: Arena) -> dict[str, Any]:
    """What is there of one run on one node, without reading its data. Local."""
    found = arena.inventory()
    snapshots: dict[tuple[int, str, int], dict[str, Any]] = {}
    for item in found:
        if item.seal is None:
            continue
        generation, step = item.seal.generation, item.seal.step
        entry = snapshots.setdefault(
            (generation.counter, generation.id, step),
            {
                "generation": generation.counter,
                "generation_id": generation.id,
                "step": step,
                "world": item.seal.world,
                "shards": [],
            },
        )
        entry["shards"] = sorted({*entry["shards"], item.seal.shard})
    try:
        pids: list[int] = arena.live_pids()
        problem = None
    except MemckptError as error:
        pids, problem = [], str(error)
    return {
        "name": arena.run.name,
        "job": arena.run.job,
        "node": arena.node,
        "path": str(arena.path),
        "snapshots": [snapshots[key] for key in sorted(snapshots, reverse=True)],
        "slots": len(found),
        "unsealed": sum(item.seal is None for item in found),
        "bytes": sum(item.nbytes for item in found),
        "live_pids": pids,
        "finished": arena.finished,
        "problems": [f"{f.slot}: {f.reason}" for f in found if f.reason not in (None, "no seal")]
        + ([problem] if problem else []),
    }


def run(args: argparse.Namespace) -> int:
    """Carry the command out. Local."""
    target = find.target(args)
    if target is not None:
        from memckpt.cli.stored import ls

        return ls.run(args, target)
    runs: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    wanted = None if args.name is None else {str(arena.path) for arena in common.find_or_fail(args)}
    for place in common.places(args.base, args.node):
        if wanted is not None and place.path not in wanted:
            continue
        if place.arena is None:
            refused.append({"path": place.path, "problem": str(place.problem)})
            continue
        try:
            runs.append(describe(place.arena))
        except FileNotFoundError:
            continue  # removed while we looked
    if args.json:
        common.print_json({"base": args.base or default_base(), "runs": runs, "refused": refused})
        return 0
    out = common.console()
    if not runs and not refused:
        out.print(f"no runs in {escape(args.base or default_base())}")
        return 0
    table = common.table(
        "RUN", "JOB", "NODE", "STEPS", "GENERATION", "SHARDS", "SLOTS", "BYTES", "LIVE", "STATE",
        right=("SLOTS", "BYTES"),
    )  # fmt: skip
    for row in runs:
        newest = row["snapshots"][:3]
        shards = [common.shards(s["shards"], s["world"]) for s in newest]
        state = "live" if row["live_pids"] else "finished" if row["finished"] else "left behind"
        table.add_row(
            escape(row["name"]),
            escape(row["job"]) or "-",
            escape(row["node"]),
            ", ".join(str(s["step"]) for s in newest) + (", ..." if len(row["snapshots"]) > 3 else "") or "-",
            str(newest[0]["generation"]) if newest else "-",
            (shards[0] if len(set(shards)) == 1 else "; ".join(shards)) or "-",
            str(row["slots"]),
            format_nbytes(row["bytes"]),
            ", ".join(map(str, row["live_pids"])) or "-",
            state + (f", {len(row['problems'])} problems" if row["problems"] else ""),
        )
    if runs:
        out.print(table)
    for item in refused:
        out.print(f"refused: {escape(item['problem'])}")
    return 0
