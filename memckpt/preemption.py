"""Being told to stop: SIGTERM and SIGUSR1 are noted, the user's own handlers still run, and training ends by itself.

Nothing is saved from a signal handler. The note rides on the next exchange of all ranks, which agree on one step to
save and stop at; past the grace time after a SIGTERM the process ends rather than hang.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Watch:
    """Notes the signals that announce a preemption, from `start` until `stop`. Local; main thread.

    Parameters
    ----------
    grace_s : float
        Seconds after a SIGTERM after which the process ends, come what may.

    Attributes
    ----------
    told : bool
        A signal has come.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._before: dict[int, _Handler] = {}
        self._told_at: float | None = None
        self._timer: threading.Timer | None = None

    @property
    def told(self) -> bool:
        return self._told_at is not None

    def grace_left_s(self) -> float:
        """Seconds until the grace time is over; all of it while no signal has come."""
        return self._grace_s if self._told_at is None else self._told_at + self._grace_s - time.monotonic()

    def start(self) -> None:
        """Take the signals over; what handled them before is still called. Does nothing, and says so, in another
        thread than the main one, where Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "memckpt cannot watch for SIGTERM and SIGUSR1 from a thread that is not the main one; a preemption "
                "will not lead to a checkpoint",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def look_again(self) -> None:
        """Put ourselves before a handler that was set after us. Called at each step."""
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) != self._handle:
                self._before[number] = signal.signal(number, self._handle)

    def stop(self) -> None:
        """Give the signals back, where they are still ours."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._pid:  # a forked worker has inherited this: it has nothing to save
            if callable(before):
                before(number, frame)
            elif number != signal.SIGUSR1 and before != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self._told_at is None:
            self._told_at = time.monotonic()
        if number == signal.SIGTERM and self._timer is None:
            self._timer = threading.Timer(self._grace_s, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        if callable(before):
            before(number, frame)

    def _give_up(self) -> None:
        os.write(2, f"memckpt: {self._grace_s:g} s of grace after SIGTERM are over; this process ends\n".encode())
        os._exit(128 + signal.SIGTERM)
