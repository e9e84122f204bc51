"""Optimizers as a source of state, read directly: ``state_dict`` at every save would loop over all its tensors."""

from __future__ import annotations

from itertools import chain, compress
from typing import Any

import msgspec
import torch

from memckpt.errors import StateError
from memckpt.state.sources import Found, Source, is_shared, same
from memckpt.state.tree import Encoder, Where, escape, key_of


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
    """A ``torch.optim.Optimizer``: per-parameter tensors as ``<name>/state/<index>/<what>``, the rest plain."""

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
        for holder, index in zip(holders, indices, strict=False):
            if index < 0 and isinstance(holder, torch.Tensor):
                raise StateError("state of a tensor that is in no param group", path=f"{self.name}.state")
        owner = list(chain.from_iterable([i] * len(s) for i, s in zip(indices, states, strict=False)))
        self._mask = [isinstance(v, torch.Tensor) and i >= 0 for v, i in zip(values, owner, strict=False)]
        places = [(i, str(n), n) for i, n, m in zip(owner, names, self._mask, strict=False) if m]
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
        self._node = {
            "class": type(self.optimizer).__name__,
            "groups": self._groups(encoder),
            "state": self._plain_of_state(values, encoder),
        }
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
        rest = [v for v, m in zip(values, self._mask, strict=False) if not m] if len(self._raw) < len(values) else []
        if same(rest, self._plain_state) and all(type(v) in _FROZEN for v in rest):
            return self._state_node
        half = len(self._states) // 2
        holders, states = self._states[:half], self._states[half:]
        by_value: dict[Any, list[int]] = {}
        nodes: dict[Any, Any] = {}
        present: list[int] = []
        others: list[Any] = []
        for holder, state in zip(holders, states, strict=False):
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
