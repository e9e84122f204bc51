"""How often there is a new checkpoint, what that costs, and what it saves: fixed, tuned, continuous, adaptive.

``python benchmarks/bench_continuous.py [--json] [--quick] [--long] [--directory DIR]``

The experiment of Orbax's report on continuous checkpointing (developers.googleblog.com, 31 March 2026), smaller: one
rank that trains on one core and leaves the other to the rest, as accelerators leave the host; 64 MiB of state, steps of
about 20 ms; each policy decides for memory and for storage. They take turns of `TURN_STEPS` steps with the same
training, in changing order, and one turn of each round goes without any checkpoint. While others train a policy's clock
stands still, and a turn includes the steps until its last save has ended (`_turns.py`). Turns in which the costs are
learnt do not count. What is restored is compared with what was saved before anything is timed.

NAME is ``fixed``: every 100 steps. ``tuned``: the optimum of Young and Daly, for both tiers, from the costs that were
measured at the start and an MTBF of 10,000 steps (2.8 h at a step per second: one of the 466 interruptions in 54 days
of Llama 3). ``continuous``: `Continuous()`. ``adaptive``: `Adaptive(0.01)`, which is not told the MTBF.
``adaptive_told``: the same with it. ``cost_memory`` and ``cost_storage`` are the costs by which the tuned one saves
every ``tuned_memory`` and ``tuned_storage`` steps.

p50_interval_NAME, p95_interval_NAME
    Steps from one complete checkpoint in memory to the next, against ``fixed``. `..._storage_NAME`: in storage.
overhead_NAME
    Added step time as a share of the step time without checkpoints: the mean over rounds of the paired turns.
    `..._low`, `..._high`: its 95% confidence interval (Student's t). `step_NAME`: the mean step.
lost_NAME
    Mean work lost, in steps, over 200 failures at random moments of the recorded run (drawn once, the same for all; a
    tenth of them takes memory with it, so that storage has to do).
goodput_NAME
    Share of the time that is work and is not lost, at that MTBF; without the time to come back, which is the same for
    all. Against the tuned interval.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import shutil
import statistics
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import _common
import torch
from _training import MIB, Training, big
from _turns import Moment, Trainee

from memckpt import Checkpointer, Persist
from memckpt.policy.adaptive import optimum_s
from memckpt.policy.save import Adaptive, Continuous, EveryNSteps, SavePolicy

WORK_S = 0.01
"""Length of the forward and backward; the update of the optimizer takes as long again."""
TURN_STEPS = 25
FIXED_STEPS = 100
MTBF_STEPS = 10_000
UNCOVERED = 0.1
"""Share of the failures after which there is nothing in memory; what `Adaptive` assumes, too."""
FAILURES = 200
LONGEST_LEARNING = 40  # turns


@dataclass
class Measured:
    """What the rounds showed of one policy; `overheads` are the added step time of each, as a share."""

    overheads: list[float]
    first_step: int
    moments: list[Moment]

    def intervals(self, tier: str) -> list[int]:
        """Steps between complete checkpoints that followed each other."""
        steps = [getattr(m, f"in_{tier}") for m in self.moments]
        complete = sorted({s for s in steps if s >= self.first_step})
        return [b - a for a, b in itertools.pairwise(complete)]

    def overhead(self) -> tuple[float, float, float]:
        """Mean added step time as a share, and the ends of its confidence interval."""
        mean = statistics.mean(self.overheads)
        half = student_t(len(self.overheads) - 1) * statistics.stdev(self.overheads) / math.sqrt(len(self.overheads))
        return mean, mean - half, mean + half

    def lost_steps(self) -> float:
        """Mean work lost over the simulated failures."""
        luck = random.Random(200)
        ends = [m.at_s for m in self.moments]
        first = next(i for i, m in enumerate(self.moments) if m.step >= self.first_step)
        lost = []
        for _ in range(FAILURES):
            at_s = luck.uniform(ends[first], ends[-1])
            index = min(bisect_right(ends, at_s), len(ends) - 1) - 1
            done = self.moments[index]
            part = (at_s - done.at_s) / (ends[index + 1] - done.at_s)
            there = done.in_storage if luck.random() < UNCOVERED else done.in_memory
            lost.append(done.step + part - max(0, there))
        return statistics.mean(lost)

    def goodput(self) -> float:
        """Share of the time that is work and is not lost."""
        return (1 - self.lost_steps() / MTBF_STEPS) / (1 + self.overhead()[0])


def student_t(freedom: int) -> float:
    """The 97.5% quantile. Source: Abramowitz and Stegun 26.7.5; within 1% from three degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = [
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    ]
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def percentile(values: list[int], share: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def validate(training: Training, memory: Path, files: Path) -> None:
    """What comes back, from memory and from storage, is what was saved."""
    checkpointer = Checkpointer(
        {"model": training.module, "optimizer": training.optimizer},
        name="bench-validate",
        every=1,
        persist=Persist(files, every=1),
        fresh=True,
        quiet=True,
    )
    checkpointer.restore()
    training.update()
    checkpointer.step(1)
    checkpointer.wait(persisted=True)
    saved = {name: tensor.clone() for name, tensor in training.tensors.items()}
    for source in ("own", "storage"):
        for tensor in training.tensors.values():
            tensor.zero_()
        report = checkpointer.restore()
        assert (report.step, report.source) == (1, source), report
        assert all(torch.equal(tensor, saved[name]) for name, tensor in training.tensors.items()), "other bytes"
        checkpointer.wait()
        for seal in memory.rglob("*.seal.json"):
            seal.unlink()
    checkpointer.close()


class Tuning(NamedTuple):
    """What a save and a persist cost in seconds of training, and the steps between them that this makes best."""

    cost_memory_s: float
    cost_storage_s: float
    memory_steps: int
    storage_steps: int


def learn(training: Training, files: Path) -> tuple[list[Trainee], Tuning]:
    """Train until the costs are known everywhere; the runs to be compared, and how one of them is tuned."""
    bare = Trainee("none", training, None, files)
    step_s = bare.train(TURN_STEPS)
    mtbf_s = MTBF_STEPS * step_s

    def both(policy: SavePolicy) -> tuple[SavePolicy, SavePolicy]:
        return policy, policy

    adaptive = Trainee("adaptive", training, both(Adaptive(0.01)), files)
    told = Trainee("adaptive_told", training, both(Adaptive(0.01, mtbf_s, UNCOVERED)), files)
    learners = [adaptive, told]
    for _ in range(LONGEST_LEARNING):
        for trainee in learners:
            trainee.train(TURN_STEPS)
        contexts = [t.context for trainee in learners for t in trainee.turns]
        if all(c is not None and None not in (c.cost_s, c.persist_cost_s) for c in contexts):
            break
    known = adaptive.turns[0].context
    if known is None or known.cost_s is None or known.persist_cost_s is None:
        raise SystemExit(f"costs are not known after {LONGEST_LEARNING * TURN_STEPS} steps: {known}")
    memory = max(1, round((optimum_s(known.cost_s, mtbf_s) + known.cost_s) / step_s))
    storage = optimum_s(known.persist_cost_s, mtbf_s / UNCOVERED) + known.persist_cost_s
    storage = memory * max(1, round(storage / step_s / memory))  # what goes to storage is saved to memory first
    others = [
        Trainee("fixed", training, both(EveryNSteps(FIXED_STEPS)), files),
        Trainee("tuned", training, (EveryNSteps(memory), EveryNSteps(storage)), files),
        Trainee("continuous", training, both(Continuous()), files),
    ]
    for trainee in others:
        trainee.train(TURN_STEPS)
    return [bare, *others, *learners], Tuning(known.cost_s, known.persist_cost_s, memory, storage)


def measure(trainees: list[Trainee], rounds: int) -> tuple[dict[str, Measured], dict[str, float]]:
    """Turn by turn; what each policy showed, and the mean step of each in seconds."""
    firsts = {trainee.name: len(trainee.moments) + 1 for trainee in trainees}
    steps: dict[str, list[float]] = {trainee.name: [] for trainee in trainees}
    luck = random.Random(1)
    for _ in range(rounds):
        for trainee in luck.sample(trainees, len(trainees)):  # nobody always comes after the same one
            steps[trainee.name].append(trainee.train(TURN_STEPS))
    bare = steps["none"]
    usual = statistics.mean(bare)
    measured = {
        trainee.name: Measured(
            [(one - without) / usual for one, without in zip(steps[trainee.name], bare, strict=True)],
            firsts[trainee.name],
            trainee.moments,
        )
        for trainee in trainees
        if trainee.name != "none"
    }
    return measured, {name: statistics.mean(seconds) for name, seconds in steps.items()}


def results_of(measured: dict[str, Measured], steps: dict[str, float], tuning: Tuning) -> list[_common.Result]:
    """Every figure."""
    results = [
        _common.result("cost_memory", tuning.cost_memory_s * 1e3, "ms"),
        _common.result("cost_storage", tuning.cost_storage_s * 1e3, "ms"),
        _common.result("tuned_memory", tuning.memory_steps, "steps"),
        _common.result("tuned_storage", tuning.storage_steps, "steps"),
    ]
    fixed = _common.against("the fixed interval", FIXED_STEPS)
    for tier, infix in (("memory", ""), ("storage", "_storage")):
        for name, one in measured.items():
            if intervals := one.intervals(tier):  # else there were fewer than two of them in that time
                for share in (50, 95):
                    value = percentile(intervals, share / 100)
                    results.append(_common.result(f"p{share}_interval{infix}_{name}", value, "steps", fixed))
    bare = _common.against("no checkpoints", steps["none"] * 1e3)
    tuned = _common.against("the tuned interval", measured["tuned"].goodput())
    for name, one in measured.items():
        results.append(_common.result(f"step_{name}", steps[name] * 1e3, "ms", bare))
        for suffix, value in zip(("", "_low", "_high"), one.overhead(), strict=True):
            results.append(_common.result(f"overhead_{name}{suffix}", value, "share"))
        results.append(_common.result(f"lost_{name}", one.lost_steps(), "steps"))
        results.append(_common.result(f"goodput_{name}", one.goodput(), "share", tuned))
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How often to save: fixed, tuned, continuous, adaptive.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--quick", action="store_true", help="a small state and few steps, to see that everything works"
    )
    parser.add_argument("--long", action="store_true", help="five times as many rounds: narrower intervals")
    parser.add_argument("--directory", metavar="DIR", help="on the disk to write to; default: that of temporary files")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    arguments = parse()
    torch.set_num_threads(1)
    files = Path(tempfile.mkdtemp(prefix="memckpt-bench-", dir=arguments.directory))
    memory = Path(tempfile.mkdtemp(prefix="memckpt-bench-", dir="/dev/shm"))
    os.environ["MEMCKPT_SHM"] = str(memory)
    try:
        training = big((4 if arguments.quick else 64) * MIB)
        training.calibrate(WORK_S / (4 if arguments.quick else 1))
        validate(training, memory, files)
        trainees, tuning = learn(training, files)
        measured, steps = measure(trainees, 4 if arguments.quick else 100 if arguments.long else 20)
        for trainee in trainees:
            trainee.close()
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(files, ignore_errors=True)
    _common.report("continuous", results_of(measured, steps, tuning), as_json=arguments.json)


if __name__ == "__main__":
    main()
