"""Weights from and to a Hugging Face checkpoint directory, and the part of each tensor that this rank holds.

Loading is exact or refused: every tensor of the architecture must be there, in its shape, and nothing else. Saving
leaves either the complete new directory or what was there before.

FSDP cuts what tensor parallelism left of a dimension, both as torch.chunk does (all chunks equal but the last ones,
which may be shorter or empty). So every rank's part is one box. Replicas count once: on the rank that comes first on
every mesh axis the tensor is replicated over.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_rl.directories import replacing
from titan_rl.errors import ConfigError, WeightsError
from titan_rl.policy.config import LoraConfig, TrainerConfig
from titan_rl.weights.adapters import adapted
from titan_rl.weights.fingerprint import shard_sum
from titan_rl.weights.manifest import LM_HEAD, TensorShard
from titan_rl.weights.ranks import Ranks
from titan_rl.weights.tensor_files import shards_of_files

if TYPE_CHECKING:
    from titan_rl.policy.models.model import Policy

ADAPTER = "adapter"
"""Of a checkpoint that was trained with LoRA: the directory of the adapters."""


def load_weights(policy: Policy, directory: Path) -> None:
    """Fill this rank's shards from `directory/*.safetensors`, reading only its boxes. Stored dtypes are widened.

    Raises:
        ConfigError: no weights, or tensors missing, unexpected or of a wrong shape, each named.
    """
    stored = {each.name: each.data for each in shards_of_files(directory)}
    shapes = policy.shape.tensor_shapes()
    allowed = {*shapes, LM_HEAD} if policy.shape.tied else shapes.keys()
    for names, problem in (
        (shapes.keys() - stored, "are missing"),
        (stored.keys() - allowed, f"are not part of {policy.shape.model_type}"),
    ):
        if names:
            some = ", ".join(sorted(names)[:5]) + ", …" * (len(names) > 5)
            raise ConfigError(f"{directory}: {len(names)} tensors {problem}: {some}")
    with torch.no_grad():
        for name, shape in shapes.items():
            if (found := tuple(stored[name].shape)) != shape:
                raise ConfigError(f"{directory}: {name} has shape {found}, its config.json asks for {shape}")
            shard = local_shard(name, policy.tensors[name])
            if shard.data.numel():
                shard.data.copy_(stored[name][shard.slices])


def reset_adapters(policy: Policy, seed: int) -> None:
    """B is 0, so that the policy is its base; A is drawn as by PEFT, each from the seed and its name."""
    for name, tensor in policy.trained.items():
        shard, whole = local_shard(name, tensor), torch.zeros(tensor.shape)
        if "lora_A" in name:
            random = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole.uniform_(-1, 1, generator=random).div_(math.sqrt(tensor.shape[1]))
        shard.data.copy_(whole[shard.slices])


def base_fingerprint(shards: Sequence[TensorShard]) -> int:
    """The sum of all weights' fingerprints, in any layout of ranks. Collective."""
    total = torch.tensor(0)
    for shard in shards:
        total += shard.counted * shard_sum(shard.data, shard.global_shape, shard.offset).cpu()
    Ranks(dist.group.WORLD).add(total)
    return int(total)


def whole_tensor(tensor: Tensor) -> Tensor:
    """Collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_whole(directory: Path, source: Path, tensors: Mapping[str, Tensor], config: TrainerConfig) -> None:
    """`write_checkpoint` of the whole tensors by rank 0. Collective. Raises WeightsError, on all ranks, if rank 0 could
    not."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole_tensor(tensor)  # one at a time, so that other ranks hold one only
        if dist.get_rank() == 0:
            whole[name] = full.to("cpu", torch.float32 if config.lora.r else getattr(torch, config.dtype)).contiguous()
    Ranks(dist.group.WORLD).together(
        f"the checkpoint {directory} could not be written",
        lambda: write_checkpoint(directory, source, whole, config) if dist.get_rank() == 0 else None,
    )


def write_checkpoint(directory: Path, source: Path, tensors: Mapping[str, Tensor], config: TrainerConfig) -> None:
    """Write `tensors` in the compute dtype, with the config and tokenizer files of `source`, as the checkpoint
    `directory`, which is new, empty, or written by an earlier call. Raises ConfigError otherwise. LoRA's adapters are
    merged into the weights of `source`, and written beside them in PEFT's format."""
    with replacing(directory) as draft:
        for file in source.iterdir():
            weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")
            if file.is_file() and not weights:
                shutil.copy(file, draft / file.name)
        model = json.loads((source / "config.json").read_text())
        model.pop("torch_dtype", None)  # the name of "dtype" before transformers 5; two would be one too many
        (draft / "config.json").write_text(json.dumps(model | {"dtype": config.dtype}, indent=2) + "\n")
        shards = [TensorShard.whole(*each) for each in tensors.items()]
        if config.lora.r:
            _write_adapters(draft / ADAPTER, source, tensors, config.lora)
            shards, tensors = list(shards_of_files(source)), scaled(tensors, config.lora)
        dtype = getattr(torch, config.dtype)
        cast = {shard.name: adapted(shard, tensors, dtype)[()].to(dtype) for shard in shards}
        save_file(cast, draft / "model.safetensors", metadata={"format": "pt"})


def scaled(adapters: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """As they are published and merged."""
    return {name: tensor * lora.scale if "lora_B" in name else tensor for name, tensor in adapters.items()}


def _write_adapters(directory: Path, base: Path, adapters: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """As `peft.PeftModel.from_pretrained` reads them."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "bias": "none",
        "inference_mode": True,
        "lora_dropout": 0.0,
        **asdict(lora),
    }
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def local_shard(name: str, tensor: Tensor) -> TensorShard:
    """The box of `tensor` on this rank, a view of its live storage and possibly empty; raises WeightsError for a layout
    that this module does not know.

    torch's own `compute_local_shape_and_global_offset` is not used: for an uneven dimension that FSDP and tensor
    parallelism both cut, it gives the layout of a strided redistribution, which is not where FSDP put the data.
    """
    if not isinstance(tensor, DTensor):
        return TensorShard.whole(name, tensor)
    mesh, data = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightsError(f"{name}: this rank is not part of the mesh that holds it")
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    counted = True
    axes = list(zip(tensor.placements, range(mesh.ndim), strict=True))
    # A strided shard is FSDP's mark on a dimension that tensor parallelism had cut before.
    for placement, axis in sorted(axes, key=lambda entry: isinstance(entry[0], _StridedShard)):
        if isinstance(placement, Replicate):
            counted = counted and coordinate[axis] == 0
        elif isinstance(placement, (Shard, _StridedShard)):
            size = shape[placement.dim]
            chunk = math.ceil(size / mesh.size(axis))
            start = min(coordinate[axis] * chunk, size)
            offset[placement.dim] += start
            shape[placement.dim] = min(chunk, size - start)
        else:
            raise WeightsError(f"{name}: weights are not expected to be {placement}")
    if tuple(shape) != tuple(data.shape):
        raise WeightsError(f"{name}: this rank holds {tuple(data.shape)} of {tuple(tensor.shape)}, expected {shape}")
    return TensorShard(name=name, data=data, global_shape=tuple(tensor.shape), offset=tuple(offset), counted=counted)
