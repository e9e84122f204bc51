"""``memckpt demo``: lose a rank of a real training run, get it back, and have it proved by somebody else."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from typing import Any

import msgspec
from rich.console import Console


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser(
        "demo",
        help="kill a rank of a training run and prove that it comes back bit for bit",
        description="Trains a small GPT under mpirun, kills a rank in mid-step, and compares every loss and the final "
        "parameters byte for byte with an uninterrupted run. The exit status is 0 only if everything was proved.",
    )
    parser.add_argument("--seed", type=int, help="decides data, victim and moment (default: drawn, and told)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps (default: 24)")
    parser.add_argument("--active", type=int, default=4, help="ranks that train (default: 4)")
    parser.add_argument("--spares", type=int, default=1, help="ranks that wait (default: 1)")
    parser.add_argument(
        "--signal", choices=("KILL", "STOP"), default="KILL", help="what the victim gets (default: KILL)"
    )
    parser.add_argument(
        "--scenario",
        choices=("in-job", "relaunch", "storage"),
        default="in-job",
        help="in-job: one rank dies, a spare takes its place; relaunch: the whole job dies, one of two pretended nodes "
        "loses its memory, and the job is started again with its ranks permuted; storage: the whole job dies and both "
        "nodes lose their memory, so that owner and buddy are gone, and the state comes from storage (default: in-job)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until it gives up (default: 300)")
    parser.add_argument("--keep", action="store_true", help="keep the run's memory and the logs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a timeline")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the demonstration through; 0 only if everything was proved. Local: starts and ends its own jobs."""
    from memckpt.demo import observer, timeline

    problem = _unfit(args)
    if problem:
        print(f"memckpt demo: {problem}", file=sys.stderr)
        return 2
    settings = observer.Settings(
        seed=secrets.randbelow(1 << 16) if args.seed is None else args.seed,
        steps=args.steps,
        active=args.active,
        spares=args.spares,
        signal=signal.Signals[f"SIG{args.signal}"],
        scenario=args.scenario,
        keep=args.keep,
        timeout_s=args.timeout,
    )
    told = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        verdict, recovery = observer.observe(settings, lambda message: told.print(f"memckpt demo: {message}"))
    except (observer.DemoFailed, OSError) as error:
        return _failed(error, settings, args.json)
    if args.json:
        print(msgspec.json.encode(verdict).decode(), flush=True)
    else:
        width = None if sys.stdout.isatty() else 120
        timeline.show(Console(highlight=False, width=width), verdict, recovery)
    return 0 if verdict.proved else 1


def _unfit(args: argparse.Namespace) -> str | None:
    if args.active < 2:
        return "--active must be 2 or more: a lone rank has no peer"
    if args.steps < 8:
        return "--steps must be 8 or more, so that there is something before and after the failure"
    if args.scenario == "in-job" and args.spares < 1:
        return "--spares must be 1 or more, to take the lost rank's place"
    if args.scenario != "in-job" and args.signal != "KILL":
        return f"--scenario {args.scenario} kills the whole job; --signal STOP has no meaning there"
    if args.seed is not None and args.seed < 0:
        return "--seed must not be negative"
    return None


def _failed(error: Exception, settings: Any, as_json: bool) -> int:
    output = getattr(error, "output", "")
    if output:
        print(output, file=sys.stderr)
    print(f"memckpt demo: not proved: {error}", file=sys.stderr)
    if as_json:
        told = {"scenario": settings.scenario, "seed": settings.seed, "proved": False, "problems": [str(error)]}
        print(msgspec.json.encode(told).decode(), flush=True)
    return 1
