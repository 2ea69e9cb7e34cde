"""Hosts in network namespaces: what each has of its own, what a cut link does, and that nothing is left."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.namespaces import Host, Hosts, skip_reason

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason())


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, shared_memory=1 << 20) as hosts:
        yield hosts


def says(host: Host, command: str) -> str:
    process = host.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    return process.communicate()[0].strip()


def test_each_host_has_its_own_address_name_and_shared_memory(hosts: Hosts) -> None:
    for host in hosts:
        assert f"inet {host.address}/24" in says(host, f"ip address show {host.interface}")
        assert says(host, "cat /proc/sys/kernel/hostname") == host.name
        assert [says(host, f"getent hosts {other.name}").split() for other in hosts] == [
            [other.address, other.name] for other in hosts
        ]
    assert len({host.address for host in hosts} | {host.name for host in hosts}) == 4
    says(hosts[0], "echo here > /dev/shm/file")
    assert says(hosts[0], "cat /dev/shm/file; df --output=size /dev/shm | tail -1").split() == ["here", "1024"]
    assert says(hosts[1], "ls /dev/shm") == ""
    assert not Path("/dev/shm/file").exists()


_ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = server.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""

_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.settimeout(0.3)
for line in sys.stdin:
    try:
        if line.strip():
            connection.sendall(line.encode())
        print(connection.recv(100).decode().strip() or "closed", flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


def test_a_cut_host_is_silent_until_its_link_is_mended_and_a_killed_one_closes(hosts: Hosts) -> None:
    near, far = hosts
    server = far.run([sys.executable, "-S", "-c", _ECHO, far.address], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"listening\n"
    client = near.run(
        [sys.executable, "-S", "-c", _CLIENT, far.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def sends(text: str) -> str:
        client.stdin.write(f"{text}\n")
        return client.stdout.readline().strip()

    assert sends("one") == "one"
    far.cut()
    assert sends("two") == "silence"
    far.mend()
    while (answer := sends("")) == "silence":  # until TCP sends again
        pass
    assert answer == "two"
    far.kill()
    assert server.returncode == -signal.SIGKILL
    assert sends("") == "closed"
    assert "python" not in says(far, "cat /proc/[0-9]*/comm")
    client.stdin.close()


def test_nothing_is_left_after_the_block() -> None:
    before = _resources()
    with Hosts(2) as hosts:
        process = hosts[1].run(["sleep", "inf"])
        assert _resources() != before
    assert process.returncode == -signal.SIGKILL
    assert _resources() == before


def _resources() -> tuple[object, ...]:
    own = Path("/proc/self")
    mounts = (own / "mounts").read_text()
    return len(list((own / "fd").iterdir())), threading.active_count(), mounts, socket.if_nameindex()
