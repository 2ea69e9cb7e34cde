"""Runs over several hosts, which are network namespaces with their own addresses, process ids and shared memory.

With `deterministic` the weights of a run are the same bits on one host and on several, whatever happens to a host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.namespaces import Hosts, skip_reason
from tests.hosts.workers import certificates, tls_variables, workers

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-"), pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, "-m", "titan_rl.train"]
FEW = (
    *("--deterministic", "true", "--loop.groups-per-step", "4", "--rollout.samples-per-group", "4"),
    *("--rollout.workers", "2", "--evaluation.every", "0", "--evaluation.prompts", "8"),
    *("--evaluation.target-exact-match", "0", "--logging.tensorboard", "false"),
)
SMALL = (
    *("--recipe", "copy4_async", "--generator.engine", "simulated", "--loop.steps", "20"),
    *("--placement.host-seconds", "4", *FEW),
)


def weights(runs: Path) -> bytes:
    (file,) = runs.glob("*/checkpoint/model.safetensors")
    return file.read_bytes()


def on_one_host(runs: Path, *settings: str) -> bytes:
    """The weights of a run on this machine."""
    command = [*TRAIN, *settings, "--logging.directory", str(runs)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return weights(runs)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_disturbed_run_over_three_hosts_ends_with_the_weights_of_one_host(tmp_path: Path) -> None:
    """A link is down for a moment, and nothing is lost. Then one host is killed, and the other one is cut off until it
    is lost. The hosts have certificates, and need no trusted network."""
    patience, ours = ("--placement.host-seconds", "10"), certificates(tmp_path)
    with Hosts(3) as hosts, workers(hosts[1:], certified=ours) as addresses:
        where = ["--hosts", ",".join(addresses), "--placement.trainer", "host0"]
        command = [*TRAIN, *SMALL, *where, *patience, "--logging.directory", str(tmp_path)]
        run = hosts[0].start(command, env=os.environ | tls_variables(ours, hosts[0].address))
        said, steps = [], 0
        for line in run.stdout:
            said.append(line)
            if line.startswith("step"):  # at most one in 2 s
                steps += 1
                if steps < 3:
                    hosts[2].cut()
                if steps == 1:
                    time.sleep(2.0)
                    hosts[2].mend()
                if steps == 2:
                    assert "is lost" not in "".join(said)
                    hosts[1].kill()
            elif line.startswith("host2 ") and "is lost" in line:
                hosts[2].mend()
        output = "".join(said)
        assert run.wait(60) == 0, output[-4000:]
        lost = re.findall(r"^(host\d) .* is lost", output, re.MULTILINE)
        assert sorted(lost) == ["host1", "host2"], output[-4000:]
        assert "lost generator" in output and "encrypted and mutually authenticated" in output
        (directory,) = tmp_path.glob("copy4_async-*")
        logs = {file.stem for file in directory.glob("logs/*.log")}
        assert {"generator0", "generator1", "relay0", "relay1", "relay2", "rollout0", "rollout1"} <= logs
        spans = "".join(file.read_text() for file in directory.glob("spans/*.jsonl"))
        timelines = re.findall(r'"([a-z]+)\w*\.0 \(host[12],', spans)
        assert {"generator", "relay", "rollout"} <= {*timelines}
    assert weights(tmp_path) == on_one_host(tmp_path / "one", *SMALL)


@pytest.mark.acceptance
def test_a_trainer_whose_host_is_lost_with_its_copies_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    settings = (*SMALL, "--loop.steps", "40", "--checkpoint.every", "2")
    with Hosts(2) as hosts, workers(hosts[1:]) as addresses:
        where = ["--hosts", *addresses, "--trusted-network", "--placement.trainer", "host1"]
        run = hosts[0].start([*TRAIN, *settings, *where, "--logging.directory", str(tmp_path)])
        lines: list[str] = []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step") and sum(each.startswith("step") for each in lines) == 2:
                hosts[1].kill()
        output = "".join(lines)
        assert run.wait(60) == 0, output[-4000:]
    assert "lost trainer: host1 " in output and "going back to the newest checkpoint: " in output, output[-4000:]
    assert weights(tmp_path) == on_one_host(tmp_path / "one", *settings)


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("recipe", "trainers"), [("copy4_async", 2), ("copy4_async", 1), ("copy4", 1), ("cpu_smoke", 2)]
)
def test_copy4_over_two_hosts_ends_with_the_weights_of_one_host(recipe: str, trainers: int, tmp_path: Path) -> None:
    """Real engines, one on each host, and trainer ranks on the first host or on both."""
    settings = ("--recipe", recipe, *FEW, "--loop.steps", "4", "--trainer.data-parallel", str(trainers))
    with Hosts(2) as hosts, workers(hosts[1:]) as addresses:
        where = ["--hosts", *addresses, "--trusted-network", "--placement.trainer", *["host0", "host1"][:trainers]]
        run = hosts[0].start([*TRAIN, *settings, *where, "--logging.directory", str(tmp_path / "two")])
        output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output[-4000:]
    assert weights(tmp_path / "two") == on_one_host(tmp_path / "one", *settings)


@pytest.mark.parametrize(
    ("settings", "generator"),
    [
        (("--generator.count", "1", "--generator.tensor-parallel", "1"), "generator0"),
        pytest.param((), "generator1-rank1", marks=pytest.mark.acceptance),
    ],
)
def test_torchrun_makes_hosts_of_its_ranks_and_the_trainer_spans_two_of_them(
    settings: tuple[str, ...], generator: str, tmp_path: Path
) -> None:
    smoke = ["--recipe", "cpu_smoke", *settings, "--trusted-network", "--placement.trainer", "host0", "host1"]
    with Hosts(2) as hosts:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        meet = ["--rdzv-backend", "static", "--master-addr", hosts[0].address, "--master-port", "29400"]
        ranks = [
            host.start(
                [*torchrun, *meet, "--node-rank", str(number), "-m", "titan_rl.train", *smoke]
                + ["--logging.directory", str(tmp_path)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for number, host in enumerate(hosts)
        ]
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    assert "the run is done after step 3" in outputs[0]
    (run,) = tmp_path.glob("cpu_smoke-*")
    assert {"trainer-rank0", "trainer-rank1", generator, "relay1"} <= {file.stem for file in run.glob("logs/*")}


def test_a_worker_refuses_to_listen_on_a_network_that_nobody_said_to_trust() -> None:
    command = [sys.executable, "-m", "titan_rl.cli", "worker", "--listen", "10.77.0.1:17000"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "without --trusted-network" in done.stderr
