"""A trainer over several hosts leaves the same publication on each of them (8 s)."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_hosts import VERSIONS
from weight_examples import SHAPES, copied, same_bytes, weights

from titan_rl.processes import OWNER
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import SharedMemoryReader
from titan_rl.weights.segment_files import segment_at

OWNERS = {"one": "101", "two": "102", "three": "103"}


@pytest.mark.parametrize(
    "hosts", [("one", "two"), ("one", "one", "two", "two"), ("two", "one", "two", "three")], ids=" ".join
)
def test_every_host_of_the_trainer_ends_with_the_whole_publication(
    hosts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    places = [argument for host in hosts for argument in (host, OWNERS[host])]
    command = [sys.executable, str(Path(__file__).with_name("trainer_hosts.py")), str(tmp_path), *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    published: list[list[Publication]] = [
        pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(len(hosts))
    ]
    assert all(ours == published[0] for ours in published)
    assert published[0][0].location == published[0][2].location
    assert published[0][0].hosts == tuple(dict.fromkeys(hosts))
    for publication in published[0][-2:]:
        segments = []
        for host in dict.fromkeys(hosts):
            monkeypatch.setenv(OWNER, OWNERS[host])
            dtype = torch.bfloat16 if publication.version.step == 2 else torch.float32
            expected = {name: each.to(dtype) for name, each in weights(publication.version.step, SHAPES).items()}
            assert same_bytes(copied(SharedMemoryReader().tensors(publication)), expected)
            segments.append(segment_at(publication.location))
        assert len({segment.stat().st_ino for segment in segments}) == len(set(hosts))
    assert published[0][-1].version.step == VERSIONS
