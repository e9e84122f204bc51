"""``memckpt rm``: remove a run's memory from this node; see also `stored.rm`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from memckpt.cli import common
from memckpt.cli.stored import find
from memckpt.errors import ForeignMemory, RunInUse
from memckpt.memory.arena import Arena
from memckpt.memory.budget import format_nbytes


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser(
        "rm",
        help="remove a run's memory from this node",
        description="In memory: removes slots, seals and directory. A run that a living process holds is refused, "
        "always: end the process first. In storage: removes one checkpoint (--step), or all of a run that is named. "
        "The last complete one and what a job may be writing go only with --yes, what is not memckpt's never.",
    )
    common.add_options(parser, run=True)
    find.add_options(parser)
    parser.add_argument("--yes", action="store_true", help="in storage, also remove what is refused without")
    parser.add_argument("--force", action="store_true", help="it is no error when there is nothing of that name")
    parser.set_defaults(run=run)


def remove(arena: Arena) -> int:
    """Remove one run from one node; bytes freed. Local.

    Raises
    ------
    RunInUse
        A living process holds it; nothing was removed.
    ForeignMemory
        Something in it is not ours and was left.
    """
    held = arena.lock()  # from here on, a job of this name that starts waits for us
    try:
        # One that was there before may be starting, and about to restore what lies here.
        for pid in arena.live_pids():
            if pid != os.getpid():
                raise RunInUse(f"pid {pid} holds this run's memory", pid=pid, run=arena.run.name, path=str(arena.path))
        nbytes = arena.slots_nbytes()
        arena.remove_all()
        return nbytes
    finally:
        held.release()
        arena.tidy()


def run(args: argparse.Namespace) -> int:
    """Carry the command out; 1 when something was not removed. Local."""
    target = find.target(args)
    if target is not None:
        from memckpt.cli.stored import rm

        return rm.run(args, target)
    arenas = common.find(args) if args.force and args.name is not None else common.find_or_fail(args)
    removed: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for arena in arenas:
        says = {"name": arena.run.name, "job": arena.run.job, "node": arena.node, "path": str(arena.path)}
        try:
            removed.append({**says, "bytes": remove(arena)})
        except RunInUse as error:
            refused.append({**says, "pid": error.pid, "reason": error.message})
        except ForeignMemory as error:
            refused.append({**says, "pid": None, "reason": str(error)})
    if args.json:
        common.print_json({"removed": removed, "refused": refused})
    else:
        for item in removed:
            print(f"removed {item['path']}: {format_nbytes(item['bytes'])}")
        for item in refused:
            print(f"memckpt: not removed: {item['path']}: {item['reason']}", file=sys.stderr)
    return 1 if refused else 0
