"""``memckpt ls DIR``: the checkpoints in a storage, complete or not and why, what is none, where to look further."""

from __future__ import annotations

import argparse

from rich.markup import escape

from memckpt.cli import common
from memckpt.cli.stored import describe, glance
from memckpt.cli.stored.find import Target, chosen, deeper
from memckpt.memory.budget import format_nbytes
from memckpt.storage import checkpoints

_COLORS = {"complete": "green", "damaged": "bold red", "incomplete": "yellow", "deeper": "cyan", "stray": "dim"}


def run(args: argparse.Namespace, target: Target) -> int:
    """Carry the command out. Local, reads only."""
    found = checkpoints.scan(target.storage, target.run)
    wanted = chosen(target, args, found)
    rows = describe.all_of(target.storage, found, wanted)
    glance.look(target.storage, wanted, rows)
    below = deeper(target, wanted)
    for says in rows:
        places = below.get(says["path"], [])
        if places:
            more = f" (and {len(places) - 1} more beside it)" if len(places) > 1 else ""
            says |= {"state": "deeper", "reason": f"a run lies further down: memckpt ls {places[0]}{more}"}
        says["runs"] = places
    counts = {state: sum(says["state"] == state for says in rows) for state in _COLORS}
    if args.json:
        common.print_json({"storage": target.storage.url, "checkpoints": rows, **counts})
        return 0
    out = common.console()
    if not rows:
        out.print(f"no checkpoints in {escape(target.storage.url)}", soft_wrap=True)
        return 0
    table = common.table(
        "RUN", "STEP", "GENERATION", "STATE", "SHARDS", "BYTES", "AGE", "METRICS", "",
        right=("STEP", "BYTES", "AGE"),
    )  # fmt: skip
    for says in rows:
        state = f"[{_COLORS[says['state']]}]{says['state']}[/]" + (", newest" if says["newest"] else "")
        run_name, step, generation = describe.name(says)
        table.add_row(
            escape(run_name),
            step,
            generation,
            state,
            describe.shards(says),
            format_nbytes(says["nbytes"]),
            describe.age(says),
            escape(describe.metrics(says)),
            escape(says["reason"] or ""),
        )
    out.print(table)
    if glance.note(rows):
        out.print(glance.note(rows), soft_wrap=True)
    return 0
