"""Real kills of real MPI jobs. The driver knows whom it killed and when; the oracle says what must come back.

A campaign is a sequence of launches of the same run, each of which is hurt in one or several ways and then killed as a
whole, so that the next launch has something to restore. What each rank says stands in logs of its own (`worker.py`);
the driver reads nothing else, and tells the job nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mpi import harness
from tests.protocol.lives import wipe
from tests.protocol.oracle import Expected, Oracle, RankLife

WORKER = Path(__file__).parent / "worker.py"
PATIENCE_S = 90.0
SAVE_POINTS = [
    "capture.slot", "capture.begun", "capture.copied", "capture.fenced", "before_seal", "after_seal",
    "replicate.chunk", "replicate.slot", "replicate.landed", "replicate.received", "replicate.sealed",
    "commit.seal", "commit.sealed", "commit.vote", "commit.counted", "commit.known", "commit.pinned",
]  # fmt: skip
RESTORE_POINTS = [
    "recover.inventoried", "recover.planned", "recover.checked", "recover.chunk", "recover.fetched", "recover.sealed",
    "recover.loaded", "recover.agreed",
]  # fmt: skip


Event = dict[str, Any]


class Hang(AssertionError):
    """Something that had to happen did not."""


@dataclass
class Launch:
    """One mpirun: 4 processes on two fake nodes.

    Attributes
    ----------
    active : int
        Ranks that train; the other processes are spares. All 4 where a loss ends the job (without ULFM).
    nodes : list of str
        Node of each process.
    """

    number: int
    active: int
    nodes: list[str]
    job: harness.Job
    lost: list[tuple[int, list[str]]] = field(default_factory=list)  # (monotonic ns, nodes)


class Campaign:
    """Runs launches until `kills` were made.

    Parameters
    ----------
    kills : int
        A process, or both processes of a node, are one. The whole job, at the end of each launch, does not count.
    seed : int
        Of everything that is drawn.
    """

    def __init__(self, kills: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._wanted = kills
        self.kills: Counter[str] = Counter()
        self.judged = 0
        self.exact = 0
        self.active = 4
        self._oracles = {2: Oracle(2), 4: Oracle(4)}
        self._folder = Path(tempfile.mkdtemp(prefix="memckpt-campaign-"))
        self._memory = Path(tempfile.mkdtemp(prefix="memckpt-campaign-", dir="/dev/shm"))
        self._launches = 0
        self._current: Launch | None = None

    def run(self) -> None:
        """To the end, or to the first violation."""
        ways: list[Callable[[], None]] = [
            self._process, self._at_point, self._node, self._in_recovery, self._only_holder,
            self._in_job_process, self._in_job_node, self._in_job_again,
        ]  # fmt: skip
        try:
            while self.kills.total() < self._wanted:
                self._random.choice(ways)()
        finally:
            if self._current is not None:
                self._current.job.kill()
            shutil.rmtree(self._memory, ignore_errors=True)
        shutil.rmtree(self._folder)

    # -- ways to hurt a run --------------------------------------------------------------------------------------------

    def _process(self) -> None:
        """A process dies; without ULFM the job goes with it."""
        launch = self._launch(4)
        self._wait_for_commits(launch)
        self._kill("process", launch, [self._random.randrange(4)])
        self._end(launch)

    def _at_point(self) -> None:
        """A process kills itself at a point between two steps of the protocol."""
        point, rank = self._random.choice(SAVE_POINTS), self._random.randrange(4)
        launch = self._launch(4, fault=f"{point}:{rank}:{self._next_step() + self._random.randrange(1, 4)}=kill")
        self.kills["at a point of a save"] += self._wait_for_end(launch)
        self._end(launch)

    def _node(self) -> None:
        """Both ranks of a node die, and its memory with them."""
        launch = self._launch(4)
        self._wait_for_commits(launch)
        self._kill_node("node", launch)
        self._end(launch)

    def _in_recovery(self) -> None:
        """A second process dies while the job comes back from the loss of a node."""
        self._node()
        rank = self._random.randrange(4)
        launch = self._launch(4, fault=f"{self._random.choice(RESTORE_POINTS)}:{rank}=kill")
        self.kills["in recovery"] += self._wait_for_end(launch)
        self._end(launch)

    def _only_holder(self) -> None:
        """A node is lost; right after the recovery a process dies on the node that had the only copies."""
        launch = self._launch(4)
        self._wait_for_commits(launch)
        node = self._kill_node("node", launch)
        self._end(launch)
        launch = self._launch(4)
        self._wait_for(launch, lambda: self._count(launch, "returned") >= 1)
        self._kill("only holder", launch, [self._random.choice([r for r in range(4) if launch.nodes[r] != node])])
        self._end(launch)

    def _in_job_process(self) -> None:
        """A process dies and a spare takes its place."""
        launch = self._launch(2, ulfm=True)
        self._wait_for_commits(launch)
        self._kill("process, with a spare", launch, [self._random.choice([0, 1])])
        self._wait_for_lives(launch, 2)
        self._end(launch)

    def _in_job_node(self) -> None:
        """A node with an active process and a spare dies with its memory; the other node's spare takes over."""
        launch = self._launch(2, ulfm=True)
        self._wait_for_commits(launch)
        self._kill_node("node, with a spare", launch)
        self._wait_for_lives(launch, 2)
        self._end(launch)

    def _in_job_again(self) -> None:
        """A second process dies while, or right after, the first one's place is taken."""
        launch = self._launch(2, ulfm=True)
        self._wait_for_commits(launch)
        first, second = self._random.sample([0, 1], 2)
        self._kill("process, with a spare", launch, [first])
        event = self._random.choice(["entering", "returned"])
        self._wait_for(launch, lambda: self._count(launch, event) > 2)
        self._kill("second process, with a spare", launch, [second])
        self._wait_for(launch, lambda: self._count(launch, "returned") >= 4)
        self._end(launch)

    # -- launches ------------------------------------------------------------------------------------------------------

    def _next_step(self) -> int:
        return self._oracles[self.active].expected().ceiling

    def _launch(self, active: int, *, ulfm: bool = False, fault: str = "") -> Launch:
        if active != self.active:  # another world: another run
            shutil.rmtree(self._memory)
            self._memory.mkdir(mode=0o700)
            self._oracles[active] = Oracle(active)
            self.active = active
        self._launches += 1
        nodes = self._random.choice([["a", "b", "a", "b"], ["b", "a", "b", "a"]])
        patient = bool(fault) or self._random.random() < 0.5  # so that the step of the fault is saved
        floor = self._oracles[active].expected().floor
        env = {
            "CAMPAIGN_LOGS": str(self._folder),
            "CAMPAIGN_LAUNCH": str(self._launches),
            "CAMPAIGN_ACTIVE": str(active),
            "CAMPAIGN_NODES": json.dumps(nodes),
            "CAMPAIGN_STEPS": "400",
            "CAMPAIGN_PATIENT": "1" if patient else "",
            "MEMCKPT_SHM": str(self._memory),
            "MEMCKPT_FAULT": fault,
            "MEMCKPT_RESTART_COUNT": "1" if floor else "0",  # then starting over is an error
        }
        job = harness.start(4, WORKER, env=env, ulfm=ulfm, mpi_args=("--mca", "btl_base_warn_component_unused", "0"))
        self._current = Launch(self._launches, active, nodes, job)
        return self._current

    def _events(self, launch: Launch) -> Iterator[Event]:
        return events(self._folder, launch.number)

    def _count(self, launch: Launch, event: str) -> int:
        return sum(line["event"] == event for line in self._events(launch))

    def _wait_for(self, launch: Launch, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end or launch.job.process.poll() is not None:
                raise self._hang(launch)
            time.sleep(0.005)

    def _wait_for_commits(self, launch: Launch) -> None:
        count = launch.active * self._random.randrange(1, 4)
        self._wait_for(launch, lambda: self._count(launch, "committed") >= count)
        time.sleep(self._random.uniform(0, 0.06))

    def _wait_for_lives(self, launch: Launch, count: int) -> None:
        """Until every rank came back for the `count`-th time, and heard of a commit since."""

        def lives() -> bool:
            generations = [line["generation"] for line in self._events(launch) if line["event"] == "committed"]
            return len(set(generations)) >= count

        self._wait_for(launch, lives)

    def _wait_for_end(self, launch: Launch) -> bool:
        """Until the job ended by itself; False where it trained on, since its fault did not come up."""
        end = time.monotonic() + PATIENCE_S
        while launch.job.process.poll() is None:
            if self._count(launch, "committed") >= 8 * launch.active:
                return False
            if time.monotonic() > end:
                raise self._hang(launch)
            time.sleep(0.01)
        return True

    def _pids(self, launch: Launch, ranks: list[int]) -> list[int]:
        pids = launch.job.ranks()
        return [pids[rank] for rank in ranks if rank in pids]

    def _kill(self, what: str, launch: Launch, processes: list[int]) -> None:
        pids = self._pids(launch, processes)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.kills[what] += 1
        end = time.monotonic() + 10
        while any(_runs(pid) for pid in pids):
            if time.monotonic() > end:
                raise Hang(f"{pids} do not die")
            time.sleep(0.001)

    def _kill_node(self, what: str, launch: Launch) -> str:
        node = self._random.choice(["a", "b"])
        self._kill(what, launch, [rank for rank in range(4) if launch.nodes[rank] == node])
        wipe(self._memory, [node])
        launch.lost.append((time.monotonic_ns(), [node]))
        return node

    def _end(self, launch: Launch) -> None:
        """Kill what is left of the launch, and judge it."""
        launch.job.kill()
        result = launch.job.finish(PATIENCE_S)
        self._current = None
        try:
            self._judge(launch)
        except AssertionError as error:
            error.add_note(self._explain(launch))
            error.add_note(result.stderr[-4000:])
            raise

    def _judge(self, launch: Launch) -> None:
        for expected in judge(self._oracles[launch.active], list(self._events(launch)), launch.lost):
            self.judged += 1
            self.exact += expected.floor == expected.ceiling

    def _hang(self, launch: Launch) -> Hang:
        """What every process was doing is part of the message."""
        for pid in launch.job.ranks().values():
            os.kill(pid, signal.SIGABRT)  # faulthandler prints all threads
        time.sleep(2)
        launch.job.kill()
        result = launch.job.finish(10.0)
        self._current = None
        return Hang(f"{self._explain(launch)}\n{result.stdout[-2000:]}\n{result.stderr[-12000:]}")

    def _explain(self, launch: Launch) -> str:
        lines = sorted(self._events(launch), key=lambda line: line["at"])
        tail = "\n".join(json.dumps(line) for line in lines[-30:])
        return f"launch {launch.number} on {launch.nodes}, {dict(self.kills)}, logs in {self._folder}:\n{tail}"


def events(folder: Path, launch: int) -> Iterator[Event]:
    """What the processes of a launch said; the lines of each process in order."""
    for path in sorted(folder.glob(f"{launch:04d}-*.jsonl")):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def judge(oracle: Oracle, lines: Iterable[Event], lost: Iterable[tuple[int, list[str]]]) -> list[Expected]:
    """Let the oracle judge every life of a launch.

    Parameters
    ----------
    lines : iterable of Event
        What its processes said.
    lost : iterable of (int, list of str)
        When (monotonic ns) which nodes' memory was lost, in order.

    Returns
    -------
    list of Expected
        What was expected of each restore.
    """
    lives: dict[int, dict[int, RankLife]] = {}
    began: dict[int, int] = {}
    for line in lines:
        if "generation" not in line:
            continue
        told = lives.setdefault(line["generation"], {}).setdefault(line["rank"], RankLife())
        if line["event"] == "returned":
            told.returned = (line["step"], line["digest"])
            began[line["generation"]] = min(line["at"], began.get(line["generation"], line["at"]))
        elif line["event"] == "begun":
            told.begun[line["step"]] = line["digest"]
        elif line["event"] == "committed":
            told.committed = max(told.committed, line["step"])
    losses, expected = deque(lost), []
    for generation in sorted(lives):
        while losses and losses[0][0] < began[generation]:
            oracle.lost(losses.popleft()[1])
        expected.append(oracle.expected())
        oracle.observe(lives[generation])
    for _, nodes in losses:
        oracle.lost(nodes)
    return expected


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
