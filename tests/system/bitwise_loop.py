"""A plain synchronous loop over the public handles of a real system, and a digest of all that came of it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.generation.config import GeneratorConfig
from titan_rl.launch.start import start
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.rollout.samples import group_advantages
from titan_rl.seeding import prompt_digest, request_seed
from titan_rl.types import (
    NO_VERSION,
    Completion,
    GenerationRequest,
    PolicyVersion,
    Purpose,
    SamplingParams,
    TrainingSample,
)

if TYPE_CHECKING:
    from titan_rl.controller.system import System

STEPS = 6
GROUPS = 4
SAMPLES = 6
LENGTH = 128

Asking = Literal["all at once", "group by group", "two at a time"]


class Outcome(NamedTuple):
    """What must be bitwise the same."""

    tokens: str
    """Digest of the token ids of all steps."""
    logprobs: str
    rewards: str
    weights: str
    """Digest of every tensor of the trainer after the last step."""
    start: str
    """The same before the first."""


def small_run(seed: int, dtype: Literal["float32", "bfloat16"], **generator: object) -> RunConfig:
    """copy4's policy and optimizer on long prompts, deterministic. The trainer computes in float32 whatever `dtype` the
    generators have, so that what it saves is all of its weights."""
    recipe = copy4()
    settings = GeneratorConfig(max_model_len=LENGTH, kv_cache_bytes=64 << 20, dtype=dtype)
    return dataclasses.replace(
        recipe,
        seed=seed,
        deterministic=True,
        policy=PolicyConfig(tiny=TinyPolicyConfig(max_length=LENGTH)),
        generator=dataclasses.replace(settings, **generator),
    )


async def train(config: RunConfig, directory: Path, asking: Asking = "all at once") -> Outcome:
    """`STEPS` steps of `GROUPS` groups. The reward is the share of even tokens, so that groups have variance."""
    digests = {name: hashlib.sha256() for name in ("tokens", "logprobs", "rewards")}
    async with start(config, log_directory=directory / "logs") as system:
        await system.trainer.save(directory / "start")
        publication = await system.trainer.push_model_state_dict()
        await system.router.pull_model_state_dict(publication)
        for step in range(STEPS):
            requests = [
                request(config, prompt, sample, publication.version)
                for prompt in range(step * GROUPS, (step + 1) * GROUPS)
                for sample in range(SAMPLES)
            ]
            completions = await ask(system, requests, asking)
            rewards = np.array([float(np.mean(each.token_ids % 2 == 0)) for each in completions])
            advantages = np.concatenate([group_advantages(group) for group in rewards.reshape(GROUPS, SAMPLES)])
            batch = SampleBatch.of(
                training_sample(index, asked, completion, float(rewards[index]), float(advantages[index]))
                for index, (asked, completion) in enumerate(zip(requests, completions, strict=True))
            )
            for completion in completions:
                digests["tokens"].update(completion.token_ids.tobytes())
                digests["logprobs"].update(completion.logprobs.tobytes())
            digests["rewards"].update(rewards.tobytes())
            await system.trainer.train_step(batch)
            previous, publication = publication, await system.trainer.push_model_state_dict()
            await system.router.pull_model_state_dict(publication)
            await system.trainer.release(previous)
        await system.trainer.save(directory / "end")
    return Outcome(
        **{name: digest.hexdigest() for name, digest in digests.items()},
        weights=digest_of(directory / "end"),
        start=digest_of(directory / "start"),
    )


def request(config: RunConfig, prompt: int, sample: int, version: PolicyVersion) -> GenerationRequest:
    """Samples of a group share the prompt; all prompts begin alike and go on at lengths of their own."""
    random = np.random.default_rng((config.seed, prompt))
    alike, own = np.arange(40) % 11 + 2, random.integers(2, 13, int(random.integers(3, 50)))
    tokens = np.concatenate([alike, own]).astype(np.int32)
    return GenerationRequest(
        request_id=f"{prompt}-{sample}-{version}",
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_new_tokens=int(random.integers(6, 24)), stop_token_ids=(1,)),
        seed=request_seed(config.seed, Purpose.TRAIN, prompt, sample, prompt_digest(tokens)),
        min_version=version,
    )


async def ask(system: System, requests: list[GenerationRequest], asking: Asking) -> list[Completion]:
    """Completions in the order of the requests."""
    at_once = {"all at once": len(requests), "group by group": SAMPLES, "two at a time": 2}[asking]
    completions: list[Completion] = []
    for first in range(0, len(requests), at_once):
        some = requests[first : first + at_once]
        completions += await asyncio.gather(*(system.router.generate(each) for each in some))
    return completions


def training_sample(
    index: int, asked: GenerationRequest, completion: Completion, reward: float, advantage: float
) -> TrainingSample:
    before, sampled = len(asked.prompt_token_ids), len(completion.token_ids)
    return TrainingSample(
        group_id=index // SAMPLES,
        sample=index % SAMPLES,
        token_ids=np.concatenate([asked.prompt_token_ids, completion.token_ids]),
        loss_mask=np.arange(before + sampled) >= before,
        logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(before, NO_VERSION, np.int64), completion.versions]),
        advantage=advantage,
        reward=reward,
    )


def digest_of(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
            digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
