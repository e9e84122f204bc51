"""Which tensors share memory: the very same view, overlapping views of one storage, or none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from memckpt.errors import StateError
from memckpt.format.dtypes import NAMES
from memckpt.format.header import MAX_DIMS
from memckpt.format.strided import Memory, contiguous_stride, memory_of
from memckpt.state.leaves import Place


@dataclass(slots=True)
class Seen:
    """One tensor as it lies in memory now; `index` is its place in the list it came from."""

    index: int
    key: str
    tensor: torch.Tensor
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool
    place: Place | None
    memory: Memory

    def same(self, other: Seen) -> bool:
        """Whether both are the same view of the same memory."""
        return (
            self.memory.address == other.memory.address
            and self.dtype == other.dtype
            and self.shape == other.shape
            and self.stride == other.stride
            and self.conj == other.conj
            and self.neg == other.neg
            and self.place == other.place
        )


def look(index: int, key: str, tensor: torch.Tensor, place: Place | None) -> Seen:
    """Where a plain strided tensor lies. Local."""
    shape = tuple(tensor.shape)
    stride = tensor.stride()
    if len(shape) > MAX_DIMS:
        raise StateError(f"a tensor of {len(shape)} dimensions; at most {MAX_DIMS} can be saved", path=key)
    dtype = tensor.dtype
    itemsize = dtype.itemsize
    if tensor.is_contiguous() and 0 not in shape:
        nbytes = tensor.numel() * itemsize
        memory = Memory(tensor.data_ptr(), nbytes, nbytes, True, shape)
        stride = contiguous_stride(shape) if 1 in shape else stride
    else:
        memory = memory_of(tensor.data_ptr(), shape, stride, itemsize)
        if 0 in shape:
            stride = contiguous_stride(shape)
    return Seen(
        index, key, tensor, NAMES[dtype], itemsize, shape, stride, tensor.is_conj(), tensor.is_neg(), place, memory
    )


def _overlapping(seen: list[Seen]) -> list[list[Seen]]:
    """Groups of tensors whose extents in memory overlap, most of them of one; empty tensors overlap with nothing."""
    begins = np.fromiter((s.memory.address for s in seen), np.uint64, len(seen))
    sizes = np.fromiter((s.memory.extent for s in seen), np.uint64, len(seen))
    order = np.argsort(begins, kind="stable")
    ends = np.maximum.accumulate((begins + sizes)[order]) if len(seen) else begins
    fresh = np.ones(len(seen), np.bool_)
    fresh[1:] = begins[order][1:] >= ends[:-1]
    groups: list[list[Seen]] = []
    for i, new in zip(order.tolist(), fresh.tolist(), strict=False):
        if new:
            groups.append([seen[i]])
        else:
            groups[-1].append(seen[i])
    for group in groups:
        if len(group) > 1:
            group.sort(key=lambda s: s.index)
    return groups


def shared(seen: list[Seen]) -> Iterator[tuple[list[Seen], bool]]:
    """Tensors by the memory they share: either all the very same view (false), or overlapping ones (true). Local."""
    for group in _overlapping(seen):
        if len(group) == 1:
            yield group, False
            continue
        distinct: list[list[Seen]] = []
        for s in group:
            for others in distinct:
                if others[0].same(s):
                    others.append(s)
                    break
            else:
                distinct.append([s])
        if len(distinct) == 1 or not _truly_overlap([d[0] for d in distinct]):
            yield from ((d, False) for d in distinct)
        else:
            yield group, True


def _truly_overlap(views: list[Seen]) -> bool:
    """Whether two views share a byte, and not only interleave (as the column blocks of one matrix do)."""
    if all(v.memory.dense for v in views):
        return True
    low = min(v.memory.address for v in views)
    high = max(v.memory.address + v.memory.extent for v in views)
    grain = math.gcd(*(v.itemsize for v in views), *(v.memory.address - low for v in views))
    taken = np.zeros((high - low) // grain, np.uint8)
    for v in views:
        words = v.itemsize // grain
        sizes = [n if s else 1 for n, s in zip(v.shape, v.stride, strict=False)]
        marks = np.lib.stride_tricks.as_strided(
            taken[(v.memory.address - low) // grain :], (*sizes, words), (*(s * words for s in v.stride), 1)
        )
        if marks.any():
            return True
        marks[...] = 1
    return False
