"""What asynchronous training gains: synchronous, S = 1 and S = 2, with drain and with hot swap, in one run.

    python scripts/bench/async_speedup.py [--only simulated real] [--steps 12] [--real-steps 40]

(i) SIMULATED engines with long-tailed lengths and a SIMULATED trainer, because their speed must be known; everything
    between them is real: controller, buffer, router, generator actors, rollout worker, sample store, publication and
    verified pulls. `titan-rl plan`'s simulation predicts every row from the same figures (`parts/simulated.py`), fixed
    beforehand: `ratio_to_planner` is measured ÷ predicted throughput. The bound is that of the busiest resource.
(ii) copy4 with real vLLM engines and the real trainer. On a few cores that both keep busy there is little to win.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import simulated
from parts.quiet_run import train
from parts.simulated import ENGINE, MEAN, MOST, SPREAD, TRAINER, SimulatedTrainer, run_lengths
from parts.table import print_report, print_table

from titan_rl.config import EvaluationConfig, LoopConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.generation.config import GeneratorConfig
from titan_rl.planner.scenario import Scenario
from titan_rl.planner.simulation import Result, Work, seconds_needed, simulate
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.rollout.config import SamplingConfig

GROUPS, SAMPLES, GENERATORS, LENGTH = 8, 8, 2, 256
PROMPT_TOKENS = 5


@dataclasses.dataclass(frozen=True)
class Way:
    """How generation and training are coupled."""

    name: str
    staleness: int
    weight_sync: str
    window: int = 1
    deterministic: bool = False
    """Planned as if it were not, which is what determinism may cost."""


WAYS = (
    Way("sync", 0, "drain"),
    Way("s1_drain", 1, "drain", 2 * GROUPS),
    Way("s1_hot_swap", 1, "hot_swap", 2 * GROUPS),
    Way("s2_drain", 2, "drain", 2 * GROUPS),
    Way("s2_hot_swap", 2, "hot_swap", 2 * GROUPS),
    Way("s1_deterministic", 1, "drain", deterministic=True),
    Way("s2_deterministic", 2, "drain", deterministic=True),
)
FULLY_ASYNC = "s2_hot_swap"


def with_way(config: RunConfig, way: Way, window: int) -> RunConfig:
    return dataclasses.replace(
        config,
        deterministic=way.deterministic,
        router=dataclasses.replace(config.router, weight_sync=way.weight_sync),
        weights=dataclasses.replace(config.weights, max_live=3),
        loop=dataclasses.replace(config.loop, max_staleness=way.staleness, window=window),
    )


# --- (i) -------------------------------------------------------------------------------------------------------------


def simulated_config(steps: int) -> RunConfig:
    recipe = copy4()
    return dataclasses.replace(
        recipe,
        policy=PolicyConfig(tiny=TinyPolicyConfig(symbols="0123456789=", max_length=LENGTH)),
        rollout=dataclasses.replace(
            recipe.rollout, samples_per_group=SAMPLES, sampling=SamplingConfig(temperature=1.0, max_new_tokens=MOST)
        ),
        generator=GeneratorConfig(
            count=GENERATORS, max_model_len=LENGTH, engine=f"{Path(simulated.__file__).resolve()}:long_tailed"
        ),
        loop=LoopConfig(steps=steps, groups_per_step=GROUPS),
        evaluation=EvaluationConfig(every=0, prompts=1),
    )


def planned(way: Way, steps: int) -> Result:
    """What the planner predicts, from nothing that was measured here."""
    return simulate(
        Scenario(
            lengths=run_lengths,
            prompt_tokens=PROMPT_TOKENS,
            engine=ENGINE,
            trainer=TRAINER,
            generators=GENERATORS,
            groups_per_step=GROUPS,
            samples_per_group=SAMPLES,
            max_staleness=way.staleness,
            window=way.window,
            weight_sync=way.weight_sync,  # type: ignore[arg-type]
            steps=steps,
        )
    )


def bound_seconds(trainer: SimulatedTrainer, scenario: Scenario) -> float:
    """Least seconds for what was trained."""
    lengths = [scenario.lengths(group, SAMPLES) for group in trainer.trained]
    pace, step = ENGINE.step_seconds(1), trainer.busy_seconds / scenario.steps
    work = Work(
        train_seconds=trainer.busy_seconds,
        prompt_tokens=len(lengths) * SAMPLES * PROMPT_TOKENS,
        sampled_tokens=trainer.sampled_tokens,
        slot_seconds=sum(max(group) * pace + step for group in lengths),
    )
    return max(seconds_needed(scenario, work).values())


async def measure_simulated(ways: Sequence[Way], steps: int) -> tuple[list[list[Any]], dict[str, Any]]:
    config = simulated_config(steps)
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    sync_speed = 0.0
    for way in ways:
        plan = planned(way, steps)
        print(f"{way.name}: {steps} steps, {plan.seconds:.0f} s planned …", flush=True)
        trainers: list[SimulatedTrainer] = []

        def make(model_path: Path, made: list[SimulatedTrainer] = trainers) -> SimulatedTrainer:
            made.append(SimulatedTrainer(model_path))
            return made[-1]

        summary, _, serving_at = await train(with_way(config, way, way.window), trainer=make)
        trainer = trainers[0]
        seconds = trainer.ended_at - serving_at
        speed = trainer.sampled_tokens / seconds
        sync_speed = sync_speed or speed
        ratio = speed / plan.tokens_per_second
        of_bound = bound_seconds(trainer, plan.scenario) / seconds
        age = sum(age * count for age, count in summary.ages.items()) / summary.ages.total()
        print(f"  {seconds:.1f} s, {ratio:.3f} of the plan's throughput", flush=True)
        rows.append([way.name, seconds, plan.seconds, ratio, speed, speed / sync_speed, of_bound, age, plan.mean_age])
        figures |= {
            f"tokens_per_second_{way.name}": speed,
            f"ratio_to_planner_{way.name}": ratio,
            f"speedup_vs_sync_{way.name}": speed / sync_speed,
            f"share_of_bound_{way.name}": of_bound,
            f"mean_age_{way.name}": age,
            f"max_age_{way.name}": max(summary.ages),
        }
    ratios = [figures[f"ratio_to_planner_{way.name}"] for way in ways if not way.deterministic]
    figures |= {
        "speedup_vs_sync": figures[f"speedup_vs_sync_{FULLY_ASYNC}"],
        "ratio_to_planner": figures[f"ratio_to_planner_{FULLY_ASYNC}"],
        "ratio_to_planner_least": min(ratios),
        "ratio_to_planner_most": max(ratios),
        "deterministic_to_drain": figures["tokens_per_second_s2_deterministic"] / figures["tokens_per_second_s2_drain"],
        "share_of_bound_most": max(figures[f"share_of_bound_{way.name}"] for way in ways),
    }
    return rows, figures


# --- (ii) ------------------------------------------------------------------------------------------------------------


async def measure_real(ways: Sequence[Way], steps: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Medians over the steps of each way's second half: the first steps warm everything up."""
    recipe = copy4()
    config = dataclasses.replace(
        recipe, loop=dataclasses.replace(recipe.loop, steps=steps), evaluation=EvaluationConfig(every=0, prompts=32)
    )
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    sync_seconds = 0.0
    for way in ways:
        window = 2 * config.loop.groups_per_step if way.staleness and not way.deterministic else 1
        print(f"{way.name}: {steps} steps of copy4 …", flush=True)
        summary, numbers, _ = await train(with_way(config, way, window))
        tail = numbers[steps // 2 :]
        # a mean, since an asynchronous run's steps come in bursts
        seconds = statistics.fmean(each["seconds/step"] for each in tail)
        sync_seconds = sync_seconds or seconds
        speed = statistics.fmean(each["rollout/tokens"] for each in tail) / seconds
        age = sum(age * count for age, count in summary.ages.items()) / summary.ages.total()
        rows.append([way.name, 1000 * seconds, speed, sync_seconds / seconds, age])
        figures |= {
            f"copy4_seconds_per_step_{way.name}": seconds,
            f"copy4_tokens_per_second_{way.name}": speed,
            f"copy4_speedup_vs_sync_{way.name}": sync_seconds / seconds,
        }
    return rows, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["simulated", "real"], default=["simulated", "real"])
    parser.add_argument("--steps", type=int, default=12, help="of each simulated run")
    parser.add_argument("--real-steps", type=int, default=40, help="of each run of copy4")
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help="at least those of the brief run")
    options = parser.parse_args()
    ways = [way for way in WAYS if way.name in options.ways]
    figures: dict[str, Any] = {}
    if "simulated" in options.only:
        rows, found = asyncio.run(measure_simulated(ways, options.steps))
        title = (
            f"(i) SIMULATED engines and trainer, the rest real; {GENERATORS} generators, {GROUPS} × {SAMPLES} rollouts "
            f"per step, lengths log-normal (mean {MEAN:g}, spread {SPREAD:g}, at most {MOST})"
        )
        header = "way|seconds|planned|÷ plan|tokens/s|÷ sync|of bound|mean age|planned age".split("|")
        figures |= {name: round(value, 4) for name, value in found.items()}
        if "real" not in options.only:
            return print_report(title, header, rows, figures)
        print_table(title, header, rows)
    rows, found = asyncio.run(measure_real(ways, options.real_steps))
    header = ["way", "ms per step", "tokens/s", "÷ sync", "mean age"]
    figures |= {name: round(value, 4) for name, value in found.items()}
    print_report("(ii) copy4, real vLLM and trainer", header, rows, figures)


if __name__ == "__main__":
    main()
