"""What the planner costs per simulated request, by the number of generators, and how near to the bound its runs are.

    python scripts/bench/planner.py [--requests 1000000] [--generators 50 1000]

A 7B policy with long answers, 32 completions per generator and step. Routing and scheduling are those of a real run.
`planner_seconds_per_million` is CPU time with the most generators. The first and the last step overlap with no others.

At S = 1 the bound is out of reach: groups wait in their slots for the longest of their batch. `far` is the same task at
S = 8, with KV that is kept when weights change.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from parts.table import print_report

from titan_rl.planner.scenario import Scenario, TrainerSpeed, read_lengths
from titan_rl.planner.simulation import simulate

SAMPLES, GROUPS_EACH = 16, 2
"""Of a group; groups of a step for each generator."""
FAR_STEPS = 60
"""Of the run at S = 8: its first batch takes as long as several."""


def scenario(generators: int, requests: int) -> Scenario:
    groups = generators * GROUPS_EACH
    return Scenario(
        lengths=read_lengths("lognormal:4000:1.0:27000", seed=1),
        trainer=TrainerSpeed(seconds_per_step=2.0, seconds_per_token=2.8e-4 / generators, seconds_per_publication=2.0),
        generators=generators,
        groups_per_step=groups,
        samples_per_group=SAMPLES,
        max_staleness=1,
        window=2 * groups,
        steps=max(1, requests // (groups * SAMPLES)),
    )


def far(near: Scenario) -> Scenario:
    return replace(
        near,
        engine=replace(near.engine, keep_prefix_cache=True),
        max_staleness=8,
        window=9 * near.groups_per_step,
        steps=max(near.steps, FAR_STEPS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each run")
    parser.add_argument("--generators", type=int, nargs="+", default=[50, 1000])
    options = parser.parse_args()
    figures: dict[str, Any] = {"requests": options.requests}
    rows, costs = [], []
    for generators in options.generators:
        planned = scenario(generators, options.requests)
        began = time.process_time()
        result = simulate(planned)
        seconds = time.process_time() - began
        costs.append(seconds / (planned.steps * planned.groups_per_step * SAMPLES) * 1e6)
        figures[f"planner_share_of_bound_{generators}"] = round(result.share_of_bound, 4)
        rows.append([str(generators), planned.steps, seconds, costs[-1], result.share_of_bound])
    figures["planner_seconds_per_million"] = round(costs[-1], 2)
    figures[f"planner_cost_{options.generators[-1]}_to_{options.generators[0]}"] = round(costs[-1] / costs[0], 3)
    result = simulate(far(scenario(options.generators[0], options.requests)))
    figures["planner_share_of_bound_far"] = round(result.share_of_bound, 4)
    print(f"{options.generators[0]} generators, S = 8, KV kept: {result.share_of_bound:.0%} of the bound")
    header = ["generators", "steps", "CPU seconds", "µs per request", "of bound"]
    print_report(f"the planner, {options.requests:,} requests", header, rows, figures)


if __name__ == "__main__":
    main()
