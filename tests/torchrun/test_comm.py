"""gloo below the contract: real ranks, real deaths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm_contract import CHECKS
from tests.mpi.harness import REPO
from tests.torchrun.harness import torchrun

pytestmark = pytest.mark.timeout(180)

DEATH = """
import os, pathlib, signal, sys, time
import numpy as np
from memckpt.comm import FIRST_TAG, barrier, detect, wait
from memckpt.errors import DeadlineExceeded, PeerLost

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once a rank is dead
seen = pathlib.Path(sys.argv[1])
comm = detect()
assert comm.kind == "torch", comm.name
others = comm.dup()
barrier(comm, 30.0)
barrier(others, 30.0)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)

def lost(begin):
    try:
        wait([begin()], 20.0, "the dead")
    except DeadlineExceeded:
        return False  # it must be seen by the connection
    except PeerLost:
        return True
    return False

assert lost(lambda: comm.irecv(bytearray(5000), 1, FIRST_TAG))
assert lost(lambda: comm.iallreduce_min(np.zeros(1, dtype=np.int64)))
if comm.rank == 0:
    held = others.irecv(bytearray(1), 2, FIRST_TAG)  # its wait keeps the group, so that giving it up closes nothing
    assert lost(lambda: others.irecv(bytearray(1), 1, FIRST_TAG))
    others.close(abort=True)  # frees rank 2 too, although the next rank is the dead one
else:
    assert lost(lambda: others.irecv(bytearray(1), 0, FIRST_TAG))
comm.close(abort=True)
(seen / str(comm.rank)).touch()
while not (seen / str(2 - comm.rank)).exists():  # the end of this process would close its connections, too
    time.sleep(0.02)
"""


@pytest.mark.parametrize("n", [2, 4])
def test_contract(n: int) -> None:
    result = torchrun(n, REPO / "tests" / "comm_contract.py", timeout_s=150).check()
    assert result.stdout.count(" ok on ") == n * len(CHECKS)


def test_death_is_seen_by_every_peer(tmp_path: Path) -> None:
    result = torchrun(3, DEATH, str(tmp_path), timeout_s=90)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"], result.stderr
