"""From a tensor of any kind to the plain strided tensors in it whose bytes are saved, or a refusal by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from memckpt.errors import StateError
from memckpt.format.dtypes import NAMES
from memckpt.state.tree import Encoder, Where, _no_tensor, key_of, path_of

#: Structure of tensor subclasses met on the way: key -> JSON of [class name, context].
Classes = dict[str, str]


class Place(NamedTuple):
    """Where a chunk lies in its global tensor: `offsets` into `global_shape`, one for each dimension."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Leaf(NamedTuple):
    """One plain strided CPU tensor of the state.

    `plain` is true when the leaf is the very tensor found in the state (no chunk, no inner tensor of a subclass).
    """

    key: str
    tensor: torch.Tensor
    place: Place | None
    plain: bool


@dataclass(slots=True)
class Collected:
    """What a `State` gave at one moment: live tensors, not yet copied, and plain values, already encoded.

    Attributes
    ----------
    tensors : list of torch.Tensor
        Plain strided CPU tensors in a stable order, one for each name; tied ones appear again.
    keys : list of str
        Their keys, in the same order.
    lazy : list
        For each tensor the ``torch.optim.Optimizer`` that alone changes it (so that it may be copied until that
        optimizer's next step), or ``None`` if it must be copied at once.
    plain : bytes
        JSON of everything that is no tensor.
    places : dict of int to Place
        Index of a chunk -> its place in the global tensor.
    classes : dict of str to str
        Key -> structure of a tensor subclass.
    token : object
        The same object as long as `tensors`, `keys`, `lazy`, `places` and `classes` are the same.
    """

    tensors: list[torch.Tensor]
    keys: list[str]
    lazy: list[Any]
    plain: bytes
    places: dict[int, Place] = field(default_factory=dict)
    classes: Classes = field(default_factory=dict)
    token: object = field(default_factory=object)


def flatten(tensor: torch.Tensor, key: str, where: Where, classes: Classes) -> list[Leaf]:
    """The leaves of one tensor, in a stable order. Local.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any kind.
    key : str
        Key of the tensor; those of inner tensors start with it.
    where : Where
        The same place, for messages; made from `key` when ``None``.
    classes : dict
        Takes the structure of tensor subclasses.

    Raises
    ------
    StateError
        The tensor has no bytes that can be saved as they are (meta, sparse, quantised, nested, on a device).
    """
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        special = _special(tensor, kind, key, where, classes)
        if special is not None:
            return special
    _check(tensor, key, where)
    return [Leaf(key, tensor, None, True)]


def _special(tensor: torch.Tensor, kind: type, key: str, where: Where, classes: Classes) -> list[Leaf] | None:
    dtensor = _dtensor_class()
    if dtensor is not None and isinstance(tensor, dtensor):
        return [_chunk(tensor, key, where)]
    if hasattr(kind, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        node = Encoder(_no_tensor).encode(context, (where or (None, "k", key), "t", "__tensor_flatten__"))
        classes[key] = msgspec.json.encode([f"{kind.__module__}.{kind.__qualname__}", node]).decode()
        leaves: list[Leaf] = []
        for name in names:
            at: Where = (where or (None, "k", key), "t", name)
            inner = flatten(getattr(tensor, name), f"{key}/{key_of((None, 't', name))}", at, classes)
            leaves += [leaf._replace(plain=False) for leaf in inner]
        return leaves
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        raise _refusal(f"tensor subclass {kind.__qualname__} without __tensor_flatten__", key, where)
    return None


def _dtensor_class() -> type | None:
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return getattr(module, "DTensor", None)


def _chunk(tensor: Any, key: str, where: Where) -> Leaf:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_partial() for p in tensor.placements):
        raise _refusal("DTensor with a pending reduction (Partial)", key, where)
    local = tensor._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()
    _check(local, key, where)
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise _refusal(f"DTensor whose chunk is {tuple(local.shape)} where {tuple(shape)} is due", key, where)
    return Leaf(key, local, Place(tuple(tensor.shape), tuple(offsets)), False)


def _check(tensor: torch.Tensor, key: str, where: Where) -> None:
    why = None
    if tensor.is_nested:
        why = "nested tensor"
    elif tensor.layout is not torch.strided:
        why = f"{str(tensor.layout).removeprefix('torch.')} tensor"
    elif tensor.is_meta:
        why = "meta tensor (it has no bytes yet)"
    elif tensor.device.type == "cuda":
        raise StateError("CUDA tensor: the GPU path comes with memckpt.cuda", path=_path(key, where))
    elif tensor.device.type != "cpu":
        why = f"tensor on {tensor.device}"
    elif tensor.is_quantized or tensor.dtype not in NAMES:
        why = f"quantised tensor ({tensor.dtype})"
    elif hasattr(tensor, "materialize"):
        why = "uninitialised lazy parameter"
    elif tensor._is_zerotensor():
        why = "zero tensor without memory"
    if why is not None:
        raise _refusal(why, key, where)


def _path(key: str, where: Where) -> str:
    return key if where is None else path_of(where)


def _refusal(what: str, key: str, where: Where) -> StateError:
    return StateError(f"{what} cannot be saved", path=_path(key, where))
