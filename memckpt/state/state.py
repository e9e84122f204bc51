"""The state of a training run: a mapping of names to what the user trains with, read by saves, filled by a restore."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch

from memckpt.errors import StateError, UsageError
from memckpt.state.leaves import Collected
from memckpt.state.modules import ModuleSource
from memckpt.state.optimizers import OptimizerSource, is_stock_optimizer
from memckpt.state.sources import (
    PLAIN_VERSION,
    ContainerSource,
    ObjectSource,
    Source,
    TensorSource,
    is_shared,
    same,
)

CONTAINERS = (dict, list, OrderedDict, Counter, defaultdict, deque, set, bytearray, np.ndarray)


class State:
    """What a Checkpointer saves.

    Parameters
    ----------
    objects : mapping of str to object
        Modules, optimizers, schedulers and anything else with ``state_dict`` and ``load_state_dict``, tensors, and
        dictionaries, lists and other mutable containers of tensors and plain values. Held by reference.
    allow_pickle : bool
        Pickle what has no plain form (and unpickle it, which runs code of whoever wrote the snapshot).

    Raises
    ------
    StateError
        An object of a kind that cannot be saved, or could not be filled again.
    """

    def __init__(self, objects: Mapping[str, object], *, allow_pickle: bool = False) -> None:
        if not isinstance(objects, Mapping):
            raise UsageError(f"the state must be a mapping of names to objects, not {type(objects).__name__}")
        self.objects = dict(objects)
        self.allow_pickle = allow_pickle
        self.sources: list[Source] = [_source(name, value, allow_pickle) for name, value in self.objects.items()]
        #: Every optimizer among the objects.
        self.optimizers: list[torch.optim.Optimizer] = [
            v for v in self.objects.values() if isinstance(v, torch.optim.Optimizer)
        ]
        self._parameters: list[Any] = []
        self._last: Collected | None = None

    def collect(self) -> Collected:
        """The tensors and plain values now. Local; cheap when no tensor was added, removed or replaced.

        Raises
        ------
        StateError
            A value that cannot be saved; its `path` says where it is.
        """
        changed = False
        for source in self.sources:
            changed = source.refresh() or changed
        parameters = [g["params"] for optimizer in self.optimizers for g in optimizer.param_groups]
        flat = list(chain.from_iterable(parameters))
        if changed or self._last is None or not same(flat, self._parameters):
            self._parameters = flat
            self._last = self._gather()
        last = self._last
        return Collected(last.tensors, last.keys, last.lazy, self._plain(), last.places, last.classes, last.token)

    def _plain(self) -> bytes:
        objects = {s.name: {"kind": s.kind, "data": s.plain()} for s in self.sources}
        return msgspec.json.encode({"version": PLAIN_VERSION, "objects": objects})

    def _gather(self) -> Collected:
        owners = self._owners()
        collected = Collected([], [], [], b"")
        for source in self.sources:
            begin = len(collected.tensors)
            collected.tensors += source.tensors
            collected.keys += source.keys
            collected.lazy += source.lazy(owners)
            collected.places |= {begin + i: place for i, place in source.places.items()}
            collected.classes |= source.classes
        return collected

    def _owners(self) -> dict[int, torch.optim.Optimizer | None]:
        """Address of a parameter object -> the one optimizer that changes it, None if it must be copied at once."""
        owners: dict[int, torch.optim.Optimizer | None] = {}
        for optimizer in self.optimizers:
            for p in chain.from_iterable(g["params"] for g in optimizer.param_groups):
                # FSDP1 and ZeRO-3 resize storage under the parameter; shared memory has writers that no hook announces.
                plain = not (hasattr(p, "_is_flat_param") or hasattr(p, "ds_id") or is_shared(p))
                owners[id(p)] = optimizer if plain and owners.get(id(p), optimizer) is optimizer else None
        return owners


def _source(name: str, value: Any, allow_pickle: bool) -> Source:
    if type(name) is not str or not name or name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
        raise StateError(f"a name in the state must be a non-empty string of valid text, not {name!r}")
    if isinstance(value, torch.nn.Module):
        return ModuleSource(name, value, allow_pickle=allow_pickle)
    if isinstance(value, torch.optim.Optimizer) and is_stock_optimizer(value):
        return OptimizerSource(name, value, allow_pickle=allow_pickle)
    if isinstance(value, torch.Tensor):
        return TensorSource(name, value, allow_pickle=allow_pickle)
    if type(value) in CONTAINERS:
        return ContainerSource(name, value, allow_pickle=allow_pickle)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return ObjectSource(name, value, allow_pickle=allow_pickle)
    raise StateError(
        f"{type(value).__name__} cannot be filled in place by a restore; put it into a dictionary "
        "(as in {'progress': {'epoch': 3}}) or give it state_dict() and load_state_dict()",
        path=name,
    )
