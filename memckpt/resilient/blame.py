"""Why training ended: because a peer was lost, or by an error of its own."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from memckpt.errors import PeerLost
from memckpt.resilient import groups
from memckpt.resilient.world import peer_loss

if TYPE_CHECKING:
    from memckpt.resilient.context import Context

SETTLE_S = 1.0
"""How long an error that may be a lost peer's, or may not, waits for the loss to be seen."""


def chain(error: BaseException) -> list[BaseException]:
    """`error` and what led to it, each once. Local."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            pending += [one.__cause__, one.__context__]
    return found


def means_loss(error: BaseException, ctx: Context) -> bool:
    """Whether training ended because of a peer, rather than by an error of its own. Local, waits up to `SETTLE_S`."""
    links = chain(error)
    if any(isinstance(link, PeerLost) or peer_loss(link) for link in links):
        return True
    lost = ctx.lost.wait(SETTLE_S)  # an error in a collective is often faster than the notice of the loss
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return False
    return lost or any(groups.failure(link) for link in links)


def describe(error: BaseException) -> str:
    """`error` in one line. Local."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def clear(error: BaseException) -> None:
    """Free what the frames of a dead generation hold: its tensors may be as large as the state. Local."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
