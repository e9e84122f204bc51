"""A small model that trains deterministically, and a Checkpointer for it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import memckpt
from memckpt.comm.local import LocalComm


class Training:
    """A small model that trains deterministically."""

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)
        )
        for p in self.model.parameters():
            torch.nn.init.normal_(p, generator=self.random)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.progress: dict[str, Any] = {"losses": [], "seen": 0}

    def states(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def step(self) -> None:
        loss = self.model(torch.randn(8, self.model[0].in_features)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress["losses"].append(loss.item())
        self.progress["seen"] += 8

    def digest(self, *, rng: bool = True) -> str:
        """Of everything; without the generator that ranks as threads share."""
        h = hashlib.sha256(repr(self.progress).encode())
        moments = [self.optimizer.state[p][k] for p in self.model.parameters() for k in sorted(self.optimizer.state[p])]
        for t in [*self.model.state_dict().values(), *moments]:
            h.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if rng:
            h.update(torch.get_rng_state().numpy().tobytes())
        return h.hexdigest()


def make(training: Training, **options: Any) -> memckpt.Checkpointer:
    defaults: dict[str, Any] = {
        "name": "run",
        "every": 1,
        "on_busy": "wait",
        "quiet": True,
        "comm": LocalComm(),
        "deadline": 20.0,
    }
    return memckpt.Checkpointer(training.states(), **{**defaults, **options})


def train(total: int) -> str:
    """Digest after `total` uninterrupted steps."""
    torch.manual_seed(1)
    training = Training()
    for _ in range(total):
        training.step()
    return training.digest()
