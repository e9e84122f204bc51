"""``memckpt prune DIR``: remove from a storage what no rule keeps."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from memckpt.cli import common
from memckpt.cli.stored import describe, find
from memckpt.errors import MemckptError, UsageError
from memckpt.memory.budget import format_nbytes
from memckpt.policy.preserve import (
    AnyOf,
    BestN,
    EveryNSteps,
    LatestDuration,
    LatestN,
    PreserveContext,
    PreservePolicy,
    select,
)
from memckpt.policy.save import FixedInterval
from memckpt.policy.save import parse as parse_save
from memckpt.policy.selection import answers
from memckpt.storage import checkpoints
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored

Rule = tuple[str, PreservePolicy]
"""A policy, and the option that it came from."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser(
        "prune",
        help="remove checkpoints from storage that no rule keeps",
        description="Shows which checkpoints would go and which stay, and why; with --yes they go. What any of the "
        "--keep rules keeps stays, run by run, and the newest complete one always. Nothing that a job may be writing "
        "goes, and nothing that is not memckpt's.",
    )
    parser.add_argument("where", metavar="DIR|URL", help="the storage, or a run's directory in it")
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="only this run (default: each run)")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N")
    parser.add_argument(
        "--keep-every", type=int, action="append", default=[], metavar="N", help="keep steps that are multiples of N"
    )
    parser.add_argument(
        "--keep-best",
        action="append",
        default=[],
        metavar="METRIC:min|max:N",
        help="keep the N best by a metric, and those that do not have it (loss:min:3)",
    )
    parser.add_argument(
        "--keep-for", metavar="TIME", help="keep those of this time before the newest (90s, 30min, 12h, 7d)"
    )
    parser.add_argument(
        "--incomplete", action="store_true", help="also remove what never became complete and no job can be writing"
    )
    sure = parser.add_mutually_exclusive_group()
    sure.add_argument("--yes", action="store_true", help="remove; without it nothing is")
    sure.add_argument("--dry-run", action="store_true", help="only show (the default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def rules_of(args: argparse.Namespace) -> list[Rule]:
    """The policies that the options mean.

    Raises
    ------
    UsageError
        One of them means nothing, or there is none at all.
    """
    rules: list[Rule] = []
    if args.keep is not None:
        rules.append((f"--keep {args.keep}", LatestN(args.keep)))
    rules += [(f"--keep-every {n}", EveryNSteps(n)) for n in args.keep_every]
    rules += [(f"--keep-best {text}", _best(text)) for text in args.keep_best]
    if args.keep_for is not None:
        rules.append((f"--keep-for {args.keep_for}", LatestDuration(_seconds(args.keep_for))))
    if not rules and not args.incomplete:
        raise UsageError("say what to keep (--keep, --keep-every, --keep-best, --keep-for), or --incomplete")
    return rules


def _best(text: str) -> BestN:
    metric, mode, count = ["", "", "", *text.rsplit(":", 2)][-3:]
    if not metric or mode not in ("min", "max") or not count.isdecimal():
        raise UsageError(f"--keep-best takes METRIC:min:N or METRIC:max:N, such as loss:min:3, not {text!r}")
    return BestN(int(count), metric, "min" if mode == "min" else "max")


def _seconds(text: str) -> float:
    try:
        policy = parse_save(text)
    except UsageError:
        policy = None
    if not isinstance(policy, FixedInterval):
        raise UsageError(f"--keep-for takes a time, such as 90s, 30min, 12h or 7d, not {text!r}")
    return policy.seconds


def plan(
    storage: Storage, found: Sequence[Stored], rules: Sequence[Rule], *, incomplete: bool, now_s: float
) -> dict[str, tuple[bool, list[str]]]:
    """What goes, of what a scan of one run found. Local, reads only.

    Returns
    -------
    dict
        By path, whether it goes, and why so.
    """
    decided: dict[str, tuple[bool, list[str]]] = {}
    complete = sorted((s for s in found if s.complete), key=find.age_order)
    infos = [s.info for s in complete]
    context = PreserveContext(
        now_s=now_s,
        tier="storage",
        nbytes_total=sum(info.nbytes for info in infos),
        free_nbytes=storage.free_nbytes(),
    )
    if complete and rules:
        said = {option: answers(policy, infos, context) for option, policy in rules}
        gone = select(AnyOf(*(policy for _, policy in rules)), infos, context=context)
        for at, (stored, info) in enumerate(zip(complete, infos, strict=True)):
            goes = any(info is one for one in gone)
            why = [option for option, flags in said.items() if flags[at]]
            why += ["the newest complete one"] if at == len(complete) - 1 else []
            decided[stored.path] = (goes, ["no rule keeps it"] if goes else why)
    for stored in found:
        if stored.stray:
            decided[stored.path] = (False, [stored.reason])
        elif not stored.complete:
            why_not = find.may_be_written(storage, stored, found)
            if incomplete and not why_not:
                decided[stored.path] = (True, [f"incomplete: {stored.reason}"])
            else:
                decided[stored.path] = (False, [why_not or "incomplete; --incomplete removes it", stored.reason])
        elif not rules:
            decided[stored.path] = (False, ["complete, and no --keep rule was given"])
    return decided


def run(args: argparse.Namespace) -> int:
    """Carry the command out; 1 when something could not be removed. Local."""
    rules = rules_of(args)
    target = find.opened(args.where, args.run_name)
    if target.path is not None:
        raise UsageError("prune takes a storage or a run in it; memckpt rm removes one checkpoint", path=target.path)
    found = checkpoints.scan(target.storage, target.run)
    if target.run is not None and not found:
        raise find.nothing(target)
    decided: dict[str, tuple[bool, list[str]]] = {}
    for name in sorted({s.run for s in found}):
        of_run = [s for s in found if s.run == name]
        decided |= plan(target.storage, of_run, rules, incomplete=args.incomplete, now_s=time.time())
    rows = [
        says | {"remove": decided[says["path"]][0], "why": decided[says["path"]][1]}
        for says in describe.all_of(target.storage, found, found)
    ]
    goes = [s for s in found if decided[s.path][0]]
    removed, refused = _remove(target.storage, goes) if args.yes else ([], [])
    if args.json:
        common.print_json(
            {
                "storage": target.storage.url,
                "rules": [option for option, _ in rules],
                "dry_run": not args.yes,
                "checkpoints": rows,
                "removed": [s.path for s in removed],
                "removed_nbytes": sum(s.nbytes for s in removed),
                "refused": refused,
            }
        )
    else:
        _show(rows, goes, removed, refused, sure=args.yes)
    return 1 if refused else 0


def _remove(storage: Storage, goes: Sequence[Stored]) -> tuple[list[Stored], list[dict[str, str]]]:
    removed: list[Stored] = []
    refused: list[dict[str, str]] = []
    for stored in goes:
        try:
            why = find.remove(storage, stored)
        except (MemckptError, OSError) as error:
            why = find.told(error)
        if why:
            refused.append({"path": stored.path, "reason": why})
        else:
            removed.append(stored)
    return removed, refused


def _show(
    rows: Sequence[dict[str, Any]],
    goes: Sequence[Stored],
    removed: Sequence[Stored],
    refused: Sequence[dict[str, str]],
    *,
    sure: bool,
) -> None:
    out = common.console()
    table = common.table(
        "", "RUN", "STEP", "GENERATION", "BYTES", "AGE", "METRICS", "WHY", right=("STEP", "BYTES", "AGE")
    )
    for says in rows:
        run_name, step, generation = describe.name(says)
        table.add_row(
            "[red]goes[/]" if says["remove"] else "stays",
            escape(run_name),
            step,
            generation,
            format_nbytes(says["nbytes"]),
            describe.age(says),
            escape(describe.metrics(says)),
            escape("; ".join(says["why"])),
        )
    if rows:
        out.print(table)
    if sure:
        out.print(f"removed {len(removed)} of {len(rows)}, {format_nbytes(sum(s.nbytes for s in removed))}")
    elif goes:
        nbytes = format_nbytes(sum(s.nbytes for s in goes))
        out.print(f"would remove {len(goes)} of {len(rows)}, {nbytes}; nothing was removed: --yes removes them")
    else:
        out.print("nothing to remove")
    for item in refused:
        print(f"memckpt: not removed: {item['path']}: {item['reason']}", file=sys.stderr)
