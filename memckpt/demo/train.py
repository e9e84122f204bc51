"""The training program of the demonstration, one process of it: ``mpirun ... python -m memckpt.demo.train``.

Data-parallel training of a small GPT. With ``--plain`` the same training runs without memckpt: what comes back after a
failure is compared with that. It knows nothing of kills; everything the observer learns is in the log files.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memckpt import resilient
from memckpt.checkpointer import Checkpointer
from memckpt.demo import log as events
from memckpt.demo.gpt import GPT, GPTConfig
from memckpt.demo.text import Batches, standard_library
from memckpt.options import Persist

BATCH = 8
CLIP = 1.0


@dataclass
class Training:
    """Everything that one rank trains with, built the same way at every start. Local."""

    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batches: Batches
    world: int

    @classmethod
    def build(cls, rank: int, world: int, seed: int, steps: int) -> Training:
        """Parameters are the same on every rank; text and dropout are not."""
        torch.manual_seed(seed)
        config = GPTConfig()
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        )
        torch.manual_seed(seed * 1_000_003 + rank)
        random.seed(seed * 1_000_003 + rank)
        return cls(
            model, optimizer, schedule, Batches(standard_library(), config.context, BATCH, rank, world, seed), world
        )

    def states(self) -> dict[str, object]:
        """What a Checkpointer is given; the random states it adds by itself."""
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "batches": self.batches}

    def step(self) -> float:
        """One optimizer step; the loss of this rank's batch. Collective over the default process group."""
        inputs, targets = self.batches.next()
        if random.random() < 0.5:  # a second random stream that has to come back
            inputs, targets = inputs.flip(0), targets.flip(0)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(inputs, targets)
        loss.backward()
        self._average()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    def _average(self) -> None:
        # One flat message in parameter order: sums form in the same order in every run, so runs compare bit for bit.
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for grad in grads:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and optimizer state in a fixed order."""
        for parameter in self.model.parameters():
            yield parameter.detach()
            state = self.optimizer.state.get(parameter, {})
            yield from (state[key] for key in sorted(state))

    def digest(self) -> str:
        """SHA-256 of the bytes of `tensors`."""
        digest = hashlib.sha256()
        for tensor in self.tensors():
            digest.update(tensor.numpy().data)
        return digest.hexdigest()


@dataclass
class Program:
    """One process: its arguments and its log."""

    args: argparse.Namespace
    log: events.Log

    def run(self, training: Training, rank: int, first: int, saved: Callable[[int], None]) -> None:
        """Train from step `first` + 1 to the end, logging each. Collective over the default process group."""
        for step in range(first + 1, self.args.steps + 1):
            loss = training.step()
            self.log.write(events.Stepped(events.now(), rank, step, loss.hex(), training.digest()))
            saved(step)
        final = self.args.log / f"final-{rank}-{os.getpid()}.bin"
        final.write_bytes(b"".join(t.numpy().tobytes() for t in training.tensors()))
        self.log.write(events.Finished(events.now(), rank, self.args.steps, final.name))

    def plain(self, rank: int) -> None:
        """The uninterrupted run without memckpt. Collective over all processes."""
        active = self.args.active
        dist.init_process_group("gloo", init_method=f"file://{self.args.log / 'store'}", rank=rank, world_size=active)
        self.log.write(events.Entered(events.now(), rank, 0, {}))
        self.run(Training.build(rank, active, self.args.seed, self.args.steps), rank, 0, lambda step: None)
        dist.destroy_process_group()

    def protected(self, ctx: resilient.Context) -> None:
        """What `memckpt.run` calls, again after each failure. Collective over the active ranks."""
        self.log.write(events.Entered(events.now(), ctx.rank, ctx.generation, dict(ctx.timeline)))
        try:
            self._protected(ctx)
        except BaseException as error:
            self.log.write(events.Left(events.now(), ctx.rank, f"{type(error).__name__}: {error}"[:400]))
            raise

    def _protected(self, ctx: resilient.Context) -> None:
        ctx.init_process_group("gloo")
        training = Training.build(ctx.rank, ctx.world, self.args.seed, self.args.steps)
        # "wait": a save that falls due while the last one is on its way is not skipped, so that every step is there.
        options: dict[str, Any] = {"every": 1, "on_busy": "wait", "deadline": self.args.deadline}
        if self.args.persist is not None:
            options["persist"] = Persist(self.args.persist, every=self.args.persist_every)
        with Checkpointer(training.states(), name=self.args.run, **options) as checkpointer:
            report = checkpointer.restore()
            self.log.write(
                events.Restored(
                    at=events.now(),
                    rank=ctx.rank,
                    step=report.step,
                    source=report.sources[ctx.rank],
                    sources=list(report.sources),
                    nbytes=report.nbytes,
                    seconds=dict(report.seconds),
                    rejected=list(report.rejected),
                    protected=report.protected,
                )
            )
            self.run(training, ctx.rank, report.step, checkpointer.step)
            checkpointer.close(keep=self.args.keep)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line of one training process. Local."""
    parser = argparse.ArgumentParser(prog="python -m memckpt.demo.train", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--log", required=True, type=Path, help="directory for the logs of this job")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--active", type=int, default=4)
    parser.add_argument(
        "--deadline", type=float, default=20.0, help="seconds to wait for a peer that shows no sign of life"
    )
    parser.add_argument("--nodes", default="", help="pretended node of each MPI rank, separated by commas")
    parser.add_argument("--persist", type=Path, help="directory to which snapshots also go")
    parser.add_argument("--persist-every", type=int, default=1, help="steps between those that go there")
    parser.add_argument("--keep", action="store_true", help="leave the memory at the end")
    parser.add_argument("--plain", action="store_true", help="train without memckpt")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one process of the training. Collective over all processes of the job."""
    args = parse(argv)
    torch.set_num_threads(1)
    world_rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    node = (args.nodes.split(",") if args.nodes else [os.uname().nodename] * (world_rank + 1))[world_rank]
    if args.nodes:
        os.environ["MEMCKPT_NODE"] = os.environ["MEMCKPT_DOMAIN"] = node
    program = Program(args, events.Log(args.log))
    pid = os.getpid()
    program.log.write(events.Started(events.now(), pid, events.start_time(pid), world_rank, node))
    Training.build(0, 1, args.seed, args.steps)  # a spare has everything imported before it is needed
    if args.plain:
        program.plain(world_rank)
    else:
        resilient.run(program.protected, active=args.active)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
