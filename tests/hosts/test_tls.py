"""With certificates the hosts of a run are encrypted, know each other, and need no trusted network (20 s)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.namespaces import Host, Hosts, skip_reason
from tests.hosts.workers import certificates, tls_variables, workers
from titan_rl.errors import ConfigError
from titan_rl.hosts.facts import TLS, transport

needs_hosts = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")
pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
    pytest.mark.timeout(600),
]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RUN = (
    *("--recipe", "cpu_smoke", "--placement.trainer", "host0"),
    *("--generator.engine", "simulated", "--generator.tensor-parallel", "1"),
    *("--generator.count", "1", "--trainer.data-parallel", "1"),
)


STRANGER = (
    "import socket, ssl, sys; host, port, authority = sys.argv[1:]; "
    "connection = socket.create_connection((host, int(port))); "
    "context = ssl.create_default_context(cafile=authority); "
    "print(context.wrap_socket(connection, server_hostname=host).recv(1))"
)
"""A client without a certificate."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as up:
        yield up


def started(host: Host, command: list[str], tls: dict[str, str]) -> subprocess.Popen[str]:
    return host.start(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | tls, stdin=subprocess.DEVNULL)


def train(host: Host, address: str, runs: Path, tls: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a run over this host and the worker's."""
    command = [sys.executable, "-m", "titan_rl.train", *RUN, "--hosts", address, "--logging.directory", str(runs)]
    run = started(host, command, tls)
    said, _ = run.communicate(timeout=500)
    return run.returncode, said


@needs_hosts
@pytest.mark.acceptance  # in CI: the disturbed run of test_runs_over_hosts
def test_a_run_with_certificates_needs_no_trusted_network(hosts: Hosts, ours: Path, tmp_path: Path) -> None:
    with workers(hosts[1:], 17003, ours) as (address,):
        code, said = train(hosts[0], address, tmp_path, tls_variables(ours, ADDRESSES[0]))
    assert code == 0, said[-3000:]
    assert "encrypted and mutually authenticated" in said


@needs_hosts
def test_a_worker_with_certificates_takes_no_strangers(hosts: Hosts, ours: Path) -> None:
    with workers(hosts[1:], certified=ours):
        stranger = [sys.executable, "-c", STRANGER, hosts[1].address, "17000", str(ours / "ca.pem")]
        assert "certificate required" in started(hosts[0], stranger, {}).communicate(timeout=60)[0]


@needs_hosts
@pytest.mark.parametrize("theirs", ["another authority", pytest.param("no TLS", marks=pytest.mark.acceptance)])
def test_a_host_that_does_not_fit_is_named(theirs: str, hosts: Hosts, ours: Path, tmp_path: Path) -> None:
    port, there = (17002, certificates(tmp_path)) if theirs == "another authority" else (17001, None)
    with workers(hosts[1:], port, there) as (address,):
        code, said = train(hosts[0], address, tmp_path, tls_variables(ours, ADDRESSES[0]))
    assert code == 1 and f"host1 ({address}) takes connections and starts nothing" in said, said[-3000:]
    assert "or only one of the hosts has TLS, or their certificates do not fit" in said


def test_what_is_wrong_with_the_variables_is_named(ours: Path) -> None:
    whole = tls_variables(ours, ADDRESSES[0])
    assert transport(["10.0.0.2:1"], whole) == "tls"
    assert transport([], {}) == "tcp"
    with pytest.raises(ConfigError, match="cannot use 10.0.0.2:1 without --trusted-network"):
        transport(["10.0.0.2:1"], {})
    with pytest.raises(ConfigError, match="HYPERACTOR_TLS_KEY is not set: set all three"):
        transport([], {name: file for name, file in whole.items() if name != TLS[1]})
    with pytest.raises(ConfigError, match=r"of no use: .*nowhere\.pem"):
        transport([], whole | {TLS[0]: "/nowhere.pem"})
    with pytest.raises(ConfigError, match="of no use: .*mismatch"):
        transport([], whole | {TLS[1]: str(ours / f"{ADDRESSES[1]}.key")})
