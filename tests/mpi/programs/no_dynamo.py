"""Keep torch from loading its compiler, which costs every process more than a second and is never used here.

``torch.optim`` imports ``torch._dynamo`` only to mark functions as not to be compiled.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Put a stand-in where torch would import the compiler from; before the first optimizer is made."""
    module = types.ModuleType("torch._dynamo")

    def disable(function: Callable[..., Any], recursive: bool = True, **_: Any) -> Callable[..., Any]:
        return function

    module.disable = disable  # type: ignore[attr-defined]
    module.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = module
    torch._dynamo = module  # type: ignore[attr-defined]
