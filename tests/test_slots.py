"""The pool of slots of one rank, and the mappings that live longer than a pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memckpt.memory.arena import Arena
from memckpt.memory.slots import SlotPool

NBYTES = 3 * 4096


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setenv("MEMCKPT_SHM", str(tmp_path))
    opened = Arena.open("r")
    held = opened.lock(rank=0)
    yield opened
    opened.close_parked()
    held.release()


def mapped(path: str) -> int:
    """Mappings of a file in this process, removed or not."""
    return sum(path in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_parked_slot_keeps_its_mapping_for_who_opens_it_next(arena: Arena) -> None:
    slot = arena.create_slot(NBYTES)
    memoryview(slot.memory)[:4] = b"abcd"
    arena.park(slot)
    assert mapped(slot.path) == 1
    again = arena.open_slot(slot.name, writable=True)
    assert again is slot and again.mapped and bytes(memoryview(again.memory)[:4]) == b"abcd"
    arena.park(again)
    arena.close_parked()
    assert mapped(slot.path) == 0
    with arena.open_slot(slot.name, writable=True) as third:
        assert third is not slot and bytes(memoryview(third.memory)[:4]) == b"abcd"


def test_a_parked_slot_whose_file_was_replaced_is_not_the_one_of_that_name(arena: Arena) -> None:
    slot = arena.create_slot(NBYTES)
    memoryview(slot.memory)[:3] = b"old"
    arena.park(slot)
    os.rename(slot.path, slot.path + ".away")
    Path(slot.path).write_bytes(b"new".ljust(NBYTES, b"\0"))
    Path(slot.path).chmod(0o600)
    with arena.open_slot(slot.name, writable=True) as found:
        assert bytes(memoryview(found.memory)[:3]) == b"new"
    arena.park(arena.create_slot(NBYTES))
    arena.close_parked()


def test_removing_a_parked_slot_gives_its_memory_back(arena: Arena) -> None:
    slot = arena.create_slot(NBYTES)
    arena.park(slot)
    arena.remove_slot(slot.name)
    assert mapped(slot.path) == 0 and not Path(slot.path).exists()


def test_a_slot_opened_for_reading_is_closed_not_parked(arena: Arena) -> None:
    name = arena.create_slot(NBYTES).name
    reader = arena.open_slot(name, writable=False)
    arena.park(reader)
    with arena.open_slot(name, writable=True) as slot:
        assert slot is not reader and slot.memory.writable


def test_a_pool_hands_its_mappings_to_the_next_one(arena: Arena) -> None:
    first = SlotPool(arena, [0], threads=1)
    slots = [first.take(NBYTES), first.take(NBYTES)]
    first.holdings[0].committed, first.holdings[0].pending = slots
    first.close(park=True)
    second = SlotPool(arena, [0], threads=1)
    second.adopt([slot.name for slot in slots if slot is not None], [], None, None)
    assert [second.take(NBYTES), second.take(NBYTES)] == slots
    second.close()


def test_an_abandoned_slot_makes_room_for_a_new_one(arena: Arena) -> None:
    pool = SlotPool(arena, [0], threads=1)
    committed, pending = pool.take(NBYTES), pool.take(NBYTES)
    assert committed is not None and pending is not None
    pool.holdings[0].committed, pool.holdings[0].pending = committed, pending
    assert pool.take(NBYTES) is None
    pool.abandon(pending)
    assert not Path(pending.path).exists() and Path(committed.path).exists()
    new = pool.take(NBYTES)
    assert new is not None and new.name != pending.name
    new.close()
    pool.close()


def test_a_leased_slot_is_kept_while_newer_ones_are_committed(arena: Arena) -> None:
    pool = SlotPool(arena, [0], threads=1, leases=1)

    def save() -> Path:
        slot = pool.take(NBYTES)
        assert slot is not None
        pool.holdings[0].pending = slot
        pool.commit()
        return Path(slot.path)

    save()
    leased = pool.lease(0)
    assert leased is not None and pool.lease(0) is None
    memoryview(leased.memory)[:2] = b"ok"
    later = [save() for _ in range(4)]
    assert Path(leased.path) not in later and len({*later}) == 2, "the others take turns"
    assert bytes(memoryview(leased.memory)[:2]) == b"ok"
    pool.release(leased)
    assert Path(leased.path) in [save() for _ in range(3)]
    assert pool.nbytes() == 3 * NBYTES
    pool.close()


def test_a_lease_of_the_newest_ends_without_freeing_it(arena: Arena) -> None:
    pool = SlotPool(arena, [0], threads=1, leases=1)
    pool.holdings[0].pending = pool.take(NBYTES)
    pool.commit()
    leased = pool.lease(0)
    assert leased is not None
    pool.release(leased)
    assert pool.holdings[0].committed is leased
    assert {pool.take(NBYTES), pool.take(NBYTES)} & {leased} == set()
    pool.close()
