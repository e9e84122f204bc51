"""What several commands need: finding runs, and printing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from memckpt.errors import ForeignMemory, MemckptError, UsageError
from memckpt.memory.arena import Arena, default_base


def add_options(parser: argparse.ArgumentParser, *, run: bool) -> None:
    """The options that every command on runs has; with `run`, the run has to be named."""
    what = "a run in memory, NAME or NAME@JOB; or in storage, a directory, or a path or URL with a / in it"
    parser.add_argument("name", metavar="RUN|DIR|URL", nargs="?", help=what if run else f"only this: {what}")
    parser.add_argument("--base", help="where memory lies (default: MEMCKPT_SHM, else /dev/shm)")
    parser.add_argument("--node", help="only this node's name (default: every one that is found here)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True)
class Place:
    """A directory that looks like a run's; `arena` is None when it cannot be used, and `problem` says why."""

    path: str
    node: str
    name: str
    job: str
    arena: Arena | None
    problem: str | None = None


def places(base: str | None = None, node: str | None = None) -> list[Place]:
    """Every run of this user under `base`, by node and name. Reads only; runs that vanish meanwhile are left out."""
    base = os.path.abspath(base or default_base())
    root = os.path.join(base, f"memckpt-{os.getuid()}")
    found: list[Place] = []
    for node_name in _directories(root):
        if node not in (None, node_name):
            continue
        for entry in _directories(os.path.join(root, node_name)):
            name, _, job = entry.partition("@")
            path = os.path.join(root, node_name, entry)
            try:
                arena = Arena.open(name, job=job, node=node_name, base=base, create=False)
                found.append(Place(path, node_name, name, job, arena))
            except FileNotFoundError:
                continue
            except (MemckptError, OSError) as error:
                found.append(Place(path, node_name, name, job, None, str(error)))
    return found


def _directories(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ForeignMemory(f"cannot be read: {error.strerror}", path=path) from None


def find(args: argparse.Namespace) -> list[Arena]:
    """The memory of the run that `args` names, one for each node here. Empty when there is none.

    Raises
    ------
    UsageError
        The name fits several jobs.
    ForeignMemory
        What is there is not ours.
    """
    name, at, job = args.name.partition("@")
    job = job if at else os.environ.get("MEMCKPT_JOB")
    fitting = [p for p in places(args.base, args.node) if p.name == name and job in (None, p.job)]
    jobs = sorted({p.job for p in fitting})
    if len(jobs) > 1:
        choices = ", ".join(f"{name}@{j}" if j else f"{name}@ (no job)" for j in jobs)
        raise UsageError(f"there are several runs of that name: {choices}", run=name)
    for place in fitting:
        if place.arena is None:
            raise ForeignMemory(str(place.problem), run=name)
    return [p.arena for p in fitting if p.arena is not None]


def find_or_fail(args: argparse.Namespace) -> list[Arena]:
    """Like `find`, but UsageError when there is none."""
    if args.name is None:
        raise UsageError("name a run in memory, or a directory or URL of a storage")
    arenas = find(args)
    if not arenas:
        where = args.base or default_base()
        raise UsageError(f"no run {args.name!r} in {where} on this node; memckpt ls shows what there is")
    return arenas


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value), flush=True)


def console(width: int = 200) -> Console:
    """Where tables go: as wide as the terminal, or `width` when nobody looks at it on one."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=width)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with these columns; those in `right` are numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def numbers(values: list[int]) -> str:
    """Ascending whole numbers in short: "0-3, 7"."""
    parts: list[str] = []
    ordered = sorted(set(values))
    start = 0
    for i in range(len(ordered)):
        if i + 1 == len(ordered) or ordered[i + 1] != ordered[i] + 1:
            first, last = ordered[start], ordered[i]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i + 1
    return ", ".join(parts)


def shards(there: list[int], world: int | None) -> str:
    """How many shards are there, and which where not all are: "all 4", "2 of 4: 0-1", "none of 4"."""
    if world is not None and set(there) == set(range(world)):
        return f"all {world}"
    of = f"of {'?' if world is None else world}"
    return f"{len(set(there))} {of}: {numbers(there)}" if there else f"none {of}"
