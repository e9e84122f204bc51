"""A benchmark's job of two ranks: a node each by name, memory of its own, gloo for the competitor."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

world = MPI.COMM_WORLD


class Places(NamedTuple):
    """Where a job may write: its memory, which all ranks share though each has a node's name, and a directory on disk.

    Both go with the job.
    """

    memory: Path
    disk: Path

    @property
    def node(self) -> Path:
        """Memory of this rank's node."""
        return self.memory / f"memckpt-{os.getuid()}" / os.environ["MEMCKPT_NODE"]


@contextmanager
def job(disk: str | None) -> Iterator[Places]:
    """The job, with one thread for each rank. Collective.

    Parameters
    ----------
    disk
        Directory under which files are to be written; None: that for temporary files.
    """
    torch.set_num_threads(1)
    os.environ["MEMCKPT_NODE"] = os.environ["MEMCKPT_DOMAIN"] = f"bench{world.rank}"
    name = f"memckpt-bench-{os.getppid()}"  # mpirun's pid: the same on all ranks
    places = Places(Path("/dev/shm") / name, Path(disk or tempfile.gettempdir()) / name)
    os.environ["MEMCKPT_SHM"] = str(places.memory)
    for directory in places:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = np.array([_free_port() if world.rank == 0 else 0])
    world.Bcast(port)
    store = dist.TCPStore("127.0.0.1", int(port[0]), world.size, is_master=world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield places
        world.Barrier()
    except BaseException:
        traceback.print_exc()
        _remove(places)
        world.Abort(1)  # the other rank would wait for this one for ever
    if world.rank == 0:
        _remove(places)
    dist.destroy_process_group()


def _remove(places: Places) -> None:
    for directory in places:
        shutil.rmtree(directory, ignore_errors=True)


def slowest(value: float) -> float:
    """The maximum over ranks. Collective."""
    return _reduced(value, MPI.MAX)


def earliest(value: float) -> float:
    """The minimum over ranks. Collective."""
    return _reduced(value, MPI.MIN)


def timed(action: Callable[[], object]) -> float:
    """Seconds of the slowest rank, all of them beginning together. Collective."""
    world.Barrier()
    begin = time.perf_counter()
    action()
    return slowest(time.perf_counter() - begin)


def _reduced(value: float, op: Any) -> float:
    out = np.array([value])
    world.Allreduce(MPI.IN_PLACE, out, op=op)
    return float(out[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
