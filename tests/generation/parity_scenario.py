"""What the ranks of test_parity do: a real engine samples, and a real trainer scores what it sampled. No tests here."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loop_harness import make_request
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.generation.vllm.rows import row_linear
from titan_rl.policy.config import LoraConfig, OptimizerConfig, TrainerConfig
from titan_rl.policy.microbatch import pack
from titan_rl.policy.models.checkpoint import local_shard
from titan_rl.policy.updater import PolicyUpdater
from titan_rl.types import NO_VERSION, Completion, GenerationRequest, PolicyVersion, TrainingSample
from titan_rl.weights.adapters import adapted

SYMBOLS = 11
GROUP = 4
TEMPERATURE = 0.7


def requests(count: int, *, longest: int, seed: int) -> list[GenerationRequest]:
    """Groups of one prompt each, every second one truncated by top_p."""
    rng = random.Random(seed)
    made = []
    for group in range(count // GROUP):
        prompt = [rng.randrange(2, 2 + SYMBOLS) for _ in range(rng.randint(1, longest))]
        ways: dict[str, Any] = {"top_p": 0.8, "support": True} if group % 2 else {}
        made += [
            make_request(
                f"{group}.{member}",
                prompt=prompt,
                new=rng.randint(6, 40),
                seed=1000 * seed + GROUP * group + member,
                temperature=TEMPERATURE,
                **ways,
            )
            for member in range(GROUP)
        ]
    return made


def sample(request: GenerationRequest, completion: Completion) -> TrainingSample:
    prompt = len(request.prompt_token_ids)
    group, member = map(int, request.request_id.split("."))
    supports = completion.supports

    def padded(array: np.ndarray, value: Any) -> np.ndarray:
        return np.concatenate([np.full(prompt, value, array.dtype), array])

    if supports is not None:
        supports = type(supports)(supports.values, padded(supports.sizes, 0))
    return TrainingSample(
        group_id=group,
        sample=member,
        token_ids=np.concatenate([request.prompt_token_ids, completion.token_ids]),
        loss_mask=padded(np.ones(len(completion.token_ids), bool), False),
        logprobs=padded(completion.logprobs, 0),
        versions=padded(completion.versions, NO_VERSION),
        advantages=float(np.random.default_rng(member).standard_normal()),
        reward=0.0,
        supports=supports,
    )


def serve(engine: VllmEngine, policy: PolicyUpdater, step: int, dtype: str) -> None:
    """Give the trainer's weights to the engine, as a pull does, whatever runs there."""
    kind, adapters = getattr(torch, dtype), {each.name: each.data for each in policy.local_shards()}
    shards = policy.local_shards() if policy.base is None else policy.base
    whole = ((each.name, adapted(each, adapters, kind)[()].to(kind)) for each in shards)
    engine.load_weights(whole, PolicyVersion(0, step))
    engine.drop_cache()


def rounds(
    model: str, engine: dict[str, Any], trainer: dict[str, Any], *, count: int, longest: int, steps: int
) -> list[dict[str, float]]:
    """Metrics of so many steps. Weights change in the middle of half of the completions of each."""
    config = GeneratorConfig(max_model_len=longest + 64, kv_cache_bytes=64 << 20, deterministic=True, **engine)
    served = VllmEngine(config, model)
    policy = trainer_of(model, trainer)
    serve(served, policy, 0, config.dtype)
    reports = []
    late: list[GenerationRequest] = []
    for step in range(steps):
        todo = requests(count, longest=longest, seed=step)
        for request in todo[len(late) :]:
            served.add(request)
        todo = late + todo[len(late) :]
        done = {}
        while served.has_work():
            done |= {each.request_id: each for each in served.step().finished}
        batch = SampleBatch.of(sample(request, done[request.request_id]) for request in todo)
        reports.append(policy.train_step(batch, policy.plan(batch)))
        # the first half of the next step's requests begin under the old weights
        late = requests(count, longest=longest, seed=step + 1)[: count // 2]
        for request in late:
            served.add(request)
        for _ in range(4):
            assert not served.step().finished
        serve(served, policy, step + 1, config.dtype)
    served.close()
    return reports


def trainer_of(model: str, settings: dict[str, Any]) -> PolicyUpdater:
    given = {"parity": "bitwise", "optimizer": OptimizerConfig(lr=1e-3), "max_tokens_per_microbatch": 2048, **settings}
    config = TrainerConfig(**given)
    return PolicyUpdater(config, model_path=Path(model), temperature=TEMPERATURE, total_steps=10, device="cpu", seed=0)


def sampled(model: str, engine: dict[str, Any], *, count: int, longest: int) -> list[TrainingSample]:
    """By a generator that serves the checkpoint as step 0's weights."""
    config = GeneratorConfig(max_model_len=longest + 64, kv_cache_bytes=64 << 20, deterministic=True, **engine)
    served = VllmEngine(config, model)
    todo = requests(count, longest=longest, seed=0)
    for request in todo:
        served.add(request)
    done = {}
    while served.has_work():
        done |= {each.request_id: each for each in served.step().finished}
    served.close()
    samples = [sample(request, done[request.request_id]) for request in todo]
    return [replace(each, versions=np.where(each.loss_mask, 0, NO_VERSION)) for each in samples]


def trained(model: str, samples: list[TrainingSample], trainers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By name of a trainer's settings: metrics of a step on these samples and this rank's weights after it, or the
    error."""
    found: dict[str, Any] = {}
    for name, settings in trainers.items():
        policy, batch = trainer_of(model, settings), SampleBatch.of(samples)
        try:
            metrics = policy.train_step(batch, policy.plan(batch))
        except TrainingError as error:
            found[name] = str(error)
        else:
            found[name] = metrics, {shard.name: shard.data.numpy().copy() for shard in policy.local_shards()}
    return found


def gradients(model: str, samples: list[TrainingSample], dtype: str) -> dict[str, float]:
    """Relative error (2-norm) of the gradient of the summed logprobs, against float64, with parity and without."""
    chosen = [each for each in samples if each.supports is None]
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    for each in chosen:
        ids = torch.from_numpy(each.token_ids.astype(np.int64))
        logprobs = (oracle(ids[None, :-1]).logits[0].double() / TEMPERATURE).log_softmax(-1)
        picked = logprobs.gather(1, ids[1:, None])[:, 0]
        (picked * torch.from_numpy(each.loss_mask[1:])).sum().backward()
    true = {name: parameter.grad for name, parameter in oracle.named_parameters() if parameter.grad is not None}
    errors = {}
    for parity in ("bitwise", "auto"):
        policy = trainer_of(model, {"parity": parity, "dtype": dtype})._policy
        policy.scores(pack(chosen, policy.device, share=True), temperature=TEMPERATURE)[0].sum().backward()
        by_storage = {local_shard("", each).data.data_ptr(): name for name, each in policy.tensors.items()}
        total = torch.zeros((), dtype=torch.float64)
        for parameter in policy.module.parameters():
            name = by_storage[local_shard("", parameter.detach()).data.data_ptr()]
            assert parameter.grad is not None
            total += (local_shard("", parameter.grad).data.double() - true[name]).square().sum()
        errors[parity] = float((total / sum(each.square().sum() for each in true.values())).sqrt())
    return errors


def adapters_gradients(model: str, samples: list[TrainingSample]) -> float:
    """Relative difference of the adapters' gradients with parity from those without."""
    made = []
    for parity in ("bitwise", "auto"):
        policy = trainer_of(model, {"parity": parity, "lora": LoraConfig(r=4)})._policy
        random = torch.Generator().manual_seed(0)
        for tensor in policy.trained.values():  # B is 0 at the start, and then A has no gradient
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=random))
        policy.scores(pack(samples, policy.device, share=True), temperature=TEMPERATURE)[0].sum().backward()
        grads = [each.grad for each in policy.module.parameters() if each.requires_grad]
        made.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
    assert len(made[0]) == len(made[1]) == sum(map(Tensor.numel, policy.trained.values()))
    return float((made[0] - made[1]).norm() / made[1].norm())


def operations(model: str, dtype: str) -> dict[str, list[int]]:
    """Of each operation, the numbers of random rows for which the trainer's is not the engine's own layer's."""
    config = GeneratorConfig(max_model_len=64, kv_cache_bytes=64 << 20, deterministic=True, dtype=dtype)
    engine = VllmEngine(config, model)
    policy = trainer_of(model, {"dtype": dtype})._policy.module
    kind = getattr(torch, dtype)
    whole: Any = engine.model
    theirs, ours = whole.model.layers[0], policy.layers["0"]
    for module in policy.modules():  # FSDP would gather weights for calls of a layer only
        if isinstance(module, FSDPModule):
            module.unshard()
    attention, ffn = ours.attention, ours.feed_forward
    size = attention.head_dim
    torch.manual_seed(0)

    def pairs(rows: int) -> dict[str, tuple[Tensor, Tensor]]:
        x, residual = (torch.randn(rows, theirs.input_layernorm.weight.shape[0]).to(kind) for _ in range(2))
        inner, wide = torch.randn(rows, ffn.w2.weight.shape[1]).to(kind), torch.randn(rows, 4 * size).to(kind)
        heads = torch.randn(rows, 6 * size).to(kind)
        query, key = heads.split([4 * size, 2 * size], -1)
        positions = torch.randint(0, 64, (rows,))
        rotated = ours.attention.rope(
            query.reshape(1, rows, 4, size), key.reshape(1, rows, 2, size), positions.view(1, -1)
        )
        queries, keys = theirs.self_attn.rotary_emb(positions, query.clone(), key.clone())
        normed, total = theirs.post_attention_layernorm(x.clone(), residual.clone())
        qkv, gate_up = theirs.self_attn.qkv_proj(x)[0], theirs.mlp.gate_up_proj(x)[0]
        projected = [weight(x) for weight in attention.qkv_linear.children()]
        by_head = query.reshape(rows, 4, size)
        return {
            "norm": (ours.attention_norm(x), theirs.input_layernorm(x.clone())),
            "norm of a sum": (ours.ffn_norm((x, residual)), normed),
            "sum": (x + residual, total),
            "norm of heads": (attention.q_norm(by_head), theirs.self_attn.q_norm(by_head.clone())),
            "queries, keys, values": (torch.cat(projected, -1), qkv),
            "rotary queries": (rotated[0].reshape(rows, -1), queries),
            "rotary keys": (rotated[1].reshape(rows, -1), keys),
            "output of attention": (attention.wo(wide), theirs.self_attn.o_proj(wide)[0]),
            "gate and up": (torch.cat([ffn.w1(x), ffn.w3(x)], -1), gate_up),
            "activation": (F.silu(ffn.w1(x)) * ffn.w3(x), theirs.mlp.act_fn(gate_up)),
            "down": (ffn.w2(inner), theirs.mlp.down_proj(inner)[0]),
            "logits": (row_linear(x, policy.lm_head.weight, None), whole.compute_logits(x)),
        }

    wrong: dict[str, list[int]] = {}
    with torch.inference_mode():
        for rows in (*range(1, 34), 100, 257):
            for name, (mine, theirs_made) in pairs(rows).items():
                wrong.setdefault(name, []).extend([] if torch.equal(mine, theirs_made) else [rows])
    engine.close()
    return wrong


def first_differences(model: str, longest: int) -> dict[str, str]:
    """What scripts/first_difference.py says of trainers with parity, without, and with a weight of their own."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from first_difference import first_difference

    engine = VllmEngine(GeneratorConfig(max_model_len=longest + 1, deterministic=True), model)
    tokens = np.random.default_rng(0).integers(2, 2 + SYMBOLS, longest).astype(np.int32)
    found = {
        parity: first_difference(engine, trainer_of(model, {"parity": parity})._policy, tokens)
        for parity in ("bitwise", "auto")
    }
    policy = trainer_of(model, {})._policy
    policy.tensors["model.layers.1.mlp.down_proj.weight"][:, 7] += 1e-3
    found["another weight"] = first_difference(engine, policy, tokens)
    engine.close()
    return found
