"""usage: {prog} [--key VALUE ...] [--config FILE.toml] [--json]

Simulate asynchronous training with the scheduling and routing classes of a real run, on a clock of its own and without
devices, and compare every combination of device split, staleness, window and weight sync on the same completions.

The defaults describe a 7B policy on 16 devices with long-tailed answers; replace them by what you measured. What each
rank of a recipe holds in memory, and whether it fits: titan-rl train --recipe NAME --dry-run.

examples:
  titan-rl plan --max-staleness 0 1 2 4 --trainer-devices 4 6 8
  titan-rl plan --devices 8 --trainer-devices 3 --weight-sync hot_swap drain
  titan-rl plan --lengths file:lengths.txt --engine.seconds-per-step 0.02 --trainer.seconds-per-token 3e-4 --json
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from titan_rl.bounds import Count, CountOrZero, Seed
from titan_rl.errors import ConfigError
from titan_rl.overrides import Command, Verb, apply
from titan_rl.planner.scenario import Lengths, Scenario, Workload, read_lengths
from titan_rl.planner.simulation import Result, simulate

COLUMNS = {
    "trainer:generators": "{trainer_devices}:{generator_devices}",
    "S": "{max_staleness}",
    "window": "{window}",
    "weights": "{weight_sync}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "s/step": "{seconds_per_step:,.1f}",
    "÷ sync": "{speedup_vs_sync:.2f}",
    "÷ colocated": "{speedup_vs_colocated:.2f}",
    "of bound": "{share_of_bound:.0%}",
    "limited by": "{limited_by}",
    "age mean": "{mean_age:.2f}",
    "max (bound)": "{max_age} ({bound})",
    "trainer busy": "{trainer_busy:.0%}",
    "generators busy": "{generators_busy:.0%}",
}
"""Of the table, and what each shows of a row."""
OF_RESULT = ("tokens_per_second", "share_of_bound", "mean_age", "trainer_busy", "generators_busy")
LEGEND = (
    "÷ sync: against S = 0 on the same split. ÷ colocated: against S = 0 with every device in both roles, in turn.",
    "of bound: against a perfect schedule of the resource in `limited by`. age: staleness in steps at consumption.",
)


@dataclass(kw_only=True, slots=True)
class PlanConfig(Workload):
    """The run, and what is compared. Four settings take several values: there is one row per combination. The seconds
    per token of `trainer` are those of ONE device."""

    trainer_devices: tuple[Count, ...] = (6,)
    """Devices that train; the rest generates."""
    max_staleness: tuple[CountOrZero, ...] = (0, 1, 2, 4)
    """Steps that generation may run ahead."""
    window: tuple[CountOrZero, ...] = (0,)
    """Look-ahead in groups; 1: strictly in order; 0: two batches' worth."""
    weight_sync: tuple[Literal["hot_swap", "drain"], ...] = ("hot_swap",)
    """As `router.weight_sync`."""
    devices: Count = 16
    """In all."""
    devices_per_generator: Count = 1
    lengths: str = "lognormal:4000:1.0:27000"
    """Tokens per completion: uniform:LEAST:MOST, lognormal:MEAN:SPREAD:MOST (spread of the logarithm) or
    file:PATH (one number per line)."""
    seed: Seed = 0
    """Of the lengths."""

    def __post_init__(self) -> None:
        for trainers in self.trainer_devices:
            left = self.devices - trainers
            if left < self.devices_per_generator:
                raise ConfigError(
                    f"--trainer-devices {trainers} of --devices {self.devices} leave {left} for generators, "
                    f"which take {self.devices_per_generator} each"
                )


def _act(command: Command, prog: str) -> int:
    rows = plan(apply(PlanConfig(), command.layers))
    print(table(rows))
    if "--json" in command.flags:
        print(json.dumps({"plans": rows}))
    return 0


VERB = Verb(
    act=_act,
    config=lambda command: PlanConfig(),
    about=__doc__,
    options={"--json": "print the plans as one JSON object in the last line"},
)


def plan(config: PlanConfig) -> list[dict[str, Any]]:
    """One row per combination, as plain data. Raises ConfigError."""
    lengths = read_lengths(config.lengths, config.seed)
    colocated = simulate(_scenario(config, lengths, config.devices, config.devices))
    rows: list[dict[str, Any]] = []
    for trainers in config.trainer_devices:
        generators = config.devices - trainers
        scenario = _scenario(config, lengths, trainers, generators)
        synchronous = simulate(scenario)
        for sync, staleness, window in itertools.product(config.weight_sync, config.max_staleness, config.window):
            look_ahead = window or 2 * config.groups_per_step
            asynchronous = replace(
                scenario, max_staleness=staleness, window=look_ahead, weight_sync=sync, max_syncing=config.max_syncing
            )
            devices = {"trainer_devices": trainers, "generator_devices": generators}
            rows.append(devices | _row(simulate(asynchronous), synchronous, colocated))
    return rows


def _scenario(config: PlanConfig, lengths: Lengths, trainers: int, generator_devices: int) -> Scenario:
    """The synchronous run: each step begins when every generator serves the version of the one before."""
    workload = {each.name: getattr(config, each.name) for each in fields(Workload)}
    workload["trainer"] = replace(config.trainer, seconds_per_token=config.trainer.seconds_per_token / trainers)
    workload["max_syncing"] = 0  # in turn, all change their weights while none generates
    return Scenario(**workload, lengths=lengths, generators=generator_devices // config.devices_per_generator)


def _row(result: Result, synchronous: Result, colocated: Result) -> dict[str, Any]:
    scenario = result.scenario
    return {
        **{name: getattr(scenario, name) for name in ("generators", "max_staleness", "window", "weight_sync")},
        **{name: getattr(result, name) for name in OF_RESULT},
        "limits": scenario.limits.describe(),
        "seconds_per_step": result.seconds / scenario.steps,
        "speedup_vs_sync": result.tokens_per_second / synchronous.tokens_per_second,
        "speedup_vs_colocated": result.tokens_per_second / colocated.tokens_per_second,
        "limited_by": result.busiest.value,
        "ages": {str(age): count for age, count in result.ages.items()},
        "max_age": max(result.ages, default=0),
        "bound": scenario.limits.bound,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All rows, a legend, and the fastest row with what its settings imply."""
    cells = [[*COLUMNS], *([text.format(**row) for text in COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    best = max(rows, key=lambda row: row["tokens_per_second"])
    fastest = "fastest: {trainer_devices}:{generator_devices}, {weight_sync}, {limits}".format(**best)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *LEGEND, fastest])
