"""Optimizers tell when their step begins: the fence, and the sign that training goes on as the lazy copy expects."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class StepHooks:
    """Calls a method before each step of some optimizers, and notes which of them stepped. Training thread.

    Parameters
    ----------
    optimizers : iterable of torch.optim.Optimizer
    before : bound method
        Held weakly: the optimizers must not keep its owner alive.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], before: Callable[[], object]) -> None:
        self._before: Any = weakref.WeakMethod(before)
        self._fired: dict[int, torch.optim.Optimizer] = {}
        me = weakref.ref(self)
        pid = os.getpid()

        # A compiled step breaks its graph here, and does not trace what we do.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            hooks = me()
            if hooks is not None and pid == os.getpid():  # in a forked child they are the parent's business
                hooks._fire(optimizer)

        self._handles = [optimizer.register_step_pre_hook(before_step) for optimizer in optimizers]

    def _fire(self, optimizer: torch.optim.Optimizer) -> None:
        before = self._before()
        if before is not None:
            before()
            self._fired[id(optimizer)] = optimizer

    def take(self) -> list[torch.optim.Optimizer]:
        """The optimizers that stepped since the last call."""
        fired, self._fired = list(self._fired.values()), {}
        return fired

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
