"""Filling the live state from a snapshot: everything is compared and prepared, the bytes are loaded, then the rest.

Tensors are written through their addresses, by the native scatter; what the live state lacks is made here, without a
hidden optimizer step, and put in place by `Targets.apply`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memckpt.dtypes import BY_NAME, ITEMSIZE, NAMES
from memckpt.errors import CorruptSnapshot, LayoutMismatch, StateDamaged, StateError
from memckpt.layout import describe
from memckpt.leaves import Place
from memckpt.overlap import Seen, look, shared
from memckpt.sources import Source
from memckpt.strided import Copy, memory_of, raw, same_order
from memckpt.tree import Decoder, unescape

if TYPE_CHECKING:
    from memckpt.header import Entry, View
    from memckpt.layout import Layout
    from memckpt.state import State

Row = tuple[str, str, str]
PLAIN_VERSION = 1


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


@dataclass
class Plan:
    """What is found out about one snapshot and one live state before anything changes."""

    stored: Layout
    allow_pickle: bool
    rows: list[Row] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # names of objects that cannot be filled as a whole
    wanted: dict[str, tuple[torch.Tensor, Place | None]] = field(default_factory=dict)
    applies: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    _memory: dict[str, torch.Tensor] = field(default_factory=dict)
    _new: set[int] = field(default_factory=set)

    def describe(self, key: str) -> str:
        return self.stored.describe(key)

    def row(self, key: str, saved: str, wanted: str) -> None:
        self.rows.append((key, saved, wanted))

    def breaks(self, source: Source, key: str, saved: str, wanted: str) -> None:
        """A difference by which the object as a whole cannot be filled."""
        self.row(key, saved, wanted)
        self.broken.add(source.name)

    def fill(self, key: str, tensor: torch.Tensor, place: Place | None) -> bool:
        """Want the stored bytes of `key` in a live tensor; false, and a row, if they are of another form."""
        whole, offsets = place if place is not None else (None, None)
        wanted = (NAMES[tensor.dtype], tuple(tensor.shape), whole, offsets, tensor.is_conj(), tensor.is_neg())
        entry, view = self.stored.names.get(key, (None, None))
        if entry is None or view is None:
            self.row(key, "-", describe(*wanted))
            return False
        if wanted != (view.dtype, view.shape, entry.global_shape, entry.offsets, view.conj, view.neg):
            self.row(key, self.describe(key), describe(*wanted))
            return False
        self.wanted[key] = (tensor, place)
        return True

    def make(self, key: str) -> torch.Tensor:
        """A new tensor of the stored form, whose bytes are wanted; names that share memory there share it here."""
        if key in self.made:
            return self.made[key]
        entry, view = self.stored.names[key]
        dtype = BY_NAME.get(view.dtype)
        if dtype is None:
            raise StateError(f"this torch has no dtype {view.dtype}", path=key)
        memory = self._memory.get(entry.key)
        if memory is None:
            memory = self._memory[entry.key] = torch.empty(entry.nbytes, dtype=torch.uint8)
        offset = view.offset
        if offset % dtype.itemsize:  # a view at an odd place in its span has to live elsewhere
            extent = memory_of(0, view.shape, view.stride, dtype.itemsize).extent
            memory, offset = torch.empty(extent, dtype=torch.uint8), 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ComplexHalf", category=UserWarning)
            made = torch.empty((0,), dtype=dtype)
        made.set_(memory.untyped_storage(), offset // dtype.itemsize, view.shape, view.stride)
        made = made.conj() if view.conj else made
        made = torch._neg_view(made) if view.neg else made
        self.made[key] = made
        self._new.add(id(made))
        chunk = entry.global_shape is not None and entry.offsets is not None
        self.wanted[key] = (made, Place(entry.global_shape, entry.offsets) if chunk else None)  # type: ignore[arg-type]
        return made

    def fetch(self, source: Source, *, in_place: bool) -> Callable[[str], torch.Tensor]:
        """Tensors of a tree: the live ones where that is asked for (or there is no other way), else new ones."""
        found = source.found
        live = source.live
        composed: dict[str, list[str]] = {}  # the inner tensors of tensor subclasses
        for key in live:
            if key not in found:
                composed.setdefault(key.partition("/~t")[0], []).append(key)

        def fetch(key: str) -> torch.Tensor:
            inner = composed.get(key) or ([key] if key in live else [])
            saved = self.stored.names.get(key)
            chunk = saved is not None and saved[0].global_shape is not None
            if inner and (in_place or chunk or key in composed):
                filled = [self.fill(k, *live[k]) for k in inner]  # all of them, for the list of differences
                if all(filled):
                    return found[key]
            elif saved is not None and not chunk:
                return self.make(key)
            else:
                self.row(key, self.describe(key), "no live tensor of that kind to fill")
            self.broken.add(source.name)
            return torch.empty(0)

        return fetch

    def decoder(self, source: Source, *, in_place: bool = False) -> Decoder:
        return Decoder(self.fetch(source, in_place=in_place), allow_pickle=self.allow_pickle, is_new=self.is_new)

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made here, and is not a live one."""
        return id(tensor) in self._new


def prepare(state: State, stored: Layout, *, strict: bool) -> Targets:
    """See `State.prepare`."""
    from memckpt import fill

    state.collect()
    objects = _objects(stored.plain)
    plan = Plan(stored, state.allow_pickle)
    keys: dict[str, list[str]] = {}
    for key in stored.names:
        keys.setdefault(key.partition("/")[0], []).append(key)
    for source in sorted(state.sources, key=fill.is_rng):
        said = objects.pop(source.name, None)
        if said is None:
            plan.breaks(source, source.name, "-", source.kind)
        elif said.kind != source.kind:
            plan.breaks(source, source.name, said.kind, source.kind)
        else:
            _compare_classes(plan, source)
            fill.plan(plan, source, said.data, keys.get(source.key, []))
    for name, said in objects.items():
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


def _objects(plain: bytes) -> dict[str, _Object]:
    try:
        root = msgspec.json.decode(plain, type=_Root)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise CorruptSnapshot(f"plain values: {error}") from error
    if root.version != PLAIN_VERSION:
        raise CorruptSnapshot(f"plain values of version {root.version}; this memckpt reads {PLAIN_VERSION}")
    return root.objects


def _compare_classes(plan: Plan, source: Source) -> None:
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


def _match(plan: Plan) -> tuple[list[Piece], list[Copy]]:
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


__all__ = ["Plan", "Targets", "prepare"]
