"""What saving costs a training run: time blocked, time added to each step, time until replicated, memory.

``mpirun --oversubscribe -n 2 python benchmarks/bench_save.py [--json] [--quick] [--state NAME ...]``

Three states of real parameters and a real optimizer (`_training.py`), every tensor changed between saves, each rank
with one thread and as its own node, ``Mirror(1)``. Restored bytes are compared with saved ones before anything is
timed. Each figure is the median of several rounds, each round the maximum over ranks.

blocked_NAME
    Training time blocked per save: `step()` plus the wait in the fence, against
    `torch.distributed.checkpoint.async_save` with a reused stager in the same run. DCP is given a flat dict of plain
    tensors, its best case.
added_NAME
    Time that a save adds to the steps that it runs behind, saves on and off taking turns, against one plain copy and
    one raw MPI exchange of the same bytes: on a CPU copying takes its cores from training.
replicated_NAME
    From `step()` until every snapshot and every replica is sealed and voted on, against the same.
memory
    Bytes beyond the state, /dev/shm and private memory, against the state.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _training import MIB, STATES, Training
from mpi4py import MPI
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

WORK_OVER_COPY = 3.0
"""Length of a forward and backward, in plain copies of the state; a real one is far longer than that."""
SHORTEST_WORK_S = 0.05
EVERY = 3
"""Steps from one save to the next, so that a save has ended before the next one is due."""

world = MPI.COMM_WORLD


def slowest(value: float) -> float:
    """The maximum over ranks. Collective."""
    out = np.array([value])
    world.Allreduce(MPI.IN_PLACE, out, op=MPI.MAX)
    return float(out[0])


def timed(action: Callable[[], object], rounds: int, before: Callable[[], object] | None = None) -> float:
    """Median over rounds of the slowest rank's seconds. Collective."""
    seconds = []
    for _ in range(rounds):
        if before is not None:
            before()
        world.Barrier()
        begin = time.perf_counter()
        action()
        seconds.append(slowest(time.perf_counter() - begin))
    return statistics.median(seconds)


def raw_limits(nbytes: int, rounds: int) -> tuple[float, float]:
    """Seconds of one plain copy into touched memory and of one MPI exchange of `nbytes`, all ranks at once.
    Collective.
    """
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    peer, send, receive = world.rank ^ 1, source.numpy(), target.numpy()
    target.copy_(source)
    world.Sendrecv(send, peer, recvbuf=receive, source=peer)
    copy = timed(lambda: target.copy_(source), rounds)
    exchange = timed(lambda: world.Sendrecv(send, peer, recvbuf=receive, source=peer), rounds)
    return copy, exchange


class PlanNothing(DefaultSavePlanner):
    """Stands in for what DCP does *behind* training, which takes it half a minute per save for 20,000 tensors.

    Staging, which is what keeps training waiting, has ended by then and is the same.
    """

    def create_local_plan(self) -> SavePlan:
        """Nothing is to be written."""
        self.plan = SavePlan([])
        return self.plan


def blocked_by_dcp(training: Training, rounds: int) -> float:
    """Seconds that `async_save` keeps the training thread, with a stager that has its memory already. Collective."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stager, seconds = DefaultStager(options), []
    tensors = {f"rank{world.rank}.{name}": tensor for name, tensor in training.tensors.items()}
    directory = Path(tempfile.gettempdir()) / f"memckpt-bench-dcp-{os.getppid()}"
    planner = (PlanNothing if len(tensors) > 5000 else DefaultSavePlanner)(flatten_state_dict=False)  # it is flat
    try:
        for index in range(rounds + 1):  # the first one allocates
            training.update()
            world.Barrier()
            begin = time.perf_counter()
            upload: Any = dcp.async_save(
                tensors, checkpoint_id=directory / f"{training.name}-{index}", planner=planner, async_stager=stager
            )
            seconds.append(slowest(time.perf_counter() - begin))
            upload.result()
            shutil.rmtree(directory / f"{training.name}-{index - 1}", ignore_errors=True)
    finally:
        stager.close()
        world.Barrier()
        shutil.rmtree(directory, ignore_errors=True)
    return statistics.median(seconds[1:])


class Saving:
    """A training run with a Checkpointer, driven in rounds of `EVERY` steps of which the first ends in a save."""

    def __init__(self, training: Training, name: str) -> None:
        import memckpt

        self.training = training
        self._fence_began = 0.0
        self.fence_s = 0.0
        training.optimizer.register_step_pre_hook(self._before_fence)
        self.checkpointer = memckpt.Checkpointer(
            {"model": training.module, "optimizer": training.optimizer},
            name=name,
            every=EVERY,
            redundancy=memckpt.Mirror(1),
            fresh=True,
            on_error="raise",
            quiet=True,
        )
        training.optimizer.register_step_pre_hook(self._after_fence)  # hooks run in the order of their registration
        self.step = self.checkpointer.restore().step

    def _before_fence(self, *_: object) -> None:
        self._fence_began = time.perf_counter()

    def _after_fence(self, *_: object) -> None:
        self.fence_s = time.perf_counter() - self._fence_began

    def train(self) -> None:
        """One step of training, without a call of ours."""
        self.training.work()
        self.training.update()

    def advance(self) -> float:
        """Call `step`; returns its seconds."""
        self.step += 1
        begin = time.perf_counter()
        self.checkpointer.step(self.step)
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Take the steps after one that saved. The last one tells all ranks that the save has ended, so the next may
        begin.
        """
        while (self.step + 1) % EVERY:
            self.train()
            if (self.step + 2) % EVERY == 0:
                self.checkpointer.wait()
            self.advance()

    def validate(self) -> None:
        """What comes back is what was saved, every byte; and every tensor differs from one save to the next.
        Collective.
        """
        self.finish()
        previous: dict[str, torch.Tensor] = {}
        for _ in range(2):
            self.finish()
            self.train()
            self.advance()
            saved = {name: tensor.clone() for name, tensor in self.training.tensors.items()}
            same = [name for name in previous if torch.equal(previous[name], saved[name])]
            assert not same, f"not changed between saves: {same[:3]}"
            previous = saved
        self.train()
        self.checkpointer.wait()
        report = self.checkpointer.restore()
        assert report.step == self.step, (report, self.step)
        wrong = [name for name, tensor in self.training.tensors.items() if not torch.equal(tensor, previous[name])]
        assert not wrong, f"restored wrong bytes: {wrong[:3]}"
        self.checkpointer.wait()
        self.finish()

    def blocked(self, rounds: int) -> float:
        """Seconds per save that training waits, in `step` and in the fence. Collective."""
        seconds = []
        for _ in range(rounds):
            self.train()
            world.Barrier()
            in_step = self.advance()
            self.train()
            seconds.append(slowest(in_step + self.fence_s))
            self.checkpointer.wait()
            self._check_saved()
            self.advance()
            self.finish()
        return statistics.median(seconds)

    def _check_saved(self) -> None:
        stats = self.checkpointer.stats()
        assert stats.committed_step == self.step, (stats, self.step)
        assert stats.lazy_nbytes > 0.99 * self.training.nbytes, stats

    def added(self, rounds: int) -> float:
        """Seconds that one save adds to the `EVERY` steps it runs behind. Collective."""
        saved, unsaved = [], []

        def with_save() -> None:
            self.train()
            self.advance()
            self.finish()

        def without() -> None:
            for _ in range(EVERY):
                self.train()

        for _ in range(rounds):
            unsaved.append(timed(without, 1))
            saved.append(timed(with_save, 1))
            stats = self.checkpointer.stats()
            assert stats.committed_step == self.step + 1 - EVERY, (stats, self.step)
        return statistics.median(s - u for s, u in zip(saved, unsaved, strict=True))

    def replicated(self, rounds: int) -> float:
        """Seconds from `step` until everything is sealed and the vote is known, with nothing else to do. Collective."""
        seconds = []
        for _ in range(rounds):
            self.train()
            world.Barrier()
            begin = time.perf_counter()
            self.advance()
            self.checkpointer.fence()
            self.checkpointer.wait()
            seconds.append(slowest(time.perf_counter() - begin))
            self._check_saved()
            self.finish()
        return statistics.median(seconds)


def private_nbytes() -> int:
    """Bytes of this process's own memory: anonymous pages in use, without what it shares through files."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, such as the copies made for comparing, is no cost of ours
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


def file_nbytes(directory: Path) -> int:
    """Bytes that the files under `directory` take up."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def measure(name: str, nbytes: int, rounds: int, memory: Path) -> list[_common.Result]:
    """Every figure of one state. Collective."""
    training = STATES[name](nbytes)
    state_nbytes = training.nbytes
    copy, exchange = raw_limits(state_nbytes, rounds)
    count = training.calibrate(max(SHORTEST_WORK_S, WORK_OVER_COPY * copy))
    training.work_count = int(slowest(count))
    for _ in range(2):
        training.work()
        training.update()
    private = private_nbytes()
    saving = Saving(training, f"bench-{name}")
    saving.validate()
    blocked = saving.blocked(rounds)
    added = saving.added(rounds) if name != "many" else None  # there the state is too small to tell it from noise
    replicated = saving.replicated(rounds)
    own = np.array([private_nbytes() - private, state_nbytes], dtype=np.int64)
    world.Allreduce(MPI.IN_PLACE, own)
    shared = file_nbytes(memory)
    saving.checkpointer.close()
    dcp_blocked = blocked_by_dcp(training, rounds)
    limit = _common.against("one plain copy + one raw MPI exchange", (copy + exchange) * 1e3)
    results = [
        _common.result(f"blocked_{name}", blocked * 1e3, "ms", _common.against("dcp.async_save", dcp_blocked * 1e3)),
        _common.result(f"replicated_{name}", replicated * 1e3, "ms", limit),
    ]
    if added is not None:
        results.append(_common.result(f"added_{name}", added * 1e3, "ms", limit))
    if name == "big":
        beyond = (shared + int(own[0])) / MIB
        results.append(_common.result("memory", beyond, "MiB", _common.against("the state", int(own[1]) / MIB)))
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What saving costs a training run.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--quick", action="store_true", help="small states, to see that everything works; no figures to quote"
    )
    parser.add_argument("--state", nargs="+", choices=sorted(STATES), default=list(STATES), help="which states")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of which the median is taken")
    return parser.parse_args()


def main() -> None:
    """Run and print. Collective."""
    arguments = parse()
    if world.size != 2:
        sys.exit("start it with two ranks: mpirun --oversubscribe -n 2 python benchmarks/bench_save.py")
    torch.set_num_threads(1)
    os.environ["MEMCKPT_NODE"] = os.environ["MEMCKPT_DOMAIN"] = f"bench{world.rank}"
    memory = Path("/dev/shm") / f"memckpt-bench-{os.getppid()}"  # mpirun's pid: the same on both ranks
    os.environ["MEMCKPT_SHM"] = str(memory)
    memory.mkdir(mode=0o700, exist_ok=True)
    port = np.array([_free_port() if world.rank == 0 else 0])
    world.Bcast(port)
    store = dist.TCPStore("127.0.0.1", int(port[0]), world.size, is_master=world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    results: list[_common.Result] = []
    try:
        for name in arguments.state:
            nbytes = (20_000 * 1024 if name == "many" else 256 * MIB) // (16 if arguments.quick else 1)
            results += measure(name, nbytes, 2 if arguments.quick else arguments.rounds, memory)
    finally:
        world.Barrier()
        if world.rank == 0:
            shutil.rmtree(memory, ignore_errors=True)
        dist.destroy_process_group()
    if world.rank == 0:
        _common.report("save", results, as_json=arguments.json)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
