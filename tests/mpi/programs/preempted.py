"""Train until told to stop, in `steps()`; every rank says at which step it left, and what was its state.

preempted.py CKPTS MODE: MODE is "plain", "evaluate" (half a second without a step after each), "handlers" (the user has
handlers of their own, set before and after), "workers" (a DataLoader with two workers) or "stuck" (one step that never
ends on rank 0).
"""

from __future__ import annotations

import signal
import sys
import time

import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

import memckpt
from tests.mpi.programs import no_dynamo
from tests.mpi.programs.train import digest, say

no_dynamo.install()


def main() -> None:
    ckpts, mode = sys.argv[1:3]
    rank = MPI.COMM_WORLD.Get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    if mode == "handlers":
        signal.signal(signal.SIGTERM, lambda *_: say("handler", "before", rank))
    batches = iter(
        DataLoader(TensorDataset(torch.randn(100_000, 64)), batch_size=8, num_workers=2 * (mode == "workers"))
    )
    with memckpt.Checkpointer(
        {"model": model, "optimizer": optimizer},
        name="stops",
        every=1,
        persist=memckpt.Persist(ckpts, every=1_000_000, stagger=0),
        deadline=20.0,
        grace=float(sys.argv[3]) if sys.argv[3:] else 20.0,
        quiet=True,
    ) as ckpt:
        if mode == "handlers":
            signal.signal(signal.SIGUSR1, lambda *_: say("handler", "after", rank))
        first = step = ckpt.restore().step
        say("restored", rank, step, digest(model, optimizer))
        for index in ckpt.steps(100_000):
            loss = model(next(batches)[0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            step = index + 1
            if step == first + 20:
                say("running", rank)
            if step > first + 20 and mode == "evaluate":
                time.sleep(0.5)
            if step > first + 20 and mode == "stuck" and rank == 0:
                time.sleep(1000)
        say("left", rank, step, ckpt.preempted, digest(model, optimizer), ckpt.stats().committed_step)
    say("done", rank)


if __name__ == "__main__":
    main()
