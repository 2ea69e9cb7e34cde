#!/usr/bin/env python
"""What `trainer.parity = "bitwise"` costs: CPU seconds of a step of the recipe copy4, beside other settings.

    python scripts/parity_cost.py [--steps 12] [--dtype float32]

Three processes after each other, each with one engine and a trainer of one rank: "auto", "deterministic" (the engine
only) and "bitwise". A step samples 256 answers of 6 tokens, trains them, and gives the weights back to the engine.
Medians are of CPU time, without the first two steps, so that it hardly matters what else the machine does. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.config_registry import copy4
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.generation.config import generator_environment
from titan_rl.policy.models.tiny import model_directory
from titan_rl.types import NO_VERSION, GenerationRequest, PolicyVersion, SamplingParams, TrainingSample

MODES = ("auto", "deterministic", "bitwise")
GROUPS, MEMBERS, PROMPT, NEW, SKIPPED = 32, 8, 5, 6, 2


def requests_of(step: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(step)
    prompts = rng.integers(2, 13, (GROUPS, PROMPT)).astype(np.int32)
    return [
        GenerationRequest(
            request_id=f"{group}.{member}",
            prompt_token_ids=prompts[group],
            sampling=SamplingParams(max_new_tokens=NEW),
            seed=step * GROUPS * MEMBERS + group * MEMBERS + member,
            min_version=PolicyVersion(0, 0),
        )
        for group in range(GROUPS)
        for member in range(MEMBERS)
    ]


def sample_of(request: GenerationRequest, completion: Any, step: int) -> TrainingSample:
    group, member = map(int, request.request_id.split("."))
    mask = np.arange(PROMPT + len(completion.token_ids)) >= PROMPT
    return TrainingSample(
        group_id=group,
        sample=member,
        token_ids=np.concatenate([request.prompt_token_ids, completion.token_ids]),
        loss_mask=mask,
        logprobs=np.concatenate([np.zeros(PROMPT, np.float32), completion.logprobs]),
        versions=np.where(mask, step, NO_VERSION),
        advantages=float(member % 2 * 2 - 1),
        reward=0.0,
    )


def measure(mode: str, steps: int, dtype: str) -> dict[str, float]:
    """In this process: medians of CPU seconds of a step's parts."""
    import torch

    from titan_rl.generation.vllm.engine import VllmEngine
    from titan_rl.policy.updater import PolicyUpdater

    recipe = copy4()
    path = model_directory(recipe)
    engine = VllmEngine(replace(recipe.generator, deterministic=mode != "auto", dtype=dtype), path)
    settings = replace(recipe.trainer, dtype=dtype, parity="bitwise" if mode == "bitwise" else "auto")
    trainer = PolicyUpdater(settings, model_path=path, temperature=1.0, total_steps=steps, device="cpu", seed=0)
    seconds: dict[str, list[float]] = {"generate": [], "train": [], "step": []}
    differing = 0.0
    for step in range(steps):
        begun = time.process_time()
        whole = ((shard.name, shard.data.to(getattr(torch, dtype))) for shard in trainer.local_shards())
        engine.load_weights(whole, PolicyVersion(0, step))
        engine.drop_cache()
        todo = requests_of(step)
        for request in todo:
            engine.add(request)
        done = {}
        while engine.has_work():
            done |= {each.request_id: each for each in engine.step().finished}
        sampled = time.process_time()
        batch = SampleBatch.of(sample_of(request, done[request.request_id], step) for request in todo)
        metrics = trainer.train_step(batch, trainer.plan(batch))
        over = time.process_time()
        differing = max(differing, metrics["logprob_difference_max"])
        for part, taken in (("generate", sampled - begun), ("train", over - sampled), ("step", over - begun)):
            seconds[part].append(taken)
    return {part: statistics.median(taken[SKIPPED:]) for part, taken in seconds.items()} | {"difference": differing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--mode", choices=MODES, help="measure this one only, in this process")
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(measure(options.mode, options.steps, options.dtype)))
        return
    found = {}
    for mode in MODES:
        environment = generator_environment("cpu", deterministic=mode != "auto") | {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
        command = [sys.executable, *sys.argv, "--mode", mode]
        said = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
        found[mode] = json.loads(said.stdout.splitlines()[-1])
        print(mode, {part: round(number, 4) for part, number in found[mode].items()}, flush=True)
    ratios = {
        f"{part}_bitwise_to_{mode}": round(found["bitwise"][part] / found[mode][part], 2)
        for part in ("generate", "train", "step")
        for mode in ("auto", "deterministic")
    }
    print(json.dumps({"dtype": options.dtype} | ratios))


if __name__ == "__main__":
    main()
