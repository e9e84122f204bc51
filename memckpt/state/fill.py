"""How each kind of object is filled: which of its tensors get bytes, what must be made, and what to do afterwards."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch

from memckpt.errors import CorruptSnapshot, MemckptError
from memckpt.format.layout import describe
from memckpt.state.filling import Filling
from memckpt.state.leaves import Place
from memckpt.state.modules import ModuleSource
from memckpt.state.optimizers import GROUP_STRUCTURE, OptimizerSource
from memckpt.state.rng import RNG
from memckpt.state.sources import ContainerSource, ObjectSource, Source, is_tensors
from memckpt.state.tree import Decoder, unescape

Live = dict[str, tuple[torch.Tensor, Place | None]]


def is_rng(source: Source) -> bool:
    """Whether a source is filled last: what is done for the others may draw random numbers."""
    return isinstance(source, ObjectSource) and isinstance(source.value, RNG)


def plan(plan: Filling, source: Source, node: Any, keys: list[str]) -> None:
    """Filling the filling of one object from its node and the stored keys that belong to it. Local; changes nothing."""
    try:
        if isinstance(source, ModuleSource):
            _module(plan, source, node, keys)
        elif isinstance(source, OptimizerSource):
            _Optimizer(plan, source, node, keys)
        elif isinstance(source, ContainerSource):
            _container(plan, source, node, keys)
        elif isinstance(source, ObjectSource):
            value = plan.decoder(source).decode(node["tree"], source.root)
            plan.applies.append((source.name, lambda: source.value.load_state_dict(value)))
        else:
            _exactly(plan, source, keys)
    except MemckptError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptSnapshot(f"plain values of the wrong form: {error!r}", path=source.name) from error


def _exactly(plan: Filling, source: Source, keys: list[str], live: Live | None = None) -> None:
    """Every live tensor gets its bytes, and every stored one is wanted."""
    live = source.live if live is None else live
    for key in keys:
        if key not in live:
            plan.row(key, plan.describe(key), "-")
    for key, (tensor, place) in live.items():
        plan.fill(key, tensor, place)


def _module(plan: Filling, source: ModuleSource, node: dict[str, Any], keys: list[str]) -> None:
    module = source.module
    fetched: set[str] = set()
    decoder = _noting(plan, source, fetched, in_place=False)
    extra = {name: decoder.decode(value, (source.root, "k", name)) for name, value in node.items()}
    for name in sorted(extra.keys() ^ source.extra.keys()):
        at = f"{source.name}.{name}"
        plan.breaks(source, at, *(("extra state", "-") if name in extra else ("-", "extra state")))
    keys = [k for k in keys if k not in fetched]
    live = {k: v for k, v in source.live.items() if k not in source.inner and k.partition("/~t")[0] not in source.inner}
    own = {id(t) for m in module.modules() for t in chain(m._parameters.values(), m._buffers.values())}
    direct = all(id(t) in own for k, t in source.found.items() if k not in source.inner)
    parts = {name: name.rpartition(".") for name in extra}
    if direct and all(last == "_extra_state" for _, _, last in parts.values()):
        _exactly(plan, source, keys, live)
        for name, value in extra.items():
            if source.name not in plan.broken:
                set_extra_state = _child(module, parts[name][0], source).set_extra_state
                plan.applies.append((source.name, partial(set_extra_state, value)))
        return
    # Its state_dict gives copies, or values of its own kind: only its load_state_dict knows where they go.
    values: dict[str, Any] = {}
    actual = {source.canonical(name): name for name in module.state_dict(keep_vars=True)}
    prefix = len(source.key) + 1
    for key in keys:
        if key not in live:
            plan.row(key, plan.describe(key), "-")
    for key, (tensor, place) in live.items():
        if plan.fill(key, tensor, place):
            del plan.wanted[key]
            values[actual[unescape(key[prefix:])]] = plan.make(key)
    values |= {actual.get(name, name): value for name, value in extra.items()}
    plan.applies.append((source.name, lambda: _load_module(module, values)))


def _load_module(module: torch.nn.Module, values: dict[str, Any]) -> None:
    module.load_state_dict(values)


def _child(module: torch.nn.Module, path: str, source: ModuleSource) -> torch.nn.Module:
    child: torch.nn.Module
    for name, child in module.named_modules(remove_duplicate=False):
        if source.canonical(name) == path:
            return child
    raise CorruptSnapshot(f"extra state of a module {path!r} that is not there", path=source.name)


def _noting(plan: Filling, source: Source, fetched: set[str], *, in_place: bool) -> Decoder:
    """A decoder that notes the keys of the tensors in its trees; these may have another form than the live ones."""
    fetch = plan.fetch(source, in_place=in_place)
    live = source.found

    def noting(key: str) -> torch.Tensor:
        fetched.add(key)
        if in_place and key in live and key in plan.stored.names and plan.describe(key) != _form(live[key]):
            return plan.make(key)
        return fetch(key)

    return Decoder(noting, allow_pickle=plan.allow_pickle, is_new=plan.is_new)


class _Optimizer:
    """State is put in place directly: ``load_state_dict`` would round float32 moments of bfloat16 parameters."""

    def __init__(self, plan: Filling, source: OptimizerSource, node: dict[str, Any], keys: list[str]) -> None:
        self.source = source
        self.optimizer = source.optimizer
        self.parameters = source.parameters
        self.live, self.found = source.live, source.found
        groups, state = node["groups"], node["state"]
        if node["class"] != type(self.optimizer).__name__:  # the state of one kind would only fail the next step
            plan.breaks(source, source.name, f"state of {node['class']}", f"state of {type(self.optimizer).__name__}")
            return
        sizes = list(_expand(groups["sizes"]))
        wanted = [len(g["params"]) for g in self.optimizer.param_groups]
        if sizes != wanted:
            at = f"{source.name}.param_groups"
            plan.breaks(source, at, f"groups of {sizes} parameters", f"groups of {wanted} parameters")
            return
        fetched: set[str] = set()
        hyper = _noting(plan, source, fetched, in_place=True)
        fresh = _noting(plan, source, fetched, in_place=False)
        self.columns = [
            (hyper.decode(name), [_run(run, hyper, source) for run in runs]) for name, runs in groups["columns"]
        ]
        if any(sum(count for count, _ in runs) != len(sizes) for _, runs in self.columns):
            raise CorruptSnapshot("hyperparameters that do not fit the param groups", path=source.name)
        self.values: dict[int, dict[Any, Any]] = {i: {} for i in self._indices(state["present"])}
        for name, value, ranges in state["values"]:
            what = fresh.decode(name)
            for i in self._indices(ranges):
                self.values[i][what] = fresh.decode(value)  # each parameter its own: the value may be mutable
        self.others = [(fresh.decode(k), fresh.decode(v)) for k, v in state["others"]]
        for key in keys:
            if key not in fetched:
                self._tensor(plan, key)
        plan.applies.append((source.name, self.apply))

    def _indices(self, ranges: list[list[int]]) -> list[int]:
        out: list[int] = []
        for begin, end in ranges:
            if not 0 <= begin < end <= len(self.parameters):
                raise CorruptSnapshot("state of a parameter that is not there", path=self.source.name)
            out += range(begin, end)
        return out

    def _tensor(self, plan: Filling, key: str) -> None:
        parts = key[len(self.source.key) + 1 :].split("/")
        if len(parts) < 3 or parts[0] != "state" or not parts[1].isdecimal() or int(parts[1]) not in self.values:
            raise CorruptSnapshot("a tensor that belongs to no parameter's state", path=key)
        index, name = int(parts[1]), _unkey(parts[2])
        place = self.live.get(key)
        held = self.found.get("/".join([self.source.key, *parts[:3]]))
        if place is not None:
            if plan.fill(key, *place):
                self.values[index][name] = held
        elif len(parts) > 3:
            plan.row(key, plan.describe(key), "no live tensor subclass to fill; take one optimizer step first")
        else:
            entry, _ = plan.stored.names[key]
            made = plan.make(key)
            if entry.global_shape is not None:
                made = self._chunk(plan, key, index, entry.global_shape, made)
            self.values[index][name] = made

    def _chunk(
        self, plan: Filling, key: str, index: int, global_shape: tuple[int, ...], local: torch.Tensor
    ) -> torch.Tensor:
        """A DTensor around a new chunk, laid out as its parameter."""
        parameter: Any = self.parameters[index]
        spec = getattr(parameter, "_spec", None)
        if spec is None or tuple(parameter.shape) != global_shape or parameter._local_tensor.shape != local.shape:
            plan.row(key, plan.describe(key), f"a chunk like that of parameter {index}")
            return local
        return type(parameter.data).from_local(  # type: ignore[no-any-return]
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def apply(self) -> None:
        state = self.optimizer.state
        index = {id(p): i for i, p in enumerate(self.parameters)}
        for holder in list(state):
            if index.get(id(holder), -1) not in self.values:
                del state[holder]
        for i, values in self.values.items():
            held = state.setdefault(self.parameters[i], {})
            for name in [n for n in held if n not in values]:
                del held[name]
            held.update(values)
        for key, value in self.others:
            state[key] = value
        for name, runs in self.columns:
            groups = iter(self.optimizer.param_groups)
            for count, make in runs:
                for _, group in zip(range(count), groups, strict=False):
                    if make is not None:
                        group[name] = make[0]
                    elif name not in GROUP_STRUCTURE:
                        group.pop(name, None)


def _run(run: list[Any], decoder: Decoder, source: Source) -> tuple[int, tuple[Any] | None]:
    count = run[0]
    if type(count) is not int or count < 1:
        raise CorruptSnapshot("hyperparameters of the wrong form", path=source.name)
    return count, (decoder.decode(run[1], source.root),) if len(run) == 2 else None


def _form(tensor: torch.Tensor) -> str:
    return describe(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _expand(runs: list[list[int]]) -> list[int]:
    out: list[int] = []
    for count, number in runs:
        if not 0 < count <= 1 << 24:
            raise CorruptSnapshot("param groups of the wrong form")
        out += [number] * count
    return out


def _unkey(part: str) -> Any:
    """The dictionary key that `memckpt.state.tree.key_of` made this component of."""
    if part.startswith("~i"):
        return int(part[2:])
    if part.startswith("~k"):
        return Decoder(_nothing).decode(msgspec.json.decode(unescape(part[2:])))
    return unescape(part)


def _nothing(key: str) -> torch.Tensor:
    raise CorruptSnapshot("a tensor inside a key", path=key)


def _container(plan: Filling, source: ContainerSource, node: dict[str, Any], keys: list[str]) -> None:
    live = source.value
    value: Any
    if "tensors" in node:
        if node["tensors"] == type(live).__name__ and is_tensors(live):
            _exactly(plan, source, keys)
            return
        if type(live) not in (dict, list):
            plan.breaks(source, source.name, node["tensors"], type(live).__name__)
            return
        if any("/~t" in key for key in keys):
            plan.breaks(source, source.name, "tensor subclasses", "no live tensors to fill")
            return
        fetch = plan.fetch(source, in_place=True)
        items = [(key.rpartition("/")[2], fetch(key)) for key in keys]
        value = [t for _, t in sorted(items, key=lambda item: int(item[0]))] if node["tensors"] == "list" else None
        if value is None:
            names = [unescape(name) for name, _ in items] if node["order"] is None else map(unescape, node["order"])
            tensors = {unescape(name): tensor for name, tensor in items}
            value = {name: tensors[name] for name in names}
    else:
        value = plan.decoder(source, in_place=True).decode(node["tree"], source.root)
    if type(value) is not type(live):
        plan.breaks(source, source.name, type(value).__name__, type(live).__name__)
        return
    fixed: tuple[str, str] | None = None
    if isinstance(value, deque) and value.maxlen != live.maxlen:
        fixed = f"deque of at most {value.maxlen}", f"deque of at most {live.maxlen}"
    elif isinstance(value, np.ndarray) and (value.shape, value.dtype) != (live.shape, live.dtype):
        fixed = f"{value.dtype}{list(value.shape)}", f"{live.dtype}{list(live.shape)}"
    if fixed is not None:
        plan.breaks(source, source.name, *fixed)
        return
    if source.name not in plan.broken:
        plan.applies.append((source.name, lambda: refill(live, value)))


def refill(live: Any, value: Any) -> None:
    """Give a mutable container the contents of another of its type, keeping the object. Local."""
    if isinstance(live, np.ndarray):
        live[...] = value
    elif isinstance(live, bytearray):
        live[:] = value
    elif isinstance(live, dict | OrderedDict | Counter | defaultdict):
        items = list(value.items())
        live.clear()
        dict.update(live, items) if type(live) is Counter else live.update(items)
        if isinstance(live, defaultdict):
            live.default_factory = value.default_factory
    elif isinstance(live, set):
        live.clear()
        live.update(value)
    else:
        live.clear()
        live.extend(value)
