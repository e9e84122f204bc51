"""Where the state comes from: one source for each object, which finds its tensors and plain values, cheaply when nothing changed.

Filling an object again is the other half, in `memckpt.restore`.
"""

from __future__ import annotations

from collections import Counter
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain, compress
from operator import is_, itemgetter
from typing import Any

import msgspec
import torch

from memckpt.errors import StateError
from memckpt.leaves import Classes, Leaf, Place, flatten
from memckpt.strided import Copy, contiguous_stride, raw_of
from memckpt.tree import Encoder, Where, escape, key_of

#: Tensors that an object makes anew at every save are copied into memory that stays, up to this many bytes in all.
VOLATILE_NBYTES = 64 << 20


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
        return [leaf for k, t, w in zip(self.keys, self.tensors, wheres) for leaf in flatten(t, k, w, classes)]


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
        return {k: (t, self.places.get(i)) for i, (k, t) in enumerate(zip(self.keys, self._inner))}

    @property
    def found(self) -> dict[str, torch.Tensor]:
        """Key -> tensor as found in the state, of any kind, as of the last `refresh`."""
        return dict(zip(self._found.keys, self._found.tensors)) if self._found is not None else {}

    def _outer(self, found: Found, leaves: list[Leaf]) -> list[torch.Tensor | None]:
        if not self._composed:
            return list(found.tensors)
        by_key = dict(zip(found.keys, found.tensors))
        return [by_key.get(leaf.key) for leaf in leaves]  # an inner tensor has a key of its own: never lazy

    def _absorb(self, inner: list[torch.Tensor], outer: list[torch.Tensor | None]) -> bool:
        """Take tensors that were made anew as new values of the old ones, if that needs no new layout."""
        old = self._inner
        fresh = [i for i, (a, b) in enumerate(zip(old, inner)) if a is not b]
        kept = self._volatile = {i: t for i, t in self._volatile.items() if _alike(t, inner[i])}
        steady = all(i in kept or a is b for i, (a, b) in enumerate(zip(self.outer, outer)))
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


def is_wrapper(module: torch.nn.Module) -> str | None:
    """Name of the child that a wrapper without state of its own (torch.compile, DDP, DataParallel) wraps. Local."""
    kind = type(module)
    if kind.__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod"
    if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return "module"
    return None


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other processes may write to a tensor. Local."""
    return bool(getattr(tensor, "_local_tensor", tensor).untyped_storage().is_shared())


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside any number of wrappers. Local."""
    while (child := is_wrapper(module)) is not None:
        inner = module._modules[child]
        assert inner is not None
        module = inner
    return module


_PARTS = itemgetter(
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"
)


class ModuleSource(Source):
    """An ``nn.Module``: parameters and persistent buffers by their dotted names, wrappers' prefixes left out."""

    kind = "module"

    def __init__(self, name: str, module: torch.nn.Module, *, allow_pickle: bool) -> None:
        super().__init__(name, allow_pickle=allow_pickle)
        self.module = unwrap(module)
        self.extra: dict[str, Any] = {}
        self._modules: list[torch.nn.Module] = []
        self._prefixes: list[str] = []
        self._seen: list[Any] = []
        self._last: Found | None = None

    def walk(self) -> Found:
        if self._last is not None and self._unchanged():
            return self._last
        self._modules, self._prefixes = [], []
        self._visit(self.module, "")
        if all(map(_is_stock, self._modules)):
            self._look()
            self.extra = {}
            self._last = self._list()
            return self._last
        self._last = None
        return self._by_state_dict()

    def plain(self) -> Any:
        return self.extra

    def _visit(self, module: torch.nn.Module, prefix: str) -> None:
        self._modules.append(module)
        self._prefixes.append(prefix)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(unwrap(child), f"{prefix}{name}.")

    def _look(self) -> None:
        parts = [_PARTS(m.__dict__) for m in self._modules]
        parameters, buffers, children, hidden, _, _ = zip(*parts)
        self._seen = [
            list(chain.from_iterable(p.values() for p in parameters)),
            list(chain.from_iterable(b.values() for b in buffers)),
            list(chain.from_iterable(c.values() for c in children)),
            list(map(type, self._modules)),
            [list(chain.from_iterable(parameters)), list(chain.from_iterable(buffers))],
            [list(chain.from_iterable(children)), list(map(len, parameters)), list(map(len, buffers))],
            list(map(set, hidden)),
        ]

    def _unchanged(self) -> bool:
        before, modules, last = self._seen, self._modules, self._last
        parameters, buffers, children, hidden, hooks, pre = zip(*map(_PARTS, [m.__dict__ for m in modules]))
        values = dict.values
        return (
            last is not None
            and same(before[0], list(chain.from_iterable(map(values, parameters))))
            and same(before[1], list(chain.from_iterable(map(values, buffers))))
            and same(before[2], list(chain.from_iterable(map(values, children))))
            and before[3] == list(map(type, modules))
            and before[4] == [list(chain.from_iterable(parameters)), list(chain.from_iterable(buffers))]
            and before[5]
            == [list(chain.from_iterable(children)), list(map(len, parameters)), list(map(len, buffers))]
            and before[6] == list(hidden)
            and not any(hooks)
            and not any(pre)
            and "state_dict" not in self.module.__dict__
        )

    def _list(self) -> Found:
        keys: list[str] = []
        tensors: list[torch.Tensor] = []
        for module, prefix in zip(self._modules, self._prefixes):
            hidden = module._non_persistent_buffers_set
            for name, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None and name not in hidden:
                    keys.append(f"{self.key}/{escape(prefix + name)}")
                    tensors.append(tensor)
        return Found(keys, tensors)

    def _by_state_dict(self) -> Found:
        """Modules with hooks, extra state or a ``state_dict`` of their own say themselves what they save."""
        keys: list[str] = []
        tensors: list[torch.Tensor] = []
        wheres: list[Where] = []
        encoder = self.encoder(keys, tensors, wheres)
        self.extra = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            name = self.canonical(name)
            where: Where = (self.root, "k", name)
            if isinstance(value, torch.Tensor):
                keys.append(key_of(where))
                tensors.append(value)
                wheres.append(where)
            else:
                self.extra[name] = encoder.encode(value, where)
        return Found(keys, tensors, wheres)

    def canonical(self, name: str) -> str:
        """A state-dict key without the prefixes of wrappers inside the module."""
        out = []
        module: torch.nn.Module | None = self.module
        for part in name.split("."):
            if module is not None and is_wrapper(module) == part:
                module = module._modules[part]
                continue
            out.append(part)
            module = module._modules.get(part) if module is not None else None
        return ".".join(out)


_stock: dict[type, bool] = {}


def _is_stock(module: torch.nn.Module) -> bool:
    """Whether PyTorch's own ``state_dict`` gives just this module's parameters and buffers."""
    kind = type(module)
    known = _stock.get(kind)
    if known is None:
        base = torch.nn.Module
        known = _stock[kind] = all(
            getattr(kind, name) is getattr(base, name)
            for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
        )
    return (
        known
        and not isinstance(module, torch.jit.ScriptModule)
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
        and not {"state_dict", "_save_to_state_dict", "get_extra_state"} & module.__dict__.keys()
    )


def is_stock_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``state_dict`` of this optimizer is PyTorch's own, so that its state may be read and filled directly."""
    return (
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and "state_dict" not in optimizer.__dict__
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


#: Members of a param group that are structure, not hyperparameters.
GROUP_STRUCTURE = ("params", "param_names")


class OptimizerSource(Source):
    """A ``torch.optim.Optimizer``: per-parameter tensors as ``<name>/state/<index>/<what>``, the rest as plain values."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, *, allow_pickle: bool) -> None:
        super().__init__(name, allow_pickle=allow_pickle)
        self.optimizer = optimizer
        self.parameters: list[torch.Tensor] = []
        self._states: list[Any] = []
        self._names: list[Any] = []
        self._types: list[type] = []
        self._raw: list[Any] = []
        self._mask: list[bool] = []
        self._order: list[int] = []
        self._fast: Found = Found([], [])
        self._index: dict[int, int] = {}
        self._node: Any = None
        self._plain_state: list[Any] = []
        self._state_node: Any = None

    def walk(self) -> Found:
        groups = self.optimizer.param_groups
        parameters = list(chain.from_iterable([g["params"] for g in groups]))
        holders = list(self.optimizer.state)
        states = list(self.optimizer.state.values())
        names: list[Any] = list(chain.from_iterable(states))
        values = list(chain.from_iterable([s.values() for s in states]))
        if not (
            same(parameters, self.parameters)
            and len(holders) * 2 == len(self._states)
            and same([*holders, *states], self._states)
            and names == self._names
            and list(map(type, values)) == self._types
        ):
            self._restructure(parameters, holders, states, names, values)
        tensors = list(compress(values, self._mask))
        if not same(tensors, self._raw):
            self._raw = tensors
            self._fast = Found(self._fast.keys, [tensors[i] for i in self._order])
        return self._with_plain(values)

    def lazy(self, owners: dict[int, torch.optim.Optimizer | None]) -> list[torch.optim.Optimizer | None]:
        own = {id(t) for t in self._fast.tensors}
        plain = [owners.get(id(p)) is self.optimizer for p in self.parameters]
        if not all(plain):  # somebody resizes or shares its parameters: then nothing is known of its state either
            return [None] * len(self.outer)
        return [self.optimizer if t is not None and id(t) in own and not is_shared(t) else None for t in self.outer]

    def _restructure(
        self, parameters: list[Any], holders: list[Any], states: list[Any], names: list[Any], values: list[Any]
    ) -> None:
        self.parameters = parameters
        self._states = [*holders, *states]
        self._names = names
        self._types = list(map(type, values))
        self._index = {id(p): i for i, p in enumerate(parameters)}
        indices = [self._index.get(id(h), -1) for h in holders]
        for holder, index in zip(holders, indices):
            if index < 0 and isinstance(holder, torch.Tensor):
                raise StateError("state of a tensor that is in no param group", path=f"{self.name}.state")
        owner = list(chain.from_iterable([i] * len(s) for i, s in zip(indices, states)))
        self._mask = [isinstance(v, torch.Tensor) and i >= 0 for v, i in zip(values, owner)]
        places = [(i, str(n), n) for i, n, m in zip(owner, names, self._mask) if m]
        self._order = sorted(range(len(places)), key=lambda at: places[at][:2])
        prefix = f"{self.key}/state/"
        keys = []
        for at in self._order:
            index, text, name = places[at]
            part = escape(text) if type(name) is str else key_of((None, "k", name))
            keys.append(f"{prefix}{index}/{part}")
        self._raw = [None]  # compared unequal, so that the list is made anew
        self._fast = Found(keys, [])
        self._plain_state = [object()]  # equal to nothing, so that the node is made anew

    def _with_plain(self, values: list[Any]) -> Found:
        keys: list[str] = []
        tensors: list[torch.Tensor] = []
        wheres: list[Where] = []
        encoder = self.encoder(keys, tensors, wheres)
        self._node = {"groups": self._groups(encoder), "state": self._plain_of_state(values, encoder)}
        if not keys:
            return self._fast
        fast = self._fast
        return Found([*fast.keys, *keys], [*fast.tensors, *tensors], [*[None] * len(fast.keys), *wheres])

    def _groups(self, encoder: Encoder) -> Any:
        """Hyperparameters by column, as runs of groups with the same value."""
        groups = self.optimizer.param_groups
        names = list(dict.fromkeys(chain.from_iterable(groups)))
        columns: list[Any] = []
        missing = object()
        for name in names:
            if name in GROUP_STRUCTURE:
                continue
            runs: list[list[Any]] = []
            last: Any = None
            for i, group in enumerate(groups):
                value = group.get(name, missing)
                if runs and value is last and not isinstance(value, torch.Tensor):
                    runs[-1][0] += 1
                    continue
                last = value
                where: Where = ((((self.root, "k", "param_groups"), "i", i)), "k", name)
                runs.append([1] if value is missing else [1, encoder.encode(value, where)])
            columns.append([encoder.encode(name, self.root), runs])
        return {"sizes": runs_of([len(g["params"]) for g in groups]), "columns": columns}

    def _plain_of_state(self, values: list[Any], encoder: Encoder) -> Any:
        rest = [v for v, m in zip(values, self._mask) if not m] if len(self._raw) < len(values) else []
        if same(rest, self._plain_state) and all(type(v) in _FROZEN for v in rest):
            return self._state_node
        half = len(self._states) // 2
        holders, states = self._states[:half], self._states[half:]
        by_value: dict[Any, list[int]] = {}
        nodes: dict[Any, Any] = {}
        present: list[int] = []
        others: list[Any] = []
        for holder, state in zip(holders, states):
            index = self._index.get(id(holder), -1)
            if index < 0:
                at: Where = ((self.root, "k", "state"), "k", holder)
                others.append([encoder.encode(holder, self.root), encoder.encode(state, at)])
                continue
            present.append(index)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    continue
                where: Where = ((((self.root, "k", "state"), "i", index)), "k", name)
                node = [encoder.encode(name, where), encoder.encode(value, where)]
                text = msgspec.json.encode(node)
                nodes[text] = node
                by_value.setdefault(text, []).append(index)
        self._plain_state = rest
        self._state_node = {
            "present": ranges_of(sorted(present)),
            "values": [[*nodes[text], ranges_of(sorted(indices))] for text, indices in by_value.items()],
            "others": others,
        }
        return self._state_node

    def plain(self) -> Any:
        return self._node


_FROZEN = frozenset({type(None), bool, int, float, str, bytes, complex})


def runs_of(numbers: list[int]) -> list[list[int]]:
    """Equal neighbours as [count, number]."""
    out: list[list[int]] = []
    for n in numbers:
        if out and out[-1][1] == n:
            out[-1][0] += 1
        else:
            out.append([1, n])
    return out


def ranges_of(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as [first, behind the last]."""
    out: list[list[int]] = []
    for n in numbers:
        if out and out[-1][1] == n:
            out[-1][1] = n + 1
        else:
            out.append([n, n + 1])
    return out


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
    return None if all(a >= b for a, b in zip(sizes, sizes[1:])) else [escape(n) for n in names]


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
