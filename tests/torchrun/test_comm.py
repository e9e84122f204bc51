"""gloo below the contract: real ranks, real deaths."""

from __future__ import annotations

import pytest

from tests.comm_contract import CHECKS
from tests.mpi.harness import REPO
from tests.torchrun.harness import torchrun

pytestmark = pytest.mark.timeout(180)

DEATH = """
import os, time
import numpy as np
from memckpt.comm import FIRST_TAG, barrier, detect, wait
from memckpt.errors import PeerLost

comm = detect()
assert comm.kind == "torch", comm.name
barrier(comm, 30.0)
if comm.rank == 1:
    os.kill(os.getpid(), 9)
begun = time.monotonic()
seen = 0
for request in (comm.irecv(bytearray(5000), 1, FIRST_TAG), comm.iallreduce_min(np.zeros(1, dtype=np.int64))):
    try:
        wait([request], 20.0, "the dead")
    except PeerLost as error:
        assert "no answer" not in str(error), error  # by the connection, not by the deadline
        seen += 1
comm.close(abort=True)
assert seen == 2 and time.monotonic() - begun < 10, (seen, time.monotonic() - begun)
open(os.environ["SEEN"] + f"/{comm.rank}", "w").close()
time.sleep(60)  # until torchrun ends the others
"""


@pytest.mark.parametrize("n", [2, 4])
def test_contract(n: int) -> None:
    result = torchrun(n, REPO / "tests" / "comm_contract.py", timeout_s=150).check()
    assert result.stdout.count(" ok on ") == n * len(CHECKS)


def test_death_is_seen_by_every_peer(tmp_path: object) -> None:
    source = DEATH.replace("time.sleep(60)", "raise SystemExit(3)")
    result = torchrun(2, source, env={"SEEN": str(tmp_path)}, timeout_s=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0"], result.stderr  # type: ignore[attr-defined]
