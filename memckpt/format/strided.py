"""Strided memory as bytes: where a view lies, whether it is one dense piece, and copies that never look at numbers."""

from __future__ import annotations

import ctypes
import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch


class Memory(NamedTuple):
    """Where the bytes of a strided view lie, and how they are stored.

    Attributes
    ----------
    address : int
        First byte of the view (0 if it is empty).
    extent : int
        Bytes from the first to behind the last element.
    nbytes : int
        Logical bytes: each element once, expanded dimensions once.
    dense : bool
        The logical bytes are the extent: the view is one piece of memory.
    stored : tuple of int
        Sizes in the order in which the piece runs through memory (if not dense: its copy), expanded dimensions as 1.
    """

    address: int
    extent: int
    nbytes: int
    dense: bool
    stored: tuple[int, ...]


def memory_of(address: int, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> Memory:
    """The `Memory` of a view; `stride` in elements, none negative. Local."""
    if 0 in shape:
        return Memory(0, 0, 0, True, shape)
    sizes = tuple(n if s else 1 for n, s in zip(shape, stride, strict=True))
    count = math.prod(sizes)
    extent = 1 + sum((n - 1) * s for n, s in zip(sizes, stride, strict=True))
    order = sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: -stride[d])
    step = 1
    dense = True
    for d in reversed(order):
        dense = dense and stride[d] == step
        step *= sizes[d]
    if dense and any(a > b for a, b in pairwise(order)):
        stored = tuple(sizes[d] for d in order)
    else:
        stored = sizes
    return Memory(address, extent * itemsize, count * itemsize, dense, stored)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major array of that shape. Local."""
    stride = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def same_order(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two strides of one shape put every element at the same place. Local."""
    return a == b or 0 in shape or all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


def raw(address: int, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> np.ndarray[Any, Any]:
    """A writable NumPy view of memory, elements as opaque integers of `itemsize` bytes. Not an owner of it. Local."""
    dtype = np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * itemsize
    buffer = (ctypes.c_uint8 * extent).from_address(address)
    return np.ndarray(shape, dtype, buffer=memoryview(buffer), strides=tuple(s * itemsize for s in stride))


def raw_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """`raw` of a plain strided CPU tensor, whatever its dtype, flags and autograd state. Local."""
    return raw(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())


class Copy(NamedTuple):
    """A copy between two strided views of memory, elements as opaque integers; `run` may be called again and again.

    `keep` holds whatever owns the memory of both.
    """

    target: np.ndarray[Any, Any]
    source: np.ndarray[Any, Any]
    keep: Any

    def run(self) -> None:
        """Copy the bytes. Local."""
        np.copyto(self.target, self.source)
