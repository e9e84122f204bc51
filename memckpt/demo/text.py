"""Real text that is on every machine with Python: the source of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

LIMIT_NBYTES = 2 << 20


def standard_library(limit_nbytes: int = LIMIT_NBYTES) -> torch.Tensor:
    """The first `limit_nbytes` bytes of the standard library's modules in order of name; uint8 [n]. Local."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_nbytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:limit_nbytes].clone()


class Batches:
    """Windows of a text in an order of its own, another part of them for each rank; its place in them is state.

    Parameters
    ----------
    text : torch.Tensor
        uint8 [n].
    context : int
        Bytes of a window, without the one to be predicted last.
    batch : int
        Windows of a batch.
    rank, world : int
        This rank takes every `world`-th window from `rank` on.
    seed : int
        Decides the order of windows in each epoch, the same on every rank.
    """

    def __init__(self, text: torch.Tensor, context: int, batch: int, rank: int, world: int, seed: int) -> None:
        self._text = text
        self._context = context
        self._batch = batch
        self._rank = rank
        self._world = world
        self._order = torch.Generator().manual_seed(seed)
        self._epoch_seed = 0
        self._position = 0
        self._windows = torch.empty(0, dtype=torch.int64)
        self._next_epoch()

    def _next_epoch(self) -> None:
        self._shuffle(int(torch.randint(1 << 62, (1,), generator=self._order)))
        self._position = 0

    def _shuffle(self, epoch_seed: int) -> None:
        self._epoch_seed = epoch_seed
        windows = torch.randperm(
            (len(self._text) - 1) // self._context, generator=torch.Generator().manual_seed(epoch_seed)
        )
        self._windows = windows[self._rank :: self._world]

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the next batch, int64 [batch, context] each. Local."""
        if self._position + self._batch > len(self._windows):
            self._next_epoch()
        starts = self._windows[self._position : self._position + self._batch] * self._context
        self._position += self._batch
        windows = self._text[starts[:, None] + torch.arange(self._context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, object]:
        """Where this rank is in its text. Local."""
        return {"epoch_seed": self._epoch_seed, "position": self._position, "order": self._order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken. Local."""
        self._order.set_state(state["order"])
        self._shuffle(state["epoch_seed"])
        self._position = state["position"]
