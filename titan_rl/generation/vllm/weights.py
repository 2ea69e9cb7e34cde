"""The weights that a vLLM model computes with, under Hugging Face names: views, with fused projections split.

Every parameter of the model is reported, or an error names it, so that no layer of unknown layout goes unverified. The
logits projection is read from the model's own `lm_head` even where it shares the embedding's memory: with tied
embeddings a stale copy would otherwise not be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from titan_rl.errors import WeightsError
from titan_rl.weights.manifest import TensorShard


class _Part(NamedTuple):
    """Rows of a layer's output dimension that are one tensor of the checkpoint."""

    name: str
    rows: int
    """On this rank."""
    global_rows: int
    first: int
    """Global index of this rank's first row."""
    counted: bool = True


def served_shards(model: torch.nn.Module, tp_rank: int) -> Iterator[TensorShard]:
    """This rank's shards of every weight of a vLLM language model. Raises WeightsError for parameters in an unknown
    layout."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules(remove_duplicate=False):
        parameters = list(module.named_parameters(recurse=False, remove_duplicate=False))
        kind = type(module)
        for name, parameter in parameters:
            data = parameter.data
            if kind is VocabParallelEmbedding or kind is ParallelLMHead:
                yield from _rows(data, name, [_vocabulary(path, module)])
            elif kind is QKVParallelLinear:
                yield from _rows(data, name, _attention_heads(_part_names(path, fused), module))
            elif kind is MergedColumnParallelLinear:
                yield from _rows(data, name, _merged(_part_names(path, fused), module))
            elif kind is ColumnParallelLinear:
                rows = module.output_size_per_partition
                yield from _rows(data, name, [_Part(path, rows, module.output_size, module.tp_rank * rows)])
            elif kind is RowParallelLinear and name == "weight":
                columns = module.input_size_per_partition
                yield TensorShard(
                    name=f"{path}.{name}",
                    data=data,
                    global_shape=(data.shape[0], module.input_size),
                    offset=(0, module.tp_rank * columns),
                )
            elif kind in (RowParallelLinear, ReplicatedLinear, RMSNorm):
                yield TensorShard.whole(f"{path}.{name}", data, counted=tp_rank == 0)
            else:
                raise WeightsError(
                    f"{path}.{name}: the layout of {kind.__name__} is unknown, so its weights cannot be verified"
                )


def _rows(data: Tensor, name: str, parts: list[_Part]) -> Iterator[TensorShard]:
    """Consecutive parts of a weight [rows, K] or bias [rows]; the rest is padding."""
    start = 0
    for part in parts:
        if part.rows:
            yield TensorShard(
                name=f"{part.name}.{name}",
                data=data[start : start + part.rows],
                global_shape=(part.global_rows, *data.shape[1:]),
                offset=(part.first, *(0,) * (data.dim() - 1)),
                counted=part.counted,
            )
        start += part.rows


def _vocabulary(path: str, module: VocabParallelEmbedding) -> _Part:
    indices = module.shard_indices
    if indices.num_added_elements:
        raise WeightsError(f"{path}: a checkpoint has no tensor for added embeddings")
    return _Part(path, indices.num_org_elements, module.org_vocab_size, indices.org_vocab_start_index)


def _attention_heads(names: list[str], module: QKVParallelLinear) -> list[_Part]:
    """Query heads are split over all ranks. So are key and value heads, unless there are fewer than ranks: then several
    ranks hold the same head, and one of them counts it."""
    query, key, value = names
    q_rows = module.num_heads * module.head_size
    k_rows = module.num_kv_heads * module.head_size
    v_rows = module.num_kv_heads * module.v_head_size
    replicas = module.num_kv_head_replicas
    kv_rank, counted = module.tp_rank // replicas, module.tp_rank % replicas == 0
    return [
        _Part(query, q_rows, module.total_num_heads * module.head_size, module.tp_rank * q_rows),
        _Part(key, k_rows, module.total_num_kv_heads * module.head_size, kv_rank * k_rows, counted),
        _Part(value, v_rows, module.total_num_kv_heads * module.v_head_size, kv_rank * v_rows, counted),
    ]


def _merged(names: list[str], module: MergedColumnParallelLinear) -> list[_Part]:
    parts = []
    for name, size in zip(names, module.output_sizes, strict=True):
        rows = size // module.tp_size
        parts.append(_Part(name, rows, size, module.tp_rank * rows))
    return parts


def _part_names(path: str, fused: dict[str, list[str]]) -> list[str]:
    parent, _, last = path.rpartition(".")
    if last not in fused:
        raise WeightsError(f"{path}: the model does not say which tensors are fused into it")
    return [f"{parent}.{part}" for part in fused[last]]
