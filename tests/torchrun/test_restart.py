"""A worker is killed under ``torchrun --max-restarts``: new processes find the old ones' memory."""

from __future__ import annotations

import re
import uuid

import pytest

from tests.torchrun.harness import torchrun

pytestmark = pytest.mark.timeout(240)

JOB = """
import hashlib, os, signal, sys
import torch
import torch.distributed as dist
import memckpt

name, kill = sys.argv[1], sys.argv[2] == "kill"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(64, 64)
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.AdamW(model.parameters())
with memckpt.Checkpointer({"model": model, "optimizer": optimizer}, name=name, every=1, on_busy="wait") as ckpt:
    report = ckpt.restore()
    print(f"attempt {attempt} rank {rank} source {report.sources[rank]} step {report.step}", flush=True)
    for step in ckpt.steps(24):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if kill and attempt < 3 and step == 6 + 5 * attempt and rank == attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"end {rank} {digest}", flush=True)
dist.destroy_process_group()
"""


def test_worker_killed_three_times() -> None:
    run = f"memckpt-test-{uuid.uuid4().hex[:8]}"
    whole = torchrun(4, JOB, run, "whole", timeout_s=100).check()
    killed = torchrun(4, JOB, run, "kill", max_restarts=3, timeout_s=200).check()
    ends = [sorted(re.findall(r"end (\d) (\w+)", result.stdout)) for result in (whole, killed)]
    assert len(ends[0]) == 4
    assert ends[0] == ends[1]
    said = re.findall(r"attempt (\d) rank (\d) source (\w+) step (\d+)", killed.stdout)
    for attempt in (1, 2, 3):
        mine = [(source, int(step)) for a, _, source, step in said if int(a) == attempt]
        assert len(mine) == 4, killed.stdout
        assert {source for source, _ in mine} <= {"own", "peer"}
        (step,) = {step for _, step in mine}
        assert 6 + 5 * (attempt - 1) - 2 <= step <= 6 + 5 * (attempt - 1)
