"""Filling the live state from a snapshot: everything is compared and prepared, the bytes are loaded, then the rest.

Tensors are written through their addresses, by the native scatter; what the live state lacks is made here, without a
hidden optimizer step, and put in place by `Targets.apply`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memckpt.errors import CorruptSnapshot, LayoutMismatch, StateDamaged
from memckpt.format.dtypes import ITEMSIZE
from memckpt.format.overlap import Seen, look, shared
from memckpt.format.strided import Copy, memory_of, raw, same_order
from memckpt.state import fill
from memckpt.state.filling import Filling, Row
from memckpt.state.sources import PLAIN_VERSION, Source
from memckpt.state.tree import unescape

if TYPE_CHECKING:
    from memckpt.format.header import Entry, View
    from memckpt.format.layout import Layout
    from memckpt.state.state import State


@dataclass(slots=True)
class Targets:
    """Where the bytes of one file go.

    Attributes
    ----------
    targets, nbytes, offsets : uint64[n]
        Address to write to, size, and first byte in the file: the arguments of `_native.scatter`.
    rows : list of tuple of (str, str, str)
        With ``strict=False``: key, what is saved, what is wanted, of all that is left out.
    keep : object
        Owner of all memory that is written to.
    """

    targets: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint64]
    rows: list[Row]
    keep: Any
    _copies: list[Copy]
    _applies: list[tuple[str, Callable[[], None]]]

    def apply(self) -> None:
        """After the bytes are loaded: finish strided tensors, put new ones in place, load plain values. Local.

        Raises
        ------
        StateDamaged
            A ``load_state_dict`` raised (chained); the live state is a mixture.
        """
        for copy in self._copies:
            copy.run()
        for name, action in self._applies:
            try:
                action()
            except Exception as error:
                raise StateDamaged(
                    f"restoring {name!r} failed after other parts had been restored: {error}", path=name
                ) from error


def prepare(state: State, stored: Layout, *, strict: bool = True, leave: frozenset[str] = frozenset()) -> Targets:
    """Where every byte of a snapshot goes in a live state. Changes nothing that is live. Local.

    Parameters
    ----------
    state : State
        What is to be filled.
    stored : Layout
        From `Layout.parse`.
    strict : bool
        Raise when keys, shapes or dtypes differ; else `Targets.rows` lists what is left out.
    leave : frozenset of str
        Names of objects that stay as they are, whatever the snapshot says of them.

    Raises
    ------
    LayoutMismatch
        The snapshot and the live state differ; it lists every key.
    CorruptSnapshot, StateError
        Plain values that are damaged, pickled without ``allow_pickle``, or cannot be made here.
    """
    state.collect()
    objects = objects_of(stored.plain)
    plan = Filling(stored, state.allow_pickle)
    keys: dict[str, list[str]] = {}
    for key in stored.names:
        keys.setdefault(key.partition("/")[0], []).append(key)
    for source in sorted(state.sources, key=fill.is_rng):
        said = objects.pop(source.name, None)
        if source.name in leave:
            continue
        if said is None:
            plan.breaks(source, source.name, "-", source.kind)
        elif said.kind != source.kind:
            plan.breaks(source, source.name, said.kind, source.kind)
        else:
            _compare_classes(plan, source)
            fill.plan(plan, source, said.data, keys.get(source.key, []))
    for name, said in objects.items():
        if name in leave:
            continue
        plan.row(name, said.kind, "-")
    pieces, copies = _match(plan)
    if plan.rows and strict:
        raise _mismatch(plan.rows, stored)
    pieces.sort(key=lambda piece: (piece[2], piece[1]))
    columns = np.array(pieces, np.uint64).reshape(-1, 3).T.copy()
    return Targets(
        columns[0],
        columns[1],
        columns[2],
        plan.rows,
        (plan.wanted, copies, state.objects),
        copies,
        [(name, action) for name, action in plan.applies if name not in plan.broken],
    )


class _Object(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    data: Any


class _Root(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    objects: dict[str, _Object]


def objects_of(plain: bytes) -> dict[str, _Object]:
    """Plain values of a snapshot by the name of their object. Local; raises CorruptSnapshot."""
    try:
        root = msgspec.json.decode(plain, type=_Root)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise CorruptSnapshot(f"plain values: {error}") from error
    if root.version != PLAIN_VERSION:
        raise CorruptSnapshot(f"plain values of version {root.version}; this memckpt reads {PLAIN_VERSION}")
    return root.objects


def _compare_classes(plan: Filling, source: Source) -> None:
    for key, wanted in source.classes.items():
        saved = plan.stored.classes.get(key, "-")
        if saved != wanted:
            plan.breaks(source, key, saved, wanted)


def _mismatch(rows: list[Row], stored: Layout) -> LayoutMismatch:
    lines = [f"  {key}: saved {saved}, wanted {wanted}" for key, saved, wanted in rows[:50]]
    if len(rows) > 50:
        lines.append(f"  and {len(rows) - 50} more")
    text = f"the snapshot and the live state differ in {len(rows)} place(s); nothing was changed\n" + "\n".join(lines)
    return LayoutMismatch(text, rows, run=stored.run or None, step=stored.step, rank=stored.shard)


Piece = tuple[int, int, int]


def _match(plan: Filling) -> tuple[list[Piece], list[Copy]]:
    """Live memory against the entries of the file: pieces to scatter, and strided copies to do after that."""
    wanted = {k: v for k, v in plan.wanted.items() if not _in(k, plan.broken)}
    seen = [look(i, key, tensor, place) for i, (key, (tensor, place)) in enumerate(wanted.items())]
    pieces: list[Piece] = []
    copies: list[Copy] = []
    for group, overlapping in shared(seen):
        stored = [plan.stored.names[s.key] for s in group]
        if (text := _conflict(group, stored, overlapping)) is not None:
            for s in group:
                plan.row(s.key, f"{plan.describe(s.key)} {text[0]}", f"{plan.describe(s.key)} {text[1]}")
        elif overlapping:
            low = min(s.memory.address for s in group)
            high = max(s.memory.address + s.memory.extent for s in group)
            entry, view = stored[0]
            pieces.append((low, high - low, entry.offset + view.offset - (group[0].memory.address - low)))
        else:
            _single(group[0], *stored[0], pieces, copies)
    return pieces, copies


def _in(key: str, names: set[str]) -> bool:
    return bool(names) and unescape(key.partition("/")[0]) in names


def _conflict(group: list[Seen], stored: list[tuple[Entry, View]], overlapping: bool) -> tuple[str, str] | None:
    """Why tensors that share memory here cannot all get what was saved under their names, if so."""
    entry, view = stored[0]
    for s, (e, v) in zip(group, stored, strict=False):
        if e.key != entry.key:
            return "in memory of its own", f"sharing memory with {group[0].key}"
        if overlapping:
            moved = (v.offset - view.offset) != (s.memory.address - group[0].memory.address)
            if moved or not same_order(s.shape, s.stride, v.stride):
                return "sharing memory in another way", f"sharing memory with {group[0].key}"
        elif v.offset != view.offset or not same_order(v.shape, v.stride, view.stride):
            return "in memory of its own", f"sharing memory with {group[0].key}"
        if any(b == 0 and n > 1 and a != 0 for n, a, b in zip(s.shape, v.stride, s.stride, strict=False)):
            return "not expanded", "expanded"
    if overlapping:
        low = min(s.memory.address for s in group)
        begin = view.offset - (group[0].memory.address - low)
        if begin < 0 or begin + max(s.memory.address + s.memory.extent for s in group) - low > entry.nbytes:
            return "sharing memory in another way", f"sharing memory with {group[0].key}"
    return None


def _single(s: Seen, entry: Entry, view: View, pieces: list[Piece], copies: list[Copy]) -> None:
    begin = entry.offset + view.offset
    if s.memory.dense and same_order(s.shape, s.stride, view.stride):
        pieces.append((s.memory.address, s.memory.nbytes, begin))
        return
    itemsize = ITEMSIZE[view.dtype]
    extent = memory_of(0, view.shape, view.stride, itemsize).extent
    staging = torch.empty(extent, dtype=torch.uint8)
    pieces.append((staging.data_ptr(), extent, begin))
    sizes = tuple(n if st else 1 for n, st in zip(s.shape, s.stride, strict=False))  # each element of live memory once
    source = raw(staging.data_ptr(), sizes, view.stride, itemsize)
    copies.append(Copy(raw(s.memory.address, sizes, s.stride, itemsize), source, (staging, s.tensor)))


__all__ = ["Filling", "Targets", "objects_of", "prepare"]
