"""Modules as a source of state: read directly where PyTorch's own ``state_dict`` gives just parameters and buffers."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from memckpt.state.sources import Found, Source, same
from memckpt.state.tree import Where, escape, key_of


def is_wrapper(module: torch.nn.Module) -> str | None:
    """Name of the child that a wrapper without state of its own (torch.compile, DDP, DataParallel) wraps. Local."""
    kind = type(module)
    if kind.__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
        return "_orig_mod"
    if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return "module"
    return None


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
        self.inner: set[str] = set()  # keys of tensors that are not values of the state dict, but inside such a value
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
            self.extra, self.inner = {}, set()
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
        parameters, buffers, children, hidden, _, _ = zip(*parts, strict=False)
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
        parameters, buffers, children, hidden, hooks, pre = zip(
            *map(_PARTS, [m.__dict__ for m in modules]), strict=False
        )
        values = dict.values
        return (
            last is not None
            and same(before[0], list(chain.from_iterable(map(values, parameters))))
            and same(before[1], list(chain.from_iterable(map(values, buffers))))
            and same(before[2], list(chain.from_iterable(map(values, children))))
            and before[3] == list(map(type, modules))
            and before[4] == [list(chain.from_iterable(parameters)), list(chain.from_iterable(buffers))]
            and before[5] == [list(chain.from_iterable(children)), list(map(len, parameters)), list(map(len, buffers))]
            and before[6] == list(hidden)
            and not any(hooks)
            and not any(pre)
            and "state_dict" not in self.module.__dict__
        )

    def _list(self) -> Found:
        keys: list[str] = []
        tensors: list[torch.Tensor] = []
        for module, prefix in zip(self._modules, self._prefixes, strict=False):
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
        self.extra = {}
        inside: list[str] = []
        inside_tensors: list[torch.Tensor] = []
        inside_wheres: list[Where] = []
        encoder = self.encoder(inside, inside_tensors, inside_wheres)
        for name, value in self.module.state_dict(keep_vars=True).items():
            name = self.canonical(name)
            where: Where = (self.root, "k", name)
            if isinstance(value, torch.Tensor):
                keys.append(key_of(where))
                tensors.append(value)
                wheres.append(where)
            else:
                self.extra[name] = encoder.encode(value, where)
        self.inner = set(inside)
        return Found(keys + inside, tensors + inside_tensors, wheres + inside_wheres)

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
