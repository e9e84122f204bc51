"""Job of test_comm_failures.py: rank 1 goes away while the others have every kind of operation under way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np

from memckpt.comm import FIRST_TAG, Communicator, Request, barrier, detect
from memckpt.errors import DeadlineExceeded, PeerLost

VICTIM = 1
BIG = 64 << 20


def outcome(request: Request, limit: float) -> str:
    while True:
        try:
            if request.test():
                return "complete"
        except PeerLost as error:
            return "lost, says MPI" if "MPI_ERR_" in str(error) else "lost"
        if time.monotonic() > limit:
            return "open"
        time.sleep(0.001)


def start_everything(comm: Communicator) -> dict[str, Request]:
    """A message that nobody sends and one too large to be eager, from and to every rank, and reductions."""
    requests: dict[str, Request] = {"reduction": comm.iallreduce_min(np.zeros(4, dtype=np.int64))}
    for peer in range(comm.size):
        if peer != comm.rank:
            requests[f"receive nothing from {peer}"] = comm.irecv(bytearray(10), peer, FIRST_TAG)
            requests[f"receive big from {peer}"] = comm.irecv(np.zeros(BIG, dtype=np.uint8), peer, FIRST_TAG + 1)
            requests[f"send big to {peer}"] = comm.isend(np.ones(BIG, dtype=np.uint8), peer, FIRST_TAG + 2)
    return requests


def main(number: int) -> None:
    world = detect()
    comm = world.dup(30.0)
    barrier(comm, 30.0)
    if comm.rank == VICTIM:
        sends = [comm.isend(np.ones(BIG, dtype=np.uint8), r, FIRST_TAG + 1) for r in range(comm.size) if r != VICTIM]
        [send.test() for send in sends]
        os.kill(os.getpid(), number)
        time.sleep(60)
    requests = start_everything(comm)
    begun = time.monotonic()
    seen = "nothing"
    while time.monotonic() - begun < 3.0 and seen == "nothing":
        for name, request in requests.items():
            try:
                request.test()
            except PeerLost:
                seen = name
                break
        time.sleep(0.001)
    detected = time.monotonic() - begun
    comm.close(abort=True)
    begun = time.monotonic()
    outcomes = {name: outcome(request, begun + 3.0) for name, request in requests.items()}
    ended = time.monotonic() - begun
    begun = time.monotonic()
    try:
        world.dup(1.0)
        dup = "made"
    except DeadlineExceeded:
        dup = "late"
    except PeerLost:
        dup = "lost"
    told = {"seen": seen, "detected": detected, "ended": ended, "outcomes": outcomes, "dup": dup}
    told["dup_seconds"] = time.monotonic() - begun
    sys.stdout.write(f"REPORT {json.dumps({'rank': comm.rank, **told})}\n")
    sys.stdout.flush()
    world.close(abort=True)
    if number == signal.SIGSTOP:
        os._exit(0)  # MPI_Finalize would wait for the stopped rank


if __name__ == "__main__":
    main(int(sys.argv[1]))
