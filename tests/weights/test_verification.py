"""What an engine computes with is compared with what was published, one rank (1 s); several: test_weight_ranks.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import weight_examples
from weight_examples import EMBEDDING, LM_HEAD, Engine, publisher_in, weights, whole_shards

from titan_rl.errors import WeightsError
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.puller import SharedMemoryReader, verify

SHAPES = {EMBEDDING: (11, 8), "layers.0.q_proj.weight": (8, 8), "layers.1.q_proj.weight": (8, 8), "norm.weight": (8,)}


def publish(directory: Path, step: int) -> Publication:
    """Each where the one before does not disappear."""
    (directory / str(step)).mkdir()
    return weight_examples.publish(publisher_in(directory / str(step)), step, weights(step, SHAPES))


@pytest.fixture
def publication(tmp_path: Path) -> Publication:
    return publish(tmp_path, 7)


@pytest.fixture
def engine(publication: Publication, tmp_path: Path) -> Engine:
    """One that holds the previous version and then loaded this one."""
    engine = Engine(shapes=SHAPES)
    engine.load(SharedMemoryReader().tensors(publish(tmp_path, 6)))
    engine.load(SharedMemoryReader().tensors(publication))
    return engine


def test_what_was_loaded_whole_is_verified(publication: Publication, engine: Engine) -> None:
    assert verify(publication, engine.served_shards(), None) == combined_fingerprint(publication.manifest)


@pytest.mark.parametrize("name", [*SHAPES, LM_HEAD])
def test_one_flipped_bit_is_refused_and_the_tensor_named(publication: Publication, engine: Engine, name: str) -> None:
    engine.parameters[name].view(torch.int32).view(-1)[3] ^= 1
    with pytest.raises(WeightsError, match=f"policy v7 is not what the engine computes with: {name} is not what was"):
        verify(publication, engine.served_shards(), None)


@pytest.mark.parametrize("name", [*SHAPES, LM_HEAD])
def test_a_skipped_tensor_is_refused_the_tied_head_too(publication: Publication, tmp_path: Path, name: str) -> None:
    engine = Engine(shapes=SHAPES)
    engine.load(SharedMemoryReader().tensors(publish(tmp_path, 6)))
    before = engine.parameters[name].clone()
    engine.load(SharedMemoryReader().tensors(publication))
    engine.parameters[name].copy_(before)
    with pytest.raises(WeightsError, match=f"{name} is not what was published"):
        verify(publication, engine.served_shards(), None)


@pytest.mark.parametrize("name", ["norm.weight", LM_HEAD])
def test_a_tensor_or_alias_that_the_engine_does_not_report_is_missing(
    publication: Publication, engine: Engine, name: str
) -> None:
    del engine.parameters[name]
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        verify(publication, engine.served_shards(), None)


def test_a_tensor_that_was_never_published_is_refused(publication: Publication, engine: Engine) -> None:
    served = [*engine.served_shards(), *whole_shards({"layers.2.q_proj.weight": torch.zeros(8, 8)})]
    with pytest.raises(WeightsError, match="layers.2.q_proj.weight was never published"):
        verify(publication, served, None)


def test_another_dtype_or_shape_is_refused(publication: Publication, engine: Engine) -> None:
    engine.parameters["norm.weight"] = engine.parameters["norm.weight"].to(torch.bfloat16)
    engine.parameters["layers.0.q_proj.weight"] = engine.parameters["layers.0.q_proj.weight"].view(4, 16)
    with pytest.raises(WeightsError) as refused:
        verify(publication, whole_shards(engine.parameters), None)
    assert "norm.weight is bfloat16 (8,), published as float32 (8,)" in str(refused.value)
    assert "layers.0.q_proj.weight is float32 (4, 16), published as float32 (8, 8)" in str(refused.value)


def test_a_tensor_that_is_reported_in_part_is_refused(publication: Publication, engine: Engine) -> None:
    def served() -> Iterator[TensorShard]:
        for shard in engine.served_shards():
            if shard.name == EMBEDDING:
                yield TensorShard(name=EMBEDDING, data=shard.data[:5], global_shape=(11, 8), offset=(0, 0))
            else:
                yield shard

    with pytest.raises(WeightsError, match=f"{EMBEDDING} has 40 of 88 elements"):
        verify(publication, served(), None)


def test_an_engine_that_cannot_tell_its_weights_is_refused(publication: Publication) -> None:
    def served() -> Iterator[TensorShard]:
        yield from whole_shards({"norm.weight": torch.zeros(8)})
        raise RuntimeError("packed away")

    with pytest.raises(WeightsError, match="policy v7 .* RuntimeError: packed away"):
        verify(publication, served(), None)


def test_many_problems_are_told_in_short(publication: Publication) -> None:
    extra = whole_shards({f"extra.{index}": torch.zeros(1) for index in range(20)})
    with pytest.raises(WeightsError, match="and 19 more"):
        verify(publication, extra, None)
