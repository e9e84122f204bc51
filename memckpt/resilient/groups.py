"""torch.distributed process groups that can be torn down under a training thread that hangs in one of their
collectives.

Gloo has no abort that frees a waiting thread: destroying the group from another thread leaves it waiting when its own
neighbours in the collective live (seen with torch 2.13). What frees it is the end of a connection. So every rank shuts
the connections that its gloo listeners accepted: each pair of ranks has one, and both ends wake with an error.
Listening sockets must stay as they are: shutting one ends the process in gloo's `accept`.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from memckpt.errors import PeerLost, UsageError
from memckpt.resilient.world import finish

if TYPE_CHECKING:
    from mpi4py import MPI

_SIOCGIFADDR = 0x8915

CONNECT_S = 10.0
"""Seconds for gloo's ranks to connect to each other, and more for many ranks."""


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """(inode, duplicate) of every TCP socket of this process; the duplicate is closed by the caller."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            # A duplicate keeps naming this socket even when the number is closed and given to another file meanwhile.
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            yield os.fstat(copy.fileno()).st_ino, copy
        else:
            copy.close()


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listeners() -> set[int]:
    """Inodes of the listening TCP sockets of this process. Local."""
    found = set()
    for inode, sock in _sockets():
        with sock:
            if _listens(sock):
                found.add(inode)
    return found


def cut(before: set[int]) -> int:
    """Shut every connection accepted by a listener of this process that is not in `before`; how many. Local.

    MPI's own connections belong to listeners that are older than any generation.
    """
    found = list(_sockets())
    try:
        ports = {s.getsockname()[1] for inode, s in found if inode not in before and _listens(s)}
        n = 0
        for _, sock in found:
            try:
                if not _listens(sock) and sock.getsockname()[1] in ports:
                    sock.shutdown(socket.SHUT_RDWR)
                    n += 1
            except OSError:
                pass  # its peer is gone already
        return n
    finally:
        for _, sock in found:
            sock.close()


def _address() -> str:
    """This host's address for its peers: that of the interface named to gloo or NCCL, else what its name resolves to,
    else that of the default route. Not MASTER_ADDR, since rank 0 may come to run on another node.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        name = os.environ.get(variable, "").split(",")[0].strip("=^")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                request = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                return socket.inet_ntoa(request[20:24])
            except OSError:
                pass  # not set, or a pattern
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "127.0.0.1"
    if found.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing; asks the kernel for the route only
                found = probe.getsockname()[0]
            except OSError:
                pass  # no route: this host is alone
    return found


def init(comm: MPI.Intracomm, backend: str, generation: int, timeout_s: float, options: dict[str, Any]) -> None:
    """``torch.distributed.init_process_group`` over the ranks of `comm`, with a store of its own. Collective.

    Raises
    ------
    UsageError
        A default process group exists already.
    PeerLost
        A peer is gone.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        raise UsageError("torch.distributed is initialized already; leave it to ctx.init_process_group")
    rank, size = comm.Get_rank(), comm.Get_size()
    timeout = datetime.timedelta(seconds=timeout_s)
    # While gloo connects, nothing frees a thread that waits for a peer which has died: only this shorter time does.
    gloo = backend == "gloo" or "cpu:gloo" in backend
    connect = min(timeout, datetime.timedelta(seconds=CONNECT_S + size / 50)) if gloo else timeout
    where = np.zeros(256, dtype=np.uint8)
    server: Any = None
    if rank == 0:
        # Bound here and handed over, so that no other process can take the port in between.
        listener = socket.create_server(("", 0), backlog=max(128, size))
        port = listener.getsockname()[1]
        server = TCPStore(
            "127.0.0.1", port, size, True, timeout=connect, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        text = f"{_address()} {port}".encode()
        where[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    finish(comm.Ibcast(where, 0), timeout_s, "address of the store")
    host, _, port_text = where.tobytes().rstrip(b"\0").decode().partition(" ")
    try:
        store = server or TCPStore(host, int(port_text), size, False, timeout=connect, wait_for_workers=False)
        dist.init_process_group(
            backend,
            store=PrefixStore(f"memckpt-{generation}", store),
            rank=rank,
            world_size=size,
            timeout=connect,
            **options,
        )
        if gloo:
            dist.distributed_c10d._set_pg_timeout(timeout)
        store.set_timeout(timeout)
    except dist.DistError as error:
        raise PeerLost(f"init_process_group: {error}") from error


def abort(before: set[int]) -> None:
    """Free a thread that waits in a process group; called from another thread. Local."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    c10d = dist.distributed_c10d
    if any(map_[0] == "nccl" for map_ in list(c10d._world.pg_map.values())):
        c10d._abort_process_group()
    cut(before)


def destroy() -> None:
    """Destroy every process group, if there is one. Local; called when no thread is in one any more."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception:  # it is broken, and what it raises then differs from release to release
            dist.distributed_c10d.GroupMember.WORLD = None
    # What failed half-way has counted a group all the same; the count is part of the next name in the store, which
    # must be the same on a survivor and on a spare that never had a group.
    if hasattr(dist.distributed_c10d._world, "group_count"):
        dist.distributed_c10d._world.group_count = 0


def failure(error: BaseException) -> bool:
    """Whether `error` is one that torch.distributed raises when a peer is gone. Local."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    if isinstance(error, dist.DistError):
        return True
    marks = ("gloo", "nccl error", "closed by peer", "connection reset by peer", "broken pipe")
    return type(error) is RuntimeError and any(mark in str(error).lower() for mark in marks)
