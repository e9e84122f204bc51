"""What `ls` and `inspect` read of stored checkpoints, so that they need not believe names and sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memckpt import _native
from memckpt.cli.stored import find
from memckpt.errors import MemckptError
from memckpt.storage import reading
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored
from memckpt.storage.marker import data_name

MAX_SHARDS = 32
"""Shards that are looked into, of the newest checkpoints: at 4 MiB each, what a command may read that is not verify."""
_READS = 8


def look(storage: Storage, wanted: Sequence[Stored], rows: Sequence[dict[str, Any]]) -> None:
    """Look into the newest of the complete checkpoints, and correct their rows. Local, reads only.

    Of each shard, its seal is compared with the marker, and its first chunk, in which the header lies, with the seal.

    Parameters
    ----------
    storage : Storage
        Where they are.
    wanted, rows : sequences
        Checkpoints, and of each what `describe.as_dict` says. `checked` is added: "first chunks", or "sizes" where
        nothing was read; None for what is not complete. What turns out to be bad is "damaged" from then on.
    """
    tops = {stored.path for stored in find.newest(wanted).values()}
    complete = [i for i, stored in enumerate(wanted) if stored.complete]
    # From old to new, and the newest of each run last.
    complete.sort(key=lambda i: (wanted[i].path in tops, find.age_order(wanted[i])))
    room = MAX_SHARDS
    for says in rows:
        says["checked"] = "sizes" if says["complete"] else None
    with ThreadPoolExecutor(_READS, thread_name_prefix="memckpt-look") as pool:
        for i in reversed(complete):
            stored, says = wanted[i], rows[i]
            assert stored.marker is not None
            room -= len(stored.marker.shards)
            if room < 0:
                break
            says["checked"] = "first chunks"
            shards = [shard.shard for shard in stored.marker.shards]
            bad = [why for why in pool.map(lambda shard, of=stored: _bad(storage, of, shard), shards) if why]
            if not bad:
                continue
            more = f", and {len(bad) - 1} more shards are bad" if len(bad) > 1 else ""
            says |= {"complete": False, "state": "damaged", "reason": bad[0] + more}
            if not find.is_marked(storage, stored):
                says |= {"state": "incomplete", "reason": "removed while it was read", "checked": None}


def _bad(storage: Storage, stored: Stored, shard: int) -> str:
    """Why a shard is not what the marker says, as far as its seal and its first chunk tell; empty where it is."""
    name = data_name(shard)
    try:
        seal = reading.read_seal(storage, stored, shard)
        first = memoryview(bytearray(min(seal.chunk_nbytes, seal.nbytes)))
        if storage.get(f"{stored.path}/{name}", 0, first) != len(first):
            return f"{name}: the file ends within its first chunk"
    except (MemckptError, OSError) as error:
        return f"{name}: {find.told(error)}"
    if seal.crcs and _native.crc32c(first) != seal.crcs[0]:
        return f"{name}: chunk 0, with its header, differs from its checksum"
    return ""


def note(rows: Sequence[dict[str, Any]]) -> str:
    """What "complete" means in these rows, for people; empty where none is complete."""
    checked = [says["checked"] for says in rows if says["complete"]]
    if not checked:
        return ""
    read = checked.count("first chunks")
    if read == len(checked):
        what = "every file is there in its size, and every seal and first chunk is good"
    elif read:
        what = (
            f"every file is there in its size; seals and first chunks were read of the newest {read} of {len(checked)}"
        )
    else:
        what = "every file is there in its size; no seal and no first chunk was read"
    return f"complete: {what}. memckpt verify reads every byte"
