"""How ranks agree on what went wrong: either all of them go on, or all of them hear every rank's trouble."""

from __future__ import annotations

import contextlib

import msgspec

from memckpt import errors
from memckpt.comm import allgather, allreduce_min, barrier
from memckpt.comm.base import Communicator
from memckpt.errors import BudgetError, LayoutMismatch, MemckptError, PeerLost, ProtocolError, RunInUse

_MAX_ROWS = 10_000
_MAX_TEXT = 4_000
_KNOWN_S = 10.0


class Problem(msgspec.Struct, frozen=True):
    """An error of one rank, in a form that can be sent; `numbers` are those that its class wants beside the message."""

    kind: str
    message: str
    rank: int
    step: int | None = None
    path: str | None = None
    rows: tuple[tuple[str, str, str], ...] = ()
    numbers: tuple[int, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What one rank has to say after a phase: slots (node, slot, why) that turned out to be bad, or an error."""

    bad: tuple[tuple[str, str, str], ...] = ()
    problem: Problem | None = None


def describe(error: BaseException, rank: int) -> Problem:
    """Turn an error into what can be sent. Local."""
    if not isinstance(error, MemckptError):
        return Problem("MemckptError", f"{type(error).__name__}: {error}"[:_MAX_TEXT], rank)
    rows: tuple[tuple[str, str, str], ...] = ()
    numbers: tuple[int, ...] = ()
    if isinstance(error, LayoutMismatch):
        rows = tuple((str(k), str(s), str(w)) for k, s, w in error.rows[:_MAX_ROWS])
    elif isinstance(error, BudgetError):
        numbers = error.needed, error.free
    elif isinstance(error, RunInUse):
        numbers = (error.pid,)
    at = error.rank if error.rank is not None else rank
    return Problem(type(error).__name__, error.message[:_MAX_TEXT], at, error.step, error.path, rows, numbers)


def restore_error(problem: Problem, run: str) -> MemckptError:
    """The error that a `Problem` describes. Local."""
    kind = getattr(errors, problem.kind, MemckptError)
    message, step, rank, path = problem.message, problem.step, problem.rank, problem.path
    if kind is LayoutMismatch:
        return LayoutMismatch(message, list(problem.rows), run=run, step=step, rank=rank, path=path)
    if kind is BudgetError and len(problem.numbers) == 2:
        needed, free = problem.numbers
        return BudgetError(message, needed=needed, free=free, run=run, step=step, rank=rank, path=path)
    if kind is RunInUse and problem.numbers:
        return RunInUse(message, pid=problem.numbers[0], run=run, step=step, rank=rank, path=path)
    if not (isinstance(kind, type) and issubclass(kind, MemckptError)) or kind in (
        LayoutMismatch,
        BudgetError,
        RunInUse,
    ):
        kind = MemckptError
    made: MemckptError = kind(message, run=run, step=step, rank=rank, path=path)
    return made


def agree(comm: Communicator, mine: Verdict, deadline_s: float, what: str) -> list[Verdict]:
    """Go on together: an empty list when no rank has anything to say, else every rank's verdict. Collective.

    Raises
    ------
    PeerLost, DeadlineExceeded
        A rank is gone; the others may have gone on.
    """
    fine = mine.problem is None and not mine.bad
    if allreduce_min(comm, [int(fine)], deadline_s, what=what)[0]:
        return []
    said = allgather(comm, msgspec.msgpack.encode(mine), deadline_s, what=what)
    # Who raises may abandon the communicators at once: not before every rank knows why.
    with contextlib.suppress(PeerLost):
        barrier(comm, min(deadline_s, _KNOWN_S), what=what)
    try:
        return [msgspec.msgpack.decode(payload, type=Verdict) for payload in said]
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a rank sent no valid verdict: {error}") from error


def settle(comm: Communicator, mine: Verdict, deadline_s: float, what: str, run: str) -> dict[tuple[str, str], str]:
    """Tell the others: the bad slots of all ranks, or the error of all. Collective; raises as `agree`, too."""
    verdicts = agree(comm, mine, deadline_s, what)
    error = first_error(verdicts, run)
    if error is not None:
        raise error
    return {(node, slot): why for verdict in verdicts for node, slot, why in verdict.bad}


def first_error(verdicts: list[Verdict], run: str) -> MemckptError | None:
    """The error that all ranks raise; rows of a layout that does not fit are collected from all of them. Local."""
    problems = [v.problem for v in verdicts if v.problem is not None]
    if not problems:
        return None
    first = problems[0]
    same = [p for p in problems if p.kind == first.kind]
    if first.kind == "LayoutMismatch":
        rows = tuple(dict.fromkeys(row for p in same for row in p.rows))
        ranks = ", ".join(str(p.rank) for p in same)
        message = first.message if len(same) == 1 else f"{first.message} (so on ranks {ranks})"
        first = Problem(first.kind, message, first.rank, first.step, first.path, rows)
    return restore_error(first, run)
