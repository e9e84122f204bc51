"""`run`: train on N ranks, and when some die, go on with spares in their place."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from memckpt.comm.mpi import _load as load_mpi
from memckpt.errors import DeadlineExceeded, UsageError
from memckpt.resilient import context
from memckpt.resilient.context import Context
from memckpt.resilient.regroup import Survivors
from memckpt.resilient.roster import RunFailed
from memckpt.resilient.world import World, has_ulfm

T = TypeVar("T")


def run(
    train: Callable[[Context], T],
    active: int | None = None,
    *,
    max_failures: int = 10,
    grace_s: float = 60.0,
    frozen_s: float = 1.0,
    silent_s: float = 60.0,
    verbose: bool = True,
) -> T | None:
    """Call ``train(ctx)`` on `active` ranks, and again on all of them when spares had to take the place of lost ones.

    Collective over COMM_WORLD.

    Parameters
    ----------
    train : callable
        Restores from its Checkpointer, trains, and returns. It is called again, in the same process, after each
        failure, also when it had returned already, so it must begin from what it restores, not from what its objects
        hold.
    active : int, optional
        Ranks that train; the others are spares. All by default.
    max_failures : int
        Interruptions in a row, without a commit (or ``ctx.progress``) in between, that are survived; one more ends
        the run.
    grace_s : float
        Seconds for an interrupted `train` to come back; then its process ends, and is one more that is lost. Also for
        each step of regrouping.
    frozen_s : float
        A process of this job that is stopped (SIGSTOP) for so long is killed by its neighbours on the node.
    silent_s : float
        The same for a process that does not run although it is not stopped.
    verbose : bool
        Print what happens, on logical rank 0.

    Returns
    -------
    object or None
        What `train` returned; None on a spare. It is returned only once every active rank has finished and all have
        agreed that it has.

    Raises
    ------
    RunFailed
        On every rank: the training of one rank raised an error of its own, too few spares are left, or failures
        repeat. Snapshots stay in memory. The process then exits with status 1 at the latest at its end.
    UsageError
        MPI or its thread level does not do, or there are fewer processes than `active`.

    Notes
    -----
    Without ``mpirun --with-ft ulfm`` the job ends with its first lost process, and is to be started again.
    """
    MPI = load_mpi()
    size = MPI.COMM_WORLD.Get_size()
    active = size if active is None else active
    if not 1 <= active <= size:
        raise UsageError(f"active={active} ranks are wanted and {size} processes were started")
    if context.current() is not None:
        raise UsageError("run() inside run()")
    if size > 1 and not has_ulfm():
        problem = "start it with mpirun --with-ft ulfm"
    elif size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        problem = "MPI was initialised below MPI_THREAD_MULTIPLE, so nobody could watch while training waits"
    elif size > 1:
        return _run(Survivors[T](train, active, max_failures, grace_s, verbose), frozen_s, silent_s)
    else:
        problem = ""
    if problem and verbose and MPI.COMM_WORLD.Get_rank() == 0:
        print(
            f"memckpt: no recovery inside the job ({problem}); after a loss, start the same program again", flush=True
        )
    return _run_plainly(train, active)


def _run(survivors: Survivors[T], frozen_s: float, silent_s: float) -> T | None:
    survivors.begin(frozen_s, silent_s)
    good = False
    try:
        value = survivors.go()
        good = True
        return value
    except DeadlineExceeded as error:
        raise RunFailed(
            f"{error.message}; start the same program again to go on from the snapshots in memory"
        ) from error
    finally:
        survivors.end(failed=not good)
        if not good:
            _leave_without_finalize(survivors.world)


def _run_plainly(train: Callable[[Context], T], active: int) -> T | None:
    """No recovery: the first `active` ranks train, the others wait for their end."""
    MPI = load_mpi()
    rank = MPI.COMM_WORLD.Get_rank()
    comm = MPI.COMM_WORLD.Split(0 if rank < active else 1, 0)
    value: T | None = None
    if rank < active:
        ctx = Context(comm, 0, [], {}, members=None, deadline_s=60.0)
        context.enter(ctx)
        try:
            value = train(ctx)
        except BaseException:
            if MPI.COMM_WORLD.Get_size() > 1:
                _leave_without_finalize(None)  # peers may wait for this rank for ever: only its exit ends the job
            raise
        finally:
            context.enter(None)
        ctx.retire(failed=False)
    end = MPI.COMM_WORLD.Ibarrier()
    while not end.Test():
        time.sleep(1e-3)
    return value


def _leave_without_finalize(world: World | None) -> None:
    """When this process ends: status 1 and no MPI_Finalize, which would wait for peers that may never come."""

    def leave() -> None:
        if not load_mpi().Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            if world is not None:
                world.farewell()
            os._exit(1)

    atexit.register(leave)
