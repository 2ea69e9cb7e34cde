"""Rollouts of tool_sum by a real engine, in a process of its own.

    python engine_turns.py MODEL_PATH RESULTS.pkl

The policy has random weights: it calls tools wrongly, is cut off, and ends its turns anywhere.
"""

import asyncio
import pickle
import sys
from pathlib import Path

import numpy as np

from titan_rl.generation.config import GeneratorConfig
from titan_rl.rollout.config import EnvironmentConfig, RolloutConfig
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.rollout.rollouter import Rollouter
from titan_rl.types import Completion, GenerationRequest, GroupRequest, PolicyVersion, Purpose, SamplingParams

GROUPS, SAMPLES = 6, 4


class Wandering(Rollouter):
    """Goes on from another history when a conversation is over: one that is cut short, and one with another prompt."""

    async def roll_out(self, group, sample, generate, rollout):
        played = await super().roll_out(group, sample, generate, rollout)
        prompt, last = rollout.prompt.token_ids, played.graph.completions[0].token_ids
        turns = self.turns(self.request(group, sample))
        for history in (np.concatenate((prompt, last[:2])), prompt[1:]):
            await self.complete(turns, turns.prompt_of_tokens(history.tolist()), generate, rollout)
        return played


async def play(model_path: Path, engine):
    """What the engine was asked and answered, and the samples."""
    asked: list[tuple[np.ndarray, Completion]] = []
    done: dict[str, Completion] = {}

    async def generate(request: GenerationRequest) -> Completion:
        engine.validate(request)
        engine.add(request)
        await asyncio.sleep(0)  # what was asked in this tick is sampled together
        while request.request_id not in done:
            done.update({completion.request_id: completion for completion in engine.step().finished})
        completion = done.pop(request.request_id)
        asked.append((request.prompt_token_ids.copy(), completion))
        return completion

    runner = GroupRunner(
        EnvironmentConfig(name="tool_sum"),
        RolloutConfig(rollouter="engine_turns:Wandering", max_turns=3),
        model_path=str(model_path),
        run_seed=3,
        max_model_len=64,
    )
    try:
        await runner.start()
        requests = [
            GroupRequest(
                group_id=group_id,
                purpose=Purpose.TRAIN,
                samples=SAMPLES,
                sampling=SamplingParams(max_new_tokens=12),
                min_version=PolicyVersion(0, 0),
            )
            for group_id in range(GROUPS)
        ]
        return asked, await asyncio.gather(*(runner.run_group(request, generate) for request in requests))
    finally:
        await runner.close()


def main() -> None:
    from titan_rl.generation.vllm.engine import VllmEngine

    model_path, results = map(Path, sys.argv[1:])
    engine = VllmEngine(GeneratorConfig(max_model_len=64, max_num_seqs=32, kv_cache_bytes=64 << 20), model_path)
    asked, groups = asyncio.run(play(model_path, engine))
    engine.close()
    results.write_bytes(
        pickle.dumps(
            {
                "asked": [
                    (prompt.tolist(), one.token_ids.tolist(), one.logprobs.tolist(), one.versions.tolist())
                    for prompt, one in asked
                ],
                "samples": [sample for group in groups for sample in group.samples],
                "rollouts": [
                    (rollout.error, rollout.messages, len(rollout.graph.completions))
                    for group in groups
                    for rollout in group.rollouts
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
