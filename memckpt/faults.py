"""Named points at which a test can make this process die, stop or fail: one between every two steps of the protocol.

In normal use a point is one attribute load and a comparison. A test arms it either in its own process with `arm`, or in
a child through ``MEMCKPT_FAULT="name[:rank[:step]]=kill|stop|raise"`` (several, separated by commas).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

Hook = Callable[[str, int, int], None]


class Injected(RuntimeError):
    """What an armed point raises for ``raise``."""


def _from_environment(text: str) -> Hook | None:
    rules: list[tuple[str, int | None, int | None, str]] = []
    for rule in filter(None, text.split(",")):
        where, _, action = rule.partition("=")
        name, rank, step = [*where.split(":"), "", ""][:3]
        rules.append((name, int(rank) if rank else None, int(step) if step else None, action or "kill"))
    if not rules:
        return None

    def hook(name: str, rank: int, step: int) -> None:
        for n, r, s, action in rules:
            if n == name and r in (None, rank) and s in (None, step):
                if action == "raise":
                    raise Injected(f"injected at {name}, rank {rank}, step {step}")
                os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    return hook


_hook: Hook | None = _from_environment(os.environ.get("MEMCKPT_FAULT", ""))


def arm(hook: Hook | None) -> None:
    """Call `hook(name, rank, step)` at every point from now on; ``None`` disarms. Local."""
    global _hook
    _hook = hook


def point(name: str, rank: int = -1, step: int = -1) -> None:
    """A place where a test may let this rank die. Local."""
    if _hook is not None:
        _hook(name, rank, step)
