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

import msgspec
import numpy as np

from memckpt import faults
from memckpt.comm.base import Communicator, Request
from memckpt.errors import ProtocolError
from memckpt.format.seal import Generation

NO, NOT_YET, YES = 0, 1, 2
_NOBODY = np.iinfo(np.int64).max
_REASON_NBYTES = 1024
_REASON_TAG = 32_500
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


class Why(msgspec.Struct, frozen=True, array_like=True):
    """Why a step was dropped.

    Attributes
    ----------
    rank : int
        Where the cause lies, which need not be the rank that tells: a holder knows why an owner did not seal.
    text : str
    """

    rank: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}" if self.rank >= 0 else self.text


NO_REASON = Why(-1, "")


class Vote:
    """The vote on one step. Driven by `poll` in the background; collective over the communicator.

    Attributes
    ----------
    outcome : bool or None
        True: committed. False: dropped. None: not known (yet).
    reason : Why
        After a no: which rank it comes from, and why.
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
        self._teller = -1
        self._reasons: list[Request] = []
        self._reason_buffer: np.ndarray | None = None
        self.outcome: bool | None = None
        self.reason = NO_REASON

    def poll(self, ballot: int, why: Why = NO_REASON) -> bool:
        """Take part with what this rank has to say now; True if something moved.

        Parameters
        ----------
        ballot : int
            `YES`, `NOT_YET` or `NO`; once yes or no it must stay so.
        why : Why
            Of a no.
        """
        if self.outcome is not None:
            return False
        if self._reason_buffer is not None:
            return self._collect_reason()
        if self._request is None:
            if ballot == NOT_YET and time.monotonic() < self._resume:
                return False
            self._start(ballot)
            return True
        if not self._request.test():
            return False
        self._request = None
        self._count(why)
        return True

    def _start(self, ballot: int) -> None:
        if ballot == YES and self._cast != YES:
            faults.point("commit.vote", self._comm.rank, self._step)
        self._cast = ballot
        who = self._comm.rank if ballot == NO else _NOBODY
        self._values[:] = (ballot, self._step, -self._step, self._mark, -self._mark, who)
        self._request = self._comm.iallreduce_min(self._values)

    def _count(self, why: Why) -> None:
        ballot, low, high, mark, unmark, who = (int(v) for v in self._values)
        if low != -high or mark != -unmark:
            self.reason = Why(-1, f"ranks voted on different steps ({low} to {-high}) or generations")
            self.outcome = False
        elif ballot == YES:
            faults.point("commit.counted", self._comm.rank, self._step)
            self.outcome = True
        elif ballot == NO:
            self._ask_reason(who, why)
        else:
            self._resume = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _ask_reason(self, teller: int, why: Why) -> None:
        """The first rank that said no tells every other one why."""
        self._teller = teller
        self._reason_buffer = np.zeros(_REASON_NBYTES, dtype=np.uint8)
        if teller == self._comm.rank:
            text = why.text.encode(errors="replace")[: _REASON_NBYTES - 64].decode(errors="ignore")
            payload = msgspec.msgpack.encode(Why(why.rank, text))
            self._reason_buffer[: 2 + len(payload)] = np.frombuffer(
                len(payload).to_bytes(2, "little") + payload, dtype=np.uint8
            )
            others = (r for r in range(self._comm.size) if r != teller)
            self._reasons = [self._comm.isend(self._reason_buffer, r, _REASON_TAG) for r in others]
        else:
            self._reasons = [self._comm.irecv(self._reason_buffer, teller, _REASON_TAG)]

    def _collect_reason(self) -> bool:
        waiting = [r for r in self._reasons if not r.test()]
        moved = len(waiting) < len(self._reasons)
        self._reasons = waiting
        if not waiting:
            assert self._reason_buffer is not None
            message = self._reason_buffer.tobytes()
            try:
                self.reason = msgspec.msgpack.decode(message[2 : 2 + int.from_bytes(message[:2], "little")], type=Why)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"rank {self._teller} said no and sent no valid reason: {error}") from error
            self.outcome = False
            return True
        return moved
