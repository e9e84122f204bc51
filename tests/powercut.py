"""A disk that remembers what was flushed: what is left of a directory when the power fails after any system call.

`Disk` stands in for the module ``os`` in `memckpt.storage.posix`. Each call but fsync is carried out for real, and
written down; beside that a model keeps, for each file and each directory, what is durable and what is not. The rules
are those that POSIX gives, which is less than most file systems do: the bytes of a file are durable after its fsync,
and the changes of a directory (a name made, renamed, removed) after the directory's; before that each of them may or
may not be, in any combination, and a rename is one change. Source: Pillai et al., OSDI 2014, whose persistence
properties these are.
"""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[str, bytes | None]
"""Path -> bytes, or None for a directory."""


@dataclass(eq=False)
class File:
    data: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Directory:
    """`durable` are its names at the last flush, `pending` the changes since: name -> node, or None for none."""

    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def names(self, changes: list[dict[str, Node | None]] | None = None) -> dict[str, Node]:
        names: dict[str, Node | None] = {**self.durable}
        for change in self.pending if changes is None else changes:
            names |= change
        return {name: node for name, node in names.items() if node is not None}


Node = File | Directory


class Disk(types.ModuleType):
    """The module ``os``, over one directory that exists and is empty.

    Attributes
    ----------
    calls : list of tuple of (str, str)
        System call and the file's name, in order; of the calls that change or flush something.
    after : callable
        Called after each of them.
    before : callable
        Called before each of them with its number, name and path; may raise what the system call would.
    lazy : set of str
        What this disk does not do though it says so: "file" (fsync of files), "directory".
    """

    def __init__(self, base: Path) -> None:
        super().__init__("os")
        self.base = str(base)
        self.root = Directory()
        self.calls: list[tuple[str, str]] = []
        self.after: Callable[[], None] = lambda: None
        self.before: Callable[[int, str, str], None] = lambda number, call, path: None
        self.lazy: set[str] = set()
        self._open: dict[int, tuple[str, Node]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _node(self, path: str) -> Node:
        node: Node = self.root
        for part in Path(path).relative_to(self.base).parts:
            assert isinstance(node, Directory)
            node = node.names()[part]
        return node

    def _change(self, path: str, node: Node | None, gone: str | None = None) -> None:
        head, name = os.path.split(path)
        directory = self._node(head)
        assert isinstance(directory, Directory)
        change: dict[str, Node | None] = {name: node}
        if gone is not None:
            assert os.path.dirname(gone) == head, "a rename between directories is not modelled"
            change[os.path.basename(gone)] = None
        directory.pending.append(change)

    def _begin(self, call: str, path: str) -> None:
        self.before(len(self.calls), call, path)
        self.calls.append((call, os.path.basename(path)))

    # -- the calls that storage makes --

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._begin("mkdir", path)
        os.mkdir(path, mode)
        self._change(path, Directory())
        self.after()

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            fd = os.open(path, flags, mode)
            if path == self.base or path.startswith(f"{self.base}/"):
                self._open[fd] = path, self._node(path)
            return fd
        self._begin("create", path)
        fd = os.open(path, flags, mode)
        self._open[fd] = path, File()
        self._change(path, self._open[fd][1])
        self.after()
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        path, node = self._open[fd]
        self._begin("write", path)
        done = os.write(fd, data)
        assert isinstance(node, File)
        node.data += bytes(data[:done])
        self.after()
        return done

    def fsync(self, fd: int) -> None:
        path, node = self._open[fd]
        self._begin("fsync", path)
        if isinstance(node, File) and "file" not in self.lazy:
            node.durable = node.data
        elif isinstance(node, Directory) and "directory" not in self.lazy:
            node.durable, node.pending = node.names(), []
        self.after()

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        self._begin("rename", target)
        os.rename(source, target)
        self._change(target, self._node(source), gone=source)
        self.after()

    def unlink(self, path: str) -> None:
        if not os.path.lexists(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        self._begin("unlink", path)
        os.unlink(path)
        self._change(path, None)
        self.after()

    def rmdir(self, path: str) -> None:
        os.rmdir(path)
        self.calls.append(("rmdir", os.path.basename(path)))
        self._change(path, None)
        self.after()

    # -- what a power cut leaves --

    def leftovers(self) -> Iterator[Tree]:
        """Every state that the disk can be in after a power cut now, with all and with none of what was not flushed."""
        for torn in (False, True):
            yield from self._states(self.root, "", torn)

    def _states(self, node: Node, path: str, whole: bool) -> Iterator[Tree]:
        if isinstance(node, File):
            yield {path: node.data if whole else node.durable}
            return
        seen: list[dict[str, Node]] = []
        for kept in itertools.product((False, True), repeat=len(node.pending)):
            names = node.names([change for change, keep in zip(node.pending, kept, strict=True) if keep])
            if names in seen:
                continue
            seen.append(names)
            below = [[*self._states(child, f"{path}/{name}", whole)] for name, child in sorted(names.items())]
            for combination in itertools.product(*below):
                tree: Tree = {path: None}
                for part in combination:
                    tree |= part
                yield tree


def lay_out(tree: Tree, target: Path) -> None:
    """Make these files and directories below `target`, which is made too."""
    for path, data in sorted(tree.items()):
        if data is None:
            (target / path.removeprefix("/")).mkdir()
        else:
            (target / path.removeprefix("/")).write_bytes(data)
