"""One process, a loop of one's own. Kill it at any time and start it again: it ends with the same parameters.

python examples/plain_loop.py --steps 200
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch

import memckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="plain-loop", help="the run: start it again under the same name")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--die-at", type=int, help="for trying it out: SIGKILL in this step")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    states = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
    }  # generators of random numbers add themselves

    with memckpt.Checkpointer(states, name=args.name, every=1, quiet=True) as ckpt:
        start = ckpt.restore().step  # 0 where nothing was there
        print(f"starting at step {start}", flush=True)
        for n in range(start + 1, args.steps + 1):
            inputs = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if n == args.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            schedule.step()
            ckpt.step(n)

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"step {args.steps}: loss {loss.item():.4f}, parameters {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
