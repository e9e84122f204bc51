"""Ranks as threads of one process: each on a node of its own, if wanted, over a `LocalGroup`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from memckpt.comm.local import Killed, LocalComm, LocalGroup
from memckpt.memory import arena

_node = threading.local()


@contextmanager
def fake_nodes(base: str) -> Iterator[None]:
    """Memory under `base`, and each rank thread on the node that `run_ranks` gave it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "default_base", lambda: base)
        patch.setattr(arena, "default_node", lambda: getattr(_node, "name", "node0"))
        yield


def run_ranks(
    group: LocalGroup | int,
    work: Callable[[LocalComm], Any],
    *,
    nodes: Sequence[str] | None = None,
    timeout_s: float = 30.0,
) -> list[Any]:
    """Run `work(comm)` as every rank at once; its results by rank, an exception in place of a result where it raised.

    A rank that was killed (`Killed`) has the result None.
    """
    group = LocalGroup(group) if isinstance(group, int) else group
    results: list[Any] = [None] * len(group.comms)

    def body(rank: int) -> None:
        if nodes is not None:
            _node.name = nodes[rank]
        try:
            results[rank] = work(group.comms[rank])
        except Killed:
            results[rank] = None
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank{rank}") for rank in range(len(group.comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"still running after {timeout_s} s: {stuck}"
    return results


def raise_errors(results: list[Any]) -> list[Any]:
    """The results, or the first error among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
