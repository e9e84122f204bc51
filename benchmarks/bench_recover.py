"""How long it takes to come back: from one's own memory, from a peer's, and after a failure to the first step again.

``python benchmarks/bench_recover.py [--json] [--quick] [--only NAME ...]`` starts mpirun itself.

256 MiB per rank, two ranks with one thread each and a node each (by name; it is one machine). What comes back is
compared with what was saved before a figure counts. Median over rounds, maximum over ranks.

own
    `restore()` of a rank's own snapshot, against one plain copy.
peer
    `restore()` where one node's snapshots have lost their seals, so that rank fetches from its peer into memory that
    is there already, against one raw MPI send and one plain copy. `peer_new_node`: the same where the memory has to
    be made ready first, against that in addition.
back, back_stopped
    From SIGKILL (SIGSTOP) of a rank of a running job to the end of the first step after it on every rank. A spare on
    a node of its own takes the rank's place, and fetches from the peer. NAME_detect, NAME_regroup, ...: the phases,
    on the rank that was slowest.
back_relaunch
    The same where the job ends and is started again, imports included.
regroup, protected_again
    Of `back`: revoke, shrink and assign, after every survivor has come back; from the kill until replicas are complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
PATIENCE_S = 120.0
SETTLE_S = 0.3
"""After a restore the background makes its memory ready for the next save; a failure seldom comes that soon."""
_LOG, _BYTES, _ROUNDS, _LAUNCH = "BENCH_LOG", "BENCH_NBYTES", "BENCH_ROUNDS", "BENCH_LAUNCH"
Event = dict[str, Any]


# -- in the job --------------------------------------------------------------------------------------------------------


class Log:
    """Lines of JSON with the machine's monotonic clock, which all processes share."""

    def __init__(self) -> None:
        path = f"{os.environ[_LOG]}/{os.environ[_LAUNCH]}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: str, **fields: object) -> None:
        """Append one line."""
        line = {"at": time.monotonic(), "launch": os.environ[_LAUNCH], "pid": os.getpid(), "event": event, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def digest(tensors: dict[str, Any]) -> int:
    """A checksum of every byte."""
    from memckpt import _native

    crc = 0
    for tensor in tensors.values():
        crc = _native.crc32c(tensor.detach().reshape(-1).numpy().view("uint8"), crc)
    return crc


def measure_restores() -> None:
    """The job of `own` and `peer`: prints one JSON object from rank 0."""
    import numpy as np
    import torch
    from _training import big
    from mpi4py import MPI

    import memckpt
    from memckpt import _native

    world, rounds = MPI.COMM_WORLD, int(os.environ[_ROUNDS])
    training = big(int(os.environ[_BYTES]))
    tensors = training.tensors
    checkpointer = memckpt.Checkpointer(
        {"model": training.module, "optimizer": training.optimizer},
        name="bench-restore",
        every=1,
        redundancy=memckpt.Mirror(1),
        fresh=True,
        on_error="raise",
        quiet=True,
    )
    checkpointer.restore()
    for step in range(1, 4):
        training.work()
        training.update()
        checkpointer.step(step)
        checkpointer.wait()
    saved = digest(tensors)
    node = Path(os.environ["MEMCKPT_SHM"]) / f"memckpt-{os.getuid()}" / os.environ["MEMCKPT_NODE"]

    def slowest(value: float) -> float:
        out = np.array([value])
        world.Allreduce(MPI.IN_PLACE, out, op=MPI.MAX)
        return float(out[0])

    def restored(lose: Callable[[], object], source: str) -> float:
        checkpointer.wait()
        for tensor in tensors.values():
            tensor.zero_()
        time.sleep(SETTLE_S)
        world.Barrier()
        if world.rank == 0:
            lose()
        world.Barrier()
        begin = time.perf_counter()
        report = checkpointer.restore()
        seconds = slowest(time.perf_counter() - begin)
        assert (report.step, report.sources[0]) == (3, source), report
        assert digest(tensors) == saved, "restored wrong bytes"
        checkpointer.wait()
        return seconds

    def lose_seals() -> None:
        for seal in node.rglob("*.seal.json"):
            seal.unlink()

    def lose_all() -> None:
        for file in node.rglob("s-*"):
            file.unlink()

    source, target = (torch.ones(training.nbytes, dtype=torch.uint8) for _ in range(2))

    def copy() -> float:
        world.Barrier()
        begin = time.perf_counter()
        target.copy_(source)
        return slowest(time.perf_counter() - begin)

    def send() -> float:
        world.Barrier()
        begin = time.perf_counter()
        if world.rank == 1:
            world.Send(source.numpy(), 0)
        elif world.rank == 0:
            world.Recv(target.numpy(), 1)
        return slowest(time.perf_counter() - begin)

    def make_ready() -> float:
        """New pages for one rank, which the kernel has to clear first."""
        path = f"{os.environ['MEMCKPT_SHM']}/ready"
        world.Barrier()
        begin = time.perf_counter()
        if world.rank == 0:
            memory = _native.SharedMemory.create(path, training.nbytes)
            memory.populate(len(os.sched_getaffinity(0)))
        seconds = slowest(time.perf_counter() - begin)
        if world.rank == 0:
            memory.close()
            os.unlink(path)
        return seconds

    figures: dict[str, list[float]] = {}
    for turn in range(rounds + 1):  # the first one does not count
        for name, action in {
            "own": lambda: restored(lambda: None, "own"),
            "copy": copy,
            "peer": lambda: restored(lose_seals, "peer"),
            "send": send,
            "ready": make_ready,
            "peer_new_node": lambda: restored(lose_all, "peer"),
        }.items():
            seconds = action()
            if turn:
                figures.setdefault(name, []).append(seconds)
    checkpointer.close()
    if world.rank == 0:
        print(json.dumps({name: statistics.median(values) for name, values in figures.items()}), flush=True)


def train_until_killed() -> None:
    """The job of `back`: trains for ever, and says in its log what happens."""
    log = Log()
    log.say("started")
    import torch

    torch.set_num_threads(1)
    from _training import big

    import memckpt

    training = big(int(os.environ[_BYTES]))
    training.calibrate(0.02)
    log.say("imported")

    def train(ctx: memckpt.Context) -> None:
        begin = time.monotonic()
        checkpointer = memckpt.Checkpointer(
            {"model": training.module, "optimizer": training.optimizer},
            name="bench-back",
            every=1,
            redundancy=memckpt.Mirror(1),
            quiet=True,
        )
        made = time.monotonic()
        report = checkpointer.restore()
        log.say(
            "returned",
            rank=ctx.rank,
            generation=report.generation,
            step=report.step,
            seconds={"open": made - begin, **report.seconds},
            timeline=ctx.timeline,
            clock=time.time() - time.monotonic(),
            sources=report.sources,
        )
        first, protected = True, False
        for step in range(report.step + 1, report.step + 100_000):
            training.work()
            training.update()
            if first:
                log.say("resumed", rank=ctx.rank, generation=report.generation)
                first = False
            checkpointer.step(step)
            ctx.check()
            if not protected and checkpointer.stats().protected:
                protected = True
                log.say("protected", rank=ctx.rank, generation=report.generation)

    memckpt.run(train, active=2, verbose=False)


# -- outside of it -----------------------------------------------------------------------------------------------------


class Runs:
    """Starts jobs and reads what they say; its folder and the jobs' memory go with it."""

    def __init__(self, nbytes: int, rounds: int) -> None:
        self.rounds = rounds
        self._nbytes = nbytes
        self._folder = Path(tempfile.mkdtemp(prefix="memckpt-bench-"))
        self._memory = Path(tempfile.mkdtemp(prefix="memckpt-bench-", dir="/dev/shm"))
        self._launches = 0
        self._jobs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            self.end(job)
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)

    def start(self, processes: int, worker: str, *, ulfm: bool = False) -> subprocess.Popen[str]:
        """Start one mpirun; process i is on node i."""
        beside = Path(sys.executable).parent / "mpirun"
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            sys.exit("needs mpirun: pip install 'memckpt[mpi]'")
        self._launches += 1
        env = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "MEMCKPT_SHM": str(self._memory),
            _LOG: str(self._folder),
            _BYTES: str(self._nbytes),
            _ROUNDS: str(self.rounds),
            _LAUNCH: str(self._launches),
        }
        options = ["--with-ft", "ulfm"] if ulfm else []
        command = [mpirun, *options, "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
        command += [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--worker", worker]
        stderr = (self._folder / "stderr").open("ab")
        with stderr:
            job = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._jobs.append(job)
        return job

    def restores(self) -> dict[str, float]:
        """Seconds of `own`, `peer` and their limits."""
        job = self.start(2, "restores")
        out, _ = job.communicate(timeout=PATIENCE_S)
        if job.returncode:
            self._fail("the job of own and peer failed")
        figures: dict[str, float] = json.loads(out.splitlines()[-1])
        return figures

    def events(self, launch: int | None = None) -> list[Event]:
        """What a launch (the last one) said, in order."""
        paths = self._folder.glob(f"{self._launches if launch is None else launch}-*.jsonl")
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return sorted(lines, key=lambda line: line["at"])

    def wait_for(self, event: str, count: int, *, after: float = 0.0) -> list[Event]:
        """The first `count` lines of that kind since `after`."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = [line for line in self.events() if line["event"] == event and line["at"] > after]
            if len(found) >= count:
                return found[:count]
            if time.monotonic() > end:
                self._fail(f"no {count} times {event!r}")
            time.sleep(0.005)

    def end(self, job: subprocess.Popen[str]) -> None:
        """SIGKILL what is left of a job: mpirun, then the processes that it started."""
        if job.poll() is None:
            job.kill()
        job.wait()
        for line in self.events():
            try:
                if b"bench_recover" in Path(f"/proc/{line['pid']}/cmdline").read_bytes():
                    os.kill(line["pid"], signal.SIGKILL)
            except OSError:
                pass

    def _fail(self, what: str) -> None:
        tail = (self._folder / "stderr").read_text(errors="replace")[-4000:]
        sys.exit(f"{what}\n{json.dumps(self.events()[-10:], indent=1)}\n{tail}")


def come_back(runs: Runs, number: int) -> list[dict[str, float]]:
    """Send a signal to rank 1 of a job with a spare for each round. Milliseconds by phase, for each round."""
    job = runs.start(2 + runs.rounds, "back", ulfm=True)
    rounds = []
    after = 0.0
    for _ in range(runs.rounds):
        runs.wait_for("protected", 2, after=after)
        time.sleep(0.2)
        victim = next(e for e in reversed(runs.events()) if e["event"] == "returned" and e["rank"] == 1)
        hit = time.monotonic()
        os.kill(victim["pid"], number)
        rounds.append(_phases(runs, hit))
        after = hit
    runs.end(job)
    return rounds


def _phases(runs: Runs, hit: float) -> dict[str, float]:
    resumed = runs.wait_for("resumed", 2, after=hit)
    protected = runs.wait_for("protected", 2, after=hit)
    last = resumed[-1]
    returned = next(e for e in runs.events() if e["event"] == "returned" and e["at"] > hit and e["pid"] == last["pid"])
    ms = {"total": last["at"] - hit, "protected_again": protected[-1]["at"] - hit}
    timeline, clock = returned["timeline"], returned["clock"]
    if timeline:
        ms["detect"] = timeline["seen"] - clock - hit
        ms["leave"] = timeline["gathered"] - timeline["seen"]
        ms["regroup"] = timeline["regroup"]
    seconds = returned["seconds"]
    ms |= {name: seconds[name] for name in ("open", "inventory", "plan", "check", "fetch", "load") if name in seconds}
    ms["step"] = last["at"] - returned["at"]
    return {name: 1e3 * value for name, value in ms.items()}


def relaunch(runs: Runs) -> list[dict[str, float]]:
    """Kill rank 1 of a job without spares and start it again when it has ended."""
    job = runs.start(2, "back")
    runs.wait_for("protected", 2)
    time.sleep(0.2)
    victim = next(e for e in reversed(runs.events()) if e["event"] == "returned" and e["rank"] == 1)
    hit = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    job.wait(PATIENCE_S)
    ended = time.monotonic()
    runs.end(job)
    job = runs.start(2, "back")
    phases = _phases(runs, hit)
    phases["detect"] = 1e3 * (ended - hit)
    phases["launch"] = 1e3 * (max(e["at"] for e in runs.events() if e["event"] == "imported") - ended)
    runs.end(job)
    return [phases]


def median_round(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The round whose total is the (lower) median, so that its phases belong together."""
    return sorted(rounds, key=lambda phases: phases["total"])[(len(rounds) - 1) // 2]


def main() -> None:
    """Run and print."""
    names = ["restore", "back", "back_stopped", "back_relaunch"]
    parser = argparse.ArgumentParser(description="How long it takes to come back.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a small state, to see that everything works")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which parts")
    parser.add_argument("--rounds", type=int, default=0, help="failures of each kind, and restores")
    parser.add_argument("--worker", choices=["restores", "back"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        os.environ["MEMCKPT_NODE"] = os.environ["MEMCKPT_DOMAIN"] = f"node{os.environ['OMPI_COMM_WORLD_RANK']}"
        (measure_restores if arguments.worker == "restores" else train_until_killed)()
        return
    import _common

    results: list[_common.Result] = []
    nbytes = (16 if arguments.quick else 256) * MIB
    if "restore" in arguments.only:
        with Runs(nbytes, arguments.rounds or (2 if arguments.quick else 5)) as runs:
            ms = {name: 1e3 * seconds for name, seconds in runs.restores().items()}
        limit = _common.against("one raw MPI send + one plain copy", ms["send"] + ms["copy"])
        results.append(_common.result("own", ms["own"], "ms", _common.against("one plain copy", ms["copy"])))
        results.append(_common.result("peer", ms["peer"], "ms", limit))
        limit = _common.against("the same and new memory made ready", ms["send"] + ms["copy"] + ms["ready"])
        results.append(_common.result("peer_new_node", ms["peer_new_node"], "ms", limit))
    for name in names[1:]:
        if name not in arguments.only:
            continue
        with Runs(nbytes, arguments.rounds or (1 if arguments.quick else 2)) as runs:
            if name == "back_relaunch":
                rounds = relaunch(runs)
            else:
                rounds = come_back(runs, signal.SIGKILL if name == "back" else signal.SIGSTOP)
        phases = median_round(rounds)
        results.append(_common.result(name, phases.pop("total"), "ms"))
        protected_again = phases.pop("protected_again")
        if name == "back":
            results.append(_common.result("regroup", phases["regroup"], "ms"))
            results.append(_common.result("protected_again", protected_again, "ms"))
        results += [_common.result(f"{name}_{phase}", value, "ms") for phase, value in phases.items()]
    _common.report("recover", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
