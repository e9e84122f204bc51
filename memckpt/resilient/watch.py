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

from memckpt.errors import MemckptError
from memckpt.memory import lock, process
from memckpt.resilient.world import World, progress

POLL_S = 0.01
BEAT_S = 0.1
LOOK_S = 0.2
RUN = "memckpt.run"
STAGGER_S = 3.0
"""Between two processes that give up waiting in a shrink."""
FATAL_S = 5.0
"""How long a process may take to end by itself when the run cannot go on."""
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
    """Polls the world for a loss; the methods from `rest` to `regroup` say what a loss means from now on.

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
        self._since: float | None = None  # from when on the limit runs
        self._limit_s = grace_s
        self._losses = 0
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
        """A loss means nothing: the process is about to agree with the others, whatever has happened. Local."""
        self._enter("rest")

    def train(self, world: World, active: frozenset[int], on_loss: Callable[[str], None]) -> None:
        """The loss of one of the ranks `active` of `world`, or a revoked world, calls `on_loss(cause)`, once. Local."""
        self._enter("train", world, active, on_loss)

    def idle(self, world: World, active: frozenset[int]) -> None:
        """The loss of one of the ranks `active` of `world` revokes `world`, since nobody else may be left to. Local."""
        self._enter("idle", world, active)

    def shrink(self, world: World, limit_s: float) -> None:
        """A loss means nothing, since a shrink copes with it; but it must end in time. Local.

        One process after the other gives up, and each that does so gives the rest new time: one may be enough.
        """
        self._enter("shrink", world, limit_s=limit_s + STAGGER_S * (world.size - 1 - world.rank))

    def exchange(self, world: World) -> None:
        """Nobody may revoke `world` yet. Local."""
        self._enter("exchange", world)

    def regroup(self, world: World) -> None:
        """The loss of any member revokes `world`, which frees whoever waits in it. Local."""
        self._enter("regroup", world)

    def _enter(
        self,
        phase: str,
        world: World | None = None,
        active: frozenset[int] = frozenset(),
        on_loss: Callable[[str], None] = lambda cause: None,
        limit_s: float | None = None,
    ) -> None:
        with self._guard:
            self._phase, self._world, self._active, self._on_loss = phase, world, active, on_loss
            self._limit_s = self._grace_s if limit_s is None else limit_s
            self._since = None if phase in ("rest", "train", "idle") else time.monotonic()
            self._losses = 0

    def stop(self) -> None:
        """End the thread, and with it every MPI call of it. Local."""
        self._halt.set()
        self.join()
        self._heartbeat.close()

    def run(self) -> None:
        """Poll until `stop`; an error here is an error of the process, since nobody would see a loss any more."""
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
                if self._phase == "train":  # in every other phase the main thread makes progress itself
                    progress()
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
            if self.fatal is not None:
                if self._phase == "train":
                    self._on_loss(self.fatal)
                # A collective that waits for that process may stay stuck in spite of a revoke (seen in Open MPI's
                # "tuned" ones), and nothing can come of a shrink.
                self._since, self._limit_s = now, FATAL_S

    def _check(self, now: float) -> None:
        world = self._world
        if world is None:
            return
        lost = world.lost()
        if self._phase == "train" and self._since is None:
            hit = any(rank in self._active for rank in lost)
            if hit or world.revoked():
                self._since = now
                self._on_loss("a peer was lost" if hit else "a peer asked to regroup")
        elif self._phase == "regroup" or (self._phase == "idle" and any(rank in self._active for rank in lost)):
            if lost and not world.revoked():
                world.revoke()
        elif self._phase == "shrink" and len(lost) != self._losses:
            self._since = now
        self._losses = len(lost)
        if self._since is not None and now - self._since > self._limit_s:
            doing = "training did not return" if self._phase == "train" else "the survivors could not regroup"
            why = self.fatal or f"{doing} within {self._limit_s:g} s after a loss; it ends, so that others can go on"
            end_process(f"pid {os.getpid()}: {why}")
