"""A host dies while others read weights from it: their relays live on and take the rest elsewhere (20 s)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.namespaces import Hosts, skip_reason
from titan_rl.launch.placement import SUPERVISION_ENVIRONMENT

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason())

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


def test_relays_outlive_a_host_that_they_read_from() -> None:
    environment = os.environ | SUPERVISION_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts/bench")])
    with Hosts(4) as hosts:
        for host in hosts:
            host.limit(20_000_000)
        for host in hosts[1:]:
            host.run([sys.executable, "-c", WORKER, f"tcp://{host.address}:17000"], env=environment)
        program = [sys.executable, str(Path(__file__).with_name("killed_parent.py"))]
        driver = hosts[0].run(
            [*program, *(host.address for host in hosts)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while (line := driver.stdout.readline().strip()) != "half":
            assert line, "the program has ended"
        hosts[2].kill()
        said, _ = driver.communicate("killed\n")
        assert json.loads(said.splitlines()[-1]) == [True, True]
