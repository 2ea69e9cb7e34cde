"""`titan-rl worker` on hosts, for tests and benches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.hosts.namespaces import Host

PORT = 17000


def lend(
    host: Host, port: int = PORT, *, behind: Sequence[str] = (), tls: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a worker; returns when it listens.

    Args:
        behind: a command that runs another one.
        tls: variables with its certificates; otherwise its network is trusted.
    """
    listen = [sys.executable, "-m", "titan_rl.cli", "worker", "--listen", f"{host.address}:{port}"]
    trusted = [] if tls else ["--trusted-network"]
    worker = host.start([*behind, *listen, *trusted], env=os.environ | (tls or {}))
    assert any("listens on" in line for line in worker.stdout)  # Monarch says something too
    return worker


@contextmanager
def workers(hosts: Sequence[Host], port: int = PORT, tls: dict[str, str] | None = None) -> Iterator[list[str]]:
    """A worker on each of these hosts; their addresses."""
    lent = []
    try:
        for host in hosts:
            lent.append(lend(host, port, tls=tls))
        yield [f"{host.address}:{port}" for host in hosts]
    finally:
        for worker in lent:
            worker.terminate()
            worker.wait(30)
