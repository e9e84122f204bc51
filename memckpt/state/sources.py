"""Where the state comes from: one source for each object finds its tensors and plain values.

Modules and optimizers are in files of their own. Filling an object again is the other half, in `memckpt.state.restore`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import is_
from typing import Any

import torch

from memckpt.format.strided import Copy, contiguous_stride, raw_of
from memckpt.state.leaves import Classes, Leaf, Place, flatten
from memckpt.state.tree import Encoder, Where, escape, key_of

#: Tensors that an object makes anew at every save are copied into memory that stays, up to this many bytes in all.
PLAIN_VERSION = 1
"""Of the form in which plain values are saved."""

VOLATILE_NBYTES = 64 << 20


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other processes may write to a tensor. Local."""
    return bool(getattr(tensor, "_local_tensor", tensor).untyped_storage().is_shared())


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the very same objects. Local."""
    return len(a) == len(b) and all(map(is_, a, b))


class Found:
    """What one walk over an object found: `keys[i]` names `tensors[i]`; `wheres[i]` says it to people (or None)."""

    __slots__ = ("keys", "tensors", "wheres")

    def __init__(self, keys: list[str], tensors: list[torch.Tensor], wheres: list[Where] | None = None) -> None:
        self.keys = keys
        self.tensors = tensors
        self.wheres = wheres

    def leaves(self, classes: Classes) -> list[Leaf]:
        wheres: Iterable[Where] = self.wheres if self.wheres is not None else [None] * len(self.keys)
        return [
            leaf for k, t, w in zip(self.keys, self.tensors, wheres, strict=False) for leaf in flatten(t, k, w, classes)
        ]


class Source(ABC):
    """One named object of the state.

    Attributes
    ----------
    tensors, keys : list
        Plain strided tensors and their keys, as of the last `refresh`.
    places : dict of int to Place
        Index -> place of a chunk in its global tensor.
    outer : list of torch.Tensor or None
        For each tensor the one found in the state, if it may be copied lazily.
    classes : dict of str to str
        Structure of tensor subclasses.
    """

    kind: str

    def __init__(self, name: str, *, allow_pickle: bool) -> None:
        self.name = name
        self.root: Where = (None, "k", name)
        self.key = escape(name)
        self.allow_pickle = allow_pickle
        self.tensors: list[torch.Tensor] = []
        self.keys: list[str] = []
        self.outer: list[torch.Tensor | None] = []
        self.places: dict[int, Place] = {}
        self.classes: Classes = {}
        self._found: Found | None = None
        self._inner: list[torch.Tensor] = []  # leaves as they are, where `tensors` may hold our copies
        self._composed = False
        self._volatile: dict[int, torch.Tensor] = {}
        self._replaced: Counter[int] = Counter()

    @abstractmethod
    def walk(self) -> Found:
        """The object's tensors now; lists may be those of the last walk if nothing changed."""

    @abstractmethod
    def plain(self) -> Any:
        """The node of everything that is no tensor, as of the last `walk`."""

    def lazy(self, owners: dict[int, torch.optim.Optimizer | None]) -> list[torch.optim.Optimizer | None]:
        """For each tensor the optimizer that alone changes it, or None."""
        return [owners.get(id(t)) if t is not None else None for t in self.outer]

    def encoder(self, keys: list[str], tensors: list[torch.Tensor], wheres: list[Where]) -> Encoder:
        """An encoder that appends the tensors it meets to these lists."""

        def store(tensor: torch.Tensor, where: Where) -> str:
            key = key_of(where)
            keys.append(key)
            tensors.append(tensor)
            wheres.append(where)
            return key

        return Encoder(store, allow_pickle=self.allow_pickle)

    def refresh(self) -> bool:
        """Walk again; true if other tensors must be copied from now on. Local."""
        found = self.walk()
        before = self._found
        unchanged = before is not None and same(before.tensors, found.tensors) and before.keys == found.keys
        if unchanged and not self._composed:
            self._settle()
            return False
        classes: Classes = {}
        leaves = found.leaves(classes)
        self._found = found
        self._composed = any(not leaf.plain for leaf in leaves)
        inner = [leaf.tensor for leaf in leaves]
        keys = [leaf.key for leaf in leaves]
        outer = self._outer(found, leaves)
        if keys == self.keys and classes == self.classes:
            if self._absorb(inner, outer):
                return False
        else:
            self._volatile, self._replaced = {}, Counter()
        self._inner = inner
        self.tensors = [self._volatile.get(i, t) for i, t in enumerate(inner)]
        self._settle()
        self.keys = keys
        self.classes = classes
        self.places = {i: leaf.place for i, leaf in enumerate(leaves) if leaf.place is not None}
        self.outer = [None if i in self._volatile else t for i, t in enumerate(outer)]
        return True

    @property
    def live(self) -> dict[str, tuple[torch.Tensor, Place | None]]:
        """Key -> the live tensor itself (never our copy of it) and its place, as of the last `refresh`."""
        return {k: (t, self.places.get(i)) for i, (k, t) in enumerate(zip(self.keys, self._inner, strict=False))}

    @property
    def found(self) -> dict[str, torch.Tensor]:
        """Key -> tensor as found in the state, of any kind, as of the last `refresh`."""
        return dict(zip(self._found.keys, self._found.tensors, strict=False)) if self._found is not None else {}

    def _outer(self, found: Found, leaves: list[Leaf]) -> list[torch.Tensor | None]:
        if not self._composed:
            return list(found.tensors)
        by_key = dict(zip(found.keys, found.tensors, strict=False))
        return [by_key.get(leaf.key) for leaf in leaves]  # an inner tensor has a key of its own: never lazy

    def _absorb(self, inner: list[torch.Tensor], outer: list[torch.Tensor | None]) -> bool:
        """Take tensors that were made anew as new values of the old ones, if that needs no new layout."""
        old = self._inner
        fresh = [i for i, (a, b) in enumerate(zip(old, inner, strict=False)) if a is not b]
        kept = self._volatile = {i: t for i, t in self._volatile.items() if _alike(t, inner[i])}
        steady = all(i in kept or a is b for i, (a, b) in enumerate(zip(self.outer, outer, strict=False)))
        if steady and all(i in kept for i in fresh):
            self._inner = inner
            self._settle()
            return True
        nbytes = sum(t.numel() * t.element_size() for t in kept.values())
        for i in fresh:
            self._replaced[i] += 1
            nbytes += inner[i].numel() * inner[i].element_size()
            if self._replaced[i] > 1 and nbytes <= VOLATILE_NBYTES and not isinstance(inner[i], torch.nn.Parameter):
                kept.setdefault(i, _memory_like(inner[i]))
        return False

    def _settle(self) -> None:
        for i, target in self._volatile.items():
            Copy(raw_of(target), raw_of(self._inner[i]), None).run()


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


def _memory_like(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    shape = tuple(tensor.shape)
    made = torch.empty((0,), dtype=tensor.dtype).set_(memory.untyped_storage(), 0, shape, contiguous_stride(shape))
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


class TensorSource(Source):
    """A tensor of the mapping itself."""

    kind = "tensor"

    def __init__(self, name: str, tensor: torch.Tensor, *, allow_pickle: bool) -> None:
        super().__init__(name, allow_pickle=allow_pickle)
        self.tensor = tensor

    def walk(self) -> Found:
        return Found([self.key], [self.tensor], [self.root])

    def plain(self) -> Any:
        return None


def is_tensors(value: Any) -> bool:
    """Whether a list or dictionary holds nothing but tensors (by names, in a dictionary): then it is a fixed set."""
    if type(value) is dict:
        return bool(value) and set(map(type, value)) == {str} and all(_tensors(value.values()))
    return type(value) is list and bool(value) and all(_tensors(value))


def _tensors(values: Iterable[Any]) -> Iterator[bool]:
    return (isinstance(v, torch.Tensor) for v in values)


class ContainerSource(Source):
    """A list or dictionary: a fixed set of tensors, or any tree of tensors and plain values."""

    kind = "container"

    def __init__(self, name: str, value: Any, *, allow_pickle: bool) -> None:
        super().__init__(name, allow_pickle=allow_pickle)
        self.value = value
        self._names: list[Any] = []
        self._last: Found | None = None
        self._node: Any = None

    def walk(self) -> Found:
        value = self.value
        names = list(value) if type(value) is dict else []
        tensors = list(value.values()) if type(value) is dict else value
        if self._last is not None and same(self._last.tensors, tensors) and names == self._names:
            return self._last
        self._last = None
        if is_tensors(value):
            kind = "k" if type(value) is dict else "i"
            wheres: list[Where] = [(self.root, kind, n) for n in (names or range(len(value)))]
            self._names = names
            self._node = {"tensors": type(value).__name__, "order": _order(list(tensors), names)}
            self._last = Found([key_of(w) for w in wheres], list(tensors), wheres)
            return self._last
        keys: list[str] = []
        found: list[torch.Tensor] = []
        wheres = []
        self._node = {"tree": self.encoder(keys, found, wheres).encode(value, self.root)}
        return Found(keys, found, wheres)

    def plain(self) -> Any:
        return self._node


def _order(tensors: list[torch.Tensor], names: list[str]) -> list[str] | None:
    """The order of a dictionary's tensors, if it is not that of the file (by element size)."""
    sizes = [t.element_size() for t in tensors]
    return None if all(a >= b for a, b in pairwise(sizes)) else [escape(n) for n in names]


class ObjectSource(Source):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    kind = "object"

    def __init__(self, name: str, value: Any, *, allow_pickle: bool) -> None:
        super().__init__(name, allow_pickle=allow_pickle)
        self.value = value
        self._node: Any = None

    def walk(self) -> Found:
        keys: list[str] = []
        tensors: list[torch.Tensor] = []
        wheres: list[Where] = []
        self._node = {"tree": self.encoder(keys, tensors, wheres).encode(self.value.state_dict(), self.root)}
        return Found(keys, tensors, wheres)

    def plain(self) -> Any:
        return self._node
