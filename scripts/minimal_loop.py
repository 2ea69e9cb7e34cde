#!/usr/bin/env python
"""The whole of RL training, top to bottom: copy4 learned in a plain loop over the public handles.

    python scripts/minimal_loop.py [--steps 150] [--seed 0]

Nothing here is special: `titan_rl.loop.loop` with `max_staleness = 0` does the same, down to the last bit of the
weights where the config is `deterministic`. Copy this file to try an algorithm of your own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from typing import TYPE_CHECKING

import numpy as np

from titan_rl import config_registry
from titan_rl.chat import make_renderer
from titan_rl.config import RunConfig
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.environments.copy import Copy
from titan_rl.environments.rubric import Transcript
from titan_rl.policy.algorithms.base import standardized
from titan_rl.run.start import start
from titan_rl.seeding import prompt_digest, request_seed
from titan_rl.types import (
    NO_VERSION,
    Completion,
    Example,
    GenerationRequest,
    PolicyVersion,
    Purpose,
    SamplingParams,
    TrainingSample,
)

if TYPE_CHECKING:
    from titan_rl.loop.system import System


class CopyTask:
    """Prompts, tokens and rewards of copy4, without a rollout worker: one turn, graded in place."""

    def __init__(self, system: System, config: RunConfig) -> None:
        self.system, self.config = system, config
        self.environment = Copy(**config.environment.kwargs, seed=config.seed)
        self.renderer = make_renderer("auto", str(system.model_path))
        self.rubric = self.environment.rubric()

    async def sample(
        self, example: Example, *, purpose: Purpose, prompt: int, sample: int, version: PolicyVersion
    ) -> tuple[np.ndarray, Completion, float]:
        """One rollout: (prompt tokens, completion, reward). Evaluation is greedy."""
        prompt_tokens = np.array(self.renderer.render(example.prompt), np.int32)
        completion = await self.system.router.generate(
            GenerationRequest(
                request_id=f"{purpose}-{prompt}-{sample}-{version}",
                prompt_token_ids=prompt_tokens,
                sampling=SamplingParams(
                    max_new_tokens=self.config.rollout.sampling.max_new_tokens,
                    temperature=1.0 if purpose is Purpose.TRAIN else 0.0,
                    stop_token_ids=tuple(self.renderer.stop_token_ids),
                ),
                seed=request_seed(self.config.seed, purpose, prompt, sample, prompt_digest(prompt_tokens)),
                min_version=version,
            )
        )
        message = self.renderer.parse(completion.token_ids.tolist(), completion.finish_reason, prompt_tokens)
        transcript = Transcript(messages=(*example.prompt, message), finish_reasons=(completion.finish_reason,))
        return prompt_tokens, completion, self.rubric.score(example, transcript).reward


def training_sample(
    prompt: int, sample: int, tokens: np.ndarray, completion: Completion, reward: float, advantage: float
) -> TrainingSample:
    """Prompt and completion as one document; only sampled tokens are in the loss."""
    before = len(tokens)
    return TrainingSample(
        group_id=prompt,
        sample=sample,
        token_ids=np.concatenate([tokens, completion.token_ids]),
        loss_mask=np.arange(before + len(completion.token_ids)) >= before,
        logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(before, NO_VERSION, np.int64), completion.versions]),
        advantages=advantage,
        reward=reward,
    )


async def train(system: System, config: RunConfig) -> PolicyVersion:
    """`loop.steps` synchronous steps; returns the version that every generator serves at the end."""
    task = CopyTask(system, config)
    groups, samples = config.loop.groups_per_step, config.rollout.samples_per_group
    publication = await system.trainer.push_model_state_dict()
    await system.router.pull_model_state_dict(publication)
    for step in range(1, config.loop.steps + 1):
        # Rollouts: every sample of every group at once, from the version that was just published.
        prompts = range((step - 1) * groups, step * groups)
        played = await asyncio.gather(
            *(
                task.sample(
                    task.environment.example(prompt),
                    purpose=Purpose.TRAIN,
                    prompt=prompt,
                    sample=sample,
                    version=publication.version,
                )
                for prompt in prompts
                for sample in range(samples)
            )
        )
        # Advantages: each reward against its own group.
        rewards = np.array([reward for _, _, reward in played])
        advantages = np.concatenate([standardized(group, 1e-4) for group in rewards.reshape(groups, samples)])
        # One optimizer step, then every generator takes the new weights.
        batch = SampleBatch.of(
            training_sample(prompts[index // samples], index % samples, *rollout, float(advantages[index]))
            for index, rollout in enumerate(played)
        )
        metrics = await system.trainer.train_step(batch)
        previous, publication = publication, await system.trainer.push_model_state_dict()
        await system.router.pull_model_state_dict(publication)
        await system.trainer.release(previous)
        if step % 10 == 0 or step == config.loop.steps:
            print(f"step {step}  reward {rewards.mean():.3f}  loss {metrics['loss']:+.4f}", flush=True)
    return publication.version


async def evaluate(system: System, config: RunConfig, version: PolicyVersion) -> float:
    """Greedy exact match on prompts that training never sees."""
    task = CopyTask(system, config)
    held_out = task.environment.held_out(config.evaluation.prompts)
    graded = await asyncio.gather(
        *(
            task.sample(example, purpose=Purpose.EVALUATE, prompt=index, sample=0, version=version)
            for index, example in enumerate(held_out)
        )
    )
    return float(np.mean([reward == 1.0 for _, _, reward in graded]))


async def main(config: RunConfig) -> float:
    async with start(config) as system:
        version = await train(system, config)
        return await evaluate(system, config, version)


if __name__ == "__main__":
    recipe = config_registry.copy4()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=recipe.loop.steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="decides prompts, sampling and initial weights")
    arguments = parser.parse_args()
    loop = dataclasses.replace(recipe.loop, steps=arguments.steps)
    exact_match = asyncio.run(main(dataclasses.replace(recipe, loop=loop, seed=arguments.seed)))
    print(f"held-out exact match {exact_match:.3f}")
    sys.exit(0 if arguments.steps < 100 or exact_match >= 0.95 else 1)
