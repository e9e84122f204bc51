"""Several hosts on one machine: network namespaces on a bridge, each with its own /dev/shm, IPC, host name and hosts
file.

As root only. A host is a process that sleeps in namespaces of its own; its memory lives as long as that process does.
Losing power is a SIGKILL of everything in its network namespace, after which its /dev/shm is gone; `boot` gives it an
empty one. What hosts share: the file system but for /dev/shm and /etc/hosts, and the numbers of processes. Nothing of
the machine itself is changed: names of interfaces carry this process's number, and /etc/hosts is replaced inside the
namespaces only.

The first host is the one that mpirun is started on; it stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

AGENT = Path(__file__).parent / "agent"
STATE_VARIABLE = "MEMCKPT_TEST_HOSTS"
_SUBNET = "10.78.0"
_BOOT_S = 10.0


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why hosts cannot be made here, None if they can; found out by making one namespace of each kind."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    name = f"mk{os.getpid() % 100_000}t"
    try:
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "del", name)
        _ip("netns", "add", name)
        try:
            probe = [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "--ipc",
                "--mount",
                "mount",
                "-t",
                "tmpfs",
                "tmpfs",
                "/dev/shm",
            ]
            subprocess.run(probe, check=True, capture_output=True)
        finally:
            _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"namespaces are not permitted here: {error.stderr}"
    return None


class Hosts:
    """`count` hosts, named h1, h2, ...; a context manager that leaves nothing behind.

    Parameters
    ----------
    count : int
    shm : str
        Size of each host's /dev/shm, as mount takes it.
    """

    def __init__(self, count: int, shm: str = "512m") -> None:
        self.names = [f"h{i + 1}" for i in range(count)]
        self._shm = shm
        self._prefix = f"mk{os.getpid() % 100_000}"
        self._state = Path(tempfile.mkdtemp(prefix="memckpt-hosts-"))
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._down()

    def _netns(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def _up(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{_SUBNET}.{i + 1} {name}" for i, name in enumerate(self.names))]
        (self._state / "hosts").write_text("\n".join(lines) + "\n")
        bridge = f"{self._prefix}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for i, host in enumerate(self.names):
            netns, cable = self._netns(host), f"{self._prefix}v{i + 1}"
            _ip("netns", "add", netns)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", netns)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("-n", netns, "addr", "add", f"{_SUBNET}.{i + 1}/24", "dev", "eth0")
            _ip("-n", netns, "link", "set", "eth0", "up")
            _ip("-n", netns, "link", "set", "lo", "up")
            self.boot(host)

    def boot(self, host: str) -> None:
        """Start a host with an empty /dev/shm."""
        assert host not in self._holders, f"{host} is up"
        script = (
            f"hostname {host} && mount -t tmpfs -o size={self._shm} tmpfs /dev/shm"
            f" && mount --bind {self._state / 'hosts'} /etc/hosts && exec sleep infinity"
        )
        command = ["ip", "netns", "exec", self._netns(host), "unshare", "--uts", "--ipc", "--mount", "sh", "-c", script]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._holders[host] = holder
        (self._state / host).write_text(str(holder.pid))
        end = time.monotonic() + _BOOT_S
        while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
            if holder.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"host {host} did not boot")
            time.sleep(0.01)

    def kill(self, host: str) -> None:
        """The host loses power: every process on it is gone, and its memory with them."""
        holder = self._holders.pop(host)
        for _ in range(100):  # a process may be forking
            pids = [int(pid) for pid in _ip("netns", "pids", self._netns(host)).split()]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            if holder.pid in pids:
                holder.wait()
            time.sleep(0.01)
        else:
            raise RuntimeError(f"processes of {host} do not die")
        holder.wait()

    def end_programs(self) -> None:
        """Kill what runs on the hosts, as after a job; their memory stays."""
        for host, holder in self._holders.items():
            for pid in map(int, _ip("netns", "pids", self._netns(host)).split()):
                if pid != holder.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def command(self, host: str, *arguments: str) -> list[str]:
        """The command line that runs `arguments` on a host."""
        pid = str(self._holders[host].pid)
        return ["nsenter", "-t", pid, "--mount", "--uts", "--ipc", "--net", "--", *arguments]

    def run(self, host: str, *arguments: str, timeout_s: float = 30.0) -> str:
        """Run a command on a host and return what it prints."""
        done = subprocess.run(
            self.command(host, *arguments), check=True, capture_output=True, text=True, timeout=timeout_s
        )
        return done.stdout

    def mpirun(
        self,
        mpirun: str,
        slots: Mapping[str, int],
        program: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
    ) -> subprocess.Popen[bytes]:
        """Start an MPI job over hosts, from the first one.

        Parameters
        ----------
        slots : mapping of str to int
            Ranks for each host.
        env : mapping of str to str
            Given to every rank.
        output : Path
            File for what the job prints.
        """
        where = ",".join(f"{host}:{count}" for host, count in slots.items())
        exports = [part for name in env for part in ("-x", name)]
        arguments = ["--host", where, "-n", str(sum(slots.values())), "--prtemca", "plm_ssh_agent", str(AGENT)]
        arguments += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "btl_tcp_if_include", "eth0"]
        arguments += ["--mca", "coll", "^han", *exports]
        full = {**os.environ, **env, STATE_VARIABLE: str(self._state)}
        full |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        with output.open("wb") as stream:
            return subprocess.Popen(
                self.command(self.names[0], mpirun, *arguments, *program),
                env=full,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _down(self) -> None:
        for host in list(self._holders):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill(host)
        for i, host in enumerate(self.names):
            for what in (("link", "del", f"{self._prefix}v{i + 1}"), ("netns", "del", self._netns(host))):
                subprocess.run(["ip", *what], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._prefix}b"], capture_output=True, check=False)
        shutil.rmtree(self._state, ignore_errors=True)
