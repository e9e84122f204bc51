"""What storage costs and gives: time until a checkpoint is durable, what training feels of it, time to restore it.

``mpirun --oversubscribe -n 2 python benchmarks/bench_persist.py [--json] [--quick] [--directory DIR]``

Two ranks with one thread and a node each (by name; it is one machine), ``Mirror(1)``, all files on the disk of DIR.
Training has a barrier between backward and the optimizer's step, where data-parallel ranks exchange gradients.
What each way of writing left is read back and compared before anything is timed. All ways take turns in the same run;
each figure is the median over rounds, each round the slowest rank. Rates are of the state's bytes, of both ranks
together.

persist
    From the moment the snapshot is committed until the marker is durable (data, seal, directory and marker flushed),
    as a rate, against a raw sequential write and fsync of the same bytes by the same number of processes.
    `persist_torch`, `persist_dcp`: the same against `torch.save` and fsync of a file per rank, and against
    `torch.distributed.checkpoint.save`.
persist_many_torch, persist_many_dcp
    The same for 20,000 tensors of 1 KiB per rank. `persist_many`: against the raw write.
blocked_persist
    Training time that memckpt holds back (in `step` and in the fence) while a step is written, beyond what it holds
    back in as many steps after a save that is not written, against the time that writing takes.
added_persist
    The same of the whole training time of those steps: writing takes its processor time from training where all cores
    train.
restore_storage
    `restore()` of a checkpoint that no memory has, against `dcp.load` into the same tensors, as a rate. Nothing of
    either's files is in the page cache (POSIX_FADV_DONTNEED, which is checked); `restore_storage_cached`: everything
    is. Slots are there already; `restore_storage_new_node`: the same with nothing cached, and memory to be made ready
    first. `restore_storage_raw`: against the limit, a plain read of the same bytes by the same number of processes,
    nothing cached, into memory that is there.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import _common
import torch
import torch.distributed.checkpoint as dcp
from _ranks import Places, earliest, job, slowest, timed, world
from _training import MIB, STATES, Training
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from memckpt import Checkpointer, Mirror, Persist, faults

STEP_S = 0.03
"""Length of a forward and backward while blocked time is measured."""
PIECE_NBYTES = 8 * MIB
FORGET_TRIES = 20
AT_ONCE = 1e12
"""Bytes per second: replication is not spread over time, so that writing begins soon after each save."""


class Moments:
    """When this rank's checkpoints were committed and durable: notes the points at which tests let a rank die."""

    _NAMES = ("commit.known", "storage.marker_durable")

    def __init__(self) -> None:
        self._at: dict[tuple[str, int], float] = {}
        faults.arm(self._note)

    def _note(self, name: str, rank: int, step: int) -> None:
        if name in self._NAMES:
            self._at[name, step] = time.monotonic()

    def persist_s(self, step: int) -> float:
        """Seconds from the first rank's commit of `step` to the marker, which rank 0 writes. Collective."""
        committed, durable = (self._at.get((name, step), math.inf) for name in self._NAMES)
        return earliest(durable) - earliest(committed)


class Persisting:
    """A training run with a Checkpointer that writes one of `persist_every` steps to storage."""

    def __init__(self, training: Training, places: Places, *, every: int, persist_every: int) -> None:
        self.training = training
        self._places = places
        self.files = places.disk / f"ours-{training.name}-{every}"
        self.checkpointer = Checkpointer(
            {"model": training.module, "optimizer": training.optimizer},
            name=f"bench-{training.name}-{every}",
            every=every,
            redundancy=Mirror(1),
            bandwidth=AT_ONCE,
            persist=Persist(self.files, every=persist_every, keep=1),
            fresh=True,
            on_error="raise",
            quiet=True,
        )
        self.step = self.checkpointer.restore().step
        self.moments = Moments()

    def advance(self) -> None:
        """One step of data-parallel training. Collective."""
        train(self.training)
        self.step += 1
        self.checkpointer.step(self.step)

    def persist(self) -> float:
        """One step that is written, with nothing else to do meanwhile: seconds from commit to durable. Collective."""
        self.advance()
        self.checkpointer.fence()
        self.checkpointer.wait(persisted=True)
        assert self.checkpointer.stats().persisted_step == self.step, (self.checkpointer.stats(), self.step)
        return self.moments.persist_s(self.step)

    def lose_memory(self, *, files: bool) -> None:
        """No snapshot is left in memory: its seals, or all its files. Collective."""
        self.checkpointer.wait()
        world.Barrier()
        for file in self._places.node.rglob("s-*" if files else "*.seal.json"):
            file.unlink()
        world.Barrier()

    def restore(self) -> None:
        """Come back from storage. Collective."""
        report = self.checkpointer.restore()
        assert (report.step, set(report.sources)) == (self.step, {"storage"}), report


class Raw:
    """The limit: the same bytes, one file for each process, written one after another and flushed."""

    def __init__(self, training: Training, places: Places) -> None:
        self._training = training
        self.files = places.disk / "raw"
        self._bytes = torch.cat([t.reshape(-1).view(torch.uint8) for t in training.tensors.values()]).numpy()

    def write(self) -> None:
        """Write and flush."""
        with open(self.files / f"{world.rank}", "wb", buffering=0) as file:
            for start in range(0, len(self._bytes), PIECE_NBYTES):
                file.write(self._bytes[start : start + PIECE_NBYTES])
            os.fsync(file.fileno())

    def is_same(self) -> bool:
        """What was written is what is read."""
        return (self.files / f"{world.rank}").read_bytes() == self._bytes.tobytes()

    def load(self) -> None:
        """Read what was written."""
        with open(self.files / f"{world.rank}", "rb", buffering=0) as file:
            for start in range(0, len(self._bytes), PIECE_NBYTES):
                file.readinto(self._bytes[start : start + PIECE_NBYTES])


class Torch:
    """`torch.save`, one file for each rank, flushed."""

    def __init__(self, training: Training, places: Places) -> None:
        self._tensors = training.tensors
        self.files = places.disk / "torch"

    def write(self) -> None:
        """Write and flush."""
        with open(self.files / f"{world.rank}", "wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def is_same(self) -> bool:
        """What was written is what is read."""
        return equal(torch.load(self.files / f"{world.rank}"), self._tensors)


class Dcp:
    """`torch.distributed.checkpoint`, given a flat dict of plain tensors, its best case; it flushes by itself."""

    def __init__(self, training: Training, places: Places) -> None:
        self._tensors = {f"rank{world.rank}.{name}": tensor for name, tensor in training.tensors.items()}
        self.files = places.disk / "dcp"

    def write(self) -> None:
        """Write and flush. Collective."""
        dcp.save(self._tensors, checkpoint_id=self.files, planner=DefaultSavePlanner(flatten_state_dict=False))

    def load(self) -> None:
        """Read into the tensors. Collective."""
        dcp.load(self._tensors, checkpoint_id=self.files, planner=DefaultLoadPlanner(flatten_state_dict=False))

    def is_same(self) -> bool:
        """What was written is what is read. Collective."""
        saved = {name: tensor.clone() for name, tensor in self._tensors.items()}
        for tensor in self._tensors.values():
            tensor.zero_()
        self.load()
        return equal(self._tensors, saved)


Way = Raw | Torch | Dcp


def train(training: Training) -> None:
    """One step, with the place where ranks wait for each other's gradients. Collective."""
    training.work()
    world.Barrier()
    training.update()


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """The same names, and the same bytes under each."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def write(way: Way) -> float:
    """Seconds that it takes to write the state anew. Collective."""
    remove(way.files)
    return timed(way.write)


def remove(directory: Path) -> None:
    """Empty `directory` and make it again; what the disk has to do for that is over then. Collective."""
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        above = os.open(directory.parent, os.O_RDONLY)
        os.fsync(above)
        os.close(above)
    world.Barrier()


def validate(persisting: Persisting, ways: list[Way]) -> None:
    """What comes back is what was saved, every byte, in all ways. Collective."""
    tensors = persisting.training.tensors
    persisting.persist()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    persisting.lose_memory(files=False)
    persisting.restore()
    assert equal(tensors, saved), "restored wrong bytes"
    for way in ways:
        write(way)
        assert way.is_same(), f"{type(way).__name__} wrote other bytes"
        remove(way.files)


def writes(
    persisting: Persisting, ways: list[Way], rounds: dict[type[Way], int]
) -> tuple[float, dict[type[Way], float]]:
    """Median seconds that memckpt and the others take, in turns. Collective."""
    ours: list[float] = []
    others: dict[type[Way], list[float]] = {type(way): [] for way in ways}
    for turn in range(max(rounds.values())):
        ours.append(persisting.persist())
        for way in ways:
            if turn < rounds[type(way)]:
                others[type(way)].append(write(way))
                remove(way.files)
        ways = [*ways[1:], ways[0]]
    return statistics.median(ours), {kind: statistics.median(seconds) for kind, seconds in others.items()}


# -- restore -----------------------------------------------------------------------------------------------------------


def files_of(directory: Path) -> Iterator[int]:
    """File descriptors of all that is not tiny below `directory`."""
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size > MIB:
            fd = os.open(path, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)


def forget(directory: Path) -> None:
    """Take the files out of the page cache, and make sure that they are. Collective."""
    world.Barrier()
    for _ in range(FORGET_TRIES):
        cached = 0.0
        if world.rank == 0:
            for fd in files_of(directory):
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                cached = max(cached, cached_share(fd))
        if slowest(cached) < 0.01:
            return
        time.sleep(0.1)  # somebody else may hold a page for a moment
    raise RuntimeError(f"{directory} stays in the page cache")


def cached_share(fd: int) -> float:
    """Which share of a file is in the page cache."""
    nbytes = os.fstat(fd).st_size
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY) as mapping:
        pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(mapping)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), pages
        )
        del first  # it holds the mapping
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages.raw) / len(pages)


def remember(directory: Path) -> None:
    """Bring the files into the page cache. Collective."""
    world.Barrier()
    if world.rank == 0:
        for fd in files_of(directory):
            while os.read(fd, PIECE_NBYTES):
                pass
    world.Barrier()


def restores(persisting: Persisting, raw: Raw, peer: Dcp, rounds: int) -> dict[str, float]:
    """Median seconds to read a checkpoint back. Collective."""
    persisting.persist()
    write(raw)
    write(peer)
    saved = {name: tensor.clone() for name, tensor in persisting.training.tensors.items()}

    def ours(prepare: Callable[[Path], None], *, files: bool) -> float:
        persisting.lose_memory(files=files)
        prepare(persisting.files)
        return timed(persisting.restore)

    def theirs(way: Raw | Dcp, prepare: Callable[[Path], None]) -> float:
        persisting.checkpointer.wait()
        prepare(way.files)
        return timed(way.load)

    cases: dict[str, Callable[[], float]] = {
        "restore_storage": lambda: ours(forget, files=False),
        "dcp": lambda: theirs(peer, forget),
        "raw": lambda: theirs(raw, forget),
        "restore_storage_cached": lambda: ours(remember, files=False),
        "dcp_cached": lambda: theirs(peer, remember),
        "restore_storage_new_node": lambda: ours(forget, files=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):  # the first does not count
        for name, case in cases.items():
            for tensor in persisting.training.tensors.values():
                tensor.zero_()
            took = case()
            assert name == "raw" or equal(persisting.training.tensors, saved), f"{name}: wrong bytes"
            if turn:
                seconds[name].append(took)
    assert raw.is_same(), "the plain read brought other bytes"
    remove(raw.files)
    remove(peer.files)
    return {name: statistics.median(values) for name, values in seconds.items()}


# -- training ----------------------------------------------------------------------------------------------------------


def felt(training: Training, places: Places, persist_s: float, rounds: int) -> tuple[float, float, float]:
    """Seconds that training is blocked and made longer by one persist, and seconds that this takes. Collective.

    Each round has two halves of as many steps that begin with a save; that of one of them is written.
    """
    training.work_count = int(slowest(training.calibrate(STEP_S)))
    step_s = statistics.median(timed(lambda: train(training)) for _ in range(5))
    every = max(8, math.ceil(3 * persist_s / step_s))
    run = Persisting(training, places, every=every, persist_every=2 * every)
    blocked, added, took = [], [], []
    for _ in range(every - 1):
        run.advance()
    for turn in range(3 * rounds + 1):
        halves = []
        for _ in range(2):  # the second is written
            before = run.checkpointer.stats().blocked_s
            whole = timed(lambda: [run.advance() for _ in range(every)])
            halves.append((slowest(run.checkpointer.stats().blocked_s - before), whole))
        saved = run.step + 1 - every
        assert saved % (2 * every) == 0
        persist_s = run.moments.persist_s(saved)
        if turn > 0 and math.isfinite(persist_s):  # else it was still being written at the end: the next half has it
            blocked.append(halves[1][0] - halves[0][0])
            added.append(halves[1][1] - halves[0][1])
            took.append(persist_s)
            if len(took) == rounds:
                break
    run.checkpointer.close()
    remove(run.files)
    return statistics.median(blocked), statistics.median(added), statistics.median(took)


# -- all of it ---------------------------------------------------------------------------------------------------------


def measure_big(places: Places, nbytes: int, rounds: int) -> list[_common.Result]:
    """Every figure of 64 large tensors. Collective."""
    training = STATES["big"](nbytes)
    mib = world.size * training.nbytes / MIB
    persisting = Persisting(training, places, every=1, persist_every=1)
    raw, peer = Raw(training, places), Dcp(training, places)
    ways: list[Way] = [raw, Torch(training, places), peer]
    validate(persisting, ways)
    persist_s, others = writes(persisting, ways, dict.fromkeys((Raw, Torch, Dcp), rounds))
    read = restores(persisting, raw, peer, max(1, rounds - 1))
    persisting.checkpointer.close()
    remove(persisting.files)
    blocked, added, took = felt(training, places, persist_s, rounds)

    def rate(name: str, seconds: float, other: str, other_s: float) -> _common.Result:
        return _common.result(name, mib / seconds, "MiB/s", _common.against(other, mib / other_s))

    duration = _common.against("the time that writing takes", took * 1e3)
    return [
        rate("persist", persist_s, "raw write + fsync", others[Raw]),
        rate("persist_torch", persist_s, "torch.save + fsync", others[Torch]),
        rate("persist_dcp", persist_s, "dcp.save", others[Dcp]),
        _common.result("blocked_persist", blocked * 1e3, "ms", duration),
        _common.result("added_persist", added * 1e3, "ms", duration),
        rate("restore_storage", read["restore_storage"], "dcp.load, nothing cached", read["dcp"]),
        rate("restore_storage_raw", read["restore_storage"], "raw read, nothing cached", read["raw"]),
        rate("restore_storage_cached", read["restore_storage_cached"], "dcp.load, all cached", read["dcp_cached"]),
        rate("restore_storage_new_node", read["restore_storage_new_node"], "dcp.load, nothing cached", read["dcp"]),
    ]


def measure_many(places: Places, nbytes: int, rounds: int) -> list[_common.Result]:
    """Every figure of many small tensors; one round of DCP, which takes long. Collective."""
    training = STATES["many"](nbytes)
    mib = world.size * training.nbytes / MIB
    persisting = Persisting(training, places, every=1, persist_every=1)
    raw, save, peer = Raw(training, places), Torch(training, places), Dcp(training, places)
    validate(persisting, [raw, save])
    ours, others = writes(persisting, [raw, save], {Raw: rounds, Torch: rounds})
    dcp_s = write(peer)
    persisting.checkpointer.close()

    def rate(name: str, other: str, other_s: float) -> _common.Result:
        return _common.result(name, mib / ours, "MiB/s", _common.against(other, mib / other_s))

    return [
        rate("persist_many", "raw write + fsync", others[Raw]),
        rate("persist_many_torch", "torch.save + fsync", others[Torch]),
        rate("persist_many_dcp", "dcp.save", dcp_s),
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What storage costs a training run, and gives.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--quick", action="store_true", help="small states, to see that everything works; no figures to quote"
    )
    parser.add_argument("--directory", metavar="DIR", help="on the disk to write to; default: that of temporary files")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of which the median is taken")
    return parser.parse_args()


def main() -> None:
    """Run and print. Collective."""
    arguments = parse()
    if world.size != 2:
        sys.exit("start it with two ranks: mpirun --oversubscribe -n 2 python benchmarks/bench_persist.py")
    smaller, rounds = (16, 1) if arguments.quick else (1, arguments.rounds)
    results: list[_common.Result] = []
    with job(arguments.directory) as places:
        results += measure_big(places, 256 * MIB // smaller, rounds)
        results += measure_many(places, 20_000 * 1024 // smaller, rounds)
    if world.rank == 0:
        _common.report("persist", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
