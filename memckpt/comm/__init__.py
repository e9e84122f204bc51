"""Transports: one contract (`Communicator`); MPI, torch.distributed and threads below it, small collectives with
deadlines above.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from memckpt.comm.base import FIRST_TAG, Communicator, Request, wait
from memckpt.comm.local import LocalComm, LocalGroup
from memckpt.comm.speed import transport_speed
from memckpt.comm.trees import allgather, allreduce_min, barrier, broadcast, gather
from memckpt.errors import UsageError

__all__ = [
    "FIRST_TAG",
    "Communicator",
    "LocalComm",
    "LocalGroup",
    "Request",
    "allgather",
    "allreduce_min",
    "barrier",
    "broadcast",
    "detect",
    "gather",
    "transport_speed",
    "wait",
]

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def detect(comm: Any = None) -> Communicator:
    """The transport that fits how this process was started. Collective where there are several ranks.

    Parameters
    ----------
    comm : Communicator or mpi4py.MPI.Intracomm, optional
        A `Communicator` is returned as it is; an mpi4py communicator is duplicated. ``None``: MPI under mpirun (or
        when the program uses MPI already), torch.distributed under torchrun (or when the program uses it already), else
        one rank by itself.

    Returns
    -------
    Communicator
        `kind` and `name` say which one it is.

    Raises
    ------
    UsageError
        `comm` is something else; or MPI or torch.distributed is wanted and cannot be had, with the reason.
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is not None:
        module = sys.modules.get("mpi4py.MPI")
        if module is None or not isinstance(comm, module.Comm):
            raise UsageError(f"comm takes a memckpt.comm.Communicator or an mpi4py communicator, not {comm!r}")
    if comm is not None or _under_mpi():
        from memckpt.comm.mpi import MPIComm

        return MPIComm(comm)
    if _under_torch():
        from memckpt.comm.torch import TorchComm

        return TorchComm()
    return LocalComm()


def _under_mpi() -> bool:
    if any(key in os.environ for key in _LAUNCHED):
        return True
    module = sys.modules.get("mpi4py.MPI")
    return (
        module is not None
        and bool(module.Is_initialized())
        and not module.Is_finalized()
        and module.COMM_WORLD.Get_size() > 1
    )


def _under_torch() -> bool:
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return bool(module.get_world_size() > 1)
    return _TORCHRUN in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
