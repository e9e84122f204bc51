"""What an argument means in storage: a root, a run in it, or one checkpoint; and what is found there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memckpt import storage as storages
from memckpt.cli import common
from memckpt.errors import MemckptError, UsageError
from memckpt.format.seal import MAX_NBYTES
from memckpt.format.seal import decode as decode_seal
from memckpt.storage import checkpoints
from memckpt.storage import marker as names
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored


@dataclass(frozen=True)
class Target:
    """What was named: a storage, and in it all runs, one run, or one checkpoint."""

    storage: Storage
    run: str | None = None
    path: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where in storage to look."""
    group = parser.add_argument_group("in storage")
    group.add_argument(
        "--storage", metavar="DIR|URL", help="look there, not in memory; RUN is then the name of a run in it"
    )
    group.add_argument("--run", dest="run_name", metavar="NAME", help="only this run")
    group.add_argument("--step", type=int, help="only this step")
    group.add_argument("--generation", metavar="ID", help="only the generation whose id begins with this")


def target(args: argparse.Namespace) -> Target | None:
    """What `args` names in storage; None where memory is meant. Local.

    Storage is meant by --storage, by an argument with a "/" in it, and by one that is a directory here.

    Raises
    ------
    UsageError
        There is no such directory, or the name may mean two things.
    """
    if args.storage is not None:
        if args.name is not None and args.run_name not in (None, args.name):
            raise UsageError(f"two runs are named: {args.name!r} and {args.run_name!r}")
        return opened(args.storage, args.run_name or args.name)
    if args.name is not None and "/" in args.name:
        return opened(args.name, args.run_name)
    if args.name is not None and os.path.isdir(args.name):
        if any(place.name == args.name for place in common.places(args.base, args.node)):
            raise UsageError(
                f"{args.name!r} is a directory here and a run in memory: write ./{args.name} for the one, "
                f"{args.name}@JOB (or {args.name}@) for the other"
            )
        return opened(args.name, args.run_name)
    for option in ("run_name", "step", "generation", "shard"):
        if getattr(args, option, None) is not None:
            name = option.partition("_")[0]
            raise UsageError(f"--{name} is for storage: name a directory or a URL, or use --storage")
    return None


def opened(where: str, run: str | None = None) -> Target:
    """The storage at a path or URL, which may be that of a run, or of a checkpoint, in it. Local.

    Raises
    ------
    UsageError
        A directory that is not there, or one of another run than `run`.
    """
    given = storages.open(where)
    if "://" not in given.url and not os.path.isdir(given.url):
        raise UsageError(f"there is no directory {given.url}")
    above, last = _split(given.url)
    if names.parse_directory(last) is not None:
        root, name = _split(above)
        found = Target(storages.open(root), name, f"{name}/{last}")
    elif last and any(names.parse_directory(path.split("/")[0]) for path, _ in given.entries("", 1)):
        found = Target(storages.open(above), last)
    else:
        return Target(given, run)
    if run not in (None, found.run):
        raise UsageError(f"{given.url} is of run {found.run!r}, not of {run!r}")
    return found


def _split(url: str) -> tuple[str, str]:
    """What is above, and the last name; no name where nothing is above."""
    scheme, separator, path = url.rpartition("://")
    above, _, last = path.rstrip("/").rpartition("/")
    if separator and not above:
        return url, ""  # a bucket
    return scheme + separator + (above or "/"), last


def age_order(stored: Stored) -> tuple[int, int]:
    """Where a checkpoint with a marker comes, from old to new, as a restore ranks them."""
    assert stored.marker is not None
    return stored.marker.generation.counter, stored.step


def newest(found: Iterable[Stored]) -> dict[str, Stored]:
    """The newest complete checkpoint of each run."""
    return {s.run: s for s in sorted((s for s in found if s.complete), key=age_order)}


def chosen(target: Target, args: argparse.Namespace, found: Sequence[Stored]) -> list[Stored]:
    """Of what was found, that which `args` names."""
    return [
        s
        for s in found
        if target.path in (None, s.path)
        and args.step in (None, s.step)
        and (args.generation is None or s.generation_id.startswith(args.generation.lower()))
    ]


def deeper(target: Target, found: Iterable[Stored]) -> dict[str, list[str]]:
    """Of the strays among what was found, those in which directories of runs lie: path or URL of each. Local.

    One level more than a scan looks at is looked at, and only where there is a stray.
    """
    strays = {stored.path for stored in found if stored.stray}
    runs: dict[str, set[str]] = {}
    root = target.storage.url.rstrip("/")
    for path, _ in target.storage.entries(target.run or "", 3 if target.run else 4) if strays else ():
        parts = path.split("/")
        stray = "/".join(parts[:2])
        level = next((i for i, part in enumerate(parts) if i > 1 and names.parse_directory(part)), None)
        if stray in strays and level is not None:
            runs.setdefault(stray, set()).add("/".join([root, *parts[:level]]))
    return {stray: sorted(places) for stray, places in runs.items()}


def may_be_written(storage: Storage, stored: Stored, found: Iterable[Stored]) -> str:
    """Why something incomplete may be what a job is writing now; empty where it is known that none does. Local.

    A job writes one checkpoint after another, and a generation begins when the one before has ended. So what is older
    than something complete is dead, if its generation is known; steps alone say nothing, since a job that was rolled
    back writes smaller ones.
    """
    siblings = [s for s in found if s.run == stored.run]
    top = newest(siblings).get(stored.run)
    if top is None:
        return "nothing of this run is complete yet, so it may be being written"
    counter = _counter(storage, stored, siblings)
    if counter is None:
        return "nothing says how old its generation is, so it may be being written"
    if (counter, stored.step) > age_order(top):
        return "newer than the newest complete one, so it may be being written"
    return ""


def _counter(storage: Storage, stored: Stored, siblings: Iterable[Stored]) -> int | None:
    """The counter of its generation: by a marker of that generation, or by a seal that is there already."""
    for sibling in siblings:
        if sibling.marker is not None and sibling.generation_id == stored.generation_id:
            return sibling.marker.generation.counter
    for path, nbytes in storage.entries(stored.path, 1):
        if not path.endswith(".seal.json") or not 0 < nbytes <= MAX_NBYTES:
            continue
        data = bytearray(nbytes)
        try:
            storage.get(path, 0, memoryview(data))
            generation = decode_seal(bytes(data)).generation
        except (MemckptError, OSError):
            continue
        if generation.id == stored.generation_id:
            return generation.counter
    return None


def remove(storage: Storage, stored: Stored) -> str:
    """Remove one checkpoint, its marker first; why not, or what was left, else empty. Local.

    Raises
    ------
    OSError
        Something could not be removed; what is left of it is no checkpoint.
    """
    if not checkpoints.prune(storage, [stored]):
        return "it has become complete meanwhile"
    left = [path.rpartition("/")[2] or path for path, _ in storage.entries(stored.path, 1)]
    return f"files that are none of memckpt's are left in it: {', '.join(left[:5])}" if left else ""


def nothing(target: Target) -> UsageError:
    """The error where nothing is what was named."""
    root = target.storage.url
    where = "/".join([root.rstrip("/"), *filter(None, [target.path or target.run])])
    return UsageError(f"no such checkpoint: {where}; memckpt ls {root} shows what there is")


def is_marked(storage: Storage, stored: Stored) -> bool:
    """Whether there is a marker, be it a good one or not."""
    return any(path == f"{stored.path}/{names.MARKER}" for path, _ in storage.entries(stored.path, 1))


def told(error: Exception) -> str:
    """An error in words, without the path that is said anyway."""
    return error.message if isinstance(error, MemckptError) else str(error)
