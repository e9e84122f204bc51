"""What a rank has to send: its snapshot in the making, sealed when it may be, or the base of a restore."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memckpt import _native, faults
from memckpt.errors import MemckptError
from memckpt.format.seal import Base, Generation, Seal, encode
from memckpt.memory.slotfile import Slot
from memckpt.saving.capture import Snapshot


@dataclass(frozen=True)
class History:
    """What every seal of this generation repeats."""

    run: str
    job: str
    shard: int
    world: int
    generation: Generation
    base: Base | None


class FreshSource:
    """A snapshot in the making, as something to send; sealed by the engine once it is fenced."""

    def __init__(self, snapshot: Snapshot, history: History) -> None:
        self.snapshot = snapshot
        self._history = history
        self._seal: bytes | None = None
        self.reason = ""

    @property
    def nbytes(self) -> int:
        return self.snapshot.nbytes

    @property
    def watermark(self) -> int:
        return self.snapshot.watermark

    @property
    def memory(self) -> _native.SharedMemory:
        assert self.snapshot.slot is not None
        return self.snapshot.slot.memory

    def seal_bytes(self) -> bytes | None:
        return self._seal

    def start(self) -> None:
        """Begin the copy behind training."""
        if self.snapshot.job is not None:
            self.snapshot.job.start()

    def advance(self) -> bool:
        """Seal the snapshot when it may be; True if something moved."""
        snapshot = self.snapshot
        if self._seal is not None or not snapshot.fenced or (snapshot.job is not None and not snapshot.job.done()):
            return False
        if snapshot.torn is None and snapshot.slot is not None:
            try:
                faults.point("commit.seal", self._history.shard, snapshot.step)
                self._seal = self._make_seal(snapshot, snapshot.slot)
                faults.point("commit.sealed", self._history.shard, snapshot.step)
                return True
            except (OSError, MemckptError) as error:
                snapshot.torn = f"the seal could not be written: {error}"
        self.reason = snapshot.torn or "not captured"
        self._seal = b""
        return True

    def _make_seal(self, snapshot: Snapshot, slot: Slot) -> bytes:
        assert snapshot.job is not None
        assert snapshot.layout is not None
        h = self._history
        seal = Seal(
            run=h.run,
            job=h.job,
            shard=h.shard,
            world=h.world,
            generation=h.generation,
            base=h.base,
            step=snapshot.step,
            layout=snapshot.layout.hash,
            nbytes=snapshot.nbytes,
            chunk_nbytes=_native.CHUNK_BYTES,
            crcs=snapshot.job.crcs().tolist(),
            created=time.time(),
        )
        slot.seal(seal)
        return encode(seal)


class SealedSource:
    """The base after a restore, as something to send to holders that lack it."""

    def __init__(self, slot: Slot | None) -> None:
        self._slot = slot
        seal = slot.read_seal() if slot is not None else None
        self._seal = encode(seal) if seal is not None else b""
        self.nbytes = slot.nbytes if slot is not None else 0
        self.watermark = len(seal.crcs) if seal is not None else 0
        self.reason = "" if seal is not None else "the base has lost its seal"

    @property
    def memory(self) -> _native.SharedMemory:
        assert self._slot is not None
        return self._slot.memory

    def seal_bytes(self) -> bytes | None:
        return self._seal

    def start(self) -> None:
        """Nothing has to be copied."""

    def advance(self) -> bool:
        """Nothing is left to do: it is sealed already."""
        return False
