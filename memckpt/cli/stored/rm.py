"""``memckpt rm DIR``: remove one checkpoint, or all of a run, from a storage."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from memckpt.cli import common
from memckpt.cli.stored import describe
from memckpt.cli.stored.find import Target, chosen, may_be_written, newest, nothing, remove, told
from memckpt.errors import MemckptError, UsageError
from memckpt.memory.budget import format_nbytes
from memckpt.storage import checkpoints
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored


def run(args: argparse.Namespace, target: Target) -> int:
    """Carry the command out; 1 when something was not removed. Local."""
    if args.step is None and args.generation is not None:
        raise UsageError("--generation goes with --step")
    found = checkpoints.scan(target.storage, target.run)
    if target.run is None:
        runs = ", ".join(sorted({s.run for s in found})) or "none"
        raise UsageError(f"name the run (--run NAME) in {target.storage.url}; there are: {runs}")
    named = chosen(target, args, found)
    if not named and not args.force:
        raise nothing(target)
    if args.step is not None and len(named) > 1:
        ids = ", ".join(s.generation_id for s in named)
        raise UsageError(f"step {args.step} is there in several generations: add --generation, one of {ids}")
    is_last = any(s.complete for s in named) and not any(s.complete and s not in named for s in found)
    removed: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    top = newest(named).get(target.run)
    for stored in sorted(named, key=lambda s: s is top):  # broken off on the way, the newest is still there
        says = {"run": stored.run, "step": None if stored.stray else stored.step, "path": stored.path}
        try:
            why = _why_not(target.storage, stored, found, top if is_last else None, sure=args.yes)
            why = why or remove(target.storage, stored)
        except (MemckptError, OSError) as error:
            why = told(error)
        if why:
            refused.append({**says, "state": describe.state(stored), "reason": why})
        else:
            removed.append({**says, "nbytes": stored.nbytes})
    if removed and args.yes:  # without it a run never becomes empty
        try:
            target.storage.remove([f"{target.run}/"])  # only where nothing is left in it
        except OSError as error:
            refused.append(
                {"run": target.run, "step": None, "path": target.run, "state": "empty", "reason": told(error)}
            )
    if args.json:
        common.print_json({"storage": target.storage.url, "removed": removed, "refused": refused})
    else:
        for item in removed:
            print(f"removed {item['path']}: {format_nbytes(item['nbytes'])}")
        for item in refused:
            print(f"memckpt: not removed: {item['path']}: {item['reason']}", file=sys.stderr)
    return 1 if refused else 0


def _why_not(storage: Storage, stored: Stored, found: list[Stored], last: Stored | None, *, sure: bool) -> str:
    """Why it stays; empty where it may go. Strays stay always, the rest goes where the user is sure.

    `last` is the run's newest complete checkpoint where all that are complete were named; then nothing goes.
    """
    if stored.stray:
        return stored.reason
    if sure:
        return ""
    if stored is last:
        return "the last complete checkpoint of the run; --yes removes it"
    why = "" if stored.complete else may_be_written(storage, stored, found)
    if last is not None and not why:
        kind = "older than the last complete checkpoint" if stored.complete else "incomplete"
        why = f"{kind}, and named together with the last complete one"
    return f"{why}; --yes removes it" if why else ""
