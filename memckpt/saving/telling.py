"""Tells the user of saves that failed behind training: at the next call, as a warning or an error."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from memckpt.errors import SaveFailed
from memckpt.saving.persist import Trouble
from memckpt.saving.tally import Tally

_STACKLEVEL = 5  # the user's line that called the Checkpointer


def tell(tally: Tally, troubles: Sequence[Trouble], *, run: str, on_error: Literal["warn", "raise"]) -> None:
    """Warn of everything that failed since the last call, or raise the first of it. Local.

    Parameters
    ----------
    tally : Tally
        Knows which saves ended in no.
    troubles : sequence of Trouble
        Steps that were committed and could not be written to storage.
    run : str
    on_error : {"warn", "raise"}

    Raises
    ------
    SaveFailed
        With ``on_error="raise"``.
    """
    errors = []
    for trouble in troubles:
        tally.add(persist_failed=1)
        tally.note(f"step {trouble.step}: not persisted: rank {trouble.rank}: {trouble.text}")
        text = f"step {trouble.step} was committed, but not persisted: rank {trouble.rank}: {trouble.text}"
        errors.append(SaveFailed(text, run=run, step=trouble.step, rank=trouble.rank))
    for outcome in tally.take_failed():
        if outcome.protect:  # nothing to decide for the user: it is tried again until it is a yes
            _warn(
                f"the restored step {outcome.step} is not protected yet, its replicas are sent again: {outcome.reason}"
            )
            continue
        rank = outcome.reason.rank if outcome.reason.rank >= 0 else None
        text = f"step {outcome.step} was not committed: {outcome.reason}"
        errors.append(SaveFailed(text, run=run, step=outcome.step, rank=rank))
    if errors and on_error == "raise":
        raise errors[0]
    for error in errors:
        _warn(str(error))


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=_STACKLEVEL)
