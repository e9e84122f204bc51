"""One tree of errors; each carries what a handler needs as fields, not only as text."""

from __future__ import annotations


class MemckptError(Exception):
    """Base of every error that memckpt raises on purpose.

    Parameters
    ----------
    message : str
        What happened and what to do about it, in one sentence or a few lines.
    run : str, optional
        Name of the run.
    step : int, optional
        Step of the snapshot concerned.
    rank : int, optional
        Logical rank on which the cause lies.
    path : str, optional
        File, directory or state key concerned.
    """

    def __init__(
        self,
        message: str,
        *,
        run: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.run = run
        self.step = step
        self.rank = rank
        self.path = path

    def __str__(self) -> str:
        where = [f"{k}={v}" for k in ("run", "step", "rank", "path") if (v := getattr(self, k)) is not None]
        return f"{self.message} [{', '.join(where)}]" if where else self.message


class UsageError(MemckptError, ValueError):
    """An argument or a call order that memckpt does not accept; nothing was changed."""


class StateError(MemckptError, TypeError):
    """A value in the state cannot be saved (or restored); `path` says where it is. Nothing was saved."""


class LayoutMismatch(MemckptError):
    """The snapshot and the live state differ in keys, shapes or dtypes; the live state is unchanged.

    Attributes
    ----------
    rows : list of tuple of (str, str, str)
        Key, what is saved, what is wanted; one row for each difference.
    """

    def __init__(self, message: str, rows: list[tuple[str, str, str]], **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.rows = rows


class CorruptSnapshot(MemckptError):
    """Bytes that do not match their seal, or a seal or header that is no valid one; never loaded."""


class ProtocolError(MemckptError):
    """A peer sent something that breaks the protocol (another version, another size, another step)."""


class BudgetError(MemckptError, MemoryError):
    """The snapshots would not fit into memory; raised before anything was written.

    Attributes
    ----------
    needed, free : int
        Bytes wanted and bytes there, on the tightest limit.
    """

    def __init__(self, message: str, *, needed: int, free: int, **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.needed = needed
        self.free = free


class RunInUse(MemckptError):
    """Another live process holds this run's memory.

    Attributes
    ----------
    pid : int
        The process that holds it.
    """

    def __init__(self, message: str, *, pid: int, **where: str | int | None) -> None:
        super().__init__(message, **where)  # type: ignore[arg-type]
        self.pid = pid


class ForeignMemory(MemckptError):
    """The run's directory, or a file in it, belongs to somebody else or is not what we made; left untouched."""


class PeerLost(MemckptError):
    """A peer died, or its connection did; the outcome of what was in flight is unknown."""


class DeadlineExceeded(PeerLost):
    """A peer did not answer in time; the outcome of what was in flight is unknown."""


class StepMismatch(MemckptError):
    """Ranks called `step` with different numbers."""


class SaveFailed(MemckptError):
    """A save did not end in a commit; training may go on and the next save may work."""


class NothingToRestore(MemckptError):
    """No complete step could be found although one was required (or is known to have existed)."""


class StateDamaged(MemckptError):
    """The live state was overwritten in part and no good copy is left; it must not be trained on."""


class Closed(MemckptError):
    """The Checkpointer was closed or abandoned."""
