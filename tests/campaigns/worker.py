"""The training that a campaign kills: says in a log of its own what it does, and what it is told.

Environment: CAMPAIGN_LOGS (directory), CAMPAIGN_LAUNCH (number of this launch), CAMPAIGN_ACTIVE (ranks that train),
CAMPAIGN_NODES (JSON: node of each process; without it, its host), CAMPAIGN_STEPS (steps to train after each restore),
CAMPAIGN_PAUSE (seconds between steps), CAMPAIGN_PATIENT (wait for each save).
"""

from __future__ import annotations

import json
import os
import time

if "CAMPAIGN_NODES" in os.environ:
    _WORLD_RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["MEMCKPT_NODE"] = os.environ["MEMCKPT_DOMAIN"] = json.loads(os.environ["CAMPAIGN_NODES"])[_WORLD_RANK]

import torch

import memckpt
from memckpt import Checkpointer, Context, Mirror
from tests.protocol.lives import Training

PATIENT = bool(os.environ.get("CAMPAIGN_PATIENT"))
PAUSE_S = float(os.environ.get("CAMPAIGN_PAUSE", "0.02"))
STEPS = int(os.environ["CAMPAIGN_STEPS"])
LAUNCH = int(os.environ["CAMPAIGN_LAUNCH"])
DEADLINE_S = 30.0


class Log:
    """Lines of JSON, each written whole, so that they outlive the process as they are."""

    def __init__(self) -> None:
        path = os.path.join(os.environ["CAMPAIGN_LOGS"], f"{LAUNCH:04d}-{os.getpid()}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: str, **fields: object) -> None:
        """Append one line."""
        line = {"at": time.monotonic_ns(), "launch": LAUNCH, "pid": os.getpid(), "event": event, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


log = Log()


def train(ctx: Context) -> None:
    """One life: restore, then train and save each step."""
    training = Training()
    checkpointer = Checkpointer(
        training.states,
        name="campaign",
        redundancy=Mirror(1),
        deadline=DEADLINE_S,
        every=1,
        on_busy="wait" if PATIENT else "skip",
        quiet=True,
    )
    log.say("entering", rank=ctx.rank)
    report = checkpointer.restore()
    where = {"rank": ctx.rank, "generation": report.generation}
    log.say("returned", **where, step=report.step, digest=training.digest(), sources=report.sources)
    committed = 0

    def hear() -> None:
        nonlocal committed
        stats = checkpointer.stats()
        if stats.protected and stats.committed_step > committed:
            committed = stats.committed_step
            log.say("committed", **where, step=committed)

    for step in range(report.step + 1, report.step + STEPS + 1):
        training.train(report.generation * 10_000 + step * 10 + ctx.rank)
        log.say("begun", **where, step=step, digest=training.digest())
        checkpointer.step(step)
        if PATIENT:
            checkpointer.fence()
            checkpointer.wait()
        end = time.monotonic() + PAUSE_S
        while True:
            hear()
            ctx.check()
            if time.monotonic() >= end:
                break
            time.sleep(PAUSE_S / 10)
    log.say("finished", **where)


if __name__ == "__main__":
    torch.set_num_threads(1)
    memckpt.run(train, active=int(os.environ["CAMPAIGN_ACTIVE"]), verbose=False)
