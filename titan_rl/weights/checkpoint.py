"""Publishes a checkpoint, as a trainer of one rank would before its first step.

The bytes are handled like those of every other version: stored, fingerprinted, pulled, and verified in the memory that
the engines compute with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.transports.publisher import ChannelPublisher

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def publish_checkpoint(directory: Path, publisher: ChannelPublisher, *, dtype: torch.dtype) -> Publication:
    """Publish the weights of a Hugging Face directory as version v0.

    Args:
        publisher: of one rank.
        dtype: what the engines compute with.

    Raises:
        WeightsError: there are no weights, or a file is damaged.
    """
    tied = bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False))
    shards = [each for each in _shards(directory) if not (tied and each.name == LM_HEAD)]
    if not shards:
        raise WeightsError(f"{directory} has no weights (*.safetensors)")
    aliases = ((LM_HEAD, EMBEDDING),) if tied else ()
    return publisher.publish(PolicyVersion(0, 0), shards, dtype=dtype, aliases=aliases)


def _shards(directory: Path) -> Iterator[TensorShard]:
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in tensors.keys():
                    data = tensors.get_tensor(name)
                    shape = tuple(data.shape)
                    yield TensorShard(name=name, data=data, global_shape=shape, offset=(0,) * data.ndim)
        except Exception as error:  # the library's own error type, or an OSError
            raise WeightsError(f"{file} cannot be read: {error}") from error
