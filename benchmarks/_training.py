"""Training runs to save: real parameters and a real optimizer, and as much work in between as one says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

MIB = 1 << 20


def llama_8b_shard(ranks: int = 8) -> list[tuple[int, ...]]:
    """Shapes of one rank's shards of Llama-3-8B under FSDP2, which cuts dimension 0 of every parameter evenly."""
    hidden, inner, keys, vocabulary, layers = 4096, 14336, 1024, 128256, 32
    layer: list[tuple[int, ...]] = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (hidden, inner), (inner, hidden), (hidden,), (hidden,)]
    model: list[tuple[int, ...]] = [(vocabulary, hidden), *(layer * layers), (hidden,), (vocabulary, hidden)]
    return [(shape[0] // ranks, *shape[1:]) for shape in model]


def scaled(shapes: list[tuple[int, ...]], numel: int) -> list[tuple[int, ...]]:
    """`shapes` with their last dimension cut so that they have about `numel` elements in all."""
    factor = numel / sum(math.prod(s) for s in shapes)
    return [(*s[:-1], max(1, round(s[-1] * factor))) for s in shapes]


@dataclass
class Training:
    """One rank's training run on the CPU, with one thread.

    Attributes
    ----------
    module, optimizer : nn.ParameterList, torch.optim.Optimizer
        What a Checkpointer is given.
    work_count : int
        Matrix products in one forward and backward; see `calibrate`.
    """

    name: str
    module: nn.ParameterList
    optimizer: torch.optim.Optimizer
    work_count: int = 1
    _gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    _matrix: torch.Tensor = field(default_factory=lambda: torch.full((192, 192), 1 / 192))

    def __post_init__(self) -> None:
        params = list(self.module)
        self._gradient = torch.randn(sum(p.numel() for p in params))
        views = self._gradient.split([p.numel() for p in params])
        for p, v in zip(params, views, strict=True):
            p.grad = v.view_as(p)
        self.update()  # makes the optimizer's state

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, by name."""
        named = {f"model.{i}": p.detach() for i, p in enumerate(self.module)}
        for i, p in enumerate(self.module):
            state = self.optimizer.state[p].items()
            named |= {f"optimizer.{i}.{key}": value for key, value in state if isinstance(value, torch.Tensor)}
        return named

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(t.nbytes for t in self.tensors.values())

    def work(self) -> None:
        """A forward and backward: a fixed number of matrix products, and a gradient that is new everywhere."""
        x = self._matrix
        for _ in range(self.work_count):
            x = x @ self._matrix
        self._gradient.mul_(-0.999)

    def update(self) -> None:
        """An optimizer step that changes every tensor of the state."""
        self.optimizer.step()

    def calibrate(self, seconds: float) -> int:
        """Matrix products that take about `seconds` on an idle core; sets `work_count`."""
        trial, begin = 200, time.perf_counter()
        x = self._matrix
        for _ in range(trial):
            x = x @ self._matrix
        self.work_count = max(1, math.ceil(trial * seconds / (time.perf_counter() - begin)))
        return self.work_count


def _parameters(shapes: list[tuple[int, ...]]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(s)) for s in shapes])


def big(nbytes: int = 256 * MIB) -> Training:
    """Few large tensors: 64 of them, half parameters and half momentum."""
    params = _parameters([(nbytes // 64 // 4,)] * 32)
    return Training("big", params, torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.01, fused=True))


def llama(nbytes: int = 256 * MIB) -> Training:
    """The tensor list of one of eight FSDP2 ranks that train Llama-3-8B with AdamW, smaller: 1,164 tensors."""
    params = _parameters(scaled(llama_8b_shard(), nbytes // 12))
    return Training("llama", params, torch.optim.AdamW(params, lr=1e-4, fused=True))


def many(nbytes: int = 20_000 * 1024) -> Training:
    """Many small tensors: 1 KiB each, half parameters and half momentum."""
    params = _parameters([(256,)] * (nbytes // 2048))
    return Training("many", params, torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.01, fused=True))


STATES: dict[str, Callable[[int], Training]] = {"big": big, "llama": llama, "many": many}
