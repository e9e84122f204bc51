"""Lives of a run whose ranks are threads: each with a Checkpointer of its own, killed at the points that a script
names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memckpt import Checkpointer, Mirror, faults
from memckpt.comm.local import Killed, LocalComm, LocalGroup
from memckpt.errors import PeerLost
from tests.ranks import run_ranks

from .oracle import RankLife

RUN = "lives"
BIG = (5 << 18) + 3  # float32: above 5 MiB, so two chunks
LARGE = 1 << 20
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Death:
    """Rank `rank` dies when it passes point `point` for the `nth` time (counted from 1)."""

    rank: int
    point: str
    nth: int


@dataclass(frozen=True)
class Script:
    """One life: where its ranks run, how far they train, who dies.

    Attributes
    ----------
    nodes : sequence of str
        Node of each rank.
    steps : int
        Steps to train after the restore.
    deaths : sequence of Death
    wiped : sequence of str
        Nodes whose memory is lost when the life has ended.
    corrupt : int or None
        Damages one of the snapshots that are there then, number 0 being the newest (modulo their count).
    patient : bool
        Wait for the last save when the next one is due, so that each step is saved.
    waits : bool
        Wait for each save after `step`, before the optimizer's next step.
    flipped : tuple of int
        Numbers (from 0, over all ranks of the life) of the large messages in which one byte changes on its way.
    delay_s : float
        Longest delay of a message, of a reduction's result, of the news of a death.
    seed : int
        Of the delays, and of what survivors see of a death.
    """

    nodes: Sequence[str]
    steps: int = 3
    deaths: Sequence[Death] = ()
    wiped: Sequence[str] = ()
    corrupt: int | None = None
    patient: bool = False
    waits: bool = False
    flipped: Sequence[int] = ()
    delay_s: float = 0.003
    seed: int = 0


class Training:
    """The state of one rank: two parameters under an optimizer (copied lazily), a buffer and plain objects (eagerly).

    Every number in it is the same, so that a mixture of two steps can be told from either.
    """

    def __init__(self) -> None:
        self.big = nn.Parameter(torch.zeros(BIG))
        self.small = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.module = nn.Module()
        self.module.register_parameter("big", self.big)
        self.module.register_parameter("small", self.small)
        self.module.register_buffer("buffer", torch.zeros(3, dtype=torch.int64))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.plain = {"value": 0}

    @property
    def states(self) -> dict[str, object]:
        """What the Checkpointer is given."""
        return {"module": self.module, "optimizer": self.optimizer, "plain": self.plain}

    def train(self, value: int) -> None:
        """One optimizer step, after which every number is `value`."""
        for parameter in (self.big, self.small):
            parameter.grad = (parameter.detach() - value).clone()
        self.optimizer.step()
        assert self.module.buffer is not None
        self.module.buffer.fill_(value)  # type: ignore[operator]
        self.plain["value"] = value

    def digest(self) -> str:
        """Of every byte; says so where the numbers are not all the same."""
        tensors = [self.big.detach(), self.small.detach(), self.module.get_buffer("buffer")]
        values = {float(x) for tensor in tensors for x in (tensor.min(), tensor.max())} | {float(self.plain["value"])}
        if len(values) > 1:
            return f"a mixture of {sorted(values)}"
        return hashlib.blake2b(b"".join(t.numpy().tobytes() for t in tensors), digest_size=8).hexdigest()


@dataclass
class Life:
    """Runs one script. What its ranks tell is in `told`."""

    number: int
    script: Script
    base: Path
    told: dict[int, RankLife] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.group = LocalGroup(len(self.script.nodes), seed=self.script.seed, max_delay_s=self.script.delay_s)
        self._passed: dict[tuple[int, str], int] = {}
        self.dead: set[int] = set()
        self._made: dict[int, Checkpointer] = {}
        self._lock = threading.Lock()
        self._large_messages = 0

    def run(self) -> None:
        """Until every rank has ended; then nothing of this life runs any more."""
        self.told = {rank: RankLife() for rank in range(self.group.size)}
        previous = threading.excepthook
        threading.excepthook = lambda args: None if args.exc_type is Killed else previous(args)
        faults.arm(self._at_point)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LocalComm, "isend", self._flipping(LocalComm.isend))
                results = run_ranks(self.group, self._rank, nodes=self.script.nodes, timeout_s=3 * DEADLINE_S)
        finally:
            faults.arm(None)
            threading.excepthook = previous
        self.errors = {rank: error for rank, error in enumerate(results) if isinstance(error, BaseException)}

    def _at_point(self, name: str, rank: int, step: int) -> None:
        if rank < 0:
            return
        with self._lock:
            passed = self._passed[rank, name] = self._passed.get((rank, name), 0) + 1
        if Death(rank, name, passed) in self.script.deaths:
            self.dead.add(rank)
            self.group.kill(rank)
            self._free_training(rank)
        if rank in self.dead:
            raise Killed(f"rank {rank} dies at {name}, step {step}")

    def _flipping(self, isend: Callable[..., Any]) -> Callable[..., Any]:
        """`isend` over a wire that changes a byte of some messages."""

        def send(comm: LocalComm, buffer: Any, dest: int, tag: int) -> Any:
            data = bytes(buffer)
            if len(data) > LARGE:
                with self._lock:
                    number, self._large_messages = self._large_messages, self._large_messages + 1
                if number in self.script.flipped:
                    data = data[:LARGE] + bytes([data[LARGE] ^ 1]) + data[LARGE + 1 :]
            return isend(comm, data, dest, tag)

        return send

    def _free_training(self, rank: int) -> None:
        """A process dies with all its threads; a thread of ours that waits for the dead one has to be told."""
        checkpointer = self._made.get(rank)
        if checkpointer is not None and checkpointer._saving is not None:
            checkpointer._saving.engine.failure = PeerLost(f"rank {rank} is the one that died", rank=rank)

    def _rank(self, comm: LocalComm) -> None:
        training, told = Training(), self.told[comm.rank]
        try:
            self._train(comm, training, told)
        except (PeerLost, Killed):
            pass
        finally:
            self._end(comm.rank)

    def _train(self, comm: LocalComm, training: Training, told: RankLife) -> None:
        checkpointer = self._made[comm.rank] = Checkpointer(
            training.states,
            name=RUN,
            comm=comm,
            redundancy=Mirror(1),
            deadline=DEADLINE_S,
            every=1,
            on_busy="wait" if self.script.patient else "skip",
            quiet=True,
        )
        report = checkpointer.restore()
        told.returned = (report.step, training.digest())
        if self.script.patient and report.step and not self.script.flipped:
            checkpointer.wait()
            stats = checkpointer.stats()
            assert stats.protected or stats.errors, "nothing hindered it from protecting the base again"
        for step in range(report.step + 1, report.step + self.script.steps + 1):
            training.train(self.number * 10_000 + step * 10 + comm.rank)
            told.begun[step] = training.digest()
            checkpointer.step(step)
            if self.script.waits:
                checkpointer.wait()
            self._hear(checkpointer, told)
            faults.point("training.heard", comm.rank, step)
        checkpointer.wait()
        self._hear(checkpointer, told)

    def _hear(self, checkpointer: Checkpointer, told: RankLife) -> None:
        stats = checkpointer.stats()
        damaged = [e for e in stats.errors if "differs from its seal" in e]  # found before it was counted on
        assert self.script.flipped or stats.errors == damaged, stats.errors
        self.failed.update(stats.errors)
        if stats.protected:
            told.committed = max(told.committed, stats.committed_step)

    def _end(self, rank: int) -> None:
        """What the end of a process does: threads stop, its lock is gone, memory stays."""
        checkpointer = self._made.pop(rank, None)
        if checkpointer is None:
            return
        if rank in self.dead:
            checkpointer.interrupt = lambda error: None  # type: ignore[method-assign]
        try:
            checkpointer.abandon()
        except Killed:
            checkpointer._parts.lock.release()  # the stand-in of a dead process may not talk, so not tidy up either


def nodes_of(base: Path) -> list[Path]:
    """Memory of each node that has any."""
    return [path for path in base.glob("memckpt-*/*") if path.is_dir()]


def wipe(base: Path, nodes: Sequence[str]) -> None:
    """The memory of these nodes is gone."""
    for path in nodes_of(base):
        if path.name in nodes:
            shutil.rmtree(path)


def damage(base: Path, number: int, where: int) -> Path | None:
    """Turn one byte of one snapshot over, the newest ones first; None where there is none."""
    seals = {path: json.loads(path.read_text()) for path in base.glob("memckpt-*/*/*/*.seal.json")}
    newest = sorted(seals, key=lambda path: (-seals[path]["step"], seals[path]["shard"], path.parts[-3]))
    if not newest:
        return None
    seal = newest[number % len(newest)]
    path = seal.with_name(seal.name.replace(".seal.json", ".safetensors"))
    with path.open("r+b") as file:
        file.seek(where % path.stat().st_size)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))
    return path


def describe(life: Life) -> dict[str, Any]:
    """For the message of a failed test."""
    told = {r: (t.returned, sorted(t.begun), t.committed) for r, t in life.told.items()}
    return {"number": life.number, "script": life.script, "told": told, "errors": life.errors}
