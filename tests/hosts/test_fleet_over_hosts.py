"""A run that starts on one host and gets another one while it works: by command, and again after its link was cut."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_runs_over_hosts import SMALL, TRAIN

from tests.hosts.namespaces import Host, Hosts, skip_reason
from tests.hosts.workers import workers

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-"), pytest.mark.timeout(600)]


class Run:
    """A run on the first host, and what it has said."""

    def __init__(self, host: Host, directory: Path, *settings: str) -> None:
        self._host, self._directory = host, directory
        command = [*TRAIN, *SMALL, *settings, "--logging.directory", str(directory)]
        self.process = host.start(command)
        self.said: list[str] = []

    def until(self, *texts: str) -> None:
        """Read until each of these was said."""
        wanted = set(texts)
        for line in self.process.stdout:
            self.said.append(line)
            wanted -= {text for text in wanted if text in line}
            if not wanted:
                return
        pytest.fail(f"{wanted} was not said:\n{''.join(self.said)[-4000:]}")

    def steps(self) -> Iterator[None]:
        """After each further step."""
        while True:
            self.until("step ")
            yield

    def fleet(self, *words: str) -> str:
        """What `titan-rl fleet RUN …` prints."""
        (run,) = self._directory.glob("*-*")
        command = [sys.executable, "-m", "titan_rl.cli", "fleet", str(run), *words]
        asked = self._host.start(command)
        printed, _ = asked.communicate(timeout=200)
        assert asked.returncode == 0, printed
        return printed


def test_a_host_joins_serves_is_lost_comes_back_and_leaves(tmp_path: Path) -> None:
    with Hosts(2) as hosts, workers(hosts[1:]) as (worker,):
        network = ("--placement.address", hosts[0].address, "--trusted-network")
        run = Run(hosts[0], tmp_path, *network, "--loop.steps", "100000", "--generator.count", "1")
        run.until("step ")

        said = run.fleet("add", worker)
        assert f"host1 ({worker}) has joined" in said and "generator1 is up on host1" in said
        for _ in run.steps():
            (line,) = (line for line in run.fleet().splitlines() if "generator1" in line)
            if "serving v" in line:
                break

        hosts[1].cut()
        run.until("host1 (", "generator1 is back")
        hosts[1].mend()
        run.until(f"host1 ({worker}) is back")
        run.until("step ")
        assert "relay1" in run.fleet()

        assert "host1 has left" in run.fleet("remove", "host1")
        shown = run.fleet()
        assert "host1" not in shown and "relay1" not in shown and "relay0" in shown
        run.until("step ")

        run.process.send_signal(signal.SIGTERM)
        run.until("the run was stopped by SIGTERM")
        assert run.process.wait(60) == 143
