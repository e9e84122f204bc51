"""What lies in storage, for a restore: listed like one more node, and fetched like a peer's snapshot."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from memckpt import _native
from memckpt.errors import CorruptSnapshot, DeadlineExceeded, ForeignMemory, MemckptError, ProtocolError
from memckpt.format.seal import Base, Seal
from memckpt.memory.slotfile import MAX_HEADER_NBYTES, Slot
from memckpt.recovery.fetch import Offer, Steps, check_head, chunks_of
from memckpt.recovery.inventory import CHUNK_NBYTES, STORAGE, Item, Listing, Sealed
from memckpt.storage import checkpoints, reading
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored
from memckpt.storage.marker import data_name

_VISIBLE_S = 30.0
_LOOK_S = 0.2


def list_storage(storage: Storage, run: str) -> Listing:
    """Describe every checkpoint of a run, complete or not, in the form of a node's slots. Local.

    Raises
    ------
    OSError, MemckptError
        The storage cannot be read.
    """
    items: list[Item] = []
    crashes: list[tuple[Base, str]] = []
    for stored in checkpoints.scan(storage, run):
        if stored.stray:
            continue
        if not stored.complete or stored.marker is None:
            items.append(Item(stored.path, stored.nbytes, reason=stored.reason, damaged=stored.damaged))
            continue
        marker = stored.marker
        crashes += [(Base(marker.generation, marker.step), generation) for generation in stored.crashes]
        for shard in marker.shards:
            sealed = Sealed(shard.shard, marker.world, marker.generation, marker.base, marker.step, shard.layout)
            items.append(Item(_place(stored.path, shard.shard), shard.nbytes, sealed))
    return Listing(STORAGE, tuple(items), crashes=tuple(crashes))


def _place(path: str, shard: int) -> str:
    return f"{path}#{shard}"


def open_stored(storage: Storage, place: str) -> tuple[Offer, Stored | None]:
    """Read seal and header of one shard, and check them. Local.

    A network file system may show a rank for a while what was there before: what is not to be seen yet is looked for
    again, for half a minute.

    Parameters
    ----------
    place : str
        As in the listing.
    """
    path, _, shard = place.rpartition("#")
    end = time.monotonic() + _VISIBLE_S
    while True:
        stored = checkpoints.examine(storage, path)
        if (stored is not None and stored.complete) or time.monotonic() > end:
            break
        time.sleep(_LOOK_S)
    if stored is None or not stored.complete:
        why = f"not to be seen on this node within {_VISIBLE_S:g} s"
        return Offer(reason=why if stored is None else stored.reason), None
    try:
        seal = reading.read_seal(storage, stored, int(shard))
        if seal.chunk_nbytes != CHUNK_NBYTES:
            raise CorruptSnapshot(f"checksums of chunks of {seal.chunk_nbytes} bytes")
        file = f"{path}/{data_name(int(shard))}"
        size = bytearray(8)
        storage.get(file, 0, memoryview(size))
        nbytes = 8 + int.from_bytes(size, "little")
        if not 8 < nbytes <= min(seal.nbytes, MAX_HEADER_NBYTES):
            raise CorruptSnapshot(f"its header says that it is {nbytes} bytes long, in a file of {seal.nbytes}")
        head = memoryview(bytearray(min(chunks_of(nbytes) * _native.CHUNK_BYTES, seal.nbytes)))
        if storage.get(file, 0, head) != len(head):
            raise CorruptSnapshot("the file ends before its header does")
        check_head(head, seal)
    except (OSError, CorruptSnapshot, ForeignMemory, ProtocolError) as error:
        return Offer(reason=error.message if isinstance(error, MemckptError) else str(error)), None
    return Offer(seal, head), stored


def load_stored(storage: Storage, place: str, deadline_s: float) -> tuple[Seal, memoryview]:
    """Read one shard into memory of its own, every chunk verified. Local.

    Raises
    ------
    OSError, CorruptSnapshot, ProtocolError
        It cannot be read, or is not what its seal says.
    DeadlineExceeded
        It takes longer than `deadline_s` seconds.
    """
    offer, stored = open_stored(storage, place)
    if offer.seal is None or stored is None:
        raise CorruptSnapshot(offer.reason)
    memory = memoryview(bytearray(offer.seal.nbytes))
    with ThreadPoolExecutor(1, thread_name_prefix="memckpt-fetch") as worker:
        job = worker.submit(reading.read_shard, storage, stored, offer.seal.shard, memory)
        try:
            return job.result(deadline_s), memory
        except TimeoutError:
            raise DeadlineExceeded(
                f"{stored.path} could not be read within {deadline_s:g} s", step=stored.step
            ) from None


def read_stored(
    storage: Storage,
    stored: Stored,
    rank: int,
    slot: Slot,
    worker: ThreadPoolExecutor,
    *,
    deadline_s: float,
) -> Steps[str]:
    """Bring one shard into an unsealed slot of the right size, every chunk verified as it lands.

    Returns
    -------
    str
        What is wrong; empty when it matches its seal.

    Raises
    ------
    DeadlineExceeded
        It takes longer than `deadline_s` seconds.
    """
    reading_it = worker.submit(reading.read_shard, storage, stored, rank, slot.memory)
    end = time.monotonic() + deadline_s
    while not reading_it.done():
        if time.monotonic() > end:
            raise DeadlineExceeded(f"{stored.path} could not be read within {deadline_s:g} s", step=stored.step)
        look_again = time.monotonic() + 1.0
        yield lambda until=look_again: reading_it.done() or time.monotonic() > until  # type: ignore[misc]
    try:
        reading_it.result()
    except (OSError, CorruptSnapshot) as error:
        return error.message if isinstance(error, MemckptError) else str(error)
    return ""


def for_job(offer: Offer, job: str) -> Offer:
    """The same with the seal of this job: storage outlives jobs, while memory of another job is foreign."""
    assert offer.seal is not None
    return Offer(msgspec.structs.replace(offer.seal, job=job), offer.head, offer.slot)
