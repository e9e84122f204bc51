"""Thread levels, who initialises, who finalizes, what is left open: status 0, and no call to MPI too late."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mpi.harness import REPO, mpirun, needs_mpi

pytestmark = [needs_mpi, pytest.mark.mpi, pytest.mark.timeout(180)]

USE = """
import threading
from memckpt.comm import allgather, barrier, detect
from memckpt.errors import Closed, UsageError
def use(comm):
    assert allgather(comm, bytes([comm.rank]), 30.0) == [bytes([rank]) for rank in range(comm.size)]
"""


@pytest.mark.parametrize("level", ["single", "funneled", "serialized", "multiple"])
def test_thread_level_is_queried(level: str) -> None:
    code = f"""
import mpi4py
mpi4py.rc.thread_level = {level!r}
{USE}
comm = detect()
from mpi4py import MPI
assert comm.concurrent == (MPI.Query_thread() == MPI.THREAD_MULTIPLE), MPI.Query_thread()
assert comm.concurrent or {level!r} != "multiple"
assert {level!r} in comm.name or comm.concurrent, comm.name
use(comm)
comm.close()
print("fine", flush=True)
"""
    assert mpirun(2, code, timeout_s=90).check().stdout.count("fine") == 2


LIVES = {
    "by us, closed twice": "comm = detect(); use(comm); comm.close(); comm.close()",
    "exit without close": "comm = detect(); use(comm); other = comm.dup(); use(other)",
    "exit with a receive that stays open": """
comm = detect(); use(comm)
request = comm.irecv(bytearray(100), (comm.rank + 1) % comm.size, 99)
""",
    "by the user before us": "from mpi4py import MPI; comm = detect(MPI.COMM_WORLD); use(comm); comm.close()",
    "by the user, by hand": """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
try:
    detect(); raise SystemExit("not refused")
except UsageError as error:
    assert "MPI.Init_thread" in str(error)
from mpi4py import MPI
MPI.Init_thread()
comm = detect(); use(comm); comm.close()
MPI.Finalize()
""",
    "the user finalizes first": """
from mpi4py import MPI
comm = detect(); use(comm)
request = comm.irecv(bytearray(100), (comm.rank + 1) % comm.size, 99)
MPI.Finalize()
for late in (request.test, lambda: comm.isend(b"", 0, 16), lambda: barrier(comm, 1.0), comm.dup, detect):
    try:
        late(); raise SystemExit("not refused")
    except Closed as error:
        assert "finalized" in str(error)
comm.close(); comm.close(abort=True)
""",
    "the user finalizes under a busy background thread": """
from mpi4py import MPI
comm = detect(); use(comm)
other = comm.dup()
ended = []
def poll():
    request = other.irecv(bytearray(100), (comm.rank + 1) % comm.size, 99)
    try:
        while not request.test():
            pass
    except Closed:
        ended.append(True)
thread = threading.Thread(target=poll, daemon=True)
thread.start()
barrier(comm, 30.0)
MPI.Finalize()
thread.join(20)
assert ended == [True]
""",
    "exit under a polling daemon thread": """
import time
comm = detect(); use(comm)
other = comm.dup()
def poll():
    request = other.irecv(bytearray(100), (comm.rank + 1) % comm.size, 99)
    while not request.test():
        time.sleep(0.0001)
threading.Thread(target=poll, daemon=True).start()
barrier(comm, 30.0)
""",
    "a user's communicator": """
from mpi4py import MPI
half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
handler = half.Get_errhandler()
comm = detect(half); use(comm)
assert comm.size == 1 and half.Get_errhandler() == handler
assert detect(comm) is comm
try:
    detect(MPI.COMM_NULL); raise SystemExit("not refused")
except UsageError:
    pass
comm.close(); half.Barrier()
""",
}


@pytest.mark.parametrize("life", LIVES)
def test_life(life: str) -> None:
    result = mpirun(2, USE + LIVES[life] + "\nprint('fine', flush=True)\n", timeout_s=90).check()
    assert result.stdout.count("fine") == 2
    assert "Traceback" not in result.stderr


def test_importing_has_no_effect_and_one_process_needs_no_mpi() -> None:
    code = """
import sys
import memckpt, memckpt.comm
assert not any(name.startswith("mpi4py") for name in sys.modules)
comm = memckpt.comm.detect()
assert (comm.kind, comm.size) == ("local", 1)
assert not any(name.startswith("mpi4py") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, timeout=90)
