"""``memckpt verify DIR``: every byte of the checkpoints in a storage against their seals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from memckpt.cli import common
from memckpt.cli.stored import describe
from memckpt.cli.stored.find import Target, chosen, is_marked, nothing
from memckpt.errors import UsageError
from memckpt.memory.budget import format_nbytes
from memckpt.storage import checkpoints, reading
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored

MAX_TOLD = 20
"""Bad places that are told of one checkpoint; --json tells all."""


def check(
    storage: Storage, stored: Stored, *, threads: int, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Verify one checkpoint. Local, reads only.

    Returns
    -------
    dict
        `status` is "ok"; "damaged"; "incomplete" when it has no marker, be it that it is being written; or "removed"
        when it was pruned meanwhile. `bad` lists what is wrong: shard, path, chunk, reason.
    """
    says = describe.as_dict(storage, stored) | {"status": "ok", "bad": []}
    if not stored.complete:
        return says | {"status": "damaged" if is_marked(storage, stored) else "incomplete"}
    bad = reading.verify(storage, stored, threads=threads, progress=progress)
    if bad:
        if not is_marked(storage, stored):
            return says | {"status": "removed", "reason": "removed while it was read"}
        says |= {"status": "damaged", "reason": f"{len(bad)} bad chunks or files"}
    return says | {"bad": [entry._asdict() for entry in bad]}


def data_nbytes(stored: Stored) -> int:
    """Bytes that `check` reads of it, and tells its progress in."""
    return sum(shard.nbytes for shard in stored.marker.shards) if stored.complete and stored.marker else 0


def run(args: argparse.Namespace, target: Target) -> int:
    """Carry the command out; 1 when something is damaged, or nothing is complete. Local."""
    if args.slot is not None:
        raise UsageError("--slot is for memory")
    found = checkpoints.scan(target.storage, target.run)
    work = [s for s in chosen(target, args, found) if not s.stray]
    if not work:
        raise nothing(target)
    out = common.console()
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=args.json or not out.is_terminal) as progress:
        bar = progress.add_task("reading", total=sum(map(data_nbytes, work)) or 1)
        threads = max(1, args.threads)
        results = [
            check(target.storage, s, threads=threads, progress=lambda nbytes: progress.advance(bar, nbytes))
            for s in work
        ]
    count = {status: sum(r["status"] == status for r in results) for status in ("ok", "damaged", "incomplete")}
    failed = count["damaged"] > 0 or count["ok"] == 0
    if args.json:
        common.print_json({"storage": target.storage.url, "checkpoints": results, **count})
        return 1 if failed else 0
    table = common.table("RUN", "STEP", "GENERATION", "SHARDS", "BYTES", "STATUS", "", right=("STEP", "BYTES"))
    for r in results:
        run_name, step, generation = describe.name(r)
        color = {"ok": "green", "damaged": "bold red"}.get(r["status"], "yellow")
        table.add_row(
            escape(run_name),
            step,
            generation,
            describe.shards(r),
            format_nbytes(r["nbytes"]),
            f"[{color}]{r['status']}[/]",
            escape(r["reason"] or ""),
        )
    out.print(table)
    for r in results:
        for entry in r["bad"][:MAX_TOLD]:
            chunk = "" if entry["chunk"] is None else f"chunk {entry['chunk']} "
            out.print(escape(f"{entry['path']}: {chunk}{entry['reason']}"), soft_wrap=True)
        if len(r["bad"]) > MAX_TOLD:
            out.print(f"and {len(r['bad']) - MAX_TOLD} more")
    return 1 if failed else 0
