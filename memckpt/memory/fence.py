"""Fence the past: no process of an earlier life of the run may still write when a restore begins.

A holder that is no member of the job is left over, or it is another live job of the same name. It is killed only on
evidence of the former, since the same run may be started twice by mistake: it comes from this very launch (and was
shrunk away), or its launcher is gone, or it does not beat for as long as we wait. One that beats under a live launcher
of its own is never killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from memckpt.errors import RunInUse
from memckpt.memory import lock, process
from memckpt.memory.lock import Holder
from memckpt.memory.process import ProcessInfo

if TYPE_CHECKING:
    from memckpt.format.seal import Generation

GRACE_S = 1.0
_TOLD_AFTER_S = 2.0


def _older(info: ProcessInfo, generation: Generation | None) -> bool:
    # An equal counter with another id is a line of history that nobody else has seen, so it too is past.
    if generation is None:
        return True
    same = (info.generation, info.generation_id) == (generation.counter, generation.id)
    return info.generation <= generation.counter and not same


def _left_over(info: ProcessInfo, own: ProcessInfo) -> bool:
    """It comes from this launch, in which it is no member any more, or nothing that launched it is left."""
    if info.launch and info.launch == own.launch:
        return True
    if not info.launcher_pid:
        return False
    launcher = (info.launcher_pid, info.launcher_start)
    return launcher == (own.launcher_pid, own.launcher_start) or not process.alive(*launcher)


def _may_kill(holder: Holder, own: ProcessInfo, first_beat: int, waited_s: float, deadline_s: float) -> bool:
    info = holder.info
    assert info is not None
    if _left_over(info, own):
        return process.stopped(info.pid) or waited_s >= min(GRACE_S, deadline_s / 4)
    return holder.beat_ns == first_beat and waited_s >= deadline_s / 2


def fence_past(
    directory: str,
    own: ProcessInfo,
    members: Collection[tuple[int, int]],
    generation: Generation | None,
    deadline_s: float,
    *,
    on_wait: Callable[[str], object] | None = None,
) -> list[ProcessInfo]:
    """Wait for, or end, every holder of a lock in `directory` that is no member; remove what the dead left. Local.

    Parameters
    ----------
    directory : str
        The run's `procs` directory on this node.
    own : ProcessInfo
        This process, as it would describe itself in a lock file.
    members : collection of (int, int)
        (pid, start time) of every process of the job as it is now; this process is one anyhow.
    generation : Generation or None
        The caller's; only holders of another one, not a later one, are ended. None: any.
    deadline_s : float
        Seconds to wait in all. Half of it for a beat before a silent holder is ended.
    on_wait : callable, optional
        Told once, after two seconds, for whom this waits.

    Returns
    -------
    list of ProcessInfo
        The processes that were ended.

    Raises
    ------
    RunInUse
        A holder is still there at the deadline; with its pid.
    ForeignMemory
        A lock file is not ours.
    """
    members = {*members, own.identity}
    started = time.monotonic()
    first_beats: dict[str, int] = {}
    ended: list[ProcessInfo] = []
    pause_s = 0.002
    while True:
        others = [h for h in lock.holders(directory) if h.held and (h.info is None or h.info.identity not in members)]
        if not others:
            lock.remove_dead(directory)
            return ended
        waited_s = time.monotonic() - started
        for holder in others:
            first = first_beats.setdefault(holder.path, holder.beat_ns)
            info = holder.info
            if info is None or holder.pid != info.pid or not _older(info, generation):
                continue
            if _may_kill(holder, own, first, waited_s, deadline_s) and process.kill_if_ours(
                info, run=own.run, job=own.job, deadline_s=max(0.05, deadline_s - waited_s)
            ):
                ended.append(info)
        waited_s = time.monotonic() - started
        still = [h for h in others if h.info not in ended]
        if still and waited_s >= deadline_s:
            raise _in_use(still[0], own, generation)
        if still and on_wait is not None and waited_s >= _TOLD_AFTER_S:
            on_wait(f"waiting, for up to {deadline_s:g} s: {_held(still[0], own, generation)}")
            on_wait = None
        if still:
            time.sleep(pause_s)
            pause_s = min(0.05, pause_s * 1.5)


def _in_use(holder: Holder, own: ProcessInfo, generation: Generation | None) -> RunInUse:
    pid = holder.pid if holder.info is None else holder.info.pid
    return RunInUse(_held(holder, own, generation), pid=pid, run=own.run, path=holder.path)


def _held(holder: Holder, own: ProcessInfo, generation: Generation | None) -> str:
    info = holder.info
    pid = info.pid if info is not None else holder.pid
    who = str(info) if info is not None else f"pid {pid} (its lock file {os.path.basename(holder.path)} cannot be read)"
    if info is None or (info.uid, info.pidns) != (own.uid, own.pidns):
        why = "it cannot be told from here whether it is left over; end it where it runs"
    elif not _older(info, generation):
        why = "it has entered a later generation than this process"
    else:
        why = "it is alive; give this job another name or MEMCKPT_JOB, or end that one first"
    return f"the memory of run {own.run!r} is held by {who}: {why}"
