"""`titan-rl worker` on hosts, for tests and benches, and the certificates of hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.hosts.namespaces import Host
from titan_rl.hosts.facts import TLS

PORT = 17000
MANUAL = Path(__file__).resolve().parents[2] / "titan_rl" / "run" / "README.md"


def certificates(directory: Path) -> Path:
    """Those of the first three hosts, made as the manual says."""
    (commands,) = re.findall(r"```text\n(openssl .*?)```", MANUAL.read_text(), re.DOTALL)
    commands = commands.replace("10.0.0.", "10.77.0.")
    subprocess.run(["sh", "-e", "-c", commands], cwd=directory, check=True, capture_output=True)
    return directory


def tls_variables(directory: Path, address: str) -> dict[str, str]:
    names = f"{address}.pem", f"{address}.key", "ca.pem"
    return dict(zip(TLS, (str(directory / name) for name in names), strict=True))


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
def workers(hosts: Sequence[Host], port: int = PORT, certified: Path | None = None) -> Iterator[list[str]]:
    """A worker on each of these hosts; their addresses. `certified`: the directory of their certificates."""
    lent = []
    try:
        for host in hosts:
            lent.append(lend(host, port, tls=tls_variables(certified, host.address) if certified else None))
        yield [f"{host.address}:{port}" for host in hosts]
    finally:
        for worker in lent:
            worker.terminate()
            worker.wait(30)
