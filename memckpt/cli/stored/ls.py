"""``memckpt ls DIR``: the checkpoints in a storage, complete or not and why, and what is none."""

from __future__ import annotations

import argparse

from rich.markup import escape

from memckpt.cli import common
from memckpt.cli.stored import describe
from memckpt.cli.stored.find import Target, chosen
from memckpt.memory.budget import format_nbytes
from memckpt.storage import checkpoints

_COLORS = {"complete": "green", "incomplete": "yellow", "stray": "dim"}


def run(args: argparse.Namespace, target: Target) -> int:
    """Carry the command out. Local, reads only."""
    found = checkpoints.scan(target.storage, target.run)
    rows = describe.all_of(target.storage, found, chosen(target, args, found))
    counts = {state: sum(says["state"] == state for says in rows) for state in _COLORS}
    if args.json:
        common.print_json({"storage": target.storage.url, "checkpoints": rows, **counts})
        return 0
    out = common.console()
    if not rows:
        out.print(f"no checkpoints in {escape(target.storage.url)}", soft_wrap=True)
        return 0
    table = common.table(
        "RUN", "STEP", "GENERATION", "STATE", "RANKS", "BYTES", "AGE", "METRICS", "",
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
            describe.ranks(says),
            format_nbytes(says["nbytes"]),
            describe.age(says),
            escape(describe.metrics(says)),
            escape(says["reason"] or ""),
        )
    out.print(table)
    return 0
