"""How a Checkpointer ends: after an error, at the interpreter's exit, and what it says of the steps that are left."""

from __future__ import annotations

import atexit
import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from memckpt.assembly import Parts
from memckpt.errors import MemckptError
from memckpt.preemption import Watch
from memckpt.reports import Stats
from memckpt.saving.capture import Capture
from memckpt.saving.generation import Saving

DRAIN_AFTER_ERROR_S = 5.0
_DRAIN_STORAGE_AFTER_ERROR_S = 30.0

_STACKLEVEL = 4  # the user's line that called `Checkpointer.close`


def tell_stopped(parts: Parts, stats: Stats, *, quiet: bool) -> None:
    """Say on rank 0 that the memory of a run that was told to stop is still there, for its next start. Local."""
    if parts.session.rank == 0 and not quiet:
        step = f"step {stats.committed_step}" if stats.committed_step >= 0 else "what it held before"
        print(
            f"memckpt: told to stop: {step} of run {parts.run!r} stays in memory, in {parts.arena.path} on each node, "
            "for the next start ('memckpt rm' removes it)",
            file=sys.stderr,
        )


def warn_of_unsaved(parts: Parts, stats: Stats, *, kept: bool) -> None:
    """Warn on rank 0 where the newest steps of a run that ends are not where the user wants to find them. Local.

    Parameters
    ----------
    stats : Stats
        At the end of the last save.
    kept : bool
        Whether memory stays.
    """
    if parts.session.rank != 0:
        return
    storage = parts.session.storage
    if storage is not None and stats.persisted_step < stats.step:
        _warn(parts, stats.step, stats.persisted_step, storage.url)
    elif kept and stats.committed_step < stats.step:
        _warn(parts, stats.step, stats.committed_step, "memory")


def _warn(parts: Parts, step: int, newest: int, where: str) -> None:
    there = f"step {newest}" if newest >= 0 else "of an earlier start, if any"
    warnings.warn(
        f"run {parts.run!r} ends at step {step}, but the newest snapshot in {where} is {there}; "
        "step(n, save=True) saves the last step, as steps() does by itself",
        RuntimeWarning,
        stacklevel=_STACKLEVEL,
    )


def note_crash(saving: Saving, kind: type[BaseException]) -> None:
    """Note that the program failed, if that was by an error of its own. Local."""
    if issubclass(kind, Exception) and not issubclass(kind, MemckptError):
        with contextlib.suppress(OSError, MemckptError):
            saving.note_crash()


def drain(saving: Saving, capture: Capture, watch: Watch, deadline_s: float) -> None:
    """After an error: give what was accepted a short time to be committed and written. Local."""
    with contextlib.suppress(MemckptError):
        capture.settle()
        saving.engine.hurry()
        saving.engine.wait(min(DRAIN_AFTER_ERROR_S, deadline_s))
        if watch.told and not saving.preempted:
            saving.salvage()
        saving.drain_storage(_DRAIN_STORAGE_AFTER_ERROR_S)


def abandon_at_exit(method: Callable[[], object]) -> Callable[[], None]:
    """Interpreter exit without `close`: end the thread before MPI is finalized under it.

    Parameters
    ----------
    method : bound method
        Held weakly.

    Returns
    -------
    callable
        What to unregister.
    """
    weak: Any = weakref.WeakMethod(method)

    def abandon() -> None:
        held = weak()
        if held is not None:
            held()

    atexit.register(abandon)
    return abandon
