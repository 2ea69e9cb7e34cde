"""run/README.md, "From laptop to cluster": its commands train over three hosts, as written but for the addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.namespaces import Host, Hosts, skip_reason

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-"), pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "titan_rl" / "run" / "README.md"
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[str]:
    """The block that begins with this program, with the addresses of `Hosts`."""
    section = README.read_text().partition("\n## From laptop to cluster\n")[2].partition("\n## ")[0]
    (block,) = (block for block in BLOCK.findall(section) if block.startswith(program))
    return block.replace("10.0.0.", "10.77.0.").splitlines()


def enter(host: Host, command: str, where: Path) -> subprocess.Popen[str]:
    """As somebody who has activated the environment types it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return host.start(["sh", "-c", f"exec {command}"], env=environment, cwd=where)


def logs(where: Path) -> set[str]:
    (run,) = (where / "runs").glob("cpu_smoke-*")
    return {file.stem for file in run.glob("logs/*.log")}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as up:
        yield up


@pytest.mark.acceptance  # in CI: workers and ranks of torchrun, with commands of the tests' own
def test_workers_on_machines_that_one_has(hosts: Hosts, tmp_path: Path) -> None:
    *workers, train = commands("titan-rl worker")
    assert len(workers) == 2 and train.startswith("titan-rl train ")
    lent = []
    for command in workers:
        (host,) = (host for host in hosts if f" {host.address}:" in command)
        lent.append(enter(host, command, tmp_path))
        assert any("trusted networks only" in line for line in lent[-1].stdout)  # Monarch says something too
    run = enter(hosts[0], train, tmp_path)
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output[-4000:]
    assert "the run is done after step 3" in output
    assert {"trainer-rank1", "generator1-rank1", "relay0", "relay1", "relay2"} <= logs(tmp_path)
    assert [worker.poll() for worker in lent] == [None, None]  # they wait for the next run


@pytest.mark.acceptance
def test_torchrun_on_every_host(hosts: Hosts, tmp_path: Path) -> None:
    (command,) = commands("torchrun")
    ranks = [enter(host, command, tmp_path) for host in hosts]
    outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(outputs)[-4000:]
    assert sum("the run is done after step 3" in output for output in outputs) == 1  # any of them can be rank 0
    assert {"trainer-rank1", "generator1-rank1", "relay0", "relay1", "relay2"} <= logs(tmp_path)
