"""Two real ranks on gloo publish and verify; one dies at it. Both are started once (8 s on busy cores)."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scenarios import (
    BY_COLUMNS,
    CUT_SHAPES,
    NORM,
    V2,
    a_writer_that_dies,
    in_world,
    parallelism_pairs,
    policy,
    two_writers,
    verified_engines,
    writers_that_fail,
)
from support.ranks import Scenario, run_scenarios
from weight_examples import EMBEDDING, LM_HEAD, TIED, copied, publisher_in, same_bytes, shard_fingerprint, whole_shards

from titan_rl.types import PolicyVersion
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.puller import SharedMemoryReader

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By rank, what the scenarios returned; what the second rank did in the last one nobody knows."""
    arguments = {"directory": tmp_path_factory.mktemp("segments"), "owner": os.getpid()}
    functions = (two_writers, writers_that_fail, verified_engines, parallelism_pairs, a_writer_that_dies)
    scenarios = [Scenario(in_world, 2, {"scenario": function} | arguments) for function in functions]
    scenarios[-1].killed = (1,)
    found = run_scenarios(scenarios, tmp_path_factory.mktemp("results"))
    return [
        {function.__name__: ranks[rank] for function, ranks in zip(functions, found, strict=True)} for rank in (0, 1)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_third_process_reads_exactly_what_two_ranks_wrote(results: Results, dtype: str) -> None:
    publication = results[0]["two_writers"][dtype]
    read = dict(SharedMemoryReader().tensors(publication))
    assert set(read) == set(CUT_SHAPES)
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
        ("incomplete", f"the ranks' shards hold 21 of 35 elements of {BY_COLUMNS}"),
        ("other_shape", f"{NORM} is (8,) on rank 1 and (7,) on a lower one"),
        ("other_version", "the ranks disagree on the version and its slot: "),
    ],
)
def test_what_one_rank_cannot_publish_is_an_error_on_both(results: Results, failure: str, sentence: str) -> None:
    for result in results:
        assert sentence in result["writers_that_fail"]["errors"][failure]


def test_failed_publications_leave_the_live_one_and_the_next_one_whole(results: Results) -> None:
    for result in results:
        failed = result["writers_that_fail"]
        assert failed["intact"] and failed["after"]
        assert failed["left"] == []


def test_a_sharded_engine_is_verified_to_the_same_number_on_both_ranks(results: Results) -> None:
    first, second = (result["verified_engines"]["fingerprint"] for result in results)
    assert first == second != combined_fingerprint(results[0]["two_writers"]["float32"].manifest)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        ("column shard", f"{BY_COLUMNS} is not what was published"),
        ("head", f"{LM_HEAD} is not what was published"),
        ("norm of rank 0", f"{NORM} is not what was published"),
        ("norm of rank 1", f"{NORM} is not what was published"),
        ("replicated part", f"{EMBEDDING} is not what was published"),
    ],
)
def test_damage_on_one_rank_is_refused_on_both(results: Results, damage: str, sentence: str) -> None:
    for result in results:
        error = result["verified_engines"]["errors"][damage]
        assert "verified v3 is not what the engine computes with" in error
        assert sentence in error


def test_a_tensor_that_every_rank_holds_is_verified(results: Results) -> None:
    for result in results:
        assert result["verified_engines"]["with replicated part"] == result["verified_engines"]["fingerprint"]


@pytest.mark.parametrize("writers", ["FSDP 2", "TP 2", "1"])
@pytest.mark.parametrize("readers", ["TP 2", "TP 1"])
def test_any_parallelism_reads_the_bytes_of_any_other(results: Results, writers: str, readers: str) -> None:
    for result in results:
        assert result["parallelism_pairs"][f"{writers} → {readers}"]


def test_the_survivor_of_a_writer_that_dies_gets_an_error_and_the_version_before_is_whole(results: Results) -> None:
    survivor = results[0]["a_writer_that_dies"]
    assert survivor["error"]
    assert same_bytes(copied(SharedMemoryReader().tensors(survivor["first"])), policy(1))


def test_a_trainer_that_starts_again_after_a_death_publishes(results: Results) -> None:
    directory = Path(results[0]["a_writer_that_dies"]["first"].location).parent
    publisher = publisher_in(directory, channel="dying", max_live=3)
    for version in (V2, PolicyVersion(1, 1)):
        again = publisher.publish(version, whole_shards(policy(2)), dtype=torch.float32, aliases=TIED)
        assert same_bytes(copied(SharedMemoryReader().tensors(again)), policy(2))
    publisher.close()
