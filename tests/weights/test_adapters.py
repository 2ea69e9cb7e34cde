"""Effective weights: the same bits in any box, and refused where base, adapter or scale is another (2 s)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import weight_examples
from safetensors.torch import save_file
from torch import Tensor
from weight_examples import EMBEDDING, TIED, Engine, bits, publisher_in, shard_fingerprint, whole_shards

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.adapters import adapted
from titan_rl.weights.fingerprint import combined_fingerprint, signed
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader, save_publication, verify
from titan_rl.weights.segment_files import segment_at
from titan_rl.weights.tensor_files import shards_of_files

UP, Q = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"
SHAPES = {EMBEDDING: (11, 8), f"{UP}.weight": (300, 70), f"{Q}.weight": (8, 8), "model.norm.weight": (8,)}
R, ALPHA = 3, 5.0


def adapters(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in (UP, Q):
        rows, columns = SHAPES[f"{name}.weight"]
        tensors[f"{name}.lora_A.weight"] = torch.randn((R, columns), generator=random)
        tensors[f"{name}.lora_B.weight"] = ALPHA / R * torch.randn((rows, R), generator=random)
    return tensors


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Tensor]:
    tensors = weight_examples.weights(3, SHAPES)
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base/model.safetensors")
    return tensors


def term_by_term(weight: Tensor, a: Tensor, b: Tensor) -> np.ndarray:
    total = weight.float().numpy().copy()
    for k in range(R):
        total += b.numpy()[:, k, None] * a.numpy()[None, k]
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_box_has_the_bits_of_the_sum_term_by_term(base: dict[str, Tensor], dtype: torch.dtype) -> None:
    name, whole, own = f"{UP}.weight", base[f"{UP}.weight"], adapters(1)
    a, b = (own[f"{UP}.lora_{each}.weight"] for each in "AB")
    expected = torch.from_numpy(term_by_term(whole.to(dtype), a, b)).to(dtype)
    exact = whole.to(dtype).double() + b.double() @ a.double()
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=5e-6 if dtype == torch.float32 else 0.2)
    before, total = whole.clone(), 0
    for rows, columns in itertools.product([(0, 7), (7, 160), (160, 300)], [(0, 33), (33, 70)]):
        box = slice(*rows), slice(*columns)
        held = TensorShard(name=name, data=whole[box], global_shape=SHAPES[name], offset=(rows[0], columns[0]))
        part = adapted(held, own, dtype)[()]
        assert torch.equal(bits(part), bits(expected[box]))
        assert torch.equal(bits(part), bits(adapted(TensorShard.whole(name, whole), own, dtype)[box]))
        total += shard_fingerprint(part, SHAPES[name], (rows[0], columns[0]))
    assert signed(total) == shard_fingerprint(expected, SHAPES[name], (0, 0))
    assert torch.equal(whole, before)


def published(
    publisher: SharedMemoryPublisher, step: int, base: dict[str, Tensor], own: dict[str, Tensor]
) -> Publication:
    """By a trainer whose shards are halves."""
    halves = []
    for name, tensor in base.items():
        middle = len(tensor) // 2
        for start, part in ((0, tensor[:middle]), (middle, tensor[middle:])):
            offset = (start, *(0,) * (tensor.dim() - 1))
            halves.append(TensorShard(name=name, data=part, global_shape=tuple(tensor.shape), offset=offset))
    settings = {"dtype": torch.float32, "aliases": TIED, "base": halves}
    return publisher.publish(PolicyVersion(0, step), whole_shards(own), **settings)


def loaded(reader: SharedMemoryReader, publication: Publication) -> Engine:
    engine = Engine(shapes=SHAPES)
    for name, tensor in reader.served(publication):
        engine.load([(name, tensor[()])])
    return engine


def test_only_adapters_are_published_and_effective_weights_are_served(base: dict[str, Tensor], tmp_path: Path) -> None:
    publication = published(publisher_in(tmp_path), 0, base, adapters(1))
    assert sum(entry.nbytes for entry in publication.manifest.entries) == 4 * R * (300 + 70 + 8 + 8)
    engine = loaded(SharedMemoryReader(tmp_path / "base"), publication)
    assert verify(publication, engine.served_shards(), None) == combined_fingerprint(publication.manifest)
    merged = {each.name: adapted(each, adapters(1), torch.float32)[()] for each in whole_shards(base)}
    whole = publisher_in(tmp_path, channel="whole").publish(
        PolicyVersion(0, 0), whole_shards(merged), dtype=torch.float32, aliases=TIED
    )
    assert combined_fingerprint(whole.manifest) == combined_fingerprint(publication.manifest)


def test_what_a_checkpoint_keeps_of_a_publication_is_published_again(base: dict[str, Tensor], tmp_path: Path) -> None:
    publisher = publisher_in(tmp_path)
    first = published(publisher, 0, base, adapters(1))
    save_publication(first, tmp_path / "kept")
    kept = {shard.name: shard.data for shard in shards_of_files(tmp_path / "kept")}
    again = published(publisher, 1, base, kept)
    assert again.manifest == first.manifest


def doubled_scale(publication: Publication, _: Publication) -> Publication:
    for name, tensor in SharedMemoryReader().tensors(publication):
        tensor *= 2 if "lora_B" in name else 1
    return publication


def missing_module(publication: Publication, _: Publication) -> Publication:
    kept = tuple(entry for entry in publication.manifest.entries if not entry.name.startswith(Q))
    return dataclasses.replace(publication, manifest=dataclasses.replace(publication.manifest, entries=kept))


def stale_adapter(publication: Publication, before: Publication) -> Publication:
    segment_at(publication.location).write_bytes(segment_at(before.location).read_bytes())
    return publication


def changed_base(publication: Publication, _: Publication) -> Publication:
    file = segment_at(publication.location).parent / "base/model.safetensors"
    tensors = {shard.name: shard.data.clone() for shard in shards_of_files(file.parent)}
    tensors[f"{Q}.weight"].view(torch.int32)[3, 3] ^= 1
    save_file(tensors, file)
    return publication


@pytest.mark.parametrize("fault", [doubled_scale, missing_module, stale_adapter, changed_base])
def test_what_makes_other_weights_is_refused_and_named(
    base: dict[str, Tensor], tmp_path: Path, fault: Callable[[Publication, Publication], Publication]
) -> None:
    publisher = publisher_in(tmp_path)
    before, publication = (published(publisher, step, base, adapters(step)) for step in (0, 1))
    broken = fault(publication, before)
    with pytest.raises(WeightsError, match=rf"v1 is not what the engine computes with: .*{Q}.weight is not what was"):
        verify(broken, loaded(SharedMemoryReader(tmp_path / "base"), broken).served_shards(), None)


def test_what_a_base_lacks_is_missing(base: dict[str, Tensor], tmp_path: Path) -> None:
    publication = published(publisher_in(tmp_path), 0, base, adapters(1))
    save_file({EMBEDDING: base[EMBEDDING]}, tmp_path / "base/model.safetensors")
    with pytest.raises(WeightsError, match=f"{UP}.weight is not what was published"):
        verify(publication, loaded(SharedMemoryReader(tmp_path / "base"), publication).served_shards(), None)
