"""Train a small model under mpirun, and say everything: what was restored, what each step left, what was committed.

train.py TOTAL [MODE STEP RANK]: MODE is what rank RANK does before it takes step STEP: raise, exit, stop, kill or none.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from mpi4py import MPI

import memckpt
from tests.mpi.programs import no_dynamo

no_dynamo.install()


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    moments = [optimizer.state[p][k] for p in model.parameters() for k in sorted(optimizer.state[p])]
    h = hashlib.sha256()
    for t in [*model.state_dict().values(), *moments]:
        h.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    h.update(torch.get_rng_state().numpy().tobytes())
    return h.hexdigest()[:16]


def fail(mode: str) -> None:
    if mode == "raise":
        raise RuntimeError("this rank has had enough")
    if mode == "exit":
        os._exit(17)
    os.kill(os.getpid(), signal.SIGSTOP if mode == "stop" else signal.SIGKILL)


def say(*words: object) -> None:
    print(*words, flush=True)


def main() -> None:
    total = int(sys.argv[1])
    mode, at, victim = sys.argv[2] if len(sys.argv) > 2 else "none", int(sys.argv[3:4][0]) if sys.argv[3:] else -1, -1
    if len(sys.argv) > 4:
        victim = int(sys.argv[4])
    rank = MPI.COMM_WORLD.Get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    deadline = float(os.environ.get("TEST_DEADLINE", "30"))
    with memckpt.Checkpointer(
        {"model": model, "optimizer": optimizer}, name="train", every=1, on_busy="wait", deadline=deadline, quiet=True
    ) as ckpt:
        report = ckpt.restore()
        say("restored", rank, report.step, digest(model, optimizer), report.sources[rank])
        for n in range(report.step + 1, total + 1):
            loss = model(torch.randn(8, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if (n, rank) == (at, victim) and mode != "none":
                fail(mode)
            optimizer.step()
            say("took", rank, n, digest(model, optimizer))
            ckpt.step(n)
            say("committed", rank, ckpt.stats().committed_step)
        ckpt.wait()
        say("final", rank, digest(model, optimizer))


if __name__ == "__main__":
    main()
