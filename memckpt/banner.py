"""The first lines that rank 0 prints: what is true of this run, here."""

from __future__ import annotations

import sys
import warnings

from memckpt.assembly import Parts, needs
from memckpt.memory.budget import format_nbytes
from memckpt.policy import in_words
from memckpt.recovery.placement import Holders, unprotected
from memckpt.recovery.recover import Recovery
from memckpt.reports import RestoreReport

_TOLD = 8  # snapshots about which the first lines say why they were not restored


def tell(parts: Parts, shard_nbytes: int, recovery: Recovery, report: RestoreReport, *, quiet: bool) -> None:
    """Print the first lines on rank 0, or, where only they are not wanted, warn of what was damaged. Local."""
    if parts.session.rank != 0:
        return
    if not quiet:
        print(*first_lines(parts, shard_nbytes, recovery.holders, report), sep="\n", file=sys.stderr)
    elif recovery.damaged:
        lines = "".join(f"\n  {line}" for line in recovery.damaged)
        warnings.warn(f"damaged snapshots of run {parts.run!r}:{lines}", RuntimeWarning, stacklevel=4)


def first_lines(parts: Parts, shard_nbytes: int, holders: Holders, report: RestoreReport) -> list[str]:
    """Describe ranks, memory, protection and where training begins. Local.

    Parameters
    ----------
    shard_nbytes : int
        Bytes of this rank's snapshot, with optimizer state that is still to come.
    holders : tuple of tuple of int
        Ranks that hold the replicas of each rank.
    """
    session = parts.session
    nodes = sorted({place.node for place in session.places})
    need = needs(parts, [shard_nbytes] * session.world)
    left = len(report.rejected) - _TOLD
    background = "in the background" if parts.engine_comm.concurrent else "by the training thread (no thread support)"
    return [
        f"memckpt: run {parts.run!r}, {_count(session.world, 'rank')} on {_count(len(nodes), 'node')} over "
        f"{session.comm.name}; saves {in_words(parts.options.every)}, replicated {background}",
        f"memckpt: {format_nbytes(shard_nbytes)} per rank; slots of up to {format_nbytes(need[0].slot_nbytes)} "
        f"per rank, {format_nbytes(sum(n.slot_nbytes for n in need))} on this node, in {parts.arena.path}",
        "memckpt: " + _survives(parts, holders),
        *_persists(parts),
        *(f"memckpt: not restored: {line}" for line in report.rejected[:_TOLD]),
        *([f"memckpt: and {left} more were not (RestoreReport.rejected)"] if left > 0 else []),
        "memckpt: " + _begins(report),
    ]


def _survives(parts: Parts, holders: Holders) -> str:
    """What may be lost, in words."""
    session = parts.session
    if session.copies == 0:
        return "survives the loss of a process: yes; of a node: no, there are no replicas"
    bare = unprotected([place.path for place in session.places], holders)
    if not bare:
        return f"survives the loss of a process: yes; of a node: yes (Mirror({session.copies})), once protected"
    if len(bare) == session.world:
        return "survives the loss of a process: yes; of a node: NO, every replica lies on the owner's own node"
    ranks = ", ".join(map(str, bare[:8])) + (" ..." if len(bare) > 8 else "")
    return (
        f"survives the loss of a process: yes; of a node: NOT for ranks {ranks}, whose replicas lie on their own node"
    )


def _persists(parts: Parts) -> list[str]:
    persist, storage = parts.options.persist, parts.session.storage
    if persist is None or storage is None:
        return []
    kept = f"{in_words(persist.every)} to {storage.url}, keeping {in_words(persist.keep)}"
    return [f"memckpt: persists {kept}; survives the loss of all memory since then"]


def _begins(report: RestoreReport) -> str:
    if report.source == "none":
        return f"starts at step 0, generation {report.generation}; not protected until the first commit"
    seconds = report.seconds["total"]
    protected = "protected" if report.protected else "its replicas are being rebuilt"
    source = "storage" if report.source == "storage" else f"memory ({report.source})"
    return (
        f"continues from step {report.step}, generation {report.generation}, out of {source}, "
        f"{format_nbytes(report.nbytes)} in {seconds:.2f} s; {protected}"
    )


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
