"""The command line. Each command is a module with `add_parser`; only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

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


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `argv`, with the options of the command in it."""
    parser = argparse.ArgumentParser(
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
        Exit status: 0 good, 1 something is wrong with what was looked at, 2 the command could not be carried out.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser(argv).parse_args(argv)
    try:
        return int(args.run(args))
    except MemckptError as error:
        print(f"memckpt: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone (a pager, head); the interpreter must not try to flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"memckpt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
