"""Data-parallel training under any MPI. When a process dies the job ends; start the same line again and it goes on.

mpirun -n 2 python examples/mpi_train.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from mpi4py import MPI

import memckpt


def average_gradients(comm: MPI.Intracomm, model: torch.nn.Module) -> None:
    """The mean of every gradient over all ranks, as one message."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    comm.Allreduce(MPI.IN_PLACE, flat.numpy())
    for grad, mean in zip(grads, (flat / comm.Get_size()).split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="mpi-train", help="the run: start it again under the same name")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--die-at", type=int, help="for trying it out: the last rank is killed in this step")
    args = parser.parse_args()

    comm = MPI.COMM_WORLD
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    torch.manual_seed(0)  # the same parameters on every rank
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # other data and dropout on each

    states = {"model": model, "optimizer": optimizer}
    # Every step is saved: a save that falls due waits for the end of the last one, in place of being skipped.
    with memckpt.Checkpointer(states, name=args.name, every=1, on_busy="wait", quiet=True) as ckpt:
        for index in ckpt.steps(args.steps):  # restores, then yields what is still to do, and saves after each
            if rank == 0:
                print(f"step {index + 1}", flush=True)
            inputs = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if rank == last and index + 1 == args.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            average_gradients(comm, model)
            optimizer.step()

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    if rank == 0:
        print(f"step {args.steps}: parameters {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
