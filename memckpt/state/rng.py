"""The random streams of a process, as something to save."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch

from memckpt.errors import StateError


class RNG:
    """The random streams of this process: Python, NumPy, torch on the CPU, and on this rank's CUDA device if in use."""

    def state_dict(self) -> dict[str, Any]:
        """The states as plain values. Local."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, np.array(words, np.uint32).tobytes(), gauss],
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if "numpy.random" in sys.modules:
            name, keys, *rest = _numpy_state()
            state["numpy"] = [name, np.asarray(keys, np.uint32).tobytes(), *rest]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the streams of `state`. Local."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        if "numpy" in state:
            name, keys, *rest = state["numpy"]
            np.random.set_state(  # noqa: NPY002
                (name, np.frombuffer(keys, np.uint32), *rest)
            )
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))


def _numpy_state() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=True)  # noqa: NPY002
    if not isinstance(state, tuple):
        raise StateError("NumPy's global generator is not MT19937; save the generator as an object of its own")
    return state


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
