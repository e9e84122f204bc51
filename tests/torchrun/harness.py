"""Run real jobs under torchrun from tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.mpi.harness import Result, launch

#: torchrun 2.13 keeps the store of one attempt for the next, whose ranks then find the addresses of dead ones there
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(
    n: int,
    script: str | Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    timeout_s: float = 60.0,
) -> Result:
    """Run `script` (a path, or Python source) on `n` ranks to its end; killed when `timeout_s` has passed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    command.append(f"--max-restarts={max_restarts}")
    return launch(command, script, *args, env={**ENVIRONMENT, **(env or {})}).finish(timeout_s)
