"""Plain objects come back with the same types, order and bits, or are refused with the path to them (C18, C41)."""

from __future__ import annotations

import argparse
import collections
import enum
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt.errors import CorruptSnapshot, StateError
from memckpt.state.tree import MAX_DEPTH, Decoder, Encoder, Where, escape, key_of, path_of, unescape

ROOT: Where = (None, "k", "state")


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


def through(value: Any, *, allow_pickle: bool = False, load_pickle: bool = False) -> Any:
    store: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor, where: Where) -> str:
        key = key_of(where)
        assert key not in store
        store[key] = tensor
        return key

    text = msgspec.json.encode(Encoder(put, allow_pickle=allow_pickle).encode(value, ROOT))
    return Decoder(store.__getitem__, allow_pickle=load_pickle).decode(msgspec.json.decode(text), ROOT)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    elif isinstance(a, complex):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert b.flags.f_contiguous or not a.flags.f_contiguous
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, torch.Tensor):
        assert a is b
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for (k, v), (m, w) in zip(a.items(), b.items(), strict=True):
            assert_same(k, m)
            assert_same(v, w)
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for v, w in zip(a, b, strict=True):
            assert_same(v, w)
    else:
        assert a == b


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**53 - 1, 2**53, -(2**53), 2**63, 2**64, -(2**4000),
    0.0, -0.0, 1.0, 1e16, 1e300, 5e-324, 0.1, math.inf, -math.inf, math.nan,
    struct.unpack("<d", struct.pack("<Q", 0xFFF4000000001234))[0],
    complex(-0.0, math.nan), "", "plain", "é\0\n\"\\/~", "\ud800 alone", b"", b"\0\xff", bytearray(b"x"),
    [], (), {}, set(), frozenset({1, "a"}), {3, 1, 2}, [[], [None]], (1, (2,)),
    {"a.b": 1, "a": {"b": 1}, "a/b": 2, "~": 3}, {1: "int", "1": "str", True + 1: "two", (1, "x"): [None]},
    {None: 0, 1.5: 1, b"k": 2, frozenset({1}): 3}, {"\ud800": 1},
    collections.OrderedDict([("z", 1), ("a", 2)]), collections.Counter("aabz"),
    collections.deque([1, 2], maxlen=3), collections.deque(), collections.defaultdict(list, {1: [2]}),
    Colour.GREEN, Access.READ | Access.WRITE, Access(0), Level.LOW, {Colour.RED: Level.LOW}, range(1, 9, 3),
    np.float32(1.5), np.float64(math.nan), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01", "ns"),
    np.str_("é"), np.arange(6, dtype=">i2").reshape(2, 3).T, np.zeros((0, 3)), np.array(3), np.array(["a", "bc"]),
    np.arange(5000.0), np.asfortranarray(np.arange(4000).reshape(40, 100)), np.arange(10000)[::2],
    torch.Size([1, 2]), torch.Size([]), torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:1"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:40].encode("ascii", "replace").decode())
def test_value_comes_back(value: Any) -> None:
    assert_same(value, through(value))
    assert_same({"nested": [value]}, through({"nested": [value]}))


def test_everything_at_once_with_tensors() -> None:
    state = dict(enumerate(VALUES)) | {"t": [torch.ones(2), {"a/b": torch.zeros(()), ("a", "b"): torch.ones(1)}]}
    assert_same(state, through(state))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(plain)
def test_any_plain_value_comes_back(value: Any) -> None:
    assert_same(value, through(value))


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters()))
def test_escape_is_reversible(text: str) -> None:
    assert unescape(escape(text)) == text
    assert "/" not in escape(text)
    escape(text).encode()


def test_keys_do_not_collide() -> None:
    places: list[Where] = [
        (ROOT, "k", "a.b"), ((ROOT, "k", "a"), "k", "b"), (ROOT, "k", "a/b"), (ROOT, "k", "a~1b"), (ROOT, "k", 1),
        (ROOT, "k", "1"), (ROOT, "k", "~i1"), (ROOT, "k", True), (ROOT, "k", 1.0), (ROOT, "k", (1,)), (ROOT, "k", None),
        (ROOT, "k", "~k[1]"), (ROOT, "t", "a"), (ROOT, "k", "a"), (ROOT, "k", "~ta"), (ROOT, "k", "\ud800"),
        (ROOT, "k", "~ud800"), (ROOT, "k", ""), ROOT,
    ]  # fmt: skip
    assert len({key_of(w) for w in places}) == len(places)


class Foreign:
    pass


@pytest.mark.parametrize(
    "value",
    [Foreign(), argparse.Namespace(a=1), len, Foreign, collections.UserDict(), np.array([Foreign()]),
     np.zeros(2, [("a", "i4")]), collections.defaultdict(lambda: 0), collections.namedtuple("P", "x")(1)],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_refused_with_the_path(value: Any) -> None:
    with pytest.raises(StateError) as caught:
        Encoder(lambda t, w: "").encode({"param_groups": [{"foo": value}]}, (None, "k", "optimizer"))
    assert caught.value.path == "optimizer.param_groups[0].foo"
    assert "optimizer.param_groups[0].foo" in str(caught.value)


def test_path_is_readable() -> None:
    assert path_of((((ROOT, "k", "a b"), "i", 3), "k", ("x", 1))) == "state['a b'][3][('x', 1)]"


def test_depth_and_cycles() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert_same(value, through(value))
    with pytest.raises(StateError, match="64"):
        through([value])
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(StateError, match="inside itself"):
        through(cycle)


def test_pickle_needs_both_sides() -> None:
    value = {"args": argparse.Namespace(lr=0.1)}
    assert through(value, allow_pickle=True, load_pickle=True) == value
    with pytest.raises(StateError, match="allow_pickle") as caught:
        through(value, allow_pickle=True)
    assert caught.value.path == "state"


def test_malicious_pickle_runs_nothing() -> None:
    ran = []

    class Bomb:
        def __reduce__(self) -> Any:
            return ran.append, (1,)

    import base64
    import pickle

    node = {"pickle": base64.b64encode(pickle.dumps(Foreign())).decode()}
    with pytest.raises(StateError):
        Decoder(lambda key: torch.empty(0)).decode({"map": {"a": node}})
    assert not ran


def test_enum_of_a_module_that_is_not_imported() -> None:
    node = {"enum": ["antigravity", "X", "Y"]}  # importing this module would open a browser
    with pytest.raises(StateError, match="not imported"):
        Decoder(lambda key: torch.empty(0)).decode(node)
    with pytest.raises(StateError):
        Decoder(lambda key: torch.empty(0)).decode({"enum": ["os", "system", "x"]})


def test_enum_that_cannot_be_found_again() -> None:
    class Local(enum.Enum):
        A = 1

    with pytest.raises(StateError, match="found again"):
        through(Local.A)


TAGS = ["int", "float", "str", "map", "dict", "tuple", "ordereddict", "counter", "defaultdict", "deque", "set",
        "frozenset", "bytes", "bytearray", "complex", "range", "array", "scalar", "enum", "flag", "size", "dtype",
        "device", "pickle", "tensor", "grad", "parameter", "nonsense"]  # fmt: skip
leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
leaf |= st.sampled_from(["<f4", "|V0", "<M8[ns]", "C", "F", "AAAA", "tests.test_tree", "Colour", "RED", "0x7", "list"])
node = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(TAGS), inner, min_size=1, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=15,
)


@settings(deadline=None, max_examples=400)
@given(node)
def test_hostile_nodes_give_nothing_but_our_errors(value: Any) -> None:
    try:
        Decoder(lambda key: torch.empty(4, dtype=torch.uint8)).decode(value)
    except (CorruptSnapshot, StateError):
        pass


def test_hostile_depth() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(CorruptSnapshot, match="nested"):
        Decoder(lambda key: torch.empty(0)).decode(value)
