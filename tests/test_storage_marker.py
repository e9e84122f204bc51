"""A marker is whole and says the truth, or there is no checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from memckpt import _native
from memckpt.errors import CorruptSnapshot, ProtocolError, UsageError
from memckpt.format.seal import Base, encode
from memckpt.storage import marker as markers
from memckpt.storage.marker import ShardRecord, decode, versions
from tests.test_storage_checkpoints import FIRST, NBYTES, SECOND, content, marker_of, seal_of


def test_marker_round_trip_and_golden_bytes() -> None:
    record = ShardRecord(shard=0, nbytes=10, layout="f" * 32, seal_nbytes=20, seal_crc=7)
    marker = marker_of(
        [record], 1200, SECOND, base=Base(FIRST, 1100), versions={"memckpt": "0.1.0"}, metrics={"loss": 2.5}
    )
    data = markers.encode(marker)
    assert data == (
        b'{"format":1,"run":"gpt","job":"7","world":1,"generation":{"counter":2,"id":"bbbbbbbbbbbbbbbb"},'
        b'"base":{"generation":{"counter":1,"id":"aaaaaaaaaaaaaaaa"},"step":1100},"step":1200,"created":2200.0,'
        b'"shards":[{"shard":0,"nbytes":10,"layout":"ffffffffffffffffffffffffffffffff","seal_nbytes":20,"seal_crc":7}],'
        b'"versions":{"memckpt":"0.1.0"},"metrics":{"loss":2.5},"crc":390993717}'
    )
    assert msgspec.structs.replace(decode(data), crc=0) == marker
    assert {*versions()} == {"memckpt", "torch", "python"}


def test_metrics_that_are_no_numbers_do_not_spoil_a_checkpoint() -> None:
    data = content(0, 5)
    seal = seal_of(data, 0, 5, world=1, generation=SECOND, base=Base(FIRST, 3))
    said = {"loss": float("nan"), "gain": float("inf"), "x": 1.0}
    made = markers.make(seal, [markers.record(seal, encode(seal))], metrics=said)
    assert decode(markers.encode(made)).metrics == {"x": 1.0}
    assert markers.checkpoint_of(made) == markers.checkpoint_of(seal)
    assert (made.created, made.shards[0].nbytes) == (17.5, NBYTES)
    assert markers.make(seal, made.shards).metrics is None
    with pytest.raises(UsageError, match="not finite"):
        markers.encode(msgspec.structs.replace(made, metrics=said))


def with_crc(text: bytes) -> bytes:
    return text[:-1] + b',"crc":%d}' % _native.crc32c(text)


def test_every_flipped_bit_and_every_cut_of_a_marker_is_seen() -> None:
    record = ShardRecord(shard=0, nbytes=10, layout="f" * 32, seal_nbytes=20, seal_crc=7)
    data = markers.encode(marker_of([record], 5, versions={}))
    for i in range(len(data)):
        with pytest.raises((CorruptSnapshot, ProtocolError)):
            decode(data[:i])
        for bit in range(8):
            with pytest.raises((CorruptSnapshot, ProtocolError)):
                decode(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])


def test_a_marker_with_a_right_checksum_can_still_lie() -> None:
    record = ShardRecord(shard=0, nbytes=10, layout="f" * 32, seal_nbytes=20, seal_crc=7)
    body = markers.encode(marker_of([record], 5, versions={}))
    text = body[: body.rindex(b',"crc":')] + b"}"
    assert decode(with_crc(text)).step == 5
    for old, new in [
        (b'"format":1', b'"format":2'), (b'"step":5', b'"step":-5'), (b'"world":1', b'"world":2'),
        (b'"shard":0', b'"shard":1'), (b"a" * 16, b"A" * 16), (b'"nbytes":10', b'"nbytes":9223372036854775808'),
        (b'"step":5', b'"step":"5"'), (b'"step":5', b'"step":5,"more":1'), (b'"run":"gpt"', b'"run":"\xff"'),
    ]:  # fmt: skip
        assert old in text
        with pytest.raises((CorruptSnapshot, ProtocolError)):
            decode(with_crc(text.replace(old, new, 1)))
    with pytest.raises(CorruptSnapshot, match="longer"):
        decode(b" " * (markers.MAX_NBYTES + 1))
    for bad in (marker_of([], 5), marker_of([record], -1), marker_of([record], 5, world=2)):
        with pytest.raises(UsageError):
            markers.encode(bad)
