"""A stored checkpoint for people and for programs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from memckpt.cli import common
from memckpt.cli.stored import find
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored
from memckpt.storage.marker import data_name, seal_name

_DATA = re.compile(r"rank-([0-9]+)\.safetensors")
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


def state(stored: Stored) -> str:
    """ "complete", "incomplete" or "stray"."""
    return "stray" if stored.stray else "complete" if stored.complete else "incomplete"


def as_dict(storage: Storage, stored: Stored, *, newest: bool = False) -> dict[str, Any]:
    """For --json; `newest` where a restore would begin with it. Reads only."""
    marker = stored.marker
    if stored.complete and marker is not None:
        shards = [shard.shard for shard in marker.shards]
    else:
        shards = [] if stored.stray else _shards(storage, stored)
    return {
        "run": stored.run,
        "step": None if stored.stray else stored.step,
        "generation": marker.generation.counter if marker else None,
        "generation_id": stored.generation_id,
        "path": stored.path,
        "state": state(stored),
        "complete": stored.complete,
        "newest": newest,
        "reason": stored.reason or None,
        "world": marker.world if marker else None,
        "shards": shards,
        "nbytes": stored.nbytes,
        "created": stored.created,
        "age_s": None if stored.created is None else max(0.0, time.time() - stored.created),
        "metrics": marker.metrics if marker else None,
    }


def _shards(storage: Storage, stored: Stored) -> list[int]:
    """Shards whose file and seal are there under their names; where a marker says their sizes, in those."""
    sizes = {path.rpartition("/")[2]: nbytes for path, nbytes in storage.entries(stored.path, 1)}
    if stored.marker is not None:
        return [
            s.shard
            for s in stored.marker.shards
            if (sizes.get(data_name(s.shard)), sizes.get(seal_name(s.shard))) == (s.nbytes, s.seal_nbytes)
        ]
    shards = (int(match[1]) for match in map(_DATA.fullmatch, sizes) if match)
    return sorted(shard for shard in shards if data_name(shard) in sizes and seal_name(shard) in sizes)


def all_of(storage: Storage, found: Sequence[Stored], wanted: Iterable[Stored]) -> list[dict[str, Any]]:
    """Those that are `wanted` of what a scan `found`, with a mark on the newest complete one of each run."""
    tops = {s.path for s in find.newest(found).values()}
    return [as_dict(storage, s, newest=s.path in tops) for s in wanted]


def name(says: dict[str, Any]) -> tuple[str, str, str]:
    """Run, step and generation, for a table; of what is no checkpoint its path."""
    if says["step"] is None:
        return says["path"], "-", "-"
    counter = "?" if says["generation"] is None else says["generation"]
    return says["run"], str(says["step"]), f"{counter} ({says['generation_id'][:8]})"


def shards(says: dict[str, Any]) -> str:
    """Which shards there are, of how many."""
    return "-" if says["step"] is None else common.shards(says["shards"], says["world"])


def age(says: dict[str, Any]) -> str:
    """How long ago it was taken, in its largest unit."""
    seconds = says["age_s"]
    if seconds is None:
        return "-"
    unit, size = next(((u, s) for u, s in _UNITS if seconds >= s), ("s", 1.0))
    return f"{seconds / size:.0f} {unit}"


def metrics(says: dict[str, Any]) -> str:
    """ "loss=0.25, accuracy=0.9"."""
    return ", ".join(f"{key}={value:.6g}" for key, value in sorted((says["metrics"] or {}).items())) or "-"
