"""What the training tells the observer: one append-only file of JSON lines for each process, never rewritten.

A line is one ``write`` to a file opened with O_APPEND: SIGKILL leaves whole lines. Times are seconds since the epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Common to all events: when it happened."""

    at: float


class Started(Event, frozen=True, tag="started"):
    """A process of the job is there; `start_time`, in clock ticks since boot, tells it from others of that pid."""

    pid: int
    start_time: int
    world_rank: int
    node: str


class Entered(Event, frozen=True, tag="entered"):
    """The training function was entered as logical `rank`, for the first time or after a failure."""

    rank: int
    generation: int
    timeline: dict[str, float]


class Restored(Event, frozen=True, tag="restored"):
    """The state is back (or there was none: step 0); `seconds` of each phase, as the restore report says."""

    rank: int
    step: int
    source: str
    sources: list[str]
    nbytes: int
    seconds: dict[str, float]
    rejected: list[str]
    protected: bool


class Stepped(Event, frozen=True, tag="stepped"):
    """An optimizer step is finished: the loss as hexadecimal float, SHA-256 of the parameters and optimizer state."""

    rank: int
    step: int
    loss: str
    digest: str


class Finished(Event, frozen=True, tag="finished"):
    """This rank is through; `final` is the file that holds the bytes of its last state."""

    rank: int
    step: int
    final: str


class Left(Event, frozen=True, tag="left"):
    """The training function was left by an exception, in words."""

    rank: int
    error: str


AnyEvent = Started | Entered | Restored | Stepped | Finished | Left
_decoder = msgspec.json.Decoder(AnyEvent)


def start_time(pid: int) -> int:
    """Start of process `pid` in clock ticks since boot; -1 when there is none. Local. Source: proc(5), stat."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return -1


def now() -> float:
    """Seconds since the epoch. Local."""
    return time.time()


class Log:
    """The file of this process in `directory`. Local."""

    def __init__(self, directory: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(directory / f"{os.getpid()}.jsonl", flags, 0o600)

    def write(self, event: AnyEvent) -> None:
        """Append `event` as one line."""
        os.write(self._fd, msgspec.json.encode(event) + b"\n")


class Follower:
    """Reads the logs of all processes in `directory` as they grow; `poll` gives what is new. Local."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self.events: list[tuple[int, AnyEvent]] = []

    def poll(self) -> list[tuple[int, AnyEvent]]:
        """New (pid, event) pairs since the last call, in order within each process."""
        fresh = [pair for path in sorted(self._directory.glob("*.jsonl")) for pair in self._lines(path)]
        self.events += fresh
        return fresh

    def _lines(self, path: Path) -> Iterator[tuple[int, AnyEvent]]:
        offset = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[path] = offset + whole
        for line in data[:whole].splitlines():
            yield int(path.stem), _decoder.decode(line)
