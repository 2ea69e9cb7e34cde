"""`titan-rl plan`: what a run would be worth, before any device is asked for.

Every combination of splits, stalenesses, windows and ways to change weights is simulated on the same completions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from titan_rl.errors import ConfigError
from titan_rl.planner.lengths import Constant, Lengths, LogNormal, Recorded, Uniform
from titan_rl.planner.report import Planned, table
from titan_rl.planner.scenario import EngineSpeed, Scenario, TrainerSpeed
from titan_rl.planner.simulation import simulate

EXIT_USAGE = 2

_DESCRIPTION = """\
Simulate asynchronous training with the scheduling and routing classes of a real run, on a clock of its own, and
compare splits of the devices, staleness, windows and ways to change weights. Lists give one row per combination.

The defaults describe a 7B policy on 16 devices with long-tailed answers; replace them by what you measured.
"""
_LENGTHS_HELP = (
    "tokens per completion: constant:N, uniform:LEAST:MOST, lognormal:MEAN:SPREAD:MOST (spread of the logarithm) or "
    "file:PATH (one number per line); default lognormal:4000:1.0:27000"
)
_EXAMPLES = """\
examples:
  titan-rl plan --max-staleness 0 1 2 4 --trainer-devices 4 6 8
  titan-rl plan --devices 8 --trainer-devices 3 --weight-sync hot_swap drain
  titan-rl plan --lengths file:lengths.txt --step-seconds 0.02 --train-token-seconds 3e-4 --json
"""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Plan what the arguments say; returns the exit code."""
    try:
        options = parser(prog).parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    try:
        rows = plan(options)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(table(rows))
    if options.json:
        print(json.dumps({"plans": [row.to_plain() for row in rows]}))
    return 0


def plan(options: argparse.Namespace) -> list[Planned]:
    """One row per combination.

    Raises:
        ConfigError: values that are wrong or do not fit together.
    """
    if options.devices_per_generator < 1:
        raise ConfigError(f"--devices-per-generator must be at least 1, got {options.devices_per_generator}")
    for trainers in options.trainer_devices:
        left = options.devices - trainers
        if trainers < 1 or left < options.devices_per_generator:
            raise ConfigError(
                f"--trainer-devices {trainers} of --devices {options.devices} leave {left} for generators, "
                f"which take {options.devices_per_generator} each"
            )
    lengths = read_lengths(options.lengths, options.seed)
    colocated = simulate(_scenario(options, lengths, options.devices, options.devices))
    rows: list[Planned] = []
    for trainers in options.trainer_devices:
        generators = options.devices - trainers
        synchronous = simulate(_scenario(options, lengths, trainers, generators))
        for sync, staleness, window in itertools.product(options.weight_sync, options.max_staleness, options.window):
            scenario = replace(
                _scenario(options, lengths, trainers, generators),
                max_staleness=staleness,
                window=window or 2 * options.groups_per_step,
                weight_sync=sync,
                max_syncing=options.max_syncing,
                admit_after=options.admit_after,
            )
            rows.append(
                Planned(
                    trainer_devices=trainers,
                    generator_devices=generators,
                    result=simulate(scenario),
                    synchronous=synchronous,
                    colocated=colocated,
                )
            )
    return rows


def read_lengths(text: str, seed: int) -> Lengths:
    """`constant:N`, `uniform:LEAST:MOST`, `lognormal:MEAN:SPREAD:MOST` or `file:PATH`."""
    kind, _, rest = text.partition(":")
    try:
        match kind, rest.split(":"):
            case "constant", [tokens]:
                return Constant(int(tokens))
            case "uniform", [least, most]:
                return Uniform(int(least), int(most), seed=seed)
            case "lognormal", [mean, spread, most]:
                return LogNormal(float(mean), float(spread), most=int(most), seed=seed)
            case "file", _:
                return Recorded.read(rest, seed=seed)
    except ValueError as error:
        raise ConfigError(f"--lengths {text}: {error}") from error
    raise ConfigError(
        f"--lengths {text}: expected constant:N, uniform:LEAST:MOST, lognormal:MEAN:SPREAD:MOST or file:PATH"
    )


def _scenario(options: argparse.Namespace, lengths: Lengths, trainers: int, generator_devices: int) -> Scenario:
    """The synchronous run: each step begins when every generator serves the version of the one before."""
    return Scenario(
        lengths=lengths,
        prompt_tokens=options.prompt_tokens,
        engine=EngineSpeed(
            seconds_per_step=options.step_seconds,
            seconds_per_sequence=options.sequence_seconds,
            seconds_per_prompt_token=options.prompt_token_seconds,
            seconds_per_load=options.load_seconds,
            max_num_seqs=options.max_num_seqs,
        ),
        trainer=TrainerSpeed(
            seconds_per_step=options.train_step_seconds,
            seconds_per_token=options.train_token_seconds / trainers,
            seconds_per_publication=options.publish_seconds,
            overlap_publication=not options.no_overlap,
        ),
        generators=generator_devices // options.devices_per_generator,
        groups_per_step=options.groups_per_step,
        samples_per_group=options.samples_per_group,
        strategy=options.strategy,
        seconds_per_group=options.group_seconds,
        steps=options.steps,
    )


def parser(prog: str) -> argparse.ArgumentParser:
    """All options, with their defaults."""
    options = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    compare = options.add_argument_group("what is compared (lists)")
    compare.add_argument(
        "--trainer-devices", type=int, nargs="+", default=[6], metavar="N", help="the rest generates; default 6"
    )
    compare.add_argument(
        "--max-staleness",
        type=int,
        nargs="+",
        default=[0, 1, 2, 4],
        metavar="S",
        help="steps that generation may run ahead; default 0 1 2 4",
    )
    compare.add_argument(
        "--window",
        type=int,
        nargs="+",
        default=[0],
        metavar="W",
        help="look-ahead in groups; 1: strictly in order; default 0: two batches' worth",
    )
    compare.add_argument(
        "--weight-sync", nargs="+", default=["hot_swap"], choices=["hot_swap", "drain"], help="default hot_swap"
    )
    run = options.add_argument_group("the run")
    run.add_argument("--devices", type=int, default=16, metavar="N", help="in all; default 16")
    run.add_argument("--devices-per-generator", type=int, default=1, metavar="N", help="default 1")
    run.add_argument("--groups-per-step", type=int, default=128, metavar="P", help="default 128")
    run.add_argument("--samples-per-group", type=int, default=16, metavar="N", help="default 16")
    run.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps to simulate; default 20")
    run.add_argument(
        "--lengths",
        default="lognormal:4000:1.0:27000",
        metavar="KIND",
        help=_LENGTHS_HELP,
    )
    run.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="of every prompt; default 512")
    run.add_argument(
        "--group-seconds",
        type=float,
        default=0.0,
        metavar="SEC",
        help="from a group's last token to its samples: environment, rewards; default 0",
    )
    run.add_argument(
        "--strategy", default="least_loaded", metavar="NAME", help="as router.strategy; default least_loaded"
    )
    run.add_argument(
        "--max-syncing", type=int, default=0, metavar="N", help="generators that drain at once; default 0: all"
    )
    run.add_argument(
        "--admit-after",
        default="pull",
        choices=["pull", "publication"],
        help="free a batch's slots once every generator serves its version, or once that is published; default pull",
    )
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the lengths; default 0")
    engine = options.add_argument_group("one generator")
    engine.add_argument(
        "--step-seconds",
        type=float,
        default=0.010,
        metavar="SEC",
        help="of a decode step, whatever the batch; default 0.01",
    )
    engine.add_argument(
        "--sequence-seconds",
        type=float,
        default=7e-5,
        metavar="SEC",
        help="added by each request in the batch; default 7e-5",
    )
    engine.add_argument("--prompt-token-seconds", type=float, default=5e-5, metavar="SEC", help="prefill; default 5e-5")
    engine.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="requests that decode together; default 256"
    )
    engine.add_argument("--load-seconds", type=float, default=2.0, metavar="SEC", help="taking new weights; default 2")
    trainer = options.add_argument_group("the trainer")
    trainer.add_argument(
        "--train-token-seconds",
        type=float,
        default=1.4e-4,
        metavar="SEC",
        help="per trained token on ONE device; default 1.4e-4",
    )
    trainer.add_argument(
        "--train-step-seconds",
        type=float,
        default=2.0,
        metavar="SEC",
        help="of every step, whatever the batch; default 2",
    )
    trainer.add_argument(
        "--publish-seconds", type=float, default=2.0, metavar="SEC", help="making a version available; default 2"
    )
    trainer.add_argument("--no-overlap", action="store_true", help="the next step waits for the publication")
    options.add_argument("--json", action="store_true", help="print the plans as one JSON object in the last line")
    return options
