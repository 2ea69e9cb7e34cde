"""One of two writers is killed in the middle of a publication (4 s on free cores)."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transport_examples import ALIASES, copied, publisher_of, same_bytes, whole_shards
from transport_scenarios import V1, V2, policy

from titan_rl.processes import OWNER
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import make_reader

TRANSPORTS = ("shared_memory", "filesystem")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By transport: v1's publication, rank 0's result, and what the writers left behind. All of them have ended."""
    scratch = tmp_path_factory.mktemp("dying")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment[OWNER] = str(os.getpid())
    command = [sys.executable, str(Path(__file__).with_name("dying_writers.py")), str(scratch), *TRANSPORTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return scratch


def load(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_survivor_gets_an_error_and_no_publication(scratch: Path, transport: str) -> None:
    statuses = load(scratch / "statuses.pickle")
    assert statuses[f"{transport} 1"] == signal.SIGKILL
    assert statuses[f"{transport} 0"] == 0
    result = load(scratch / transport / "result.0.pickle")
    assert "error" in result and "published" not in result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_version_before_is_as_readable_as_ever(scratch: Path, transport: str) -> None:
    first: Publication = load(scratch / transport / "v1.0.pickle")
    assert (first.version, first) == (V1, load(scratch / transport / "v1.1.pickle"))
    assert same_bytes(copied(make_reader(first).tensors(first)), policy(1))


def test_the_half_written_version_is_not_to_be_seen_among_the_files(scratch: Path) -> None:
    channel = scratch / "filesystem" / "files" / "policy"
    visible = [path.name for path in channel.iterdir() if not path.name.startswith(".")]
    assert visible == ["v1"]
    assert (channel / ".v2.partial").is_dir()  # it did die in the middle


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_starts_again_publishes_and_clears_up(scratch: Path, transport: str) -> None:
    publisher = publisher_of(transport, scratch / transport, max_live=3)
    for version in (V2, PolicyVersion(1, 1)):
        again = publisher.publish(version, whole_shards(policy(2)), dtype=torch.float32, aliases=ALIASES)
        assert same_bytes(copied(make_reader(again).tensors(again)), policy(2))
    if transport == "filesystem":
        assert sorted(path.name for path in (scratch / "filesystem/files/policy").iterdir()) == ["v1", "v1.1", "v2"]
    publisher.close()
