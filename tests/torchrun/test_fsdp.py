"""FSDP2 under torchrun: as many ranks go on bit for bit, another number of them gets the same state."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

import pytest

from tests.torchrun.harness import torchrun

pytestmark = pytest.mark.timeout(400)

JOB = """
import hashlib, os, sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
import memckpt

name, first, last, persist, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["MEMCKPT_NODE"] = f"n{rank % 2}"  # two nodes, however many ranks
dist.init_process_group("gloo")
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 5, bias=False))
model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
if first:  # a restore has something to change
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank + 1.0)
if kind == "hsdp" and world % 2 == 0:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
else:
    mesh = init_device_mesh("cpu", (world,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
options = {"persist": memckpt.Persist(persist, every=1)} if persist != "-" else {}
states = {"model": model, "optimizer": optimizer, "schedule": schedule}
ckpt = memckpt.Checkpointer(states, name=name, every=1, on_busy="wait", deadline=60.0, quiet=True, **options)
report = ckpt.restore()
assert report.step == first, report


def digest():
    full = StateDictOptions(full_state_dict=True)
    h = hashlib.sha256()
    for part in (get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)):
        for key, value in sorted(part.items()):
            for name, inner in sorted(value.items()) if isinstance(value, dict) else [("", value)]:
                items = sorted(inner.items()) if isinstance(inner, dict) else [("", inner)]
                for what, t in items:
                    h.update(f"{key} {name} {what} ".encode())
                    h.update(t.numpy().tobytes() if isinstance(t, torch.Tensor) else repr(t).encode())
    return h.hexdigest()


if report.step:
    restored = digest()
    if rank == 0:
        print(f"restored {report.step} {report.source} {report.saved_by} {restored}", flush=True)
data = torch.Generator().manual_seed(77)
for n in range(report.step + 1, last + 1):
    data.manual_seed(n)
    x = torch.randn(4, 10, generator=data)  # the same on every rank, so that their number changes no gradient
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    schedule.step()
    model.seen += 1
    ckpt.step(n, save=n == last)
ckpt.wait(persisted=True)
ended = digest()
if rank == 0:
    print(f"end {last} {ended}", flush=True)
ckpt.close(keep=True)
dist.destroy_process_group()
"""


def job(world: int, run: str, first: int, last: int, persist: str = "-", kind: str = "fsdp") -> tuple[str, str, str]:
    """What it was restored from and by how many ranks it was saved, digests after the restore and at the end."""
    out = torchrun(world, JOB, run, str(first), str(last), persist, kind, timeout_s=100).check().stdout
    restored = re.search(r"restored \d+ (\w+ \d+) (\w+)", out)
    end = re.search(r"end \d+ (\w+)", out)
    assert end is not None, out
    return (*(restored.groups() if restored else ("", "")), end[1])


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Memory of its own for this test."""
    path = tmp_path / "shm"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("MEMCKPT_SHM", str(path))
    return path


@pytest.fixture
def run() -> str:
    return f"memckpt-test-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(run: str, kind: str, memory: Path) -> None:
    _, _, whole = job(4, run + "w", 0, 5, kind=kind)
    _, _, third = job(4, run, 0, 3, kind=kind)
    said, restored, end = job(4, run, 3, 5, kind=kind)
    assert said == "own 4"
    assert restored == third
    assert end == whole


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_saved_on_4_ranks_and_restored_on_2_on_3_and_on_1(run: str, kind: str, memory: Path) -> None:
    _, _, at_3 = job(4, run, 0, 3, kind=kind)
    said, restored, at_5 = job(2, run, 3, 5, kind=kind)
    assert (said, restored) == ("peer 4", at_3)
    said, restored, at_6 = job(3, run, 5, 6, kind=kind)
    assert (said, restored) == ("peer 2", at_5)
    said, restored, _ = job(4, run, 6, 6, kind=kind)
    assert (said, restored) == ("peer 3", at_6)


def test_from_storage_on_another_number_of_ranks(run: str, tmp_path: Path, memory: Path) -> None:
    _, _, at_3 = job(4, run, 0, 3, str(tmp_path / "ckpts"))
    for world in (3, 1):
        shutil.rmtree(memory)
        memory.mkdir(mode=0o700)
        said, restored, _ = job(world, run, 3, 3, str(tmp_path / "ckpts"))
        assert (said, restored) == ("storage 4", at_3)
