"""What old samples do to learning: sort5 with every batch exactly k versions old, by the loss that it is trained with.

    python scripts/bench/lag.py [--seeds 0,1,2] [--lags 0,4,8] [--losses ignored,tis,clip] [--steps 100]

The real stack (trainer, vLLM, router, rollout worker), driven by a loop that keeps k batches in a queue: at version v
it trains what v - k sampled, while v samples what v + k will train. The first k steps have nothing so old and train
what v0 sampled. Each run of a seed starts from the same checkpoint, warmed up on the demonstrations once. Accuracy is
that of sampled answers (temperature 1) on held-out prompts. The last line is one JSON object.

    ignored  policy gradient: the samples' age is ignored        clip  GRPO's clip against the behaviour logprobs
    tis      importance weights, truncated at 2                  At lag 0 all three are the same, and only one is run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts.table import print_report

from titan_rl.config import RunConfig
from titan_rl.config_registry import sort5
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.launch.start import start
from titan_rl.policy.config import LossConfig, PolicyConfig
from titan_rl.types import NO_VERSION, GroupRequest, PolicyVersion, Purpose, SamplingParams

if TYPE_CHECKING:
    from titan_rl.controller.system import System

LOSSES = {
    "ignored": LossConfig(name="policy_gradient"),
    "tis": LossConfig(name="tis", kwargs={"cap": 2.0}),
    "clip": LossConfig(name="grpo", kwargs={"clip_low": 0.2, "clip_high": 0.2}),
}
HELD_OUT = 1000
LEARNED = 0.9
"""Mean reward of a step's batch that counts as learned."""
BELOW, ABOVE = 0.6, 0.85
"""At lag 4: what ignoring the age stays below, and clipping above."""


@dataclasses.dataclass
class Learned:
    """One run."""

    accuracy: float
    rewards: list[float]
    """By step, of the batch that it trained."""
    ages: Counter[int]
    """Samples by their age in versions."""
    seconds: float

    @property
    def step_to_learn(self) -> int:
        """The first step whose batch was good enough, from 1; 0: none was."""
        return next((step for step, reward in enumerate(self.rewards, 1) if reward >= LEARNED), 0)


async def warm_up(config: RunConfig, directory: Path) -> float:
    """Save what the demonstrations teach; returns its sampled accuracy."""
    async with start(config) as system:
        for step in range(config.trainer.warmup.steps):
            report = await system.rollouts.run_group(system.demonstration_group(step))
            await system.trainer.warm_up_step(report.samples)
            await system.rollouts.release(report.samples)
        await system.trainer.save(directory)
        publication = await system.trainer.push_model_state_dict()
        await system.router.pull_model_state_dict(publication)
        return await sampled_accuracy(system, publication.version)


async def train(config: RunConfig, lag: int) -> Learned:
    """All steps of the config, each on a batch that is `lag` versions old as soon as there is one."""
    started = time.monotonic()
    rewards: list[float] = []
    ages: Counter[int] = Counter()
    async with start(config) as system:
        publication = await system.trainer.push_model_state_dict()
        await system.router.pull_model_state_dict(publication)
        queue: deque[SampleBatch] = deque()
        for number in range(lag):
            queue.append(await play(system, number, publication.version))
        for step in range(config.loop.steps):
            playing = asyncio.create_task(play(system, step + lag, publication.version))
            if not queue:
                queue.append(await playing)
            batch = queue.popleft()
            await system.trainer.train_step(batch)
            if lag:
                queue.append(await playing)
            rewards.append(statistics.mean(batch.rewards))
            ages.update(age(batch, step))
            await system.rollouts.release(batch)
            previous, publication = publication, await system.trainer.push_model_state_dict()
            await system.router.pull_model_state_dict(publication)
            await system.trainer.release(previous)
            if (step + 1) % 20 == 0:
                print(f"    step {step + 1}/{config.loop.steps}  reward {rewards[-1]:.3f}", flush=True)
        for batch in queue:
            await system.rollouts.release(batch)
        accuracy = await sampled_accuracy(system, publication.version)
    return Learned(accuracy=accuracy, rewards=rewards, ages=ages, seconds=time.monotonic() - started)


async def play(system: System, number: int, version: PolicyVersion) -> SampleBatch:
    """Batch `number` of the prompt stream, sampled by `version`: nobody pulls another one before this returns."""
    groups = system.config.loop.groups_per_step
    prompts = range(number * groups, (number + 1) * groups)
    reports = await system.rollouts.run_groups([system.train_group(prompt, version) for prompt in prompts])
    return SampleBatch.concat(report.samples for report in reports)


def age(batch: SampleBatch, step: int) -> list[int]:
    return [step - PolicyVersion.decode(code).step for code in batch.oldest_versions if code != NO_VERSION]


async def sampled_accuracy(system: System, version: PolicyVersion) -> float:
    """Share of held-out prompts that one answer at temperature 1 solves."""
    sampling = SamplingParams(max_new_tokens=system.config.rollout.sampling.max_new_tokens, temperature=1.0)
    requests = [
        GroupRequest(group_id=prompt, purpose=Purpose.EVALUATE, samples=1, sampling=sampling, min_version=version)
        for prompt in range(system.rollouts.held_out)
    ]
    reports = await system.rollouts.run_groups(requests)
    return statistics.fmean(rollout.reward for report in reports for rollout in report.rollouts)


async def study(
    seeds: list[int], lags: list[int], losses: list[str], steps: int
) -> dict[tuple[int, str, int], Learned]:
    """Every run by (lag, loss, seed)."""
    recipe = sort5()
    runs: dict[tuple[int, str, int], Learned] = {}
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            config = dataclasses.replace(
                recipe,
                seed=seed,
                loop=dataclasses.replace(recipe.loop, steps=steps),
                # one is enough, and leaves a core to the trainer
                generator=dataclasses.replace(recipe.generator, count=1),
                evaluation=dataclasses.replace(recipe.evaluation, prompts=HELD_OUT),
            )
            warmed = Path(directory) / str(seed)
            print(f"seed {seed}: warm-up on {config.trainer.warmup.steps} batches of demonstrations", flush=True)
            print(f"  sampled accuracy after it {await warm_up(config, warmed):.3f}", flush=True)
            for lag in lags:
                for loss in losses if lag else losses[:1]:
                    print(f"seed {seed}: lag {lag}, {loss if lag else 'any loss'}", flush=True)
                    trainer = dataclasses.replace(config.trainer, loss=LOSSES[loss])
                    run = await train(
                        dataclasses.replace(config, policy=PolicyConfig(path=str(warmed)), trainer=trainer), lag
                    )
                    runs[lag, loss if lag else "any", seed] = run
                    print(f"  sampled accuracy {run.accuracy:.3f}, {run.seconds:.0f} s", flush=True)
                    print(f"  samples by age {dict(sorted(run.ages.items()))}", flush=True)
    return runs


AS_EXPECTED = "as expected"


def verdict(runs: dict[tuple[int, str, int], Learned]) -> str:
    """Whether every seed at lag 4 is on the side where it should be."""
    wrong = [
        f"{loss} seed {seed}: {run.accuracy:.3f}"
        for (lag, loss, seed), run in runs.items()
        if lag == 4 and ((loss == "ignored" and run.accuracy >= BELOW) or (loss == "clip" and run.accuracy <= ABOVE))
    ]
    return "; ".join(wrong) or AS_EXPECTED


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--lags", type=numbers, default=[0, 4, 8])
    parser.add_argument("--losses", type=lambda text: text.split(","), default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if unknown := set(options.losses) - set(LOSSES):
        parser.error(f"--losses: there is no {', '.join(sorted(unknown))}; there are {', '.join(LOSSES)}")
    runs = asyncio.run(study(options.seeds, options.lags, options.losses, options.steps))
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {"seeds": options.seeds, "steps": options.steps, "lag_4": verdict(runs)}
    for lag, loss in dict.fromkeys((lag, loss) for lag, loss, _ in runs):
        some = [run for (of_lag, of_loss, _), run in runs.items() if (of_lag, of_loss) == (lag, loss)]
        accuracies = [run.accuracy for run in some]
        ages = sum((run.ages for run in some), Counter())
        mean_age = sum(age * count for age, count in ages.items()) / ages.total()
        learned = [str(run.step_to_learn or "–") for run in some]
        rows.append(
            [
                f"lag {lag}, {loss}",
                statistics.median(accuracies),
                f"{min(accuracies):.3f}–{max(accuracies):.3f}",
                ", ".join(learned),
                mean_age,
                f"{ages[lag] / ages.total():.0%}",
            ]
        )
        name = f"lag_{lag}_{loss}"
        figures[f"{name}_accuracy"] = [round(accuracy, 4) for accuracy in accuracies]
        figures[f"{name}_step_to_learn"] = [run.step_to_learn for run in some]
        figures[f"{name}_ages"] = [f"{age}:{count}" for age, count in sorted(ages.items())]
    header = ["run", "accuracy", "of single seeds", f"reward {LEARNED} at step", "mean age", "exactly k old"]
    print_report("sort5, sampled accuracy on held-out prompts", header, rows, figures)
    return 0 if figures["lag_4"] == AS_EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
