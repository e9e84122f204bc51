"""``memckpt inspect DIR``: markers, shards and tensors of the checkpoints in a storage."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from rich.markup import escape

from memckpt.cli import common, contents
from memckpt.cli.stored import describe, find, glance
from memckpt.cli.stored.find import Target, chosen, nothing, told
from memckpt.errors import CorruptSnapshot, MemckptError, UsageError
from memckpt.memory.budget import format_nbytes
from memckpt.storage import checkpoints, reading
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored
from memckpt.storage.marker import Marker, data_name


def _marker_dict(marker: Marker) -> dict[str, Any]:
    says: dict[str, Any] = msgspec.to_builtins(marker)
    return says


def shard_dict(storage: Storage, stored: Stored, shard: int) -> dict[str, Any]:
    """Seal and tensors of one shard; `reason` says what cannot be read. Local, reads only the header."""
    says: dict[str, Any] = {"shard": shard, "reason": None, "seal": None}
    try:
        seal = reading.read_seal(storage, stored, shard)
        says["seal"] = contents.seal_dict(seal)
        parsed = _header(storage, f"{stored.path}/{data_name(shard)}", seal.nbytes)
    except (MemckptError, OSError) as error:
        return says | {"reason": told(error)}
    return says | contents.tensors(parsed)


def _header(storage: Storage, path: str, nbytes: int) -> Any:
    from memckpt.format.header import MAX_HEADER_NBYTES, parse  # imports torch

    size = bytearray(8)
    storage.get(path, 0, memoryview(size))
    head_nbytes = 8 + int.from_bytes(size, "little")
    if not 8 < head_nbytes <= min(nbytes, 8 + MAX_HEADER_NBYTES):
        raise CorruptSnapshot(f"its header says that it is {head_nbytes} bytes long, in a file of {nbytes}")
    head = memoryview(bytearray(head_nbytes))
    if storage.get(path, 0, head) != head_nbytes:
        raise CorruptSnapshot("the file ends before its header does")
    return parse(head, nbytes)


def run(args: argparse.Namespace, target: Target) -> int:
    """Carry the command out. Local, reads only."""
    if args.slot is not None:
        raise UsageError("--slot is for memory; --shard N shows the tensors of a shard in storage")
    found = checkpoints.scan(target.storage, target.run)
    wanted = [s for s in chosen(target, args, found) if not s.stray]
    if target.path is None and args.step is None:
        tops = find.newest(wanted)
        wanted = [tops[name] for name in sorted(tops)]
    if not wanted:
        raise nothing(target)
    told_all = describe.all_of(target.storage, found, wanted)
    glance.look(target.storage, wanted, told_all)
    for says, stored in zip(told_all, wanted, strict=True):
        says["marker"] = None if stored.marker is None else _marker_dict(stored.marker)
        if args.shard is not None and stored.marker is not None:
            says["contents"] = shard_dict(target.storage, stored, args.shard)
    if args.json:
        common.print_json({"storage": target.storage.url, "checkpoints": told_all})
        return 0
    out = common.console()
    for says, stored in zip(told_all, wanted, strict=True):
        _show(out, says, stored)
    if glance.note(told_all):
        out.print(glance.note(told_all), soft_wrap=True)
    return 0


def _show(out: Any, says: dict[str, Any], stored: Stored) -> None:
    run_name, step, generation = describe.name(says)
    out.print(f"[bold]{escape(run_name)}, step {step}[/]: {says['state']}", soft_wrap=True)
    marker = stored.marker
    facts = {"path": stored.path, "reason": says["reason"], "generation": generation, "bytes": says["nbytes"]}
    if marker is not None:
        base = marker.base
        facts |= {
            "base": base and f"generation {base.generation.counter} ({base.generation.id[:8]}), step {base.step}",
            "job": marker.job,
            "world": marker.world,
            "age": describe.age(says),
            "metrics": describe.metrics(says),
            "versions": ", ".join(f"{name} {version}" for name, version in marker.versions.items()),
        }
    for name, value in facts.items():
        if value not in (None, ""):
            out.print(f"  {name:<11}{escape(str(value))}", soft_wrap=True)
    if marker is not None:
        table = common.table("SHARD", "FILE", "BYTES", "LAYOUT", right=("SHARD", "BYTES"))
        for shard in marker.shards:
            table.add_row(
                str(shard.shard), data_name(shard.shard), format_nbytes(shard.nbytes), escape(shard.layout[:12])
            )
        out.print(table)
    inside = says.get("contents")
    if inside is not None:
        contents.show(out, inside)
