"""The weights that a vLLM model computes with, under Hugging Face names: views, with fused projections split.

Every parameter of the model is reported, or an error names it, so that no layer of unknown layout goes unverified. The
logits projection is read from the model's own `lm_head` even where it shares the embedding's memory: with tied
embeddings a stale copy would otherwise not be seen. Where a layer computes with a packed matrix, that one is read.

New weights are stored in these views. If the views were wrong, so would be what verification reads; therefore the first
weights of an engine come through vLLM's own loader, and are looked for in the views (`check_places`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from titan_rl.errors import WeightsError
from titan_rl.generation.vllm.packed import PackedMatrix
from titan_rl.weights.fingerprint import BITS
from titan_rl.weights.manifest import TensorShard


class _Part(NamedTuple):
    """Rows of a layer's output dimension that are one tensor of the checkpoint."""

    name: str
    rows: int
    """On this rank."""
    global_rows: int
    first: int
    """Global index of this rank's first row."""


def served_shards(model: torch.nn.Module, *, packed: bool = True) -> Iterator[TensorShard]:
    """This rank's shards of every weight of a vLLM language model. Raises WeightsError for parameters in an unknown
    layout. With `packed` false those that packed matrices were made from, instead of these."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules(remove_duplicate=False):
        parameters = list(module.named_parameters(recurse=False, remove_duplicate=False))
        kind = type(module)
        for name, parameter in parameters:
            data: Tensor | PackedMatrix = parameter.data
            if packed and name == "weight" and isinstance(compute := getattr(module, "cpu_linear", None), PackedMatrix):
                data = compute
            if kind is VocabParallelEmbedding or kind is ParallelLMHead:
                mine = module.shard_indices
                part = _Part(path, mine.num_org_elements, module.org_vocab_size, mine.org_vocab_start_index)
                yield from _rows(data, name, [part])
            elif kind is QKVParallelLinear:
                yield from _rows(data, name, _attention_heads(_part_names(path, fused), module))
            elif kind is MergedColumnParallelLinear:
                yield from _rows(data, name, _merged(_part_names(path, fused), module))
            elif kind is RowParallelLinear and name == "weight":
                rows, columns = data.shape
                yield from _rows(data, name, [_Part(path, rows, rows, 0)], module.input_size, module.tp_rank * columns)
            elif kind is RMSNorm or kind is RowParallelLinear:  # its bias, which the first rank adds
                yield from _rows(data, name, [_Part(path, data.shape[0], data.shape[0], 0)])
            elif kind is GateLinear:  # the block has it too, but the experts compute with theirs
                if path.endswith(experts := ".experts.gate"):
                    router = path.removesuffix(experts) + ".gate"
                    yield from _rows(data, name, [_Part(router, data.shape[0], data.shape[0], 0)])
            elif kind is RoutedExperts:
                yield from _experts(path.removesuffix(".routed_experts"), name, parameter.data, module)
            else:
                raise WeightsError(
                    f"{path}.{name}: the layout of {kind.__name__} is unknown, so its weights cannot be verified"
                )


def load(tensors: Mapping[str, Tensor], served: Iterable[TensorShard]) -> None:
    """Store whole tensors, or adapted ones, in these shards; a shard of another name stays as it is. The tensors may
    change after it."""
    for shard in served:
        if (whole := tensors.get(shard.name)) is None:
            continue
        box = whole[shard.slices]
        if shard.data.device.type == "cpu":
            from titan_rl.weights.panels import store  # here: it loads numba

            store(box, shard.data)
            continue
        # A box of columns is cut out on the device: the host would put it together in one thread. More bytes cross,
        # and the device needs room for the whole matrix.
        box = box if box.is_contiguous() else whole.to(shard.data.device, non_blocking=True)[shard.slices]
        shard.data.copy_(box, non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def check_places(tensors: Mapping[str, Tensor], parameters: Iterable[TensorShard]) -> None:
    """Raises WeightsError, which names it, for a tensor that is not where it would be stored. vLLM has loaded them."""
    for shard in parameters:
        if shard.name in tensors:
            bits = BITS[shard.data.dtype]
            expected = tensors[shard.name][shard.slices].to(shard.data.device, shard.data.dtype)
            if not torch.equal(shard.data.view(bits), expected.view(bits)):
                raise WeightsError(f"vLLM's own loader puts {shard.name} elsewhere than here is known")


def _rows(
    data: Tensor | PackedMatrix, name: str, parts: list[_Part], columns: int = 0, first_column: int = 0
) -> Iterator[TensorShard]:
    """Consecutive parts of a weight [rows, K] or [rows]; the rest is padding. `columns` of the global tensor, K
    if 0."""
    start = 0
    for part in parts:
        done, end = 0, start + part.rows
        if not part.rows:  # this rank has nothing but padding
            continue
        for rows, box in data.boxes(start, end) if isinstance(data, PackedMatrix) else [(part.rows, data[start:end])]:
            offset = (part.first + done, first_column)
            yield TensorShard(
                name=f"{part.name}.{name}",
                data=box,
                global_shape=(part.global_rows, columns or data.shape[-1])[: len(data.shape)],
                offset=offset[: len(data.shape)],
            )
            done += rows
        start = end


def _attention_heads(names: list[str], module: QKVParallelLinear) -> list[_Part]:
    """Query heads are split over all ranks. So are key and value heads, unless there are fewer than ranks: then several
    ranks hold the same head."""
    queries = module.num_heads, module.total_num_heads, module.tp_rank
    keys = module.num_kv_heads, module.total_num_kv_heads, module.tp_rank // module.num_kv_head_replicas
    sizes = module.head_size, module.head_size, module.v_head_size
    return [
        _Part(name, heads * size, total * size, rank * heads * size)
        for name, size, (heads, total, rank) in zip(names, sizes, (queries, keys, keys), strict=True)
    ]


def _merged(names: list[str], module: MergedColumnParallelLinear) -> list[_Part]:
    rows = [size // module.tp_size for size in module.output_sizes]
    parts = zip(names, rows, module.output_sizes, strict=True)
    return [_Part(name, own, size, module.tp_rank * own) for name, own, size in parts]


def _experts(path: str, name: str, data: Tensor, module: RoutedExperts) -> Iterator[TensorShard]:
    """`w13_weight` [E, 2F, D] is each expert's gate and up, `w2_weight` [E, D, F] its down; ranks share F."""
    ranks, rank = (getattr(module.moe_config.moe_parallel_config, each) for each in ("tp_size", "tp_rank"))
    for number, matrix in enumerate(data):
        if name == "w2_weight":
            rows, columns = matrix.shape
            down = _Part(f"{path}.{number}.down_proj", rows, rows, 0)
            yield from _rows(matrix, "weight", [down], ranks * columns, rank * columns)
        else:
            rows = len(matrix) // 2
            pair = [_Part(f"{path}.{number}.{each}_proj", rows, ranks * rows, rank * rows) for each in ("gate", "up")]
            yield from _rows(matrix, "weight", pair)


def _part_names(path: str, fused: dict[str, list[str]]) -> list[str]:
    parent, _, last = path.rpartition(".")
    return [f"{parent}.{part}" for part in fused[last]]
