#!/usr/bin/env python
"""From which layer and operation on the trainer's numbers are not the generators', and how far they are from
transformers': on CPU, for `trainer.parity` and for a family of your own.

    python scripts/first_difference.py CHECKPOINT [--architecture FILE.py:NAME] [--dtype bfloat16] [--parity auto]

A deterministic engine and a trainer of one rank load the checkpoint and compute one row of random tokens. What their
modules gave is compared in the order in which it is computed. A run that `trainer.parity` ended leaves its weights in
`checkpoint/`. Exit code: 1 if something differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_rl.generation.config import GeneratorConfig, generator_environment
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.models.architecture import read_shape
from titan_rl.types import NO_VERSION, GenerationRequest, PolicyVersion, SamplingParams, TrainingSample

MODULES = (
    ("norm before attention", "input_layernorm", "attention_norm"),
    ("queries, keys and values", "self_attn.qkv_proj", "attention.qkv_linear"),
    ("norm of queries", "self_attn.q_norm", "attention.q_norm"),
    ("norm of keys", "self_attn.k_norm", "attention.k_norm"),
    ("rotary embedding", "self_attn.rotary_emb", "attention.rope"),
    ("attention", "self_attn.attn", "attention.inner_attention"),
    ("output of attention", "self_attn.o_proj", "attention.wo"),
    ("norm before the feed-forward", "post_attention_layernorm", "ffn_norm"),
    ("feed-forward", "mlp", "feed_forward"),
)
"""Operations of a layer, the engine's modules and the trainer's."""


def of_engine(engine: Any, tokens: np.ndarray) -> np.ndarray:
    """Logprobs of all tokens but the first."""
    sampling = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    version = PolicyVersion(0, 0)
    request = GenerationRequest(
        request_id="row", prompt_token_ids=tokens, sampling=sampling, seed=0, min_version=version
    )
    engine.drop_cache()
    engine.add(request)
    found: np.ndarray = engine.step().finished[0].prompt_logprobs["logprob"][:, 0]
    return found


def of_trainer(policy: Any, tokens: np.ndarray) -> np.ndarray:
    from titan_rl.policy.microbatch import pack

    everything = np.arange(len(tokens)) > 0
    numbers = np.zeros(len(tokens), np.float32)
    row = TrainingSample(
        group_id=0,
        sample=0,
        token_ids=tokens,
        loss_mask=everything,
        logprobs=numbers,
        versions=np.where(everything, 0, NO_VERSION),
        advantages=numbers,
        reward=0.0,
    )
    found: np.ndarray = policy.logprobs(pack([row], policy.device, share=False), temperature=1.0)[0].numpy()
    return found


def of_transformers(checkpoint: Path, dtype: str, tokens: np.ndarray) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    found: np.ndarray = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    return found


def first_difference(engine: Any, policy: Any, tokens: np.ndarray) -> str:
    """Between a `VllmEngine` and a `Policy` of the same weights; empty where there is none."""
    names = [("embedding", "model.embed_tokens", "tok_embeddings")]
    for number in range(policy.shape.layers):
        places = (f"model.layers.{number}.", f"layers.{number}.")
        names += [(f"layer {number}, {what}", places[0] + one, places[1] + other) for what, one, other in MODULES]
    names.append(("last norm", "model.norm", "norm"))
    count = len(tokens) - 1
    served, trained = dict(engine.model.named_modules()), dict(policy.module.named_modules())
    names = [each for each in names if each[1] in served and each[2] in trained]

    theirs = outputs(served, [one for _, one, _ in names], lambda: of_engine(engine, tokens))
    ours = outputs(trained, [other for _, _, other in names], lambda: of_trainer(policy, tokens))
    for what, one, other in names:
        rows = theirs[one][:count], ours[other][:count]
        if not torch.equal(*rows):
            differing = (rows[0] != rows[1]).any(-1).nonzero()[:, 0].tolist()
            most = float((rows[0].double() - rows[1].double()).abs().max())
            return f"{what}: {len(differing)} of {count} rows, the first {differing[0]}, by up to {most:.2g}"
    return ""


def outputs(modules: dict[str, Any], names: list[str], compute: Callable[[], Any]) -> dict[str, Tensor]:
    """What the named modules give while this is computed, as rows."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            several = name.endswith(("rotary_emb", "rope", "qkv_linear"))
            parts = output if isinstance(output, tuple) and several else (output,)
            parts = [part[0] if isinstance(part, tuple) else part for part in parts]
            parts = [part[0] if part.ndim > 2 and part.shape[0] == 1 else part for part in parts]
            # vLLM's layers share one rotary embedding, which has the first layer's name
            found.setdefault(name, torch.cat([part.flatten(1) for part in parts], -1).clone())

        return hook

    hooks = [modules[name].register_forward_hook(keep(name)) for name in names]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--architecture", default="", help="a family of your own, as policy.architecture names it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--parity", choices=("bitwise", "auto"), default="bitwise")
    parser.add_argument("--tokens", type=int, default=100, help="at most; no more than the checkpoint has positions")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    needed = generator_environment("cpu", deterministic=True) | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if any(os.environ.get(name) != value for name, value in needed.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | needed)  # they are read at a start
    from titan_rl.generation.vllm.engine import VllmEngine
    from titan_rl.policy.updater import PolicyUpdater

    shape = read_shape(options.checkpoint, options.architecture)
    length = min(options.tokens, shape.max_length - 1)
    settings = GeneratorConfig(max_model_len=length + 1, deterministic=True, dtype=options.dtype)
    engine = VllmEngine(settings, options.checkpoint)
    trainer = PolicyUpdater(
        TrainerConfig(parity=options.parity, dtype=options.dtype),
        model_path=options.checkpoint,
        architecture=options.architecture,
        temperature=1.0,
        total_steps=1,
        device="cpu",
        seed=0,
    )
    tokens = np.random.default_rng(options.seed).integers(0, shape.vocab, length).astype(np.int32)
    found = first_difference(engine, trainer._policy, tokens)
    print(found or "no difference")
    ours = of_trainer(trainer._policy, tokens)
    others = {"the generator's": of_engine(engine, tokens)}
    others["transformers'"] = of_transformers(options.checkpoint, options.dtype, tokens)
    for whose, theirs in others.items():
        print(f"the trainer's logprobs differ from {whose} by at most {np.abs(ours - theirs).max():.1e} nats")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
