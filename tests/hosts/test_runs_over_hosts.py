"""Runs over several hosts, which are network namespaces with their own addresses, process ids and shared memory.

With `deterministic` the weights of a run are the same bits on one host and on two, whatever happens to a host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import Host, Hosts, skip_reason

pytestmark = [
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-"),
    pytest.mark.timeout(600),
]

REPOSITORY = Path(__file__).resolve().parents[2]
PORT = 17000
TRAIN = [sys.executable, "-m", "titan_rl.train"]
SMALL = (
    *("--recipe", "copy4_async", "--deterministic", "true", "--generator.engine", "simulated"),
    *("--loop.steps", "14", "--loop.groups-per-step", "4", "--rollout.samples-per-group", "4"),
    *("--rollout.workers", "2", "--evaluation.every", "0", "--evaluation.prompts", "8"),
    *("--evaluation.target-exact-match", "0", "--placement.host-seconds", "4", "--logging.tensorboard", "false"),
)


@contextmanager
def workers(hosts: Sequence[Host]) -> Iterator[list[str]]:
    """Workers on these hosts; their addresses."""
    started = []
    try:
        for host in hosts:
            address = f"{host.address}:{PORT}"
            command = [sys.executable, "-m", "titan_rl.cli", "worker", "--listen", address, "--trusted-network"]
            worker = host.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.append(worker)
            # Monarch says something too
            assert any("trusted networks only" in line and address in line for line in worker.stdout)
        yield [f"{host.address}:{PORT}" for host in hosts]
    finally:
        for worker in started:
            worker.terminate()
            worker.wait(30)


def weights(runs: Path) -> bytes:
    (file,) = runs.glob("*/checkpoint/model.safetensors")
    return file.read_bytes()


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    runs = tmp_path_factory.mktemp("one")
    command = [*TRAIN, *SMALL, "--logging.directory", str(runs)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return weights(runs)


@pytest.mark.parametrize("event", ["nothing", "host is killed", "link is cut"])
def test_a_run_over_two_hosts_ends_with_the_weights_of_one_host(event: str, on_one_host: bytes, tmp_path: Path) -> None:
    with Hosts(2) as hosts, workers(hosts[1:]) as addresses:
        where = ["--hosts", ",".join(addresses), "--trusted-network", "--placement.trainer", "host0"]
        run = hosts[0].run(
            [*TRAIN, *SMALL, *where, "--logging.directory", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = []
        for line in run.stdout:
            said.append(line)
            if event != "nothing" and line.startswith("step") and int(line.split()[1].split("/")[0]) >= 4:
                {"host is killed": hosts[1].kill, "link is cut": hosts[1].cut}[event]()
                event = "nothing"
        output = "".join(said)
        assert run.wait(60) == 0, output[-4000:]
        assert ("host1" in output) is ("is lost" in output)
        logs = {file.stem for file in tmp_path.glob("*/logs/*.log")}
        assert {"generator0", "generator1", "relay0", "relay1", "rollout0", "rollout1"} <= logs
    assert weights(tmp_path) == on_one_host


def test_torchrun_makes_hosts_of_its_ranks_and_the_trainer_spans_two_of_them(tmp_path: Path) -> None:
    smoke = ["--recipe", "cpu_smoke", "--trusted-network", "--placement.trainer", "host0", "host1"]
    with Hosts(2) as hosts:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        meet = ["--rdzv-backend", "static", "--master-addr", hosts[0].address, "--master-port", "29400"]
        ranks = [
            host.run(
                [*torchrun, *meet, "--node-rank", str(number), "-m", "titan_rl.train", *smoke]
                + ["--logging.directory", str(tmp_path)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, host in enumerate(hosts)
        ]
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    assert "the run is done after step 3" in outputs[0]
    (run,) = tmp_path.glob("cpu_smoke-*")
    assert {"trainer-rank0", "trainer-rank1", "generator0-rank1", "relay1"} <= {
        file.stem for file in run.glob("logs/*")
    }


def test_a_worker_refuses_to_listen_on_a_network_that_nobody_said_to_trust() -> None:
    command = [sys.executable, "-m", "titan_rl.cli", "worker", "--listen", "10.77.0.1:17000"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "without --trusted-network" in done.stderr
