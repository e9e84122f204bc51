"""``memckpt verify``: every byte of a run's snapshots in memory against their seals; see also `stored.verify`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from rich.markup import escape
from rich.progress import Progress

from memckpt import _native
from memckpt.cli import common, contents
from memckpt.cli.stored import find
from memckpt.errors import MemckptError, UsageError
from memckpt.format.seal import Seal
from memckpt.memory.arena import Arena, Found
from memckpt.memory.budget import format_nbytes

MAX_KEYS = 50
"""Names of tensors that are told of one damaged chunk."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line. Local."""
    parser = subparsers.add_parser(
        "verify",
        help="check every byte of a run's snapshots against their seals",
        description="Reads every sealed snapshot of the run on this node, or every checkpoint of a storage. Exit "
        "status 1 when one is damaged, and in a storage also when none is complete.",
    )
    common.add_options(parser, run=True)
    find.add_options(parser)
    parser.add_argument("--slot", help="only this slot")
    parser.add_argument("--threads", type=int, default=2, help="threads that read (default: 2)")
    parser.set_defaults(run=run)


def bad_chunks(memory: _native.SharedMemory, seal: Seal, threads: int) -> list[int]:
    """Indices of the chunks whose bytes are not those of the seal. Local."""
    none = np.empty(0, np.uint64)
    if seal.chunk_nbytes == _native.CHUNK_BYTES:
        crcs = _native.crc_sources(none, none, none, memory, seal.nbytes, None, threads).tolist()
    else:
        with memoryview(memory) as view:
            step = seal.chunk_nbytes
            crcs = [_native.crc32c(view[at : min(at + step, seal.nbytes)]) for at in range(0, seal.nbytes, step)]
    return [i for i, (now, then) in enumerate(zip(crcs, seal.crcs, strict=True)) if now != then]


def check(arena: Arena, name: str, *, threads: int = 2) -> dict[str, Any] | None:
    """Verify one slot; None when it has vanished. Local, reads only.

    Returns
    -------
    dict
        `status` is "ok", "unsealed", "damaged", or "changed" when the run wrote the slot meanwhile; `chunks` names each
        bad chunk with its bytes and the tensors in them.
    """
    says: dict[str, Any] = {"node": arena.node, "slot": name, "status": "ok", "reason": None, "step": None}
    says |= {"shard": None, "nbytes": 0, "chunks": []}
    for _ in range(3):
        found = arena.find(name)
        if found is None:
            return None
        seal, says["nbytes"] = _seal_of(arena, found), found.nbytes
        if seal is not None:
            says |= {"step": seal.step, "shard": seal.shard}
        if seal is None or seal.nbytes > found.nbytes:
            unsealed = found.reason == "no seal"
            return says | {"status": "unsealed" if unsealed else "damaged", "reason": found.reason}
        try:
            with arena.open_slot(name, writable=False) as slot:
                bad = bad_chunks(slot.memory, seal, threads)
            after = arena.find(name)
        except FileNotFoundError:
            return None
        if after is None:
            return None
        if _seal_of(arena, after) != seal:
            says |= {"status": "changed", "reason": "written again while it was read"}
            continue  # a live run goes on; what was read may be of two snapshots
        says |= {"status": "ok", "reason": None}
        if bad or found.reason is not None:
            says |= {"status": "damaged", "reason": found.reason or f"{len(bad)} of {len(seal.crcs)} chunks are bad"}
            says["chunks"] = [_chunk(i, seal, *_tensors(arena, name, seal)) for i in bad]
        return says
    return says


def _seal_of(arena: Arena, found: Found) -> Seal | None:
    """The seal, also where the file's header disagrees with it: then its checksums tell which bytes are bad."""
    if found.seal is not None:
        return found.seal
    try:
        return arena.read_seal(found.slot)
    except (MemckptError, OSError):
        return None


def _tensors(arena: Arena, name: str, seal: Seal) -> tuple[list[dict[str, Any]], int]:
    try:
        says = contents.of_slot(arena, name, seal.nbytes)
    except (MemckptError, OSError):
        return [], seal.nbytes  # the header itself is hit, so nothing says what lies where
    return says["entries"], says["data_offset"]


def _chunk(index: int, seal: Seal, rows: list[dict[str, Any]], data_offset: int) -> dict[str, Any]:
    first = index * seal.chunk_nbytes
    end = min(first + seal.chunk_nbytes, seal.nbytes)
    keys = [r["key"] for r in rows if r["offset"] < end and r["offset"] + r["nbytes"] > first]
    return {
        "index": index,
        "first": first,
        "end": end,
        "header": first < data_offset,
        "tensors": len(keys),
        "keys": keys[:MAX_KEYS],
    }


def run(args: argparse.Namespace) -> int:
    """Carry the command out; 1 when something is damaged. Local."""
    target = find.target(args)
    if target is not None:
        from memckpt.cli.stored import verify

        return verify.run(args, target)
    work = [
        (arena, found)
        for arena in common.find_or_fail(args)
        for found in arena.inventory()
        if args.slot in (None, found.slot)
    ]
    if args.slot is not None and not work:
        raise UsageError(f"no slot {args.slot!r} of this run on this node", run=args.name)
    out = common.console()
    results: list[dict[str, Any]] = []
    with Progress(console=out, transient=True, disable=args.json or not out.is_terminal) as progress:
        bar = progress.add_task("reading", total=sum(found.nbytes for _, found in work) or 1)
        for arena, found in work:
            result = check(arena, found.slot, threads=max(1, args.threads))
            if result is not None:
                results.append(result)
            progress.advance(bar, found.nbytes)
    damaged = [r for r in results if r["status"] == "damaged"]
    if args.json:
        common.print_json({"run": args.name, "slots": results, "damaged": len(damaged)})
        return 1 if damaged else 0
    table = common.table("NODE", "SLOT", "STEP", "SHARD", "BYTES", "STATUS", "", right=("STEP", "SHARD", "BYTES"))
    for r in results:
        color = {"ok": "green", "damaged": "bold red"}.get(r["status"], "yellow")
        table.add_row(
            escape(r["node"]),
            r["slot"],
            "-" if r["step"] is None else str(r["step"]),
            "-" if r["shard"] is None else str(r["shard"]),
            format_nbytes(r["nbytes"]),
            f"[{color}]{r['status']}[/]",
            escape(r["reason"] or ""),
        )
    out.print(table)
    for r in damaged:
        for chunk in r["chunks"]:
            what = ["the header"] if chunk["header"] else []
            what += chunk["keys"]
            more = f" and {chunk['tensors'] - len(chunk['keys'])} more" if chunk["tensors"] > len(chunk["keys"]) else ""
            where = f"{r['slot']}: chunk {chunk['index']}, bytes {chunk['first']} to {chunk['end']}"
            out.print(escape(f"{where}: {', '.join(what)}{more}"), soft_wrap=True)
    return 1 if damaged else 0
