"""The command line. Each command is a module with `add_parser`; only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from memckpt.errors import MemckptError

COMMANDS = {
    "demo": "kill a rank of a training run and prove that it comes back bit for bit",
    "ls": "list the runs in this node's memory, or the checkpoints in a storage",
    "inspect": "show seals and tensors of a run's snapshots, in memory or in a storage",
    "verify": "check every byte of a run's snapshots against their seals, in memory or in a storage",
    "rm": "remove a run's memory from this node, or a checkpoint from a storage",
    "prune": "remove checkpoints from a storage that no rule keeps",
    "doctor": "find out what works on this machine, what is missing and what to do",
}


def _version() -> str:
    try:
        return importlib.metadata.version("memckpt")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


class _JsonParser(argparse.ArgumentParser):
    """A parser that says as one JSON object what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        _fail(message, as_json=True)
        self.exit(2)


def _fail(text: str, *, as_json: bool) -> None:
    """Say why the command could not be carried out: to people, or as the one JSON object of --json."""
    if as_json:
        print(json.dumps({"error": text}), flush=True)
    else:
        print(f"memckpt: {text}", file=sys.stderr)


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `argv`, with the options of the command in it."""
    kind = _JsonParser if "--json" in argv else argparse.ArgumentParser  # subparsers are of the same kind
    parser = kind(
        prog="memckpt", description="Checkpoints in memory and in storage: what there is, and whether it is good."
    )
    parser.add_argument("--version", action="version", version=f"memckpt {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"memckpt.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Local.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; default are those of the process.

    Returns
    -------
    int
        Exit status: 0 good, 1 something is wrong with what was looked at, 2 the command could not be carried out; with
        --json it prints one JSON object then, too, and "error" in it says why.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(argv).parse_args(argv)
    as_json = bool(getattr(args, "json", False))
    try:
        return int(args.run(args))
    except MemckptError as error:
        _fail(str(error), as_json=as_json)
        return 2
    except BrokenPipeError:
        # The reader has gone (a pager, head); the interpreter must not try to flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _fail(str(error), as_json=as_json)
        return 2
    except KeyboardInterrupt:
        if as_json:
            _fail("interrupted", as_json=True)
        return 130
