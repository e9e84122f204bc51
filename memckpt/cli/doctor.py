"""``memckpt doctor``: what works on this machine, what is missing, what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

from rich.markup import escape

from memckpt.cli import checks, common, mpicheck
from memckpt.cli.checks import Check
from memckpt.memory.arena import default_base
from memckpt.memory.budget import format_nbytes

_ORDER = ("ok", "warn", "fail")
_WIDTH = 120


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser(
        "doctor",
        help="find out what works on this machine, what is missing and what to do",
        description="Exit status 1 when something that memckpt needs does not work.",
    )
    parser.add_argument("--base", help="where memory lies (default: MEMCKPT_SHM, else /dev/shm)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each small MPI job (default: 30)")
    parser.add_argument("--no-mpi", action="store_true", help="start no MPI job")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def left_over(base: str) -> Check:
    """Memory of runs that no process holds."""
    runs, nbytes = [], 0
    for place in common.places(base):
        if place.arena is None:
            return Check("memory left behind", "warn", str(place.problem), "look at it; memckpt leaves it alone")
        try:
            if not place.arena.live_pids():
                nbytes += place.arena.slots_nbytes()
                runs.append(place.name)
        except FileNotFoundError:
            continue
    if not runs:
        return Check("memory left behind", "ok", "none")
    names = ", ".join(sorted(set(runs))[:5])
    found = f"{format_nbytes(nbytes)} of {len(runs)} runs that no process holds ({names}); a restart finds it again"
    return Check("memory left behind", "ok", found)


def examine(base: str, *, mpi: bool = True, timeout_s: float = 30.0) -> list[Check]:
    """Every check; one that breaks is a finding, too. Local."""
    single: list[tuple[str, Callable[[], Check]]] = [
        ("memory for slots", partial(checks.memory_place, base)),
        ("memory limits", partial(checks.memory_limits, base)),
        ("locked memory", checks.locked_memory),
        ("processor", checks.processor),
        ("kernel", checks.kernel),
        ("torch and CUDA", checks.cuda),
        ("what memory survives", partial(checks.survival, base)),
        ("memory left behind", partial(left_over, base)),
        ("Open MPI's left-over segments", partial(checks.forsaken_segments, base)),
    ]
    found: list[Check] = []
    if mpi:
        try:
            found += mpicheck.checks(timeout_s)
        except Exception as error:
            found.append(Check("MPI", "fail", f"{type(error).__name__}: {error}", "report this"))
    for name, check in single:
        try:
            found.append(check())
        except Exception as error:  # a broken machine must not keep the other findings from being told
            found.append(Check(name, "fail", f"{type(error).__name__}: {error}", "report this"))
    return found


def run(args: argparse.Namespace) -> int:
    """Carry the command out; 1 when a check failed. Local."""
    base = os.path.abspath(args.base or default_base())
    found = examine(base, mpi=not args.no_mpi, timeout_s=args.timeout)
    worst = max((c.status for c in found), key=_ORDER.index)
    if args.json:
        common.print_json({"status": worst, "checks": [c.as_dict() for c in found]})
        return 1 if worst == "fail" else 0
    out = common.console(width=_WIDTH)
    table = common.table("", "CHECK", "FOUND")
    colors = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in found:
        text = escape(check.found) + (f"\n[dim]{escape(check.advice)}[/]" if check.advice else "")
        table.add_row(f"[{colors[check.status]}]{check.status}[/]", escape(check.name), text)
    out.print(table)
    return 1 if worst == "fail" else 0
