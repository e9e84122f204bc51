"""Nodes with memory in a directory, for tests of a recovery: what saves leave, and ways to lose it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memckpt import _native
from memckpt.comm.local import LocalGroup
from memckpt.format.layout import Layout
from memckpt.format.seal import Base, Generation, Seal
from memckpt.memory.arena import Arena
from memckpt.recovery import recover
from memckpt.recovery.inventory import Place
from memckpt.recovery.placement import place
from memckpt.recovery.recover import Recovery
from memckpt.recovery.session import Session
from memckpt.state.state import State
from tests.ranks import run_ranks

CHUNK = _native.CHUNK_BYTES
BIG = 2 * CHUNK + 12_345
FIRST = Generation(counter=1, id="a" * 16)
SECOND = Generation(counter=2, id="b" * 16)


class Model(torch.nn.Module):
    """Two parameters and a buffer, one of them larger than two chunks if wanted."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(nbytes // 4))
        self.b = torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@dataclass
class Rank:
    """The live state of one rank."""

    model: Model
    progress: dict[str, Any] = field(default_factory=lambda: {"epoch": 0})

    @property
    def state(self) -> State:
        return State({"model": self.model, "progress": self.progress})

    def set(self, rank: int, step: int) -> None:
        generator = np.random.default_rng([rank, step])
        for tensor in self.model.state_dict().values():
            flat = tensor.reshape(-1).view(torch.uint8).numpy()
            flat[:] = np.frombuffer(generator.bytes(flat.size), dtype=np.uint8)
        self.progress["epoch"] = step

    def bytes(self) -> bytes:
        tensors = self.model.state_dict().values()
        return b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors) + bytes(
            [self.progress["epoch"]]
        )


class Cluster:
    """Nodes with memory, in a directory, and runs over them."""

    def __init__(self, path: Path, world: int, *, nbytes: int = 400, copies: int = 1) -> None:
        self.path, self.world, self.nbytes, self.copies = path, world, nbytes, copies
        self.nodes = [f"n{r}" for r in range(world)]
        self.locks: list[Any] = []
        self.slots: dict[tuple[str, int, int], str] = {}

    def rank(self) -> Rank:
        return Rank(Model(self.nbytes))

    def arena(self, node: str) -> Arena:
        return Arena.open("run", node=node, base=str(self.path), job="")

    def want(self, rank: int, step: int) -> bytes:
        live = self.rank()
        live.set(rank, step)
        return live.bytes()

    def write(self, node: str, rank: int, step: int, generation: Generation = FIRST, base: Base | None = None) -> str:
        """Put a sealed snapshot into a node's memory."""
        live, arena = self.rank(), self.arena(node)
        live.set(rank, step)
        lock = arena.lock(rank=900)
        try:
            collected = live.state.collect()
            layout = Layout.build(collected, run="run", shard=rank, world=self.world)
            slot = arena.create_slot(layout.file_nbytes)
            with memoryview(slot.memory) as view:
                view[: layout.data_offset] = layout.header(collected.plain, step)
            pieces = layout.pieces(collected)
            pieces.refresh()
            job = _native.gather(pieces.sources, pieces.nbytes, pieces.offsets, slot.memory, layout.file_nbytes)
            assert job.wait(10)
            slot.seal(
                Seal(
                    run="run", shard=rank, world=self.world, generation=generation, base=base, step=step,
                    layout=layout.hash, nbytes=layout.file_nbytes, chunk_nbytes=CHUNK, crcs=job.crcs().tolist(),
                    created=float(step),
                )
            )  # fmt: skip
            slot.close()
        finally:
            lock.release()
        self.slots[node, rank, step] = slot.name
        return slot.name

    def save(self, step: int, generation: Generation = FIRST, base: Base | None = None) -> None:
        """What a committed save leaves."""
        holders = place(self.nodes, self.copies)
        for r in range(self.world):
            for node in {self.nodes[r], *(self.nodes[h] for h in holders[r])}:
                self.write(node, r, step, generation, base)

    def flip(self, node: str, rank: int, step: int, at: int = -1) -> None:
        """Change one byte of a sealed snapshot."""
        path = self.file(node, self.slots[node, rank, step])
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    def file(self, node: str, slot: str) -> Path:
        return next(self.path.glob(f"memckpt-*/{node}/run/{slot}.safetensors"))

    def lose(self, node: str, rank: int, step: int) -> None:
        path = self.file(node, self.slots[node, rank, step])
        path.unlink()
        Path(str(path).replace(".safetensors", ".seal.json")).unlink()

    def wipe(self, node: str) -> None:
        for path in self.path.glob(f"memckpt-*/{node}/run/s-*"):
            path.unlink()

    def sealed(self) -> dict[str, tuple[str, bytes]]:
        """Every seal there is, and the bytes it stands for."""
        found = {}
        for seal in sorted(self.path.glob("memckpt-*/*/run/*.seal.json")):
            data = Path(str(seal).replace(".seal.json", ".safetensors"))
            found[str(data)] = (seal.read_text(), data.read_bytes())
        return found

    def whole(self, data: Path) -> bool:
        """Whether a sealed slot's bytes match its seal."""
        found = self.arena(data.parent.parent.name).find(data.name.removesuffix(".safetensors"))
        if found is None or found.seal is None:
            return False
        content = data.read_bytes()
        return [_native.crc32c(content[i : i + CHUNK]) for i in range(0, len(content), CHUNK)] == found.seal.crcs

    def there(self, node: str, slot: str) -> bool:
        """Whether a good copy is left in this slot."""
        try:
            return self.whole(self.file(node, slot))
        except StopIteration:
            return False

    def session(self, comm: Any, nodes: list[str], deadline_s: float = 10.0) -> Session:
        places = tuple(Place(node) for node in nodes)
        return Session(
            comm, self.arena(nodes[comm.rank]), "run", comm.rank, comm.size, places, self.copies, deadline_s, 1
        )

    def restore(
        self,
        nodes: list[str] | None = None,
        *,
        live: list[Rank] | None = None,
        group: LocalGroup | None = None,
        deadline_s: float = 10.0,
        by_rank: dict[int, dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> tuple[list[Any], list[Rank]]:
        """Run `recover` on every rank at once: what it returned or raised, and the live states."""
        nodes = self.nodes if nodes is None else nodes
        states = live or [self.rank() for _ in nodes]

        def work(comm: Any) -> Recovery:
            session = self.session(comm, nodes, deadline_s)
            lock = session.arena.lock(rank=comm.rank)
            try:
                return recover.recover(
                    session, states[comm.rank].state, **{**arguments, **(by_rank or {}).get(comm.rank, {})}
                )
            finally:
                lock.release()

        return run_ranks(group or LocalGroup(len(nodes)), work, nodes=nodes), states

    def check(self, results: list[Any], states: list[Rank], step: int) -> None:
        """Every rank has the very bytes of `step`, agrees on everything, and has it sealed on its node."""
        for r, (result, live) in enumerate(zip(results, states, strict=True)):
            if isinstance(result, BaseException):
                raise result
            assert result.base.step == step
            assert live.bytes() == self.want(r, step), f"rank {r} has other bytes than those of step {step}"
            first = results[0]
            for same in ("base", "fallback", "generation", "holders", "rebuild", "sources", "nbytes", "rejected"):
                assert getattr(result, same) == getattr(first, same)
            assert result.own.name in {p.slot for p in result.pinned if p.shard == r and p.snapshot == result.base}
            assert not {p.slot for p in result.pinned} & set(result.free)
