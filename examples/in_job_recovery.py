"""Training that goes on inside the job: two ranks train, one process waits, and rank 1 is killed half-way.

mpirun --with-ft ulfm --oversubscribe -n 3 python examples/in_job_recovery.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import memckpt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--name", default="in-job-recovery", help="the run: start it again under the same name")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--die-at", type=int, default=20, help="step in which rank 1 is killed, once; 0 for never")
args = parser.parse_args()


def train(ctx: Any) -> None:
    """Entered on each active rank; after a loss entered again, by a spare in place of the lost one."""
    ctx.init_process_group("gloo")  # new in each generation, and torn down with it
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + ctx.rank)

    with memckpt.Checkpointer({"model": model, "optimizer": optimizer}, name=args.name, every=1, quiet=True) as ckpt:
        report = ckpt.restore()
        print(f"rank {ctx.rank}: step {report.step} from {report.sources[ctx.rank]}, process {os.getpid()}", flush=True)
        for n in range(report.step + 1, args.steps + 1):
            inputs = torch.randn(32, 16)
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            if n == args.die_at and ctx.rank == 1 and not ctx.failures:
                os.kill(os.getpid(), signal.SIGKILL)
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= ctx.world
            optimizer.step()
            ckpt.step(n)

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    if ctx.rank == 0:
        print(f"step {args.steps}: parameters {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    memckpt.run(train, active=2)
