"""CRC-32C and the fused copy: golden values, and every CPU path against the scalar one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memckpt import _native

FEATURES: dict[str, Any] = _native.cpu_features()
PATHS: list[str] = FEATURES["paths"]
NOISE = np.random.default_rng(0).integers(0, 256, 1 << 17, dtype=np.uint8)


@pytest.fixture(autouse=True)
def _restore_path() -> Iterator[None]:
    yield
    _native.select_cpu_path(FEATURES["path"])


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> _native.SharedMemory:
    return _native.SharedMemory.create(str(tmp_path_factory.mktemp("crc") / "memory"), 1 << 18)


def bitwise_crc(data: bytes) -> int:
    """The definition, one bit at a time."""
    r = 0xFFFFFFFF
    for byte in data:
        r ^= byte
        for _ in range(8):
            r = r >> 1 ^ (0x82F63B78 if r & 1 else 0)
    return r ^ 0xFFFFFFFF


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, B.4, and the check value of the CRC catalogue
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_golden(path: str, data: bytes, expected: int) -> None:
    _native.select_cpu_path(path)
    assert _native.crc32c(data) == expected


def test_definition() -> None:
    data = NOISE[:2000].tobytes()
    assert _native.crc32c(data) == bitwise_crc(data)


@settings(deadline=None, max_examples=200)
@given(
    start=st.integers(0, 130),
    nbytes=st.one_of(st.integers(0, 1200), st.integers(0, 100_000)),
    shift=st.integers(0, 130),
    seed=st.integers(0, 2**32 - 1),
)
def test_paths_agree(memory: _native.SharedMemory, start: int, nbytes: int, shift: int, seed: int) -> None:
    source = NOISE[start : start + nbytes]
    _native.select_cpu_path("scalar")
    expected, plain = _native.crc32c(source, seed), _native.crc32c(source)
    target = np.frombuffer(memoryview(memory), np.uint8)
    for path in PATHS:
        _native.select_cpu_path(path)
        assert _native.crc32c(source, seed) == expected
        target[:] = 0xA5
        assert _native.copy_crc(memory, shift, source) == plain
        assert np.array_equal(target[shift : shift + nbytes], source)
        assert (target[:shift] == 0xA5).all()
        assert (target[shift + nbytes :] == 0xA5).all()


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_seed_continues(a: bytes, b: bytes) -> None:
    assert _native.crc32c(b, _native.crc32c(a)) == _native.crc32c(a + b)


def test_refusals(memory: _native.SharedMemory) -> None:
    with pytest.raises(ValueError):
        _native.crc32c(NOISE[::2])
    with pytest.raises(TypeError):
        _native.crc32c(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        _native.copy_crc(memory, memory.nbytes - 1, b"ab")
    with pytest.raises(ValueError):
        _native.copy_crc(memory, memory.nbytes + 1, b"")
    with pytest.raises(ValueError):
        _native.copy_crc(memory, 8, memoryview(memory)[:100])
    with pytest.raises(TypeError):
        _native.copy_crc(memory, -1, b"")
    with pytest.raises(TypeError):
        _native.copy_crc(None, 0, b"")  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        _native.select_cpu_path("abacus")


@pytest.mark.parametrize("path", PATHS)
def test_environment_forces_a_path(path: str) -> None:
    code = "from memckpt import _native; print(_native.cpu_features()['path'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MEMCKPT_CPU": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == path


def test_environment_with_nonsense_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import memckpt._native"],
        env={**os.environ, "MEMCKPT_CPU": "abacus"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no such CPU path: abacus" in done.stderr


def test_gil_is_released() -> None:
    """While one thread is inside one long native call, another runs Python code."""
    _native.select_cpu_path("scalar")
    data = np.zeros(64 << 20, np.uint8)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(10):  # a busy machine may not let the other thread run at once
            begin = time.perf_counter()
            _native.crc32c(data)
            end = time.perf_counter()
            # With the GIL held there could be one tick at either end, never five in between.
            if sum(begin < t < end for t in ticks) >= 5:
                return
    finally:
        stop.set()
        thread.join()
    pytest.fail("no other thread ran during a native call")


def test_csrc_includes_python_in_one_file_only() -> None:
    csrc = Path(__file__).parent.parent / "csrc"
    for file in csrc.iterdir():
        if file.name != "bindings.cpp":
            text = file.read_text()
            assert "pybind11" not in text.replace("bindings.cpp", ""), file
            assert "Python.h" not in text, file
            assert "torch/" not in text, file
