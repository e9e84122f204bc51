"""Commit: the vote of all ranks on one step.

A rank votes yes when its own snapshot and every replica that it must hold are sealed in its own node's memory. The vote
is a minimum over all ranks, in rounds: a rank that is not ready answers "not yet", so a round always ends soon while
every rank lives, however long a training thread takes to reach its fence, and a deadline on a round means a lost peer,
not a slow one. The vote has three ends: all said yes in one round (committed), one said no (dropped), an error or the
deadline (unknown). Unknown is an exception here and never turned into a no.
"""

from __future__ import annotations

import time
import zlib

import numpy as np

from memckpt import faults
from memckpt.comm.base import Communicator, Request
from memckpt.format.seal import Generation

NO, NOT_YET, YES = 0, 1, 2
_NOBODY = np.iinfo(np.int64).max
_REASON_NBYTES = 1024
_REASON_TAG = 32_500
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


class Vote:
    """The vote on one step. Driven by `poll` in the background; collective over the communicator.

    Attributes
    ----------
    outcome : bool or None
        True: committed. False: dropped. None: not known (yet).
    reason : str
        After a no: the rank that said no, and why.
    """

    def __init__(self, comm: Communicator, step: int, generation: Generation) -> None:
        self._comm = comm
        self._step = step
        self._mark = zlib.crc32(f"{generation.counter} {generation.id}".encode())
        self._request: Request | None = None
        self._values = np.zeros(6, dtype=np.int64)
        self._pause_s = _FIRST_PAUSE_S
        self._resume = 0.0
        self._cast = NOT_YET
        self._reasons: list[Request] = []
        self._reason_buffer: np.ndarray | None = None
        self.outcome: bool | None = None
        self.reason = ""
        self.rank_of_no: int | None = None

    def poll(self, ballot: int, reason: str = "", *, cause_elsewhere: bool = False) -> bool:
        """Take part with what this rank has to say now; True if something moved.

        Parameters
        ----------
        ballot : int
            `YES`, `NOT_YET` or `NO`; once yes or no it must stay so.
        reason : str
            Why no.
        cause_elsewhere : bool
            The no only follows from what another rank did, whose word is asked for first.
        """
        if self.outcome is not None:
            return False
        if self._reason_buffer is not None:
            return self._collect_reason()
        if self._request is None:
            if ballot == NOT_YET and time.monotonic() < self._resume:
                return False
            self._start(ballot, cause_elsewhere)
            return True
        if not self._request.test():
            return False
        self._request = None
        self._count(reason)
        return True

    def _start(self, ballot: int, cause_elsewhere: bool) -> None:
        if ballot == YES and self._cast != YES:
            faults.point("commit.vote", self._comm.rank, self._step)
        self._cast = ballot
        who = self._comm.rank + cause_elsewhere * self._comm.size if ballot == NO else _NOBODY
        self._values[:] = (ballot, self._step, -self._step, self._mark, -self._mark, who)
        self._request = self._comm.iallreduce_min(self._values)

    def _count(self, reason: str) -> None:
        ballot, low, high, mark, unmark, who = (int(v) for v in self._values)
        if low != -high or mark != -unmark:
            self.reason = f"ranks voted on different steps ({low} to {-high}) or generations"
            self.outcome = False
        elif ballot == YES:
            faults.point("commit.counted", self._comm.rank, self._step)
            self.outcome = True
        elif ballot == NO:
            self._ask_reason(who % self._comm.size, reason)
        else:
            self._resume = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _ask_reason(self, who: int, reason: str) -> None:
        """The first rank that said no for a cause of its own tells every other one why."""
        self.rank_of_no = who
        self._reason_buffer = np.zeros(_REASON_NBYTES, dtype=np.uint8)
        if who == self._comm.rank:
            text = reason.encode(errors="replace")[:_REASON_NBYTES]
            self._reason_buffer[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            others = (r for r in range(self._comm.size) if r != who)
            self._reasons = [self._comm.isend(self._reason_buffer, r, _REASON_TAG) for r in others]
        else:
            self._reasons = [self._comm.irecv(self._reason_buffer, who, _REASON_TAG)]

    def _collect_reason(self) -> bool:
        waiting = [r for r in self._reasons if not r.test()]
        moved = len(waiting) < len(self._reasons)
        self._reasons = waiting
        if not waiting:
            assert self._reason_buffer is not None
            text = self._reason_buffer.tobytes().rstrip(b"\0").decode(errors="replace")
            self.reason = f"rank {self.rank_of_no}: {text}"
            self.outcome = False
            return True
        return moved
