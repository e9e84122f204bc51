"""The storage tier of one rank as the training thread sees it: what is on its way, and what went wrong where.

Errors of one rank's writer are told to all: the rank says so at the exchanges until everybody knows whose error it is,
and then sends its words to every other rank, without anyone waiting for them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import numpy as np

from memckpt.assembly import Parts
from memckpt.comm.base import FIRST_TAG, Communicator, Request
from memckpt.memory.slots import SlotPool
from memckpt.saving.decide import Agreed
from memckpt.saving.engine import Outcome
from memckpt.saving.persist import Manner, Persister, Task, Trouble

_TAG = FIRST_TAG + 31_000
_STAGGER_S, _LONGEST_STAGGER_S, _FEW_RANKS = 0.02, 30.0, 16
_MESSAGE_NBYTES = 2048
_TEXT_NBYTES = 1500


def open_durable(parts: Parts, pool: SlotPool, first_exchange: int) -> Durable | None:
    """The storage tier of a generation that begins; None where nothing is persisted. Local."""
    session, persist = parts.session, parts.options.persist
    if session.storage is None or persist is None:
        return None
    stagger_s = min(_STAGGER_S * session.world, _LONGEST_STAGGER_S) if session.world > _FEW_RANKS else 0.0
    manner = Manner(
        bytes_per_s=None if persist.bandwidth is None else persist.bandwidth / len(parts.node_ranks),
        stagger_s=stagger_s if persist.stagger_s is None else persist.stagger_s,
        deadline_s=persist.deadline_s,
        keep=persist.keep,
    )
    persister = Persister(session.storage, run=session.run, rank=session.rank, world=session.world, manner=manner)
    return Durable(persister, pool, parts.decide_comm, first_exchange)


class Durable:
    """Training thread only, but for `on_outcome`, which the engine calls.

    Parameters
    ----------
    persister : Persister
    pool : SlotPool
        Where committed slots are leased.
    comm : Communicator
        For what went wrong; the one of the exchanges.
    first_exchange : int
        Number of the first exchange of this generation.
    """

    def __init__(self, persister: Persister, pool: SlotPool, comm: Communicator, first_exchange: int) -> None:
        self._persister, self._pool, self._comm = persister, pool, comm
        self._lock = threading.Lock()
        self._metrics: Mapping[str, float] | None = None
        self._pending: int | None = None  # decided, and neither dropped nor written yet
        self._heard = first_exchange - 2
        self._telling: list[tuple[list[Request], np.ndarray]] = []
        self._hearing: list[tuple[Request, np.ndarray]] = []
        self._troubles: list[Trouble] = []

    @property
    def idle(self) -> bool:
        """Nothing that was decided is left to be written here."""
        return self._pending is None and not self._persister.busy

    @property
    def troubled(self) -> bool:
        """There is an error of this rank that the others have not heard of."""
        return self._persister.troubled

    @property
    def persisted_step(self) -> int:
        """Newest step that this rank knows to be complete in storage; -1 for none."""
        return self._persister.persisted_step

    @property
    def last_s(self) -> float:
        """Seconds that the last checkpoint took to write."""
        return self._persister.last_s

    def decided(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """`step` is being saved and goes to storage once it is committed, with what the user said of it."""
        with self._lock:
            self._pending, self._metrics = step, metrics

    def on_outcome(self, outcome: Outcome) -> None:
        """A save has ended; where it is the one that was decided on, its slot is leased and written."""
        with self._lock:
            if outcome.protect or outcome.step != self._pending:
                return
            if outcome.committed and not self._submit():
                self._persister.complain(outcome.step, "the last checkpoint was still being written")
            self._pending = None

    def _submit(self) -> bool:
        slot = None if self._persister.busy else self._pool.lease(self._comm.rank)
        seal = slot.read_seal() if slot is not None else None
        if slot is None or seal is None:
            return False
        self._persister.submit(Task(slot, seal, self._metrics, lambda: self._pool.release(slot)))
        return True

    def salvage(self) -> None:
        """Write the newest committed step, where nothing is under way: for the end by an error after a preemption, when
        ranks can agree on nothing any more. Complete if they all come to the same step.
        """
        with self._lock:
            if self.idle:
                self._metrics = None
                self._submit()

    # -- what went wrong -----------------------------------------------------------------------------------------------

    def hear(self, agreed: Agreed) -> None:
        """Learn from an exchange whether some rank has an error to tell, and begin to listen, or to tell."""
        rank = agreed.troubled
        # The exchange after the one that told was begun before anybody had heard: it says the same once more.
        if rank is None or agreed.index <= self._heard + 1:
            self._move()
            return
        self._heard = agreed.index
        message = np.zeros(_MESSAGE_NBYTES, dtype=np.uint8)
        if rank == self._comm.rank:
            trouble = self._persister.take_trouble()
            assert trouble is not None
            self._note(trouble)
            text = trouble.text.encode(errors="replace")[:_TEXT_NBYTES].decode(errors="ignore")
            payload = msgspec.msgpack.encode((trouble.rank, trouble.step, text))
            payload = len(payload).to_bytes(2, "little") + payload
            message[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
            others = [r for r in range(self._comm.size) if r != rank]
            self._telling.append(([self._comm.isend(message, r, _TAG) for r in others], message))
        else:
            self._hearing.append((self._comm.irecv(message, rank, _TAG), message))
        self._move()

    def _move(self) -> None:
        self._telling = [(left, m) for sends, m in self._telling if (left := [s for s in sends if not s.test()])]
        while self._hearing and self._hearing[0][0].test():
            message = self._hearing.pop(0)[1].tobytes()
            payload = message[2 : 2 + int.from_bytes(message[:2], "little")]
            self._note(Trouble(*msgspec.msgpack.decode(payload, type=tuple[int, int, str])))

    def _note(self, trouble: Trouble) -> None:
        self._troubles.append(trouble)
        self._persister.give_up(trouble.step)

    @property
    def hears(self) -> bool:
        """Words of other ranks, or to them, are still on their way."""
        self._move()
        return bool(self._telling or self._hearing)

    def take_troubles(self) -> list[Trouble]:
        """What went wrong on any rank since the last call."""
        troubles, self._troubles = self._troubles, []
        return troubles

    # -- the end -------------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Somebody waits: no pacing any more for what is under way."""
        self._persister.hurry()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing of this rank is under way; False when time ran out."""
        return self._persister.drain(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Break off what is under way; what was half written is no checkpoint."""
        self._persister.stop(timeout_s)
