"""What an engine computes with is compared with what was published, one rank (1 s); several: test_weight_ranks.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.fingerprint import combined_fingerprint
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader, verify

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDING: (11, 8), "layers.0.q_proj.weight": (8, 8), "layers.1.q_proj.weight": (8, 8), "norm.weight": (8,)}


class FakeEngine:
    """Parameters of its own, the logits projection apart from the embedding: the worst case for a tied model."""

    def __init__(self) -> None:
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.parameters[HEAD] = torch.zeros(SHAPES[EMBEDDING])

    def load(self, tensors: Iterator[tuple[str, Tensor]], skip: str = "") -> None:
        for name, tensor in tensors:
            for target in (name, HEAD) if name == EMBEDDING else (name,):
                if target != skip:
                    self.parameters[target].copy_(tensor)

    def served_shards(self) -> Iterator[TensorShard]:
        for name, data in self.parameters.items():
            yield whole(name, data)


def whole(name: str, data: Tensor, *, counted: bool = True) -> TensorShard:
    return TensorShard(name=name, data=data, global_shape=tuple(data.shape), offset=(0,) * data.dim(), counted=counted)


def publish(directory: Path, step: int) -> Publication:
    generator = torch.Generator().manual_seed(step)
    shards = [whole(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]
    (directory / str(step)).mkdir()
    publisher = SharedMemoryPublisher(channel="policy", rank=0, group=None, max_live=1, directory=directory / str(step))
    return publisher.publish(PolicyVersion(0, step), shards, dtype=torch.float32, aliases=((HEAD, EMBEDDING),))


@pytest.fixture
def publication(tmp_path: Path) -> Publication:
    return publish(tmp_path, 7)


@pytest.fixture
def engine(publication: Publication, tmp_path: Path) -> FakeEngine:
    """One that holds the previous version and then loaded this one."""
    engine = FakeEngine()
    engine.load(SharedMemoryReader().tensors(publish(tmp_path, 6)))
    engine.load(SharedMemoryReader().tensors(publication))
    return engine


def test_what_was_loaded_whole_is_verified(publication: Publication, engine: FakeEngine) -> None:
    assert verify(publication, engine.served_shards(), None) == combined_fingerprint(publication.manifest)


def test_every_version_has_a_combined_fingerprint_of_its_own(tmp_path: Path) -> None:
    assert combined_fingerprint(publish(tmp_path, 1).manifest) != combined_fingerprint(publish(tmp_path, 2).manifest)


@pytest.mark.parametrize("name", [*SHAPES, HEAD])
def test_one_flipped_bit_is_refused_and_the_tensor_named(
    publication: Publication, engine: FakeEngine, name: str
) -> None:
    engine.parameters[name].view(torch.int32).view(-1)[3] ^= 1
    with pytest.raises(WeightsError, match=f"policy v7 is not what the engine computes with: {name} is not what was"):
        verify(publication, engine.served_shards(), None)


@pytest.mark.parametrize("name", [*SHAPES, HEAD])
def test_a_skipped_tensor_is_refused_the_tied_head_too(publication: Publication, tmp_path: Path, name: str) -> None:
    engine = FakeEngine()
    engine.load(SharedMemoryReader().tensors(publish(tmp_path, 6)))
    engine.load(SharedMemoryReader().tensors(publication), skip=name)
    with pytest.raises(WeightsError, match=f"{name} is not what was published"):
        verify(publication, engine.served_shards(), None)


def test_two_exchanged_tensors_are_refused_and_both_named(publication: Publication, engine: FakeEngine) -> None:
    first, second = (f"layers.{index}.q_proj.weight" for index in (0, 1))
    parameters = engine.parameters
    parameters[first], parameters[second] = parameters[second], parameters[first]
    with pytest.raises(WeightsError, match=f"{first} is not what was published; {second} is not what was published"):
        verify(publication, engine.served_shards(), None)


def test_two_exchanged_rows_are_refused(publication: Publication, engine: FakeEngine) -> None:
    embedding = engine.parameters[EMBEDDING]
    embedding[[2, 5]] = embedding[[5, 2]]
    with pytest.raises(WeightsError, match=EMBEDDING):
        verify(publication, engine.served_shards(), None)


@pytest.mark.parametrize("name", ["norm.weight", HEAD])
def test_a_tensor_or_alias_that_the_engine_does_not_report_is_missing(
    publication: Publication, engine: FakeEngine, name: str
) -> None:
    del engine.parameters[name]
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        verify(publication, engine.served_shards(), None)


def test_a_tensor_that_was_never_published_is_refused(publication: Publication, engine: FakeEngine) -> None:
    engine.parameters["layers.2.q_proj.weight"] = torch.zeros(8, 8)
    with pytest.raises(WeightsError, match="layers.2.q_proj.weight was never published"):
        verify(publication, engine.served_shards(), None)


def test_another_dtype_or_shape_is_refused(publication: Publication, engine: FakeEngine) -> None:
    engine.parameters["norm.weight"] = engine.parameters["norm.weight"].to(torch.bfloat16)
    engine.parameters["layers.0.q_proj.weight"] = engine.parameters["layers.0.q_proj.weight"].view(4, 16)
    with pytest.raises(WeightsError) as refused:
        verify(publication, engine.served_shards(), None)
    assert "norm.weight is bfloat16 (8,), published as float32 (8,)" in str(refused.value)
    assert "layers.0.q_proj.weight is float32 (4, 16), published as float32 (8, 8)" in str(refused.value)


def test_a_tensor_that_is_reported_in_part_is_refused(publication: Publication, engine: FakeEngine) -> None:
    def served() -> Iterator[TensorShard]:
        for shard in engine.served_shards():
            if shard.name == EMBEDDING:
                yield TensorShard(name=EMBEDDING, data=shard.data[:5], global_shape=(11, 8), offset=(0, 0))
            else:
                yield shard

    with pytest.raises(WeightsError, match=f"{EMBEDDING} has 40 of 88 elements"):
        verify(publication, served(), None)


def test_a_replica_that_differs_is_refused(publication: Publication, engine: FakeEngine) -> None:
    replica = whole("norm.weight", engine.parameters["norm.weight"] + 1, counted=False)
    with pytest.raises(WeightsError, match="the replica of norm.weight is not what was published"):
        verify(publication, [*engine.served_shards(), replica], None)


def test_an_engine_that_cannot_tell_its_weights_is_refused(publication: Publication) -> None:
    def served() -> Iterator[TensorShard]:
        yield whole("norm.weight", torch.zeros(8))
        raise RuntimeError("packed away")

    with pytest.raises(WeightsError, match="policy v7 .* RuntimeError: packed away"):
        verify(publication, served(), None)


def test_many_problems_are_told_in_short(publication: Publication) -> None:
    extra = [whole(f"extra.{index}", torch.zeros(1)) for index in range(20)]
    with pytest.raises(WeightsError, match="and 19 more"):
        verify(publication, extra, None)
