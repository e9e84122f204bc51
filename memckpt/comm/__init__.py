"""Transports: one contract (`Communicator`), MPI and threads below it, small collectives with deadlines above."""

from __future__ import annotations

import os
import sys
from typing import Any

from memckpt.comm.base import FIRST_TAG, Communicator, Request, wait
from memckpt.comm.local import LocalComm, LocalGroup
from memckpt.comm.speed import transport_speed
from memckpt.comm.trees import allgather, allreduce_min, barrier, broadcast, gather

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

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def detect(comm: Any = None) -> Communicator:
    """The transport that fits how this process was started. Collective under MPI.

    Parameters
    ----------
    comm : Communicator or mpi4py.MPI.Intracomm, optional
        A `Communicator` is returned as it is; an mpi4py communicator is duplicated. ``None``: MPI under mpirun (or
        when the program uses MPI already), else one rank by itself.

    Returns
    -------
    Communicator
        `kind` and `name` say which one it is.

    Raises
    ------
    UsageError
        MPI is wanted and cannot be had, with the reason.
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is None and not any(key in os.environ for key in _LAUNCHED):
        module = sys.modules.get("mpi4py.MPI")
        if module is None or not module.Is_initialized() or module.Is_finalized() or module.COMM_WORLD.Get_size() == 1:
            return LocalComm()
    from memckpt.comm.mpi import MPIComm

    return MPIComm(comm)
