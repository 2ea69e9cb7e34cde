#!/usr/bin/env python
"""The trainer's step of a Qwen3 of any size as rank 0 of many, without weights, devices or other ranks: what it keeps.

    python scripts/fake_step.py 8B --data-parallel 4 --tensor-parallel 2 --tokens 8192 [--recompute]

Tensors are fake (they have a shape and no memory), the process group is torch's fake one, and attention is the varlen
kernel's, which only CUDA computes. torch's FSDP memory tracker counts; the last line is JSON, in GiB, at the peak of a
step of two micro-batches whose optimizer has its state already, and as `titan_rl.run.memory` estimates it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.microbatch import MicroBatch, Run
from titan_rl.policy.models.architecture import Architecture
from titan_rl.policy.updater import import_torchtitan
from titan_rl.run.memory import published_shape, trainer_memory

DOCUMENTS = 4


def batch_of(tokens: int, trained: int) -> MicroBatch:
    def whole(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    row = {"tokens": whole(tokens)[None], "positions": whole(tokens)[None]}
    of_trained = {name: whole(trained) for name in ("rows", "targets", "samples", "versions")}
    numbers = {name: torch.zeros(trained) for name in ("behaviour_logprobs", "advantages")}
    run = Run(segments=DOCUMENTS, length=tokens // DOCUMENTS, shared=0)
    return MicroBatch(documents=(), runs=(run,), key_rows=None, supports=None, **row, **of_trained, **numbers)


def peak_of_step(shape: Architecture, config: TrainerConfig) -> dict[str, float]:
    """Bytes by torch's kinds, where their sum is largest."""
    import_torchtitan("cpu")
    from torchtitan.models.common.attention import VarlenAttention

    from titan_rl.policy import token_scores
    from titan_rl.policy.models import model
    from titan_rl.policy.optimizer import PolicyOptimizer

    model.DocumentAttention = VarlenAttention  # type: ignore[misc]  # as on CUDA
    token_scores.CHUNK_ELEMENTS["cpu"] = token_scores.CHUNK_ELEMENTS["cuda"]
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(config.ranks), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.ranks)
    policy = model.build_policy(shape, config, torch.device("meta"))  # meshes are looked at, so they are not fake
    peak: dict[str, float] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.module.to_empty(device="cpu")
        model.reduce_gradients_by_plain_sums(policy.module)
        object.__setattr__(policy, "device", torch.device("cpu"))
        optimizer = PolicyOptimizer(config.optimizer, policy.module, total_steps=9)
        _ = optimizer.tensors  # makes the state
        batch = batch_of(config.max_tokens_per_microbatch, config.max_tokens_per_microbatch // 2)
        tracker = FSDPMemTracker(policy.module, optimizer._optimizers.optimizers[0])
        tracker.track_inputs(())
        with tracker:
            for _ in range(2):  # the second meets the gradients of the first
                logprobs, entropies, _ = policy.scores(batch, temperature=1.0)
                (logprobs.sum() + entropies.sum()).backward()
                del logprobs, entropies
            optimizer.step()
        for parts in tracker.get_tracker_snapshot("peak").values():
            peak = dict(Counter(peak) + Counter({getattr(kind, "name", kind): size for kind, size in parts.items()}))
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", help="of a published dense Qwen3: 0.6B, 1.7B, 4B, 8B, 14B or 32B")
    parser.add_argument("--data-parallel", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    asked = parser.parse_args()
    shape = published_shape(f"Qwen3-{asked.size}")
    assert shape is not None, f"no Qwen3 of size {asked.size}"
    layout: dict[str, Any] = {"data_parallel": asked.data_parallel, "tensor_parallel": asked.tensor_parallel}
    rest: dict[str, Any] = {"dtype": "bfloat16", "activation_checkpointing": "full" if asked.recompute else "none"}
    config = TrainerConfig(max_tokens_per_microbatch=asked.tokens, **layout, **rest)
    found = peak_of_step(shape, config)
    estimated = trainer_memory(config, shape)
    in_gib = {name: round(size / 2**30, 3) for name, size in found.items() if size}
    print(json.dumps({"tracked": in_gib, "estimated": {n: round(s / 2**30, 3) for n, s in estimated.items()}}))


if __name__ == "__main__":
    main()
