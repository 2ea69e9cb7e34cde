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
from rank_scenarios import V1, V2, policy
from weight_examples import ALIASES, copied, publisher_in, same_bytes, whole_shards

from titan_rl.processes import OWNER
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import SharedMemoryReader


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v1's publication, rank 0's result, and what the writers left behind. Both have ended."""
    scratch = tmp_path_factory.mktemp("dying")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment[OWNER] = str(os.getpid())
    command = [sys.executable, str(Path(__file__).with_name("dying_writers.py")), str(scratch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return scratch


def load(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def test_the_survivor_gets_an_error_and_no_publication(scratch: Path) -> None:
    assert load(scratch / "statuses.pickle") == [0, signal.SIGKILL]
    result = load(scratch / "result.0.pickle")
    assert "error" in result and "published" not in result


def test_the_version_before_is_as_readable_as_ever(scratch: Path) -> None:
    first: Publication = load(scratch / "v1.0.pickle")
    assert (first.version, first) == (V1, load(scratch / "v1.1.pickle"))
    assert same_bytes(copied(SharedMemoryReader().tensors(first)), policy(1))


def test_a_trainer_that_starts_again_publishes(scratch: Path) -> None:
    publisher = publisher_in(scratch, max_live=3)
    for version in (V2, PolicyVersion(1, 1)):
        again = publisher.publish(version, whole_shards(policy(2)), dtype=torch.float32, aliases=ALIASES)
        assert same_bytes(copied(SharedMemoryReader().tensors(again)), policy(2))
    publisher.close()
