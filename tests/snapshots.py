"""A snapshot of a `State` in a file, and back, by the native engine alone: for the tests of the plain layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from memckpt import _native
from memckpt.format.layout import Layout
from memckpt.format.strided import raw_of
from memckpt.state.restore import Targets, prepare
from memckpt.state.state import State


@dataclass
class Snapshot:
    path: Path
    memory: _native.SharedMemory
    layout: Layout
    crcs: np.ndarray

    def bytes(self) -> bytes:
        return self.path.read_bytes()


def take(state: State, path: Path, *, step: int = 1, run: str = "test", shard: int = 0, world: int = 1) -> Snapshot:
    collected = state.collect()
    layout = Layout.build(collected, run=run, shard=shard, world=world)
    pieces = layout.pieces(collected)
    assert _native.first_change(pieces.address_methods, pieces.size_methods, pieces.addresses, pieces.sizes) == -1
    pieces.refresh()
    memory = _native.SharedMemory.create(str(path), layout.file_nbytes)
    header = layout.header(collected.plain, step)
    memoryview(memory)[: len(header)] = header
    job = _native.gather(pieces.sources, pieces.nbytes, pieces.offsets, memory, layout.file_nbytes, keep=pieces)
    assert job.wait(20)
    return Snapshot(path, memory, layout, job.crcs())


def put(state: State, snapshot: Snapshot, *, strict: bool = True) -> Targets:
    stored = Layout.parse(snapshot.memory, file_nbytes=snapshot.layout.file_nbytes)
    targets = prepare(state, stored, strict=strict)
    job = _native.scatter(
        snapshot.memory,
        stored.file_nbytes,
        targets.targets,
        targets.nbytes,
        targets.offsets,
        crcs=snapshot.crcs,
        keep=targets,
    )
    assert job.wait(20)
    assert job.bad_chunks().size == 0
    targets.apply()
    return targets


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in logical order, as they are in memory."""
    return raw_of(tensor).tobytes()


def scramble(tensor: torch.Tensor) -> None:
    """Other bytes in every element of a tensor, without looking at numbers."""
    if tensor.numel():
        raw = raw_of(tensor)
        raw[...] = np.frombuffer(b"\xa5" * raw.itemsize, raw.dtype)[0]
