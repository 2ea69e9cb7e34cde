"""What planning costs, and the shape of what it predicts.

    python scripts/bench/plan.py [--only scale shape] [--generators 1000] [--requests 1000000]

(a) one simulated run of many generators and requests: seconds, memory, and how much more memory twice the run takes;
(b) the ratios that published systems report, for what `titan-rl plan` takes by default: a 7B policy on 16 devices.

(b) is the same on every machine and at every load; the seconds of (a) are not.
"""

from __future__ import annotations

import argparse
import resource
import time
import tracemalloc
from typing import Any

from parts.table import print_report, print_table

from titan_rl.planner.command import VERB, Planned, config_of, plan
from titan_rl.planner.scenario import EngineSpeed, LogNormal, Scenario, TrainerSpeed
from titan_rl.planner.simulation import simulate

SAMPLES_PER_GROUP = 8
REQUESTS_PER_GENERATOR_AND_STEP = 32
GREEDY = 10**9


def fleet(generators: int, requests: int) -> Scenario:
    groups_per_step = generators * REQUESTS_PER_GENERATOR_AND_STEP // SAMPLES_PER_GROUP
    return Scenario(
        lengths=LogNormal(4000, 1.0, most=27_000),
        prompt_tokens=512,
        engine=EngineSpeed(
            seconds_per_step=0.01, seconds_per_sequence=7e-5, seconds_per_prompt_token=5e-5, seconds_per_load=2.0
        ),
        trainer=TrainerSpeed(seconds_per_step=60.0, seconds_per_publication=2.0),
        generators=generators,
        groups_per_step=groups_per_step,
        samples_per_group=SAMPLES_PER_GROUP,
        max_staleness=2,
        window=2 * groups_per_step,
        steps=max(1, requests // (groups_per_step * SAMPLES_PER_GROUP)),
    )


def measure_scale(generators: int, requests: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """One run for time and resident memory; a tenth of it, twice as long the second time, for allocations."""
    peaks = []
    for share in (10, 5):
        tracemalloc.start()
        simulate(fleet(max(1, generators // 10), requests // 10 // share * 10))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    started = time.perf_counter()
    result = simulate(fleet(generators, requests))
    seconds = time.perf_counter() - started
    asked = requests + result.scenario.max_staleness * generators * REQUESTS_PER_GENERATOR_AND_STEP
    row = [generators, requests, seconds, asked / seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    figures = {
        "plan_generators": generators,
        "plan_requests": requests,
        "plan_seconds": seconds,
        "plan_rss_mib": row[-1],
        "plan_peak_of_twice_the_run": peaks[1] / peaks[0],
        "plan_scale_share_of_bound": result.share_of_bound,
    }
    return [[*row, peaks[1] / peaks[0]]], figures


def measure_shape() -> tuple[list[list[Any]], dict[str, Any]]:
    def plans(*arguments: str) -> list[Planned]:
        return plan(config_of(VERB.read(arguments)))

    by_staleness = plans("--max-staleness", "0", "1", "2", "3", "4")
    in_order, greedy = plans("--max-staleness", "2", "--window", "1", str(GREEDY))
    (drain,) = plans("--max-staleness", "2", "--weight-sync", "drain")
    two = by_staleness[2]

    def ratio(one: Planned, other: Planned) -> float:
        return one.result.tokens_per_second / other.result.tokens_per_second

    ratios = {
        "async_to_colocated_sync": (two.vs_colocated, "1.6-2.8"),
        "async_to_split_sync": (two.vs_sync, "-"),
        "s1_to_s2": (ratio(by_staleness[1], two), "below 1"),
        "s4_to_s2": (ratio(by_staleness[4], two), "about 1"),
        "windowed_to_greedy": (ratio(two, greedy), ">= 0.99"),
        "in_order_to_windowed": (ratio(in_order, two), "below 1"),
        "hot_swap_to_drain": (ratio(two, drain), "1.12-1.17"),
        "trained_to_population_length": (two.result.trained_length / two.result.population_length, "1"),
        "share_of_bound": (two.result.share_of_bound, "<= 1"),
    }
    rows = [[name.replace("_", " "), ratio, published] for name, (ratio, published) in ratios.items()]
    return rows, {f"plan_{name}": ratio for name, (ratio, _) in ratios.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=["scale", "shape"], default=["scale", "shape"])
    arguments.add_argument("--generators", type=int, default=1000)
    arguments.add_argument("--requests", type=int, default=1_000_000)
    options = arguments.parse_args()
    scale = ("(a) one plan", ["generators", "requests", "seconds", "requests/s", "peak RSS MiB", "peak, twice ÷ once"])
    shape = ("(b) 7B on 16 devices, S = 2, window of two batches", ["ratio", "planned", "published"])
    figures: dict[str, Any] = {}
    if "scale" in options.only:
        rows, figures = measure_scale(options.generators, options.requests)
        if "shape" not in options.only:
            return print_report(*scale, rows, figures)
        print_table(*scale, rows)
    rows, found = measure_shape()
    print_report(*shape, rows, figures | found)


if __name__ == "__main__":
    main()
