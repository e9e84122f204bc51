"""Kinds of training, each stopped twice and resumed: losses and every byte of the state as without the stops.

Saves are forced at each step and what is copied behind training is audited, so that a kind whose state changes where
the lazy copy does not expect it would show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memckpt
from memckpt.comm.local import LocalComm
from tests.ranks import fake_nodes, raise_errors, run_ranks

STEPS = 9


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Iterator[Path]:
    with fake_nodes(str(tmp_path)):
        yield tmp_path


class Kind:
    """One way to train: `states`, and `step`, which returns the loss."""

    width = 24

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()
        self.losses: list[float] = []
        self.extra: dict[str, Any] = {}

    def make_model(self) -> nn.Module:
        w = self.width
        return nn.Sequential(nn.Linear(w, w), nn.BatchNorm1d(w), nn.Dropout(0.2), nn.Linear(w, 3))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "losses": self.losses, **self.extra}

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(6, self.width)).square().mean()

    def step(self) -> None:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def digest(self) -> str:
        h = hashlib.sha256(repr(self.losses).encode())

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                flat = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
                h.update(f"{value.dtype}{tuple(value.shape)}".encode() + flat.numpy().tobytes())
            elif isinstance(value, dict):
                for key, inner in sorted(value.items(), key=repr):
                    h.update(repr(key).encode())
                    add(inner)
            elif isinstance(value, list | tuple):
                for inner in value:
                    add(inner)
            elif hasattr(value, "state_dict"):
                add(value.state_dict())
            else:
                h.update(repr(value).encode())

        add(self.states())
        h.update(torch.get_rng_state().numpy().tobytes())
        return h.hexdigest()


class Fused(Kind):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True, amsgrad=True)


class TensorRate(Kind):
    """A learning rate that is a tensor, and is changed in place by the scheduler."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=torch.tensor(1e-2), foreach=False)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.extra = {"schedule": self.schedule}

    def step(self) -> None:
        super().step()
        self.schedule.step()


class Scaler(Kind):
    """GradScaler on bfloat16 autocast: its scale grows, and an overflow skips the optimizer's step."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.extra = {"scaler": self.scaler}

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss()
        if len(self.losses) in (2, 6):
            loss = loss * float("inf")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(self.scaler.get_scale())


class Ema(Kind):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.extra = {"ema": self.ema}

    def step(self) -> None:
        super().step()
        self.ema.update_parameters(self.model)


class Lora(Kind):
    """Frozen weights and small trained factors beside them."""

    def make_model(self) -> nn.Module:
        class Adapted(nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.base = nn.Linear(width, width).requires_grad_(requires_grad=False)
                self.a = nn.Parameter(torch.randn(width, 2) * 0.1)
                self.b = nn.Parameter(torch.zeros(2, width))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.base(x) + x @ self.a @ self.b

        return nn.Sequential(Adapted(self.width), nn.Tanh(), Adapted(self.width))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Accumulation(Kind):
    """Three backward passes to one step."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(3):
            loss = self.loss() / 3
            loss.backward()
            self.losses.append(loss.item())
        self.optimizer.step()


class InBackward(Kind):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def make_optimizer(self) -> Any:
        self.each = {p: torch.optim.AdamW([p], lr=1e-2) for p in self.model.parameters()}
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._update)
        return None

    def _update(self, parameter: torch.Tensor) -> None:
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def states(self) -> dict[str, Any]:
        each = {f"optimizer{i}": optimizer for i, optimizer in enumerate(self.each.values())}
        return {"model": self.model, "losses": self.losses, **each}

    def step(self) -> None:
        loss = self.loss()
        loss.backward()
        self.losses.append(loss.item())


class Moments(torch.optim.Optimizer):
    """Adam with float32 moments of bfloat16 parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p, dtype=torch.float32)
                    state["v"] = torch.zeros_like(p, dtype=torch.float32)
                grad = p.grad.float()
                state["m"].mul_(0.9).add_(grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
                p.sub_((group["lr"] * state["m"] / (state["v"].sqrt() + 1e-6)).to(p.dtype))


class Bfloat16(Kind):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, 3)).bfloat16()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return Moments(self.model.parameters(), lr=1e-2)

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(6, self.width).bfloat16()).float().square().mean()


class MovingScale(nn.Module):
    """A stand-in for fp8: the scale of a weight changes in forward, by what it sees there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.2)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("history", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.history.copy_(self.history.roll(1))
            self.history[0] = x.abs().max()
            self.scale.fill_(self.history.max().item())
        return (x / self.scale) @ self.weight * self.scale


class Float8(Kind):
    def make_model(self) -> nn.Module:
        return nn.Sequential(MovingScale(self.width), nn.ReLU(), MovingScale(self.width))


class Several(Kind):
    """Two optimizers, of which one steps every second time, and schedules of two kinds."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.second = torch.optim.RMSprop(self.model[3].parameters(), lr=1e-3, centered=True, momentum=0.5)
        return torch.optim.NAdam(self.model[0].parameters(), lr=1e-2)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.cycle = torch.optim.lr_scheduler.OneCycleLR(self.second, 1e-2, total_steps=50)
        self.extra = {"second": self.second, "plateau": self.plateau, "cycle": self.cycle}

    def step(self) -> None:
        super().step()
        if len(self.losses) % 2:
            self.second.step()
        self.second.zero_grad()
        self.plateau.step(self.losses[-1])
        self.cycle.step()


class Compiled(Kind):
    """``torch.compile`` of the model and of the optimizer's step, by the backend that needs no compiler."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.compiled = torch.compile(self.model, backend="aot_eager")
        optimizer = super().make_optimizer()
        self.stepping = torch.compile(optimizer.step, backend="aot_eager", fullgraph=False)
        return optimizer

    def loss(self) -> torch.Tensor:
        out: torch.Tensor = self.compiled(torch.randn(6, self.width))
        return out.square().mean()

    def step(self) -> None:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.stepping()
        self.losses.append(loss.item())


KINDS = [
    Kind, Fused, TensorRate, Scaler, Ema, Lora, Accumulation, InBackward, Bfloat16, Float8, Several, Compiled,
]  # fmt: skip


def make(training: Kind, **options: Any) -> memckpt.Checkpointer:
    given = {"name": "kinds", "every": 1, "on_busy": "wait", "quiet": True, "comm": LocalComm(), "deadline": 30.0}
    return memckpt.Checkpointer(training.states(), **{**given, **options})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_stopped_twice_and_resumed(kind: type[Kind]) -> None:
    whole = kind(1)
    for _ in range(STEPS):
        whole.step()
    expected = whole.digest()

    failed = 0
    for seed, stop in ((1, 3), (50, 6), (51, STEPS)):
        training = kind(seed)
        ckpt = make(training)
        start = ckpt.restore().step
        assert start == {3: 0, 6: 3, STEPS: 6}[stop]
        for n in range(start + 1, stop + 1):
            training.step()
            ckpt.step(n)
        assert ckpt.wait()
        failed += ckpt.stats().failed
        if stop < STEPS:
            training.step()  # is lost, and what is lost must not show
        ckpt.abandon()
    assert training.digest() == expected
    assert failed == 0


def test_pipeline_stages_of_different_size() -> None:
    """Three times as much on one rank as on the other, each the other's buddy."""

    class Stage:
        def __init__(self, rank: int, seed: int) -> None:
            self.random = torch.Generator().manual_seed(seed + rank)
            width = 96 if rank else 32
            self.weight = nn.Parameter(torch.randn(width, width, generator=self.random))
            self.optimizer = torch.optim.AdamW([self.weight])

        def step(self, n: int) -> None:
            self.random.manual_seed(n)
            self.weight.grad = torch.randn(self.weight.shape, generator=self.random)
            self.optimizer.step()

    def life(comm: LocalComm, seed: int, until: int) -> tuple[int, bytes]:
        stage = Stage(comm.rank, seed)
        states = {"stage": {"w": stage.weight}, "optimizer": stage.optimizer}
        ckpt = memckpt.Checkpointer(states, name="stages", every=1, on_busy="wait", comm=comm, quiet=True)
        start = ckpt.restore().step
        for n in range(start + 1, until + 1):
            stage.step(n)
            ckpt.step(n)
        ckpt.wait()
        ckpt.abandon()
        return start, stage.weight.detach().numpy().tobytes()

    def lives(seed: int, until: int, nodes: list[str]) -> list[tuple[int, bytes]]:
        return raise_errors(run_ranks(2, lambda comm: life(comm, seed, until), nodes=nodes))

    expected = []
    for rank in range(2):
        stage = Stage(rank, 1)
        for n in range(1, 7):
            stage.step(n)
        expected.append(stage.weight.detach().numpy().tobytes())
    lives(1, 4, ["a", "b"])
    assert lives(9, 6, ["b", "a"]) == [(4, expected[0]), (4, expected[1])]
