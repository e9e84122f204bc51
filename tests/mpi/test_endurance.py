"""A thousand saves: memory stays flat, and nothing is left after `memckpt rm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import harness
from tests.mpi.harness import needs_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.long, needs_mpi, pytest.mark.timeout(400)]

PROGRAM = """
import gc, os, resource, sys, pathlib, torch, memckpt
from mpi4py import MPI
comm = MPI.COMM_WORLD
base = pathlib.Path(os.environ["MEMCKPT_SHM"])
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(64 * 1024)) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for p in model.parameters():
    p.grad = torch.ones_like(p)

def used():
    gc.collect()
    rss = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    return rss, sum(f.stat().st_size for f in base.rglob("*") if f.is_file())

ckpt = memckpt.Checkpointer({"model": model, "optimizer": optimizer}, name="long", every=1, on_busy="wait", quiet=True)
ckpt.restore()
marks = []
for n in range(1, 1001):
    optimizer.step()
    ckpt.step(n)
    if n in (100, 1000):
        ckpt.wait()
        comm.Barrier()
        marks.append(used())
        comm.Barrier()
assert ckpt.stats().commits >= 999, ckpt.stats()
print("MARKS", comm.rank, *marks[0], *marks[1], flush=True)
ckpt.close(keep=True)
"""


def test_a_thousand_saves_leave_memory_flat_and_rm_leaves_nothing(tmp_path: Path) -> None:
    env = {"MEMCKPT_SHM": str(tmp_path)}
    result = harness.start(2, PROGRAM, env=env).finish(360).check()
    marks = [line.split() for line in result.stdout.splitlines() if line.startswith("MARKS")]
    assert len(marks) == 2
    for _, _, rss_early, files_early, rss_late, files_late in marks:
        assert int(rss_late) - int(rss_early) < 1 << 20
        assert abs(int(files_late) - int(files_early)) < 256  # seals grow by a digit or two
    subprocess.run([sys.executable, "-m", "memckpt", "rm", "long"], env={**os.environ, **env}, check=True)
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]
