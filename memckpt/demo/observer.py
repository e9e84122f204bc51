"""The process that kills and judges: picks moment and victim from a seed, and compares with an uninterrupted run.

It trains nothing and shares nothing with the training but the log files, so it cannot be fooled by what the training
believes of itself. Rules: a process is signalled only if it descends from the mpirun that was started here; the verdict
is "proved" only if every check was made and held; whatever happens, everything ends before the time limit.
"""

from __future__ import annotations

import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from memckpt.demo import memory
from memckpt.demo.history import Comparison, History, Life
from memckpt.demo.job import Job
from memckpt.demo.log import Follower, now
from memckpt.demo.verdict import Recovery, Verdict, conclude


class DemoFailed(Exception):
    """The demonstration could not be carried through; the message says where, `output` is what the job said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    seed: int
    steps: int = 24
    active: int = 4
    spares: int = 1
    signal: signal.Signals = signal.SIGKILL
    scenario: str = "in-job"
    keep: bool = False
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Choice:
    """Whom to signal and when: in the step after `step`, when `fraction` of it has gone by."""

    rank: int
    step: int
    fraction: float


def choose(seed: int, steps: int, active: int) -> Choice:
    """The victim and the moment that `seed` stands for. Local; the same seed gives the same choice."""
    pick = random.Random(seed)
    return Choice(
        pick.randrange(active), pick.randint(max(2, steps // 4), max(2, steps * 3 // 4)), pick.uniform(0.05, 0.95)
    )


def permuted(seed: int, nodes: list[str]) -> list[str]:
    """`nodes` in another order, so that at least one rank changes its node. Local."""
    pick, shuffled = random.Random(seed + 1), list(nodes)
    while shuffled == nodes:
        pick.shuffle(shuffled)
    return shuffled


class Observer:
    """Carries one demonstration through. Local; use `observe`."""

    def __init__(self, settings: Settings, directory: Path, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.run = f"demo-{secrets.token_hex(4)}"
        self._directory = directory
        self._say = say
        self._until = time.monotonic() + settings.timeout_s
        self._began = time.monotonic()
        self._jobs: list[Job] = []
        self._nodes: list[str] = []

    def close(self) -> None:
        """End what still runs; remove this run's memory unless it is to be kept."""
        for job in self._jobs:
            job.kill()
        if not self.settings.keep:
            for node in self._nodes:
                memory.wipe(node)

    def judge(self) -> tuple[Verdict, Recovery]:
        """Train without and with a failure, and compare."""
        s = self.settings
        self._say(f"training {s.steps} steps on {s.active} ranks without interruption, to compare with")
        reference_log, reference = self._log("reference"), self._log("reference").name
        job, follower = self._start(reference, s.active, ["--plain"])
        self._finish(job, follower, s.active, reference)
        carry_out = {"in-job": self._in_job, "relaunch": self._relaunch, "storage": self._from_storage}
        recovery = carry_out[s.scenario]()
        uninterrupted = History.of(follower.events)
        comparison = Comparison()
        comparison.steps(uninterrupted.lives, recovery.lives, s.active, s.steps)
        comparison.finals(uninterrupted, reference_log, recovery.after, recovery.log, s.active)
        elapsed_s = time.monotonic() - self._began
        told = (self.run, s.scenario, s.seed, s.steps, s.signal.name, s.active)
        return conclude(*told, recovery, comparison, elapsed_s), recovery

    def _in_job(self) -> Recovery:
        s = self.settings
        choice = choose(s.seed, s.steps, s.active)
        processes = s.active + s.spares
        # Each process has a node of its own here, as with one rank a node: a spare finds nothing in its own memory.
        nodes = self._nodes = [f"{self.run}-n{i}" for i in range(processes)]
        self._say(
            f"training again, under memckpt, with {s.spares} spare; rank {choice.rank} is going to get {s.signal.name}"
        )
        job, follower = self._start("recovered", processes, ["--nodes", ",".join(nodes)])
        victim = self._wait_for(choice, job, follower, "recovered")
        at = now()
        if not job.signal(victim.pid, s.signal):
            raise DemoFailed(f"process {victim.pid} of rank {choice.rank} was gone before the signal", job.tail())
        if s.signal == signal.SIGKILL:
            memory.wipe(nodes[History.of(follower.events).processes[victim.pid].world_rank])
        self._finish(job, follower, s.active, "recovered", stopped=victim.pid)
        history = History.of(follower.events)
        return Recovery(
            choice.rank,
            victim.pid,
            at,
            history.before(at),
            history,
            self._log("recovered"),
            in_job=True,
            restarted_at=at,
        )

    def _relaunch(self) -> Recovery:
        s = self.settings
        choice = choose(s.seed, s.steps, s.active)
        names = self._nodes = [f"{self.run}-a", f"{self.run}-b"]
        nodes = [names[rank * 2 // s.active] for rank in range(s.active)]
        self._say("training again, under memckpt, on two pretended nodes; the whole job is going to be killed")
        job, follower = self._start("killed", s.active, ["--nodes", ",".join(nodes)])
        victim = self._wait_for(choice, job, follower, "killed")
        at = now()
        job.kill()
        memory.wipe(names[1])
        follower.poll()
        before = History.of(follower.events).lives
        self._say(
            f"job killed in step {victim.last_step + 1}, memory of {names[1]} wiped; starting again, ranks permuted"
        )
        restarted_at = now()
        job, follower = self._start("recovered", s.active, ["--nodes", ",".join(permuted(s.seed, nodes))])
        self._finish(job, follower, s.active, "recovered")
        after = History.of(follower.events)
        return Recovery(
            choice.rank, victim.pid, at, before, after, self._log("recovered"), in_job=False, restarted_at=restarted_at
        )

    def _from_storage(self) -> Recovery:
        s = self.settings
        choice = choose(s.seed, s.steps, s.active)
        names = self._nodes = [f"{self.run}-a", f"{self.run}-b"]
        nodes = ",".join(names[rank * 2 // s.active] for rank in range(s.active))
        directory = self._directory / "storage"
        more = ["--nodes", nodes, "--persist", str(directory), "--persist-every", str(max(1, s.steps // 8))]
        self._say("training again, under memckpt, which also persists; both pretended nodes are going to be lost")
        job, follower = self._start("killed", s.active, more)
        victim = self._wait_for(
            choice, job, follower, "killed", and_for=lambda: memory.newest_persisted(directory, self.run) is not None
        )
        at = now()
        job.kill()
        for name in names:
            memory.wipe(name)
        if left := memory.left(names):
            raise DemoFailed(f"memory that should be lost is still there: {left[0]}")
        follower.poll()
        before = History.of(follower.events).lives
        persisted = memory.newest_persisted(directory, self.run)
        if persisted is None:
            raise DemoFailed("what was complete in storage before the kill is not there any more")
        self._say(
            f"job killed in step {victim.last_step + 1}, memory of both nodes wiped; step {persisted} is in storage; "
            "starting again"
        )
        restarted_at = now()
        job, follower = self._start("recovered", s.active, more)
        self._finish(job, follower, s.active, "recovered")
        after = History.of(follower.events)
        return Recovery(
            choice.rank, victim.pid, at, before, after, self._log("recovered"),
            in_job=False, restarted_at=restarted_at, persisted_step=persisted,
        )  # fmt: skip

    def _log(self, name: str) -> Path:
        path = self._directory / name
        path.mkdir(exist_ok=True)
        return path

    def _start(self, name: str, processes: int, more: list[str]) -> tuple[Job, Follower]:
        s = self.settings
        log = self._log(name)
        # -P: a working directory that holds the source of memckpt must not hide the installed package.
        ulfm = [] if "--plain" in more else ["--with-ft", "ulfm"]
        program = [sys.executable, "-P", "-m", "memckpt.demo.train", "--run", self.run, "--log", str(log)]
        program += ["--steps", str(s.steps), "--seed", str(s.seed), "--active", str(s.active)]
        program += [*more, *(["--keep"] if s.keep else [])]
        scratch = self._directory / "mpi"
        scratch.mkdir(exist_ok=True)
        job = Job([*ulfm, "--oversubscribe", "-n", str(processes), *program], scratch, self._directory / f"{name}.out")
        self._jobs.append(job)
        return job, Follower(log)

    def _wait_for(
        self, choice: Choice, job: Job, follower: Follower, name: str, and_for: Callable[[], bool] = lambda: True
    ) -> Life:
        """The life of the victim, when the chosen moment has come, and `and_for` with it."""
        while True:
            if follower.poll():
                life = History.of(follower.events).latest().get(choice.rank)
                if life is not None and life.last_step >= choice.step and len(life.steps) >= 2 and and_for():
                    break
            self._look(job, name)
            time.sleep(0.001)
        job.members()  # so that all of them can be ended by id even if mpirun is gone by then
        times = [s.at for s in life.steps][-8:]
        typical = statistics.median(b - a for a, b in pairwise(times))
        time.sleep(max(0.0, life.steps[-1].at + choice.fraction * typical - now()))
        follower.poll()
        return History.of(follower.events).latest()[choice.rank]

    def _finish(self, job: Job, follower: Follower, ranks: int, name: str, stopped: int | None = None) -> None:
        """Wait until every rank says it is through and the job has ended."""
        while job.poll() is None:
            if follower.poll() and stopped is not None and History.of(follower.events).finished(ranks):
                job.signal(stopped, signal.SIGKILL)  # a process that was stopped and left out keeps mpirun waiting
            self._look(job, name, ended=False)
            time.sleep(0.01)
        follower.poll()
        if not History.of(follower.events).finished(ranks):
            lives = History.of(follower.events).lives
            errors = "; ".join(f"rank {life.rank}: {life.left.error}" for life in lives[-ranks:] if life.left)
            raise DemoFailed(
                f"the job '{name}' ended before all of its {ranks} ranks were through ({errors})", job.tail()
            )

    def _look(self, job: Job, name: str, ended: bool = True) -> None:
        if ended and job.poll() is not None:
            raise DemoFailed(f"the job '{name}' ended (status {job.poll()}) before the moment of the kill", job.tail())
        if time.monotonic() > self._until:
            raise DemoFailed(f"not through after {self.settings.timeout_s:.0f} s, in the job '{name}'", job.tail())


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end this process in order, so that its jobs end with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _scratch(keep: bool, say: Callable[[str], None]) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="memckpt-"))
    try:
        yield directory
    finally:
        if keep:
            say(f"logs are kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def observe(settings: Settings, say: Callable[[str], None] = lambda message: None) -> tuple[Verdict, Recovery]:
    """Carry one demonstration through and judge it. Local; starts and ends its own jobs.

    Raises
    ------
    DemoFailed
        When it could not be carried to its end, within the time limit; nothing is left running.
    """
    with _terminable(), _scratch(settings.keep, say) as directory:
        observer = Observer(settings, directory, say)
        try:
            return observer.judge()
        finally:
            observer.close()
