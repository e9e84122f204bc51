"""What a restore is going to do to one live state: found out, and refused, before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memckpt.errors import StateError
from memckpt.format.dtypes import BY_NAME, NAMES
from memckpt.format.layout import describe
from memckpt.format.strided import memory_of
from memckpt.state.leaves import Place
from memckpt.state.sources import Source
from memckpt.state.tree import Decoder

if TYPE_CHECKING:
    from memckpt.format.layout import Layout

Row = tuple[str, str, str]


@dataclass
class Filling:
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
