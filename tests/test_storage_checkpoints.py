"""Checkpoints in a storage: written whole or not at all, found by looking, removed marker first."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memckpt import _native, storage
from memckpt.errors import CorruptSnapshot, SaveFailed, UsageError
from memckpt.format.seal import Base, Generation, Seal, encode
from memckpt.storage import marker as markers
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import Stored, scan, shards_there, write_marker, write_shard
from memckpt.storage.marker import Marker, ShardRecord, directory_name, versions
from memckpt.storage.reading import Bad, read_seal, read_shard, verify

FIRST, SECOND = Generation(1, "a" * 16), Generation(2, "b" * 16)
CHUNK = 1000
NBYTES = 2500


def content(shard: int, step: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(f"{shard} {step}").randbytes(nbytes)


def seal_of(data: bytes, shard: int, step: int, *, chunk_nbytes: int = CHUNK, **changes: Any) -> Seal:
    crcs = [_native.crc32c(data[at : at + chunk_nbytes]) for at in range(0, len(data), chunk_nbytes)]
    fields: dict[str, Any] = {
        "run": "gpt", "job": "7", "shard": shard, "world": 2, "generation": FIRST, "base": None, "step": step,
        "layout": f"{shard:032x}", "nbytes": len(data), "chunk_nbytes": chunk_nbytes, "crcs": crcs, "created": 17.5,
    }  # fmt: skip
    return Seal(**fields | changes)


def marker_of(records: list[ShardRecord], step: int, generation: Generation = FIRST, **changes: Any) -> Marker:
    fields: dict[str, Any] = {
        "run": "gpt", "job": "7", "world": len(records), "generation": generation, "step": step,
        "created": 1000.0 + step, "shards": tuple(records), "versions": versions(),
    }  # fmt: skip
    return Marker(**fields | changes)


def write(to: Storage, step: int, generation: Generation = FIRST, world: int = 2, nbytes: int = NBYTES) -> Marker:
    """What a save leaves that got as far as its shards."""
    records = []
    for shard in range(world):
        data = content(shard, step, nbytes)
        seal = seal_of(data, shard, step, generation=generation, world=world)
        records.append(write_shard(to, "gpt", seal, data))
    return marker_of(records, step, generation)


def save(to: Storage, step: int, generation: Generation = FIRST, **more: Any) -> Marker:
    marker = write(to, step, generation, **more)
    write_marker(to, "gpt", marker)
    return marker


def only(to: Storage, run: str | None = "gpt") -> Stored:
    (found,) = scan(to, run)
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Storage:
    return storage.open(tmp_path)


def at(root: Path, step: int = 5, generation: Generation = FIRST) -> Path:
    return root / "gpt" / directory_name(step, generation.id)


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


# -- writing and reading -----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_its_files_byte_for_byte(disk: Storage, tmp_path: Path) -> None:
    marker = save(disk, 1200)
    directory = tmp_path / "gpt" / ("step-000001200-" + "a" * 16)
    names = ["rank-00000.safetensors", "rank-00000.seal.json", "rank-00001.safetensors", "rank-00001.seal.json"]
    assert sorted(p.name for p in directory.iterdir()) == ["checkpoint.json", *names]
    for shard in (0, 1):
        data = content(shard, 1200)
        assert (directory / f"rank-0000{shard}.safetensors").read_bytes() == data
        assert (directory / f"rank-0000{shard}.seal.json").read_bytes() == encode(seal_of(data, shard, 1200))
    found = only(disk)
    assert (found.complete, found.reason, found.step, found.generation) == (True, "", 1200, FIRST)
    assert found.created == 2200.0
    assert found.nbytes == sum(p.stat().st_size for p in directory.iterdir())
    assert msgspec.structs.replace(found.marker or marker, crc=0) == marker
    assert verify(disk, found) == []


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("piece_nbytes", [1, 300, CHUNK, 2300, 1 << 20])
def test_every_size_comes_back_whatever_the_pieces(disk: Storage, nbytes: int, piece_nbytes: int) -> None:
    data = content(0, 5, nbytes)
    record = write_shard(disk, "gpt", seal_of(data, 0, 5, world=1), data, piece_nbytes=piece_nbytes)
    write_marker(disk, "gpt", marker_of([record], 5))
    memory = bytearray(b"\xee" * (nbytes + 9))
    seal = read_shard(disk, only(disk), 0, memory, threads=3)
    assert memory == data + b"\xee" * 9
    assert msgspec.structs.replace(seal, crc=0) == seal_of(data, 0, 5, world=1)


def test_a_slot_is_written_and_filled_where_it_lies(disk: Storage, tmp_path: Path) -> None:
    nbytes, step = 9 << 20, 5
    slot = _native.SharedMemory.create(str(tmp_path / "slot"), nbytes + 4096)
    data = content(0, step, nbytes)
    memoryview(slot)[:nbytes] = data
    paced: list[int] = []
    seal = seal_of(data, 0, step, chunk_nbytes=4 << 20, world=1)
    record = write_shard(disk, "gpt", seal, slot, pace=paced.append)
    write_marker(disk, "gpt", marker_of([record], step))
    assert paced == [8 << 20, 1 << 20]
    memoryview(slot)[:nbytes] = bytes(nbytes)
    read_shard(disk, only(disk), 0, slot)
    assert bytes(memoryview(slot)[:nbytes]) == data
    slot.close()  # BufferError if anything still held on to it


class GaveUp(Exception):
    pass


def test_giving_up_leaves_nothing_and_lets_go_of_the_memory(disk: Storage, tmp_path: Path) -> None:
    slot = _native.SharedMemory.create(str(tmp_path / "slot"), NBYTES)
    memoryview(slot)[:] = content(0, 5)
    calls = 0

    def pace(nbytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise GaveUp

    with pytest.raises(GaveUp) as caught:
        write_shard(disk, "gpt", seal_of(content(0, 5), 0, 5), slot, pace=pace, piece_nbytes=600)
    slot.close()
    assert caught.traceback  # the frames are still held here
    assert disk.entries("gpt", 2) == [("gpt/" + at(tmp_path).name + "/", 0)]


def test_damaged_memory_is_not_written(disk: Storage) -> None:
    data = content(0, 5)
    seal = seal_of(data, 0, 5)
    for where, chunk in [(0, 0), (1999, 1), (NBYTES - 1, 2)]:
        bad = bytearray(data)
        bad[where] ^= 1
        with pytest.raises(CorruptSnapshot, match=f"chunk {chunk} ") as caught:
            write_shard(disk, "gpt", seal, bad, piece_nbytes=700)
        assert (caught.value.rank, caught.value.step) == (0, 5)
    assert [path for path, _ in disk.entries() if not path.endswith("/")] == []


def test_what_is_complete_is_never_written_again(disk: Storage, tmp_path: Path) -> None:
    marker = save(disk, 5)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in at(tmp_path).iterdir()}
    other = content(1, 6)
    with pytest.raises(FileExistsError) as caught:
        write_shard(disk, "gpt", seal_of(other, 1, 5), other)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(FileExistsError):
        write_marker(disk, "gpt", msgspec.structs.replace(marker, created=9.0))
    assert before == {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in at(tmp_path).iterdir()}
    save(disk, 5, SECOND)  # another history has another name
    assert [s.generation for s in scan(disk, "gpt")] == [FIRST, SECOND]


def test_a_shard_without_marker_may_be_written_again(disk: Storage) -> None:
    write(disk, 5)
    save(disk, 5)
    assert verify(disk, only(disk)) == []


def test_wrong_arguments_change_nothing(disk: Storage) -> None:
    data = content(0, 5)
    with pytest.raises(UsageError, match="2499 are there"):
        write_shard(disk, "gpt", seal_of(data, 0, 5), data[:-1])
    with pytest.raises(UsageError, match="run"):
        write_shard(disk, "other", seal_of(data, 0, 5), data)
    for name in ("", ".hidden", "a/b", "a\\b", "x" * 101, "a\n"):
        with pytest.raises(UsageError):
            write_shard(disk, name, seal_of(data, 0, 5, run=name), data)
    assert disk.entries() == []


def test_shards_are_seen_as_they_come(disk: Storage, tmp_path: Path) -> None:
    seals = [seal_of(content(shard, 5), shard, 5) for shard in (0, 1)]
    assert shards_there(disk, seals[0]) == {}
    second = write_shard(disk, "gpt", seals[1], content(1, 5))
    assert shards_there(disk, seals[0]) == {1: second}
    assert shards_there(disk, seal_of(content(0, 5), 0, 5, generation=SECOND)) == {}
    for other in (seal_of(content(0, 5), 0, 5, job="8"), seal_of(content(0, 5), 0, 5, base=Base(SECOND, 1))):
        assert shards_there(disk, other) == {}, "a seal of another checkpoint under that name"
    first = write_shard(disk, "gpt", seals[0], content(0, 5))
    known = shards_there(disk, seals[1])
    assert known == {0: first, 1: second}
    for damaged in ("rank-00001.seal.json", "rank-00000.safetensors"):
        os.truncate(at(tmp_path) / damaged, 100)
    assert shards_there(disk, seals[1]) == {}
    assert shards_there(disk, seals[1], known={0: first}) == {0: first}, "not looked at again"


def test_no_marker_before_every_file_is_there(disk: Storage, tmp_path: Path) -> None:
    marker = write(disk, 5)
    for name, what in [("rank-00001.safetensors", "missing"), ("rank-00000.seal.json", "missing")]:
        aside = at(tmp_path) / name
        aside.rename(tmp_path / "aside")
        with pytest.raises(SaveFailed, match=f"{name} is {what}"):
            write_marker(disk, "gpt", marker)
        (tmp_path / "aside").rename(aside)
    os.truncate(at(tmp_path) / "rank-00001.safetensors", NBYTES - 1)
    with pytest.raises(SaveFailed, match="2499 bytes instead of 2500"):
        write_marker(disk, "gpt", marker)
    assert not only(disk).complete


def test_read_shard_refuses_every_flipped_bit_it_meets(disk: Storage, tmp_path: Path) -> None:
    save(disk, 5)
    found = only(disk)
    data = at(tmp_path) / "rank-00001.safetensors"
    for where, chunk in [(0, 0), (1000, 1), (NBYTES - 1, 2)]:
        flip(data, where)
        with pytest.raises(CorruptSnapshot, match=f"chunk {chunk} differs") as caught:
            read_shard(disk, found, 1, bytearray(NBYTES))
        assert (caught.value.rank, caught.value.step) == (1, 5)
        assert verify(disk, found) == [
            Bad(1, f"{found.path}/rank-00001.safetensors", chunk, "differs from its checksum")
        ]
        flip(data, where)
    os.truncate(data, 1500)
    with pytest.raises(CorruptSnapshot, match="chunk 1 is cut off"):
        read_shard(disk, found, 1, bytearray(NBYTES))
    assert [(b.chunk, b.reason[:10]) for b in verify(disk, found)] == [(1, "is cut off"), (2, "is cut off")]
    data.unlink()
    with pytest.raises(FileNotFoundError):
        read_shard(disk, found, 1, bytearray(NBYTES))
    (bad,) = verify(disk, found)
    assert (bad.shard, bad.chunk) == (1, None)
    assert "rank-00001.safetensors" in bad.reason
    memory = bytearray(NBYTES)
    read_shard(disk, found, 0, memory)
    assert memory == content(0, 5)


def test_a_seal_of_another_checkpoint_is_refused(disk: Storage, tmp_path: Path) -> None:
    marker = save(disk, 5)
    found = only(disk)
    path = at(tmp_path) / "rank-00000.seal.json"
    good = path.read_bytes()
    flip(path, 20)
    with pytest.raises(CorruptSnapshot, match="not the one"):
        read_seal(disk, found, 0)
    assert [(b.shard, b.path.rpartition("/")[2], b.chunk) for b in verify(disk, found)] == [
        (0, "rank-00000.seal.json", None)
    ]
    data = content(0, 5)
    for wrong in (
        seal_of(data, 0, 6), seal_of(data, 1, 5), seal_of(data, 0, 5, generation=SECOND), seal_of(data, 0, 5, job=""),
        seal_of(data, 0, 5, base=Base(SECOND, 3)), seal_of(data, 0, 5, layout="0" * 31 + "f"), seal_of(data[1:], 0, 5),
    ):  # fmt: skip
        path.write_bytes(encode(wrong))  # such a marker is wrong, but checksums alone would not say so
        record = markers.record(wrong, encode(wrong))
        record = msgspec.structs.replace(marker.shards[0], seal_nbytes=record.seal_nbytes, seal_crc=record.seal_crc)
        lies = Stored(*list(vars(found).values())[:6], msgspec.structs.replace(marker, shards=(record,), world=2), 0)
        with pytest.raises(CorruptSnapshot, match="seal and marker"):
            read_seal(disk, lies, 0)
    path.write_bytes(good)
    assert read_seal(disk, found, 0).step == 5


def test_read_shard_wants_a_shard_and_room(disk: Storage) -> None:
    save(disk, 5)
    found = only(disk)
    for memory in (bytes(NBYTES), bytearray(NBYTES - 1)):
        with pytest.raises(UsageError, match="writable bytes"):
            read_shard(disk, found, 0, memory)
    with pytest.raises(UsageError, match="shard 2"):
        read_shard(disk, found, 2, bytearray(NBYTES))
