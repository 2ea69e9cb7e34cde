"""Two real ranks on gloo publish and verify; both processes are started once (8 s on busy cores)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_scenarios import EMBEDDING, HEAD, NORM, ROW_CUT, SHAPES, policy

from titan_rl.processes import OWNER, RENDEZVOUS
from titan_rl.weights.fingerprint import combined_fingerprint, shard_fingerprint
from titan_rl.weights.puller import SharedMemoryReader

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By rank, what the scenarios returned. Both ranks have ended."""
    directory = tmp_path_factory.mktemp("segments")
    (directory / "pairs").mkdir()
    output = tmp_path_factory.mktemp("results") / "rank"
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", RENDEZVOUS: str(directory / "rendezvous")}
    environment |= {"WORLD_SIZE": "2", "PYTHONPATH": str(root), OWNER: str(os.getpid())}
    command = [sys.executable, str(Path(__file__).with_name("weight_scenarios.py")), str(directory), str(output)]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    return [torch.load(f"{output}.{rank}", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_third_process_reads_exactly_what_two_ranks_wrote(results: Results, dtype: str) -> None:
    publication = results[0]["two_writers"][dtype]
    read = dict(SharedMemoryReader().tensors(publication))
    assert set(read) == set(SHAPES)
    for entry in publication.manifest.entries:
        expected = policy(1)[entry.name].to(getattr(torch, dtype))
        assert torch.equal(read[entry.name], expected), entry.name
        assert entry.fingerprint == shard_fingerprint(expected, expected.shape, (0,) * expected.dim())


def test_all_ranks_get_the_same_publication(results: Results) -> None:
    assert results[0]["two_writers"] == results[1]["two_writers"]


@pytest.mark.parametrize(
    "failure, sentence",
    [
        ("raising", "publishing failing v2: rank 1: RuntimeError: out of luck"),
        ("unwritable", "publishing failing v2: rank 1: "),
        ("incomplete", f"the ranks' shards hold 14 of 28 elements of {ROW_CUT}"),
        ("other shape", f"{NORM} is (4,) on rank 1 and (3,) on a lower one"),
        ("other version", "the ranks disagree"),
    ],
)
def test_what_one_rank_cannot_publish_is_an_error_on_both(results: Results, failure: str, sentence: str) -> None:
    for result in results:
        assert sentence in result["writers_that_fail"]["errors"][failure]


def test_failed_publications_leave_the_live_one_and_the_next_one_whole(results: Results) -> None:
    for result in results:
        failed = result["writers_that_fail"]
        assert failed["intact"] == failed["after"] == dict.fromkeys(sorted(SHAPES), True)
        assert failed["left"] == []


def test_a_sharded_engine_is_verified_to_the_same_number_on_both_ranks(results: Results) -> None:
    first, second = (result["verified_engines"]["fingerprint"] for result in results)
    assert first == second != combined_fingerprint(results[0]["two_writers"]["float32"].manifest)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        ("column shard", f"{ROW_CUT} is not what was published"),
        ("head", f"{HEAD} is not what was published"),
        ("counted norm", f"{NORM} is not what was published"),
        ("replicated norm", f"the replica of {NORM} is not what was published (rank 1)"),
        ("replicated part", f"the replica of {EMBEDDING} at (0, 0) is not what the rank that counts it has (rank 1)"),
    ],
)
def test_damage_on_one_rank_is_refused_on_both(results: Results, damage: str, sentence: str) -> None:
    for result in results:
        error = result["verified_engines"]["errors"][damage]
        assert "verified v3 is not what the engine computes with" in error
        assert sentence in error


def test_a_replicated_part_is_compared_with_the_one_that_counts(results: Results) -> None:
    for result in results:
        assert result["verified_engines"]["with replicated part"] == result["verified_engines"]["fingerprint"]


@pytest.mark.parametrize("writers", ["FSDP 2", "TP 2", "1"])
@pytest.mark.parametrize("readers", ["TP 2", "TP 1"])
def test_any_parallelism_reads_the_bytes_of_any_other(results: Results, writers: str, readers: str) -> None:
    for result in results:
        assert result["parallelism_pairs"][f"{writers} → {readers}"]
