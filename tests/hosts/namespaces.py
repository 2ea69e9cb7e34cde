"""Several hosts on one machine, for tests, benches and the chaos program. Needs root on Linux and `ip`.

    with Hosts(3) as hosts:
        worker = hosts[1].run([sys.executable, "worker.py", hosts[1].address])
        hosts[1].cut()

- A host has its own address, interface, loopback, ports, host name, process ids, /proc and /dev/shm. It knows the names
  of all. Its other files are this machine's, like a file system that all hosts share.
- The hosts reach each other through one bridge and nothing else: neither this process, nor the internet, nor the hosts
  of another `Hosts`, which has the same addresses.
- Nothing outlives this process, even if it is killed: the namespaces have no names, and the first process of each host
  ends when the pipe from this process closes. The kernel then kills all others of the host.

Each host has a thread here whose children are born on the host. So the process that `run` returns is the command
itself: its pid, signals and exit code are real.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
"""CLONE_NEW… of linux/sched.h."""

_FIRST_PROCESS = """
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs names /dev/shm
echo "$1" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
mount -t tmpfs -o size=$0,mode=1777 shm /dev/shm
echo up
exec env --ignore-signal=CHLD cat  # so the kernel reaps the orphans that this process adopts
"""

_libc = ctypes.CDLL(None, use_errno=True)


class Hosts(Sequence["Host"]):
    """`count` hosts, up inside the `with` block.

    Args:
        count: at most 250.
        shared_memory: size of each host's /dev/shm, bytes.
    """

    def __init__(self, count: int, *, shared_memory: int = 256 << 20) -> None:
        self._switch = _Network()
        self._hosts: list[Host] = []
        try:
            self._switch("ip", "link add bridge type bridge", "link set bridge up")
            for number in range(1, count + 1):
                self._hosts.append(Host(number, count, self._switch, shared_memory))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill everything on every host and remove the network."""
        for host in self._hosts:
            host.close()
        self._switch.close()


class Host:
    """One host. `Hosts` makes it."""

    interface = "net0"

    def __init__(self, number: int, count: int, switch: _Network, shared_memory: int) -> None:
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self._switch = switch
        self._port = f"port{number}"
        names = ["127.0.0.1 localhost", *(f"10.77.0.{other} host{other}" for other in range(1, count + 1))]
        self._first_command = ["sh", "-e", "-c", _FIRST_PROCESS, str(shared_memory), "\n".join(names)]
        self._network = _Network()
        self._processes: list[subprocess.Popen[Any]] = []
        try:
            switch(
                "ip",
                f"link add {self._port} type veth peer name {self.interface} netns {self._network.path}",
                f"link set {self._port} master bridge up",
            )
            self._network(
                "ip",
                "link set lo up",
                f"address add {self.address}/24 dev {self.interface}",
                f"link set {self.interface} up",
            )
            self._boot()
        except BaseException:
            self._network.close()
            raise

    def run(self, command: Sequence[str], env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, in the current directory.

        Args:
            env: its whole environment; None: this process's.
            options: of `subprocess.Popen`.
        """
        options = {"cwd": os.getcwd(), **options}
        process = self.call(subprocess.Popen, command, env=env, **options)
        self._processes.append(process)
        return process

    def start(self, command: Sequence[str], env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """As `run`; what it prints and its errors are one text, in its `stdout`."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        return self.run(command, env, **options)

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call it in a thread whose network and file systems are this host's. Process ids in it are this machine's, and
        so /proc is of no use there."""
        return self._resident.submit(function, *args, **options).result()

    def holds(self, pid: int) -> bool:
        """Whether a process of this machine is on this host."""
        return os.path.samefile(f"/proc/{pid}/ns/net", self._network.path)

    def kill(self) -> None:
        """SIGKILL everything on this host, and return when it is gone. Then the host is up again: empty, with an empty
        /dev/shm, and with the same address. Its peers see closed connections; after `cut` they see nothing."""
        self._halt()
        self._boot()

    def cut(self) -> None:
        """Pull the cable. What the host sends or should receive is lost without an error; within the host its address
        still works."""
        self._switch("ip", f"link set {self._port} down")

    def mend(self) -> None:
        """Plug the cable in again."""
        self._switch("ip", f"link set {self._port} up")

    def limit(self, bits_per_second: int) -> None:
        """Limit what this host sends to all others together, and what it receives, to so many bits per second each."""
        burst = max(1 << 17, bits_per_second // 800)  # bytes; 10 ms, and more than the largest packet
        queue = f"tbf rate {bits_per_second}bit burst {burst} latency 50ms"
        self._network("tc", f"qdisc replace dev {self.interface} root {queue}")
        self._switch("tc", f"qdisc replace dev {self._port} root {queue}")

    def close(self) -> None:
        self._halt()
        self._network.close()

    def _boot(self) -> None:
        self._resident = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        self._resident.submit(self._move_in).result()
        self._first = self.call(
            subprocess.Popen, self._first_command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._first.stdout.readline() != b"up\n":
            raise OSError(f"{self.name} did not start: its first process could not mount its file systems")

    def _move_in(self) -> None:
        _call(_libc.setns, self._network.descriptor, _NEWNET)
        _call(_libc.unshare, _NEWNS | _NEWUTS | _NEWIPC | _NEWPID)
        socket.sethostname(self.name)

    def _halt(self) -> None:
        self._first.kill()
        for process in self._processes:  # the first process remains until all others are reaped
            process.wait()
        self._processes.clear()
        with self._first:
            pass
        self._resident.shutdown()


class _Network:
    """A network namespace. It lives as long as its descriptor or a process in it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.descriptor = self._thread.submit(self._make).result()
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @staticmethod
    def _make() -> int:
        _call(_libc.unshare, _NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def __call__(self, program: str, *commands: str) -> None:
        """Run commands of `ip` or `tc` in it."""
        batch = "\n".join(commands)
        self._thread.submit(subprocess.run, [program, "-batch", "-"], input=batch, text=True, check=True).result()

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self.descriptor)


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function.__name__}: {os.strerror(ctypes.get_errno())}")


@functools.cache
def skip_reason() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"{' and '.join(missing)} of iproute2 not installed"
    try:
        Hosts(1).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine cannot make network namespaces: {error}"
    return ""
