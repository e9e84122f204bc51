"""How fast the transport is between two ranks, for the first lines that are printed."""

from __future__ import annotations

import time

import numpy as np

from memckpt.comm.base import Communicator, Request, wait
from memckpt.comm.trees import allreduce_min, barrier

_TAG = 4
_CHUNK = 4 << 20
_WINDOW = 4


def transport_speed(comm: Communicator, nbytes: int, deadline_s: float) -> float:
    """Bytes per second at which every rank sends to the next one, and receives, `nbytes` at once. Collective.

    Parameters
    ----------
    comm : Communicator
        Used by nothing else meanwhile.
    nbytes : int
        Bytes each way, rounded up to 4 MiB pieces; 32 MiB of memory are needed whatever it is.
    deadline_s : float
        For each of its waits.

    Returns
    -------
    float
        Bytes per second in one direction on the slowest rank, the same on every rank; ``inf`` when there is one rank.

    Raises
    ------
    PeerLost, DeadlineExceeded
        See `memckpt.comm.wait`.
    """
    if comm.size == 1:
        return float("inf")
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    source = np.zeros(_CHUNK, dtype=np.uint8)
    targets = np.zeros((_WINDOW, _CHUNK), dtype=np.uint8)
    count = max(-(-nbytes // _CHUNK), 1)
    elapsed_ns = 0
    for pieces in (1, count):  # the first makes the connection
        barrier(comm, deadline_s, what="transport speed")
        begun = time.perf_counter_ns()
        window: list[list[Request]] = []
        for number in range(pieces):
            pair = [comm.irecv(targets[number % _WINDOW], before, _TAG), comm.isend(source, after, _TAG)]
            window.append(pair)
            if len(window) == _WINDOW:
                wait(window.pop(0), deadline_s, "transport speed")
        for pair in window:
            wait(pair, deadline_s, "transport speed")
        elapsed_ns = time.perf_counter_ns() - begun
    (slowest,) = allreduce_min(comm, [-elapsed_ns], deadline_s, what="transport speed")
    return count * _CHUNK / (-slowest * 1e-9)
