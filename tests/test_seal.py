"""A seal is whole and says the truth, or it is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt import _native
from memckpt.errors import CorruptSnapshot, ProtocolError
from memckpt.format import seal
from memckpt.format.layout import Layout
from memckpt.format.seal import Base, Generation, Seal, agree, decode, encode
from memckpt.state.state import State
from tests.test_layout import GOLDEN

GENERATION = Generation(3, "0123456789abcdef")


def make(**changes: Any) -> Seal:
    fields: dict[str, Any] = {
        "run": "golden", "job": "17", "shard": 0, "world": 2, "generation": GENERATION,
        "base": Base(Generation(2, "fedcba9876543210"), 1100), "step": 1200, "layout": "f" * 32,
        "nbytes": 4168, "chunk_nbytes": 4 << 20, "crcs": [7], "created": 1700000000.5,
    }  # fmt: skip
    return Seal(**fields | changes)


def with_crc(text: bytes) -> bytes:
    return text[:-1] + b',"crc":%d}' % _native.crc32c(text)


def test_round_trip() -> None:
    for made in [make(), make(base=None, job=""), make(nbytes=0, crcs=[]), make(run='",crc":1}'), make(run="é\ud7ff")]:
        found = decode(encode(made))
        assert msgspec.structs.replace(found, crc=0) == made
        assert encode(found) == encode(made)


def test_golden_bytes() -> None:
    data = encode(make(layout=LAYOUT, crcs=[CRC]))
    assert data == (
        b'{"format":1,"run":"golden","job":"17","shard":0,"world":2,"generation":{"counter":3,"id":"0123456789abcdef"},'
        b'"base":{"generation":{"counter":2,"id":"fedcba9876543210"},"step":1100},"step":1200,'
        b'"layout":"'
        + LAYOUT.encode()
        + b'","nbytes":4168,"chunk_nbytes":4194304,"crcs":[%d],' % CRC
        + b'"created":1700000000.5,"crc":2672780242}'
    )
    assert data == (GOLDEN / "small.seal.json").read_bytes()


LAYOUT = "2e274bdc9cdf7fb6e1eb9ec856cc47fd"
CRC = 2993862485


def test_generations_are_ordered_by_counter_then_id() -> None:
    a, b, c = Generation(1, "f" * 16), Generation(2, "0" * 16), Generation(2, "1" * 16)
    assert sorted([c, a, b]) == [a, b, c]
    assert max(a, b, c) is c


def test_every_single_byte_counts() -> None:
    data = encode(make())
    for at in range(len(data)):
        with pytest.raises((CorruptSnapshot, ProtocolError)):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptSnapshot):
            decode(data[:at])


WRONG: list[dict[str, Any]] = [
    {"shard": 2}, {"shard": -1}, {"world": 0}, {"step": -1}, {"nbytes": -1}, {"chunk_nbytes": 0}, {"crcs": []},
    {"crcs": [1, 2]}, {"crcs": [-1]}, {"crcs": [1 << 32]}, {"nbytes": (4 << 20) + 1}, {"step": 1 << 63},
    {"generation": Generation(-1, "0" * 16)}, {"generation": Generation(1, "0" * 15)},
    {"generation": Generation(1, "X" * 16)}, {"base": Base(GENERATION, -1)},
    {"base": Base(Generation(0, ""), 1)},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_fields_out_of_bounds(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptSnapshot):
        decode(encode(make(**changes)))


def test_other_versions_and_members() -> None:
    text = msgspec.json.encode(make()).replace(b',"crc":0', b"")
    decode(with_crc(text))
    with pytest.raises(ProtocolError, match="format 2"):
        decode(with_crc(text.replace(b'"format":1', b'"format":2,"new":true')))
    with pytest.raises(CorruptSnapshot):
        decode(with_crc(text.replace(b'"format":1', b'"format":1,"new":true')))
    with pytest.raises(CorruptSnapshot):
        decode(with_crc(text.replace(b'"step":1200,', b"")))
    with pytest.raises(CorruptSnapshot):
        decode(with_crc(b"[" * 5000 + b"]" * 5000))
    with pytest.raises(CorruptSnapshot, match="longer"):
        decode(bytes(seal.MAX_NBYTES + 1))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=100))
def test_random_bytes(data: bytes) -> None:
    for text in (data, with_crc(b"{" + data + b"}")):
        with pytest.raises((CorruptSnapshot, ProtocolError)):
            decode(text)


def test_agree() -> None:
    collected = State({"t": torch.zeros(3)}).collect()
    layout = Layout.build(collected, run="golden", shard=0, world=2)
    layout = Layout.parse(layout.header(collected.plain, 1200))
    good = make(layout=layout.hash, nbytes=layout.file_nbytes)
    agree(good, layout)
    for changes in [{"run": "x"}, {"shard": 1}, {"world": 3}, {"step": 1}, {"layout": "0"}, {"nbytes": 1}]:
        with pytest.raises(CorruptSnapshot, match="seal says"):
            agree(msgspec.structs.replace(good, **changes), layout)
