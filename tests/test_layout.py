"""Every dtype and shape lies in a snapshot byte for byte; the safetensors library opens it in place (C02, C11, C40)."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from memckpt import _native
from memckpt.errors import CorruptSnapshot, LayoutMismatch, MemckptError, ProtocolError, StateError
from memckpt.format import seal
from memckpt.format.dtypes import BY_NAME, ITEMSIZE, LOGICAL, NAMES, SAFETENSORS, ST_ITEMSIZE
from memckpt.format.header import PAGE, Entry, View, encode_static, encode_variable, structure_hash
from memckpt.format.layout import Layout
from memckpt.format.strided import memory_of, raw_of
from memckpt.state.leaves import Collected
from memckpt.state.restore import prepare
from memckpt.state.state import State
from tests.snapshots import bits, put, scramble, take

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

SHAPES = [(), (0,), (0, 3), (1,), (1, 1, 1), (2, 3, 1, 2, 3), (7,), (13, 3), (255,)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], rng: random.Random, *, misaligned: int = 0) -> torch.Tensor:
    """Random bits, `misaligned` elements into its storage."""
    count = int(np.prod(shape)) + misaligned
    memory = torch.frombuffer(bytearray(rng.randbytes(count * dtype.itemsize) or b"\0"), dtype=torch.uint8).clone()
    made = torch.empty((0,), dtype=dtype)
    stride = torch.empty(shape, device="meta").stride()
    return made.set_(memory.untyped_storage(), misaligned if count > misaligned else 0, shape, stride)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_dtype_and_shape(name: str, tmp_path: Path) -> None:
    dtype = BY_NAME[name]
    rng = random.Random(name)
    tensors = {f"{i}": tensor_of(dtype, shape, rng) for i, shape in enumerate(SHAPES)}
    tensors["misaligned"] = tensor_of(dtype, (5,), rng, misaligned=1)
    tensors["transposed"] = tensor_of(dtype, (3, 5), rng).t()
    tensors["permuted"] = tensor_of(dtype, (2, 3, 4), rng).permute(2, 0, 1)
    tensors["sliced"] = tensor_of(dtype, (6, 7), rng)[1:5:2, 1:6:3]
    tensors["expanded"] = tensor_of(dtype, (3, 1), rng).expand(3, 4)
    tensors["unfolded"] = tensor_of(dtype, (6,), rng).as_strided((3, 3), (1, 1))
    want = {k: bits(v) for k, v in tensors.items()}
    forms = {k: (v.dtype, v.shape, v.stride(), v.storage_offset()) for k, v in tensors.items()}
    state = State({"d": tensors})
    snapshot = take(state, tmp_path / "s")
    for tensor in tensors.values():
        scramble(tensor)
    put(state, snapshot)
    assert {k: bits(v) for k, v in tensors.items()} == want
    assert {k: (v.dtype, v.shape, v.stride(), v.storage_offset()) for k, v in tensors.items()} == forms
    made: dict[str, torch.Tensor] = {}
    put(State({"d": made}), snapshot)
    assert list(made) == list(tensors)
    assert {k: bits(v) for k, v in made.items()} == want
    assert {k: (v.dtype, v.shape) for k, v in made.items()} == {k: f[:2] for k, f in forms.items()}


def test_dtype_tables_agree_with_torch() -> None:
    assert {n: d.itemsize for n, d in BY_NAME.items()} == {n: ITEMSIZE[n] for n in BY_NAME}
    assert {st_: BY_NAME[n].itemsize for st_, n in LOGICAL.items()} == ST_ITEMSIZE


def test_all_bit_patterns_survive(tmp_path: Path) -> None:
    """C02: NaNs with payloads, signalling ones, -0.0 and subnormals are bytes like any others."""
    all16 = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    words = [0x7F800001, 0xFF800001, 0x7FC12345, 0x80000000, 0x00000001, 0x807FFFFF]
    tensors = {
        "bf16": all16.view(torch.bfloat16),
        "fp16": all16.view(torch.float16),
        "fp32": torch.from_numpy(np.array(words, np.uint32).view(np.int32)).view(torch.float32),
        "column": all16.view(torch.bfloat16).reshape(256, 256)[:, ::2],
    }
    want = {k: bits(v) for k, v in tensors.items()}
    snapshot = take(State({"d": tensors}), tmp_path / "s")
    target = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in tensors.items()}
    put(State({"d": target}), snapshot)
    assert {k: bits(v) for k, v in target.items()} == want


def test_safetensors_opens_it_in_place(tmp_path: Path) -> None:
    rng = random.Random(1)
    tensors = {n: tensor_of(BY_NAME[n], (3, 4), rng) for n in [*SAFETENSORS, "float4_e2m1fn_x2"]}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), 'name with / and " é': torch.ones(2)}
    snapshot = take(State({"d": tensors}), tmp_path / "s.safetensors", step=7)
    with safe_open(snapshot.path, "pt") as file:
        assert len(file.keys()) == len(tensors)
        assert file.metadata()["memckpt.step"] == "7"
        for (key, (_, _)), name in zip(sorted(snapshot.layout.names.items()), sorted(tensors), strict=False):
            found = file.get_tensor(key)
            assert (found.dtype, found.shape) == (tensors[name].dtype, tensors[name].shape)
            assert bits(found) == bits(tensors[name])
    with safe_open(snapshot.path, "np") as file:
        np.testing.assert_array_equal(file.get_tensor("d/float64").view(np.uint64), raw_of(tensors["float64"]))


def test_data_is_aligned_and_without_holes(tmp_path: Path) -> None:
    rng = random.Random(2)
    tensors = {f"{n}{i}": tensor_of(BY_NAME[n], (2 * i + 1,), rng) for n in sorted(BY_NAME) for i in range(2)}
    base = torch.arange(40, dtype=torch.uint8)
    tensors |= {"odd a": base[0:7], "odd b": base[3:12]}
    snapshot = take(State({"d": tensors}), tmp_path / "s")
    at = snapshot.layout.data_offset
    assert at % PAGE == 0
    for entry in snapshot.layout.entries:
        assert entry.offset == at
        at += entry.nbytes
        if not entry.views:
            assert entry.offset % ITEMSIZE[entry.dtype] == 0
    assert at == snapshot.layout.file_nbytes == snapshot.path.stat().st_size


def test_conjugate_and_negative_bits_are_recorded(tmp_path: Path) -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    tensors = {
        "conj": z.conj(),
        "imag": torch.randn(3, dtype=torch.complex64).conj().imag,
        "part": z.clone().conj()[:, ::2],
    }
    want = {k: (bits(v), v.is_conj(), v.is_neg(), v.resolve_neg().resolve_conj().clone()) for k, v in tensors.items()}
    snapshot = take(State({"d": tensors}), tmp_path / "s")
    made: dict[str, torch.Tensor] = {}
    put(State({"d": made}), snapshot)
    assert {k: (bits(v), v.is_conj(), v.is_neg()) for k, v in made.items()} == {k: w[:3] for k, w in want.items()}
    assert all(torch.equal(made[k], w[3]) for k, w in want.items())
    with pytest.raises(LayoutMismatch):
        put(State({"d": {k: v.resolve_conj().resolve_neg().clone() for k, v in tensors.items()}}), snapshot)


def test_flags_of_live_tensors_do_not_matter(tmp_path: Path) -> None:
    with torch.inference_mode():
        inference = torch.arange(4.0)
    leaf = torch.arange(3.0).requires_grad_()
    state = State({"i": inference, "l": leaf, "f": {"frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}})
    snapshot = take(state, tmp_path / "s")
    scramble(inference)
    scramble(leaf)
    put(state, snapshot)
    assert bits(inference) == bits(torch.arange(4.0))
    assert bits(leaf) == bits(torch.arange(3.0))
    assert leaf.requires_grad
    assert inference.is_inference()


def test_saved_channels_last_loads_into_contiguous_and_back(tmp_path: Path) -> None:
    source = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    snapshot = take(State({"x": source}), tmp_path / "a")
    [entry] = snapshot.layout.entries
    assert entry.stored_shape == (2, 4, 5, 3)
    plain = torch.zeros(2, 3, 4, 5)
    put(State({"x": plain}), snapshot)
    assert bits(plain) == bits(source)
    assert plain.is_contiguous()
    wide = torch.zeros(2, 3, 4, 10)[..., ::2]
    put(State({"x": wide}), snapshot)
    assert bits(wide) == bits(source)
    back = torch.zeros_like(source)
    put(State({"x": back}), take(State({"x": plain}), tmp_path / "b"))
    assert bits(back) == bits(source)
    assert back.is_contiguous(memory_format=torch.channels_last)


REFUSED: dict[str, Any] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "lazy": lambda: torch.nn.UninitializedParameter(),
    "zero": lambda: torch._efficientzerotensor((3,)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused_by_name(kind: str) -> None:
    state = State({"d": {"ok": torch.ones(1), "bad": [REFUSED[kind]()]}})
    with pytest.raises(StateError) as caught:
        state.collect()
    assert caught.value.path == "d.bad[0]"


def test_empty_states(tmp_path: Path) -> None:
    for i, objects in enumerate([{}, {"d": {}}, {"m": torch.nn.Module()}, {"t": torch.empty(0)}]):
        state = State(objects)
        snapshot = take(state, tmp_path / str(i))
        assert snapshot.layout.file_nbytes % PAGE == 0
        put(state, snapshot)
        with safe_open(snapshot.path, "pt") as file:
            assert len(list(file.keys())) == len(snapshot.layout.entries)


def test_tied_tensors_are_one_entry(tmp_path: Path) -> None:
    weight = torch.randn(50, 20)
    snapshot = take(State({"d": {"a": weight, "b": weight, "c": weight[:], "other": torch.ones(1)}}), tmp_path / "s")
    assert [e.aliases for e in snapshot.layout.entries] == [("d/b", "d/c"), ()]
    assert snapshot.layout.file_nbytes == snapshot.layout.data_offset + 4000 + 4
    tied = torch.zeros(50, 20)
    put(State({"d": {"a": tied, "b": tied, "c": tied, "other": torch.zeros(1)}}), snapshot)
    assert bits(tied) == bits(weight)
    untied = {k: torch.zeros(50, 20) for k in "abc"} | {"other": torch.zeros(1)}
    put(State({"d": untied}), snapshot)
    assert all(bits(untied[k]) == bits(weight) for k in "abc")
    made: dict[str, torch.Tensor] = {}
    put(State({"d": made}), snapshot)
    made["a"][0, 0] = 77
    assert made["b"][0, 0] == made["c"][0, 0] == 77


def test_overlapping_views_are_one_span(tmp_path: Path) -> None:
    base = torch.randn(100)
    live = {"a": base[:60], "b": base[40:], "c": base[10:30:2], "d": base[:60].view(6, 10)}
    snapshot = take(State({"v": live}), tmp_path / "s")
    [entry] = snapshot.layout.entries
    assert entry.nbytes == 400
    assert [v.key for v in entry.views] == ["v/a", "v/b", "v/c", "v/d"]
    want = {k: bits(v) for k, v in live.items()}
    base.zero_()
    put(State({"v": live}), snapshot)
    assert {k: bits(v) for k, v in live.items()} == want
    apart = {k: torch.zeros_like(v) for k, v in live.items()}
    put(State({"v": apart}), snapshot)
    assert {k: bits(v) for k, v in apart.items()} == want
    made: dict[str, torch.Tensor] = {}
    put(State({"v": made}), snapshot)
    assert {k: bits(v) for k, v in made.items()} == want
    made["a"][50] = 5.0
    assert made["b"][10] == made["d"][5, 0] == 5.0


def test_memory_shared_otherwise_is_a_mismatch(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    apart = take(State({"v": {"a": torch.zeros(6), "b": torch.ones(6)}}), tmp_path / "a")
    live = {"a": base[:6], "b": base[4:]}
    with pytest.raises(LayoutMismatch, match="sharing memory"):
        prepare(State({"v": live}), Layout.parse(apart.memory))
    tied = {"a": base[:6], "b": base[:6]}
    with pytest.raises(LayoutMismatch, match="sharing memory"):
        prepare(State({"v": tied}), Layout.parse(apart.memory))
    overlapping = take(State({"v": live}), tmp_path / "b")
    with pytest.raises(LayoutMismatch, match="another way"):
        prepare(State({"v": {"a": base[:6], "b": base[3:9]}}), Layout.parse(overlapping.memory))
    assert bits(base) == bits(torch.arange(10.0))
    full = take(State({"x": torch.arange(6.0).reshape(2, 3)}), tmp_path / "c")
    with pytest.raises(LayoutMismatch, match="expanded"):
        prepare(State({"x": torch.zeros(3).expand(2, 3)}), Layout.parse(full.memory))


def test_interleaved_views_stay_apart(tmp_path: Path) -> None:
    base = torch.randn(8, 30)
    live = {"q": base[:, :10], "k": base[:, 10:20], "v": base[:, 20:]}
    snapshot = take(State({"m": live}), tmp_path / "s")
    assert sorted(e.nbytes for e in snapshot.layout.entries) == [320, 320, 320]
    want = bits(base)
    base.zero_()
    put(State({"m": live}), snapshot)
    assert bits(base) == want


def test_expanded_is_stored_once(tmp_path: Path) -> None:
    live = torch.randn(4, 1).expand(4, 1000)
    snapshot = take(State({"x": live}), tmp_path / "s")
    assert snapshot.layout.entries[0].nbytes == 16
    want = bits(live)
    made: dict[str, torch.Tensor] = {}
    full = torch.zeros(4, 1000)
    put(State({"x": full}), snapshot)
    assert bits(full) == want
    assert not made


def test_staged_views_follow_their_source(tmp_path: Path) -> None:
    base = torch.zeros(6, 6)
    state = State({"x": base[:, ::2]})
    collected = state.collect()
    layout = Layout.build(collected, run="r", shard=0, world=1)
    pieces = layout.pieces(collected)
    assert not pieces.lazy.any()
    base.fill_(3)
    pieces.refresh()
    file = np.zeros(layout.file_nbytes, np.uint8)
    memory = _native.SharedMemory.create(str(tmp_path / "f"), layout.file_nbytes)
    assert _native.gather(pieces.sources, pieces.nbytes, pieces.offsets, memory, layout.file_nbytes).wait(10)
    file[:] = np.frombuffer(memory, np.uint8)
    assert (file[layout.data_offset :].view(np.float32) == 3).all()


def test_pieces_see_moved_tensors() -> None:
    tensor = torch.zeros(4, 6)
    state = State({"x": tensor})
    collected = state.collect()
    pieces = Layout.build(collected, run="r", shard=0, world=1).pieces(collected)

    def changed() -> int:
        return _native.first_change(pieces.address_methods, pieces.size_methods, pieces.addresses, pieces.sizes)

    assert changed() == -1
    assert not pieces.reshaped()
    tensor.data = tensor.data.view(6, 4)
    assert changed() == -1
    assert pieces.reshaped()
    tensor.data = torch.zeros(4, 6)
    assert changed() == 0
    other = State({"x": torch.zeros(4, 6)}).collect()
    with pytest.raises(StateError, match="build it again"):
        Layout.build(collected, run="r", shard=0, world=1).pieces(other)


def test_hash_is_of_the_structure_alone() -> None:
    def layout(objects: dict[str, Any], **kw: Any) -> Layout:
        return Layout.build(State(objects).collect(), **({"run": "r", "shard": 0, "world": 2} | kw))

    one = layout({"d": {"a": torch.zeros(2, 3), "n": 1}})
    assert one.hash == layout({"d": {"a": torch.ones(2, 3), "n": 2}}, run="q", shard=1).hash
    assert one.hash == layout({"d": {"a": torch.ones(2, 3), "n": "a longer value" * 1000}}).hash
    for other in [
        {"d": {"b": torch.zeros(2, 3)}},
        {"d": {"a": torch.zeros(3, 2)}},
        {"d": {"a": torch.zeros(3, 2).t()}},
        {"d": {"a": torch.zeros(2, 3, dtype=torch.int32)}},
        {"d": {"a": torch.zeros(2, 3), "b": torch.zeros(0)}},
    ]:
        assert one.hash != layout(other).hash
    tied = torch.zeros(2)
    assert layout({"d": [tied, tied]}).hash != layout({"d": [tied, torch.zeros(2)]}).hash


def test_plain_values_grow_within_their_room() -> None:
    objects: dict[str, Any] = {"d": {"t": torch.zeros(3), "text": "x" * 1000}}
    state = State(objects)
    collected = state.collect()
    layout = Layout.build(collected, run="r", shard=0, world=1)
    first = layout.header(collected.plain, 1)
    objects["d"]["text"] += "y" * 200
    plain = state.collect().plain
    assert layout.fits(plain)
    second = layout.header(plain, 2**62)
    assert len(first) == len(second) == layout.data_offset
    offset, tail = layout.header_tail(plain, 2**62)
    assert second == first[:offset] + tail
    assert Layout.parse(second).step == 2**62
    assert Layout.parse(second).plain == plain
    objects["d"]["text"] += "z" * 9000
    plain = state.collect().plain
    assert not layout.fits(plain)
    with pytest.raises(StateError, match="room"):
        layout.header(plain, 3)
    larger = Layout.build(state.collect(), run="r", shard=0, world=1)
    assert larger.hash == layout.hash
    assert larger.data_offset > layout.data_offset
    roomy = Layout.build(state.collect(), run="r", shard=0, world=1, plain_nbytes=100_000)
    assert roomy.fits(b"x" * 99_000)


def test_header_longer_than_the_library_reads() -> None:
    state = State({"d": {"text": "x" * 101_000_000}})
    with pytest.raises(StateError, match="100000000"):
        Layout.build(state.collect(), run="r", shard=0, world=1)


def test_sizes_beyond_32_bits() -> None:
    """C38's part here: offsets and sizes are 64-bit. Numbers only, no memory."""
    memory = memory_of(4096, (1 << 33, 5), (5, 1), 2)
    assert (memory.nbytes, memory.dense) == ((1 << 33) * 10, True)
    huge = torch.empty(0, dtype=torch.uint8)
    entries = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}' % (2**32 + 5, 2**32 + 5)
    entries += b',"b":{"dtype":"U8","shape":[3],"data_offsets":[%d,%d]}' % (2**32 + 5, 2**32 + 8)
    layout = Layout.parse(_with_entries(entries, {"a": 2**32 + 5, "b": 3}))
    assert layout.entries[1].offset == layout.data_offset + 2**32 + 5
    assert layout.file_nbytes == layout.data_offset + 2**32 + 8
    assert huge.numel() == 0


def _with_entries(entries: bytes, sizes: dict[str, int]) -> bytes:

    made = tuple(Entry(k, "uint8", "U8", (n,), (1,), (n,), n) for k, n in sizes.items())
    meta = {"format": 1, "run": "r", "shard": 0, "world": 1, "layout": structure_hash(made, {})}
    metadata = {"memckpt": json.dumps(meta), "memckpt.step": "1", "memckpt.plain": "{}"}
    text = entries + b',"__metadata__":' + json.dumps(metadata).encode() + b"}"
    return struct.pack("<Q", PAGE - 8) + text.ljust(PAGE - 8)


def _small() -> tuple[Layout, bytes]:
    base = torch.arange(8.0)
    objects = {
        "d": {
            "a": torch.zeros(2, 3).t(),
            "b": torch.ones(3, dtype=torch.complex128),
            "v": base[:5],
            "w": base[3:],
            "n": [1],
        },
        "t": base.clone(),
    }
    collected = State(objects).collect()
    layout = Layout.build(collected, run="r", shard=1, world=4)
    return layout, layout.header(collected.plain, 5)


def test_parse_gives_what_was_built() -> None:
    layout, header = _small()
    parsed = Layout.parse(header, file_nbytes=layout.file_nbytes)
    assert parsed.entries == layout.entries
    for name in ("run", "shard", "world", "hash", "data_offset", "file_nbytes", "classes", "plain"):
        assert getattr(parsed, name) == getattr(layout, name)
    assert parsed.check(layout) == []


def test_check_lists_every_difference() -> None:
    def layout(value: dict[str, Any]) -> Layout:
        return Layout.build(State({"d": value}).collect(), run="r", shard=0, world=1)

    saved = layout({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(4, 4)})
    wanted = layout({"a": torch.zeros(2, dtype=torch.bfloat16), "x": torch.zeros(1), "c": torch.zeros(2, 8)})
    assert [tuple(row) for row in saved.check(wanted)] == [
        ("d/a", "float32[2]", "bfloat16[2]"),
        ("d/b", "float32[2]", "-"),
        ("d/c", "float32[4, 4]", "float32[2, 8]"),
        ("d/x", "-", "float32[1]"),
    ]


def test_truncated_and_foreign_files() -> None:
    layout, header = _small()
    for broken in [b"", header[:7], header[:100], header[:-1], b"\0" * 4096, struct.pack("<Q", 1 << 40) + header[8:]]:
        with pytest.raises(CorruptSnapshot):
            Layout.parse(broken)
    with pytest.raises(CorruptSnapshot, match="the file has"):
        Layout.parse(header, file_nbytes=layout.file_nbytes - 1)
    foreign = b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"__metadata__":{"format":"pt"}}'
    with pytest.raises(CorruptSnapshot, match="not one of memckpt"):
        Layout.parse(struct.pack("<Q", PAGE - 8) + foreign.ljust(PAGE - 8))
    with pytest.raises(ProtocolError, match="format 2"):
        Layout.parse(header.replace(b'{\\"format\\":1', b'{\\"format\\":2'))


_LAYOUT, _HEADER = _small()


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(_HEADER.rstrip()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_headers(changes: list[tuple[int, int]]) -> None:
    """Whatever bytes change, parsing gives our errors, or a layout whose every entry lies within the file."""
    data = bytearray(_HEADER)
    for at, value in changes:
        data[at] = value
    try:
        layout = Layout.parse(data)
    except (CorruptSnapshot, ProtocolError):
        return
    assert layout.hash == _LAYOUT.hash
    assert layout.file_nbytes == _LAYOUT.file_nbytes
    try:
        prepare(State({"t": torch.zeros(8)}), layout)
    except MemckptError:
        pass


json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=4)
    | st.sampled_from(["U8", "F32", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=300)
@given(json_value, json_value, json_value)
def test_hostile_json(entry: Any, meta: Any, note: Any) -> None:
    inner = {"format": 1, "run": "r", "shard": 0, "world": 1, "layout": "0" * 32, "classes": {}, "entries": {"a": note}}
    metadata = {"memckpt": json.dumps(meta if meta else inner), "memckpt.step": "1", "memckpt.plain": "{}"}
    text = json.dumps({"a": entry, "__metadata__": metadata}).encode()
    with pytest.raises((CorruptSnapshot, ProtocolError)):
        Layout.parse(struct.pack("<Q", PAGE - 8) + text.ljust(PAGE - 8)[: PAGE - 8])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        Layout.parse(data)


def test_offsets_out_of_order_holes_and_names_twice() -> None:
    for entries, sizes in [
        (b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}', {"a": 3}),
        (b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}', {"a": 3}),
        (b'{"a":{"dtype":"U8","shape":[-3],"data_offsets":[0,3]}', {"a": 3}),
        (b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[3,0]}', {"a": 3}),
        (b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}',
         {"a": 3, "b": 3}),
        (b'{"a":{"dtype":"F99","shape":[3],"data_offsets":[0,3]}', {"a": 3}),
    ]:  # fmt: skip
        with pytest.raises(CorruptSnapshot):
            Layout.parse(_with_entries(entries, sizes))


GOLDEN = Path(__file__).parent / "golden"


def golden_objects() -> dict[str, Any]:
    base = torch.arange(4, dtype=torch.int16)
    return {
        "weights": {"w": torch.tensor([[1.0, -0.0], [float("inf"), 0.5]]), "tied": base, "also": base},
        "matrix": torch.arange(6, dtype=torch.float64).reshape(2, 3).t(),
        "progress": {"epoch": 3, "rate": 0.1, (1, 2): "é"},
    }


def test_golden_bytes() -> None:
    """The bytes of one small snapshot, literally: a change here is a change of the format."""
    objects = golden_objects()
    collected = State(objects).collect()
    layout = Layout.build(collected, run="golden", shard=0, world=2)
    pieces = layout.pieces(collected)
    file = bytearray(layout.header(collected.plain, 1200))
    for e in layout.entries:
        file += bits(objects["matrix"].t()) if e.key == "matrix" else bits(objects["weights"][e.key.partition("/")[2]])
    assert [int(n) for n in pieces.offsets] == [e.offset for e in layout.entries]
    assert bytes(file) == (GOLDEN / "small.safetensors").read_bytes()
    assert file[: 8 + len(HEADER)] == struct.pack("<Q", 4088) + HEADER
    assert set(file[8 + len(HEADER) : 4096]) == {0x20}
    assert file[4096:].hex() == DATA


HEADER = b"".join([
    b'{"matrix":{"dtype":"F64","shape":[2,3],"data_offsets":[0,48]},',
    b'"weights/w":{"dtype":"F32","shape":[2,2],"data_offsets":[48,64]},',
    b'"weights/tied":{"dtype":"I16","shape":[4],"data_offsets":[64,72]},',
    b'"__metadata__":{"format":"pt","memckpt":"{\\"format\\":1,\\"run\\":\\"golden\\",\\"shard\\":0,\\"world\\":2,',
    b'\\"layout\\":\\"2e274bdc9cdf7fb6e1eb9ec856cc47fd\\",\\"classes\\":{},\\"entries\\":{',
    b'\\"matrix\\":{\\"shape\\":[3,2],\\"stride\\":[1,3]},\\"weights/tied\\":{\\"aliases\\":[\\"weights/also\\"]}}}",',
    b'"memckpt.step":"1200","memckpt.plain":"{\\"version\\":1,\\"objects\\":{',
    b'\\"weights\\":{\\"kind\\":\\"container\\",\\"data\\":{\\"tensors\\":\\"dict\\",\\"order\\":null}},',
    b'\\"matrix\\":{\\"kind\\":\\"tensor\\",\\"data\\":null},',
    b'\\"progress\\":{\\"kind\\":\\"container\\",\\"data\\":{\\"tree\\":{\\"dict\\":[[\\"epoch\\",3],[\\"rate\\",0.1],',
    b'[{\\"tuple\\":[1,2]},\\"\xc3\xa9\\"]]}}}}}"}}',
])  # fmt: skip
DATA = (
    "0000000000000000000000000000f03f0000000000000040000000000000084000000000000010400000000000001440"
    "0000803f000000800000807f0000003f"
    "0000010002000300"
)


def test_golden_snapshot_can_still_be_read() -> None:
    data = (GOLDEN / "small.safetensors").read_bytes()
    layout = Layout.parse(data, file_nbytes=len(data))
    said = seal.decode((GOLDEN / "small.seal.json").read_bytes())
    seal.agree(said, layout)
    assert said.crcs == [_native.crc32c(data)]
    objects = golden_objects()
    want = {k: bits(v) for k, v in [*objects["weights"].items(), ("matrix", objects["matrix"])]}
    for tensor in [*objects["weights"].values(), objects["matrix"]]:
        scramble(tensor)
    objects["progress"].clear()
    state = State(objects)
    targets = prepare(state, layout)
    for address, nbytes, offset in zip(targets.targets, targets.nbytes, targets.offsets, strict=False):
        import ctypes

        ctypes.memmove(int(address), data[int(offset) : int(offset + nbytes)], int(nbytes))
    targets.apply()
    assert {k: bits(v) for k, v in [*objects["weights"].items(), ("matrix", objects["matrix"])]} == want
    assert objects["progress"] == {"epoch": 3, "rate": 0.1, (1, 2): "é"}


def test_places_of_chunks() -> None:
    from memckpt.state.leaves import Place

    collected = Collected([torch.zeros(2, 3)], ["w"], [None], b"{}", {0: Place((4, 3), (2, 0))})
    layout = Layout.build(collected, run="r", shard=0, world=2)
    parsed = Layout.parse(layout.header(b"{}", 1))
    assert (parsed.entries[0].global_shape, parsed.entries[0].offsets) == ((4, 3), (2, 0))
    assert parsed.describe("w") == "float32[2, 3] at [2, 0] of [4, 3]"
    outside = Collected([torch.zeros(2, 3)], ["w"], [None], b"{}", {0: Place((4, 3), (3, 0))})
    with pytest.raises(CorruptSnapshot, match="outside"):
        Layout.parse(Layout.build(outside, run="r", shard=0, world=2).header(b"{}", 1))


def test_names_of_all_dtypes_are_known() -> None:
    assert set(NAMES.values()) == set(BY_NAME)
    assert msgspec.json.decode(msgspec.json.encode(sorted(BY_NAME))) == sorted(BY_NAME)


def test_no_view_of_the_file_stays(tmp_path: Path) -> None:
    snapshot = take(State({"t": torch.zeros(3)}), tmp_path / "s")
    Layout.parse(snapshot.memory)
    with pytest.raises(CorruptSnapshot) as caught:  # the traceback keeps frames alive
        Layout.parse(snapshot.memory, file_nbytes=1)
    snapshot.memory.close()
    assert caught.value.__traceback__ is not None


def test_a_reader_made_from_the_document_alone() -> None:
    """What ``docs/format.md`` says is enough: no code of ours, only JSON, struct and a hash."""
    import hashlib

    data = (GOLDEN / "small.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert (8 + length) % 4096 == 0
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    meta = json.loads(metadata["memckpt"])
    logical = {"F64": "float64", "F32": "float32", "I16": "int16"}

    def rows(shape: list[int]) -> list[int]:
        return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]

    entries = []
    for key, info in header.items():
        note = meta["entries"].get(key, {})
        shape = note.get("shape", info["shape"])
        begin, end = info["data_offsets"]
        entries.append([
            key, note.get("dtype", logical[info["dtype"]]), info["dtype"], shape, note.get("stride", rows(shape)),
            info["shape"], end - begin, 0, note.get("global_shape"), note.get("offsets"), note.get("aliases", []),
            note.get("views", []), note.get("conj", False), note.get("neg", False),
        ])  # fmt: skip
    text = json.dumps([entries, sorted(meta["classes"].items())], separators=(",", ":")).encode()
    assert hashlib.blake2b(text, digest_size=16).hexdigest() == meta["layout"]
    plain = json.loads(metadata["memckpt.plain"])
    assert plain["objects"]["progress"]["data"]["tree"] == {
        "dict": [["epoch", 3], ["rate", 0.1], [{"tuple": [1, 2]}, "é"]]
    }
    sealed = (GOLDEN / "small.seal.json").read_bytes()
    body, _, crc = sealed.rpartition(b',"crc":')
    assert int(crc[:-1]) == _native.crc32c(body + b"}")
    assert json.loads(sealed)["nbytes"] == len(data)


BAD_ENTRIES: dict[str, Any] = {
    "view behind the span": Entry(
        "~span/a", "uint8", "U8", (8,), (1,), (8,), 8, views=(View("a", "float32", (2,), (1,), 4),)),
    "view before the span": Entry(
        "~span/a", "uint8", "U8", (8,), (1,), (8,), 8, views=(View("a", "uint8", (2,), (1,), -1),)),
    "strides out of the entry": Entry("a", "float32", "F32", (2, 2), (9, 1), (2, 2), 16),
    "dtype of another size": Entry("a", "float64", "F32", (2, 2), (2, 1), (2, 2), 16),
    "unknown dtype": Entry("a", "float99", "F32", (2, 2), (2, 1), (2, 2), 16),
    "shape of another size": Entry("a", "float32", "F32", (2, 3), (3, 1), (2, 2), 16),
    "negative stride": Entry("a", "float32", "F32", (2, 2), (-2, 1), (2, 2), 16),
    "alias of itself": Entry("a", "float32", "F32", (2,), (1,), (2,), 8, aliases=("a",)),
    "span with an alias": Entry(
        "a", "uint8", "U8", (2,), (1,), (2,), 2, views=(View("v", "uint8", (2,), (1,)),), aliases=("b",)),
    "half a chunk": Entry("a", "float32", "F32", (2,), (1,), (2,), 8, global_shape=(4,)),
    "65 dimensions": Entry("a", "uint8", "U8", (1,) * 65, (1,) * 65, (1,) * 65, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(BAD_ENTRIES))
def test_entries_that_lie_although_their_hash_is_right(kind: str) -> None:
    entries = (BAD_ENTRIES[kind],)
    static = encode_static(entries, {}, structure_hash(entries, {}), "r", 0, 1)
    text = static + encode_variable(b"{}", 1)
    with pytest.raises(CorruptSnapshot):
        Layout.parse(struct.pack("<Q", PAGE - 8) + text.ljust(PAGE - 8))
