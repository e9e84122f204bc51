"""A toy training for `memckpt.resilient.run`: sums over MPI, a split of it, and gloo, with deaths on request.

Arguments: active ranks, steps, then events ``GENERATION:RANK:STEP:WHAT`` with WHAT one of kill, stop, raise, lost,
exit, killsoon, hang, return. Each rank prints one JSON line when a generation begins and one when `run` returns or
raises.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import weakref

import numpy as np

from memckpt import faults, resilient
from memckpt.errors import PeerLost

ACTIVE, STEPS = int(sys.argv[1]), int(sys.argv[2])
EVENTS = [tuple(text.split(":")) for text in sys.argv[3:]]
MODE = os.environ.get("TOY", "mpi,split")
if "gloo" in MODE:
    import torch
    import torch.distributed as dist
PAUSE_S = float(os.environ.get("TOY_PAUSE", "0.002"))
WORLD_RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps({"world_rank": WORLD_RANK, "time": time.time(), **fields}) + "\n")
    sys.stdout.flush()


def event(ctx: resilient.Context, step: int) -> bool:
    for generation, rank, at, what in EVENTS:
        if (int(generation), int(rank), int(at)) == (ctx.generation, ctx.rank, step):
            say(event=what, rank=ctx.rank, generation=ctx.generation)
            if what in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            elif what == "raise":
                raise ValueError("a bug of this rank's own")
            elif what == "lost":
                raise PeerLost("as a Checkpointer says it")
            elif what == "exit":
                os._exit(3)
            elif what == "killsoon":
                threading.Timer(float(os.environ["TOY_SOON"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif what == "hang":
                time.sleep(3600)
            elif what == "return":
                return True
    return False


class Held:
    """Stands for the state that a generation's frames hold."""


HELD: list[weakref.ref[Held]] = []


def train(ctx: resilient.Context) -> str:
    say(alive=sum(ref() is not None for ref in HELD), generation=ctx.generation)
    held = Held()
    HELD.append(weakref.ref(held))
    say(
        begin=ctx.generation, rank=ctx.rank, timeline=ctx.timeline, resilient=ctx.resilient,
        failures=[[f.generation, [[loss.logical, loss.place.node] for loss in f.lost], f.reason] for f in ctx.failures],
    )  # fmt: skip
    event(ctx, -1)
    if "gloo" in MODE:
        ctx.init_process_group("gloo")
    half = ctx.split(ctx.rank % 2, ctx.rank) if "split" in MODE else None
    for step in range(STEPS):
        if event(ctx, step):
            return "early"
        if "mpi" in MODE:
            x, y = np.full(64, ctx.rank + 1.0), np.empty(64)
            ctx.comm.Allreduce(x, y)
            assert y[0] == ctx.world * (ctx.world + 1) / 2
        if half is not None:
            x, y = np.ones(4), np.empty(4)
            half.Allreduce(x, y)
            assert y[0] == half.size
        if "gloo" in MODE:
            t = torch.ones(1000)
            dist.all_reduce(t)
            assert float(t[0]) == ctx.world
        if "check" in MODE:
            ctx.check()
        if "progress" in MODE:
            ctx.progress(step)
        time.sleep(PAUSE_S)
    return "done"


def arm(rule: str) -> None:
    """``WORLD_RANK:POINT:kill|stop``: this process, at the first such point after the first generation has begun."""
    world_rank, point, what = rule.split(":")
    if int(world_rank) != WORLD_RANK:
        return

    def hook(name: str, rank: int, generation: int) -> None:
        if name == point and generation > 0:
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    faults.arm(hook)


for rule in filter(None, os.environ.get("TOY_FAULTS", "").split(",")):
    arm(rule)
OPTIONS = json.loads(os.environ.get("TOY_OPTIONS", "{}"))
try:
    value = resilient.run(train, active=ACTIVE, **OPTIONS)
except resilient.RunFailed as error:
    say(failed=str(error), rank=error.rank)
    raise
say(value=value)
