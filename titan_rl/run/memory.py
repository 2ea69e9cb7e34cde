"""What every rank of a run on CUDA holds, by part, in bytes: arithmetic on the policy's sizes, without a device.

The trainer's part was fitted to torch's FSDP memory tracker (`scripts/fake_step.py`): within 3 % of it for 0.6B and 8B
without recomputing, 5 to 10 % above it for 32B and 8B with `activation_checkpointing = "full"`. What "selective" and
sequence parallelism save is not known and not refused by. NCCL, CUDA's context and what the allocator cannot use come
on top: `USABLE`. Nothing was measured on a device. Where devices are shared, each rank is held against a whole one:
they are not added up.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePath

import tomli

from titan_rl.config import RunConfig
from titan_rl.errors import ConfigError
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.models.architecture import Architecture, read_shape
from titan_rl.policy.models.qwen3 import Qwen3
from titan_rl.policy.models.tiny import tiny_shape
from titan_rl.weights.manifest import EMBEDDING
from titan_rl.weights.segment_files import DIRECTORY

GIB = 1 << 30
ASSUMED_DEVICE = 80 * GIB
"""Memory of a device where none is there to ask."""
USABLE = 0.93
"""Share of a device's memory that a trainer rank's tensors may take."""
ENGINE_RESERVE = 3 * GIB
"""CUDA's context, NCCL and the graphs of a generator rank."""
CHUNK = 128 << 20
"""Logits that the trainer computes at once, on CUDA."""

_WIDTH = {"float32": 4, "bfloat16": 2}
_PUBLISHED = tomli.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def published_shape(path: str) -> Architecture | None:
    """That of the published model that the directory is named after; None: it is not."""
    sizes = _PUBLISHED.get(PurePath(path).name)
    return Qwen3(**sizes) if sizes else None


def shape_of(config: RunConfig) -> Architecture | None:
    """None: neither is the checkpoint there, nor is its directory named after a published model."""
    policy = config.policy
    try:
        return tiny_shape(policy.tiny) if policy.tiny else read_shape(Path(policy.path), policy.family)
    except ConfigError:
        return published_shape(config.policy.path)


def parameters(shape: Architecture) -> int:
    return sum(map(math.prod, shape.tensor_shapes().values()))


def learning(config: TrainerConfig, shape: Architecture) -> int:
    """Parameters that are trained: LoRA's, or all."""
    matrices = ((name.split(".")[-2], sizes) for name, sizes in shape.tensor_shapes().items())
    adapted = (sizes for module, sizes in matrices if module in config.lora.target_modules)
    return config.lora.r * sum(map(sum, adapted)) or parameters(shape)


def trainer_memory(config: TrainerConfig, shape: Architecture) -> dict[str, float]:
    """Of one rank, at the peak of a step of full micro-batches."""
    share, split = config.replicas / config.ranks, config.tensor_parallel
    trained = learning(config, shape) * share
    teacher = read_shape(Path(config.kl.teacher), type(shape)) if config.kl.teacher else shape
    frozen = parameters(teacher) * (config.kl.coefficient > 0)
    width = _WIDTH[config.dtype]
    head = math.prod(shape.tensor_shapes()[EMBEDDING]) / split
    layer = (parameters(shape) / split - head * (1 if shape.tied else 2)) / shape.layers
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    ffn = shape.ffn * getattr(shape, "chosen", 1)  # as many experts compute a token
    kept = 10.25 * shape.dim + (4.55 * attention + 4.24 * ffn) / split  # of a token in a layer
    layers = shape.layers
    if config.activation_checkpointing == "full":
        kept, layers = kept + shape.layers * shape.dim, 1
    return {
        "weights": 4 * parameters(shape) * share + 4 * trained * (config.lora.r > 0),
        "gradients": 4 * trained,
        "moments": 8 * trained,
        "KL reference": 4 * frozen / config.ranks * config.replicas,
        "rotary tables": 8.0 * shape.layers * shape.max_length * shape.head_dim,
        "gathered": width * (head + 2 * layer) + 4 * layer,
        "activations": width * kept * layers * config.max_tokens_per_microbatch,
        "logits": (4 + width) * head + 8 * min(CHUNK, config.max_tokens_per_microbatch * shape.vocab / split),
    }


def generator_memory(config: RunConfig, shape: Architecture, device: int) -> dict[str, float]:
    """Of one rank. What is left of `gpu_memory_utilization` is KV cache."""
    generator, width = config.generator, _WIDTH[config.generator.dtype]
    step = width * (4 * shape.dim + 2 * shape.ffn / generator.tensor_parallel) * generator.max_num_batched_tokens
    parts = {
        "weights": width * parameters(shape) / generator.tensor_parallel,
        "a step": step + 12.0 * shape.vocab * generator.max_num_seqs,
        "graphs, NCCL": float(ENGINE_RESERVE),
    }
    if config.generator_settings().shares_device:
        return parts | {"KV cache": float(generator.kv_cache_bytes)}
    return parts | {"KV cache": generator.gpu_memory_utilization * device - sum(parts.values())}


def kv_bytes(config: RunConfig, shape: Architecture) -> float:
    """Of one token, on one rank."""
    width = _WIDTH[config.generator.dtype]
    return 2 * width * shape.layers * shape.kv_heads * shape.head_dim / config.generator.tensor_parallel


def shared_memory(config: RunConfig, shape: Architecture) -> dict[str, int]:
    """In /dev/shm: publications on every host, copies of the trainer's state where its ranks are."""
    trained, kl = learning(config.trainer, shape), config.trainer.kl
    width = 4 if config.trainer.lora.r else _WIDTH[config.generator.dtype]  # adapters are published in float32
    copies = (24 + 4 * (kl.coefficient > 0 and not kl.teacher)) * config.checkpoint.in_memory
    return {
        "publications": config.weights_settings().max_live * width * trained,
        "copies of the trainer": copies * trained,
    }


def describe_memory(config: RunConfig, shape: Architecture, device: int) -> list[str]:
    """Lines for people: a device of so many bytes, then each kind of rank."""
    device = device or ASSUMED_DEVICE
    engine = generator_memory(config, shape, device)
    rows = {"a trainer rank": trainer_memory(config.trainer, shape), "a generator rank": engine}
    rows["/dev/shm, in all"] = {part: float(size) for part, size in shared_memory(config, shape).items()}
    if config.trainer.lora.r:
        rows["page cache of a generator's host"] = {"base": float(_WIDTH[config.generator.dtype] * parameters(shape))}
    lines = ["", f"memory by estimate, of {parameters(shape):,} parameters on devices of {device / GIB:.0f} GiB"]
    for name, parts in rows.items():
        listed = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items() if size)
        lines.append(f"  {name}: {sum(parts.values()) / GIB:.1f} GiB ({listed})")
    return [*lines, f"  KV cache of a generator: {max(0, engine['KV cache'] / kv_bytes(config, shape)):,.0f} tokens"]


def too_large(config: RunConfig, shape: Architecture, device: int) -> Iterator[str]:
    """What does not fit on devices of so many bytes (0: unknown) or in this host's /dev/shm, and what to change."""
    device = device or ASSUMED_DEVICE
    trainer = trainer_memory(config.trainer, shape)
    known = config.trainer.activation_checkpointing != "selective" and not config.trainer.sequence_parallel
    if not config.serving and known and (needed := sum(trainer.values())) > USABLE * device:
        largest = max(trainer, key=lambda part: trainer[part])
        recompute = 'trainer.activation_checkpointing = "full", a smaller trainer.max_tokens_per_microbatch'
        remedy = recompute if largest == "activations" else "more trainer.data_parallel"
        yield (
            f"a trainer rank needs {needed / GIB:.0f} GiB ({largest}: {trainer[largest] / GIB:.0f}), and a device has "
            f"{device / GIB:.0f}: {remedy} or more trainer.tensor_parallel"
        )
    engine, shares = generator_memory(config, shape, device), config.generator_settings().shares_device
    needed, left = config.generator.max_model_len * kv_bytes(config, shape), engine["KV cache"]
    if shares and (total := sum(engine.values())) > device:
        more = "more generator.tensor_parallel"
        yield f"a generator rank needs {total / GIB:.0f} GiB, and a device has {device / GIB:.0f}: {more}"
    if left < needed:
        setting = "kv_cache_bytes" if shares else "gpu_memory_utilization"
        remedy = "more of it" if shares else "more generator.tensor_parallel"
        yield (
            f"generator.{setting} leaves {left / GIB:.1f} GiB of {device / GIB:.0f} for KV, and one request of "
            f"generator.max_model_len takes {needed / GIB:.1f}: {remedy}"
        )
    needed, free = shared_memory(config, shape)["publications"], shutil.disk_usage(DIRECTORY).free
    if needed > free:
        yield (
            f"{DIRECTORY} has {free / GIB:.1f} GiB free, and weights.max_live publications take {needed / GIB:.1f}: "
            "make it larger (containers: --shm-size)"
        )
