"""What a storage has to be able to do: whole files under names that mean something, and nothing in between."""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from memckpt.errors import UsageError

HOPELESS = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)  # fmt: skip
"""What trying again does not mend: the place is not there, or is not ours to write."""

Reached = Callable[[str, str], None]
"""Called with (stage, path) as a `Storage.put` goes on: for tests that let the process die there."""


def unheard(stage: str, path: str) -> None:
    """Nobody is told."""


class Part(NamedTuple):
    """A file to be written: its path, its size in bytes, and its bytes piece by piece.

    The pieces are asked for one at a time and written as they are, so each may be a view that ends with the next.
    """

    path: str
    nbytes: int
    pieces: Iterable[bytes | memoryview]


class Entry(NamedTuple):
    """A file that is there, and its size in bytes; or, with a "/" at its end, a directory of which no more is said."""

    path: str
    nbytes: int


class Storage(ABC):
    """A place for files that outlives this machine. All methods are local and may be called from any thread.

    Paths are relative to the root, their components joined by "/". An error is an `OSError` with the `errno` of its
    cause and the name of the file; what it leaves behind is said at each method.

    Attributes
    ----------
    url : str
        The root, as a user would write it.
    read_nbytes : int
        How many bytes one `get` should ask for.
    """

    url: str
    read_nbytes: int

    @abstractmethod
    def prepare(self) -> None:
        """Make the root where it lacks, and find out whether files can be written there, as far as that can be told
        without writing one.
        """

    @abstractmethod
    def put(self, parts: Sequence[Part], reached: Reached = unheard) -> None:
        """Write files of one directory, in place of older ones of their names; the directory is made where it lacks.

        When this returns they are complete and durable. None of them is ever to be seen in part under its name, and on
        a file system none is there before all are durable; after an error or a crash there may be any number of them,
        whole. After an error nothing else is left; after a crash there may be files whose name begins with ".tmp-".

        Parameters
        ----------
        parts : sequence of Part
            What to write, in this order. What their pieces raise passes through, like any error here.
        reached : callable
            Told the stages "written", "synced" and "named" of each path, and "durable" once with the last path.
        """

    @abstractmethod
    def get(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read from byte `offset` on into a writable buffer of bytes; fewer are read only where the file ends.

        Returns
        -------
        int
            Number of bytes read.
        """

    @abstractmethod
    def entries(self, prefix: str = "", depth: int = 3) -> list[Entry]:
        """Every file below the directory `prefix`, by path; none where that is not there.

        Never from a cache of ours. Not deeper than `depth` levels: what lies below is one directory's entry, as are, on
        a file system, directories that are empty or cannot be read.
        """

    @abstractmethod
    def remove(self, paths: Iterable[str]) -> None:
        """Remove files in this order, and the directories that this leaves empty, but not the root.

        Durable when this returns. What is not there is no error. A path with "/" at its end is a directory, and goes
        only if it is empty. After an error or a crash any of them may be left.
        """

    @abstractmethod
    def free_nbytes(self) -> int | None:
        """Bytes that may still be written, by what the file system says; None where nobody knows."""


def components(path: str) -> list[str]:
    """The components of a relative path; UsageError for one that could leave the root."""
    parts = [part for part in path.split("/") if part]
    if path.startswith("/") or not {".", ".."}.isdisjoint(parts) or "\0" in path:
        raise UsageError(f"{path!r} is no path below a storage's root")
    return parts


def directory_of(parts: Sequence[Part]) -> str:
    """The directory that all parts lie in; UsageError where they do not."""
    directories = {part.path.rpartition("/")[0] for part in parts}
    if len(directories) != 1:
        raise UsageError(f"files of one directory at a time, not of {sorted(directories)}")
    return directories.pop()


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Let an OSError say which file it is about; those of read, write and fsync do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise
