"""The thread that sees a peer die, or stand still, while the training thread is busy or hangs.

ULFM reports a dead process; it says nothing of one that was stopped. Progress deadlines are therefore ours: every
process of a run beats in a file that its neighbours on the node read, and one that stands still is killed by them,
after which ULFM reports it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from memckpt import lock, process
from memckpt.comm.mpi import _load as load_mpi
from memckpt.errors import MemckptError
from memckpt.resilient.world import World

POLL_S = 0.01
BEAT_S = 0.1
LOOK_S = 0.2
RUN = "memckpt.run"
UNREPORTED_S = 3.0
"""How long a dead process may go unreported by MPI; a launcher that reports it does so within milliseconds."""


def end_process(why: str) -> None:
    """Say why on stderr and end this process at once, so that peers see it as lost. Local, does not return."""
    print(f"memckpt: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # an orderly exit would wait in MPI_Finalize


class Heartbeat:
    """This process's beat, and a look at those of its neighbours on the node.

    Parameters
    ----------
    job : str
        What the processes of one mpirun have in common.
    node : str
        Name of the (possibly pretended) node, for messages; everybody in the same pid namespace is a neighbour.
    frozen_s : float
        A process that is stopped for so long is killed.
    silent_s : float
        A process that does not beat for so long is killed, stopped or not.
    """

    def __init__(self, job: str, node: str, frozen_s: float, silent_s: float) -> None:
        self.job, self.frozen_s, self.silent_s = job, frozen_s, silent_s
        # The launcher's own folder for this job on this host: it goes with the job, however the job ends.
        base = os.environ.get("PMIX_SERVER_TMPDIR", "")
        base = base if os.path.isdir(base) else tempfile.gettempdir()
        folder = Path(base, f"memckpt-{os.getuid()}-{job.replace('/', '_')}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat(follow_symlinks=False).st_uid != os.getuid():
            raise MemckptError("the folder for heartbeats belongs to somebody else", path=str(folder))
        self.folder = str(folder)
        self._lock = lock.take(self.folder, process.describe(run=RUN, job=job, node=node))
        self._stopped_since: dict[tuple[int, int], float] = {}

    def beat(self) -> None:
        self._lock.beat()

    def look(self) -> list[process.ProcessInfo]:
        """Neighbours that stand still for too long, judged only by a process that did not stand still itself. Local."""
        if self._lock.was_paused(self.frozen_s):
            self._stopped_since.clear()  # the whole node may have been asleep: everybody gets a new grace period
            return []
        now = time.monotonic()
        still: list[process.ProcessInfo] = []
        stopped: dict[tuple[int, int], float] = {}
        for holder in lock.holders(self.folder):
            info = holder.info
            if info is None or not holder.held or info.pid == os.getpid() or info.job != self.job:
                continue
            silent_s = (time.monotonic_ns() - holder.beat_ns) / 1e9
            if silent_s >= self.frozen_s and process.stopped(info.pid):
                stopped[info.identity] = self._stopped_since.get(info.identity, now)
                # A process that beat until a moment ago was not stopped for long, whatever it is now.
                if now - stopped[info.identity] >= min(0.1, self.frozen_s):
                    still.append(info)
            elif silent_s >= self.silent_s and not self._lock.was_paused(self.silent_s):
                still.append(info)
        self._stopped_since = stopped
        return still

    def kill_the_frozen(self) -> list[str]:
        """SIGKILL the neighbours of this job that stand still; what was done, for messages. Local."""
        return [
            f"{info} stood still and was killed"
            for info in self.look()
            if process.kill_if_ours(info, run=RUN, job=self.job, deadline_s=0.5)
        ]

    def close(self) -> None:
        self._lock.release()
        try:
            os.rmdir(self.folder)
        except OSError:
            pass  # neighbours are still there


class Watch(threading.Thread):
    """Polls the world for a loss; `train`, `regroup` and `rest` say what a loss means now.

    Parameters
    ----------
    heartbeat : Heartbeat
        Beaten by this thread.
    grace_s : float
        Seconds that the training thread gets to come back after a loss, before the process is ended.
    """

    def __init__(self, heartbeat: Heartbeat, grace_s: float) -> None:
        super().__init__(name="memckpt-watch", daemon=True)
        self._heartbeat = heartbeat
        self._grace_s = grace_s
        self._guard = threading.Lock()
        self._phase = "rest"
        self._world: World | None = None
        self._active: frozenset[int] = frozenset()
        self._on_loss: Callable[[str], None] = lambda cause: None
        self._tripped_at: float | None = None
        self._known: World | None = None
        self._neighbours: list[tuple[int, int, int]] = []  # rank, pid, start
        self._gone_since: dict[int, float] = {}
        self.fatal: str | None = None
        self._halt = threading.Event()

    def know(self, world: World, members: list[tuple[bool, int, int]]) -> None:
        """The members of `world` in order: whether on this host, pid, start time. Local."""
        with self._guard:
            self._known, self._gone_since = world, {}
            self._neighbours = [(rank, pid, start) for rank, (here, pid, start) in enumerate(members) if here]

    def rest(self) -> None:
        """A loss means nothing: this process waits in an agreement that ends by itself. Local."""
        with self._guard:
            self._phase, self._tripped_at = "rest", None

    def train(self, world: World, active: frozenset[int], on_loss: Callable[[str], None]) -> None:
        """The loss of one of the ranks `active` of `world`, or a revoked world, calls `on_loss(cause)`, once. Local."""
        with self._guard:
            self._phase, self._world, self._active, self._on_loss = "train", world, active, on_loss
            self._tripped_at = None

    def shrink(self) -> None:
        """A loss means nothing, since a shrink copes with it; but it must end within the grace period. Local."""
        with self._guard:
            self._phase, self._tripped_at = "shrink", time.monotonic()

    def regroup(self, world: World) -> None:
        """The loss of any member revokes `world`, which frees whoever waits in it. Local."""
        with self._guard:
            self._phase, self._world, self._tripped_at = "regroup", world, time.monotonic()

    def stop(self) -> None:
        """End the thread, and with it every MPI call of it. Local."""
        self._halt.set()
        self.join()
        self._heartbeat.close()

    def run(self) -> None:
        """Poll until `stop`; an error here is an error of the process, since nobody would see a loss any more."""
        MPI = load_mpi()
        beat_at = look_at = 0.0
        try:
            while not self._halt.wait(POLL_S):
                now = time.monotonic()
                if now >= beat_at:
                    self._heartbeat.beat()
                    beat_at = now + BEAT_S
                if now >= look_at:
                    for what in self._heartbeat.kill_the_frozen():
                        print(f"memckpt: {what}", file=sys.stderr, flush=True)
                    self._look_for_the_unreported(now)
                    look_at = time.monotonic() + LOOK_S
                MPI.COMM_SELF.Iprobe()  # failure notices arrive only while somebody makes progress
                with self._guard:
                    self._check(now)
        except Exception as error:
            end_process(f"the watching thread failed: {error!r}")

    def _look_for_the_unreported(self, now: float) -> None:
        """Open MPI's launcher is silent about a process that ends with a status other than 0, so nobody can regroup."""
        with self._guard:
            gone = [(rank, pid) for rank, pid, start in self._neighbours if not process.alive(pid, start)]
            if self._known is None or not gone or self.fatal is not None:
                return
            reported = self._known.lost()
            silent = [(rank, pid) for rank, pid in gone if rank not in reported]
            self._gone_since = {rank: self._gone_since.get(rank, now) for rank, _ in silent}
            for rank, pid in silent:
                if now - self._gone_since[rank] >= UNREPORTED_S:
                    self.fatal = (
                        f"pid {pid} has exited and MPI does not say so, so the others cannot regroup; start the same "
                        "program again to go on from the snapshots in memory"
                    )
            if self.fatal is not None and self._phase == "train":
                self._tripped_at = self._tripped_at or now
                self._on_loss(self.fatal)
            elif self.fatal is not None and self._phase == "shrink":
                end_process(self.fatal)

    def _check(self, now: float) -> None:
        world = self._world
        if self._phase == "rest" or world is None:
            return
        if self._phase == "regroup" or (self._phase == "train" and self._tripped_at is None):
            lost = world.lost()
            hit = [r for r in lost if r in self._active] if self._phase == "train" else lost
            revoked = world.revoked()
            if self._phase == "regroup":
                if hit and not revoked:
                    world.revoke()
            elif hit or revoked:
                self._tripped_at = now
                self._on_loss("a peer was lost" if hit else "a peer asked to regroup")
        if self._tripped_at is not None and now - self._tripped_at > self._grace_s:
            doing = "training did not return" if self._phase == "train" else "the survivors could not regroup"
            end_process(f"{doing} within {self._grace_s:g} s after a loss; this process ends so that others can go on")
