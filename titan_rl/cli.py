"""`titan-rl`: the console command.

    titan-rl train --recipe NAME …    train a policy (`python -m titan_rl.train` is the same)
    titan-rl recipes                  list recipes and bundled tasks
    titan-rl try TASK                 play a task without training
    titan-rl eval POLICY … --task …   compare policies on held-out prompts
    titan-rl plan …                   simulate splits, staleness and weight syncs before a run
    titan-rl serve --policy.path DIR  serve a checkpoint over HTTP (OpenAI's API)
    titan-rl worker --listen ADDRESS  lend this host to runs that are started elsewhere
    titan-rl runs                     list runs: state, step, score, how to go on
    titan-rl doctor                   what this host lacks, and what to do
    titan-rl fleet RUN …              show a living run's hosts and generators, add and take away
    titan-rl report RUN [RUN2 …]      write one HTML file that shows a run, or compares several
    titan-rl bubbles RUN              show which part of a run waited for whom
    titan-rl watch RUN                show the rollouts that a run records, while it goes on
    titan-rl replay RUN --group N     play a recorded group again, and compare it token by token

Loads neither torch, vLLM nor Monarch before a run really starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from titan_rl import __version__, train
from titan_rl.config_registry import RECIPES, first_line
from titan_rl.environments import SHORT_NAMES
from titan_rl.importing import import_user_module
from titan_rl.overrides import EXIT_USAGE, did_you_mean, say
from titan_rl.processes import leave

PROG = "titan-rl"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code (see `train.main`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a recipe may be a module of the working directory
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"{PROG} {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        say(PROG, f"there is no verb {verb!r}{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
        return EXIT_USAGE
    return VERBS[verb](rest)


def command() -> NoReturn:
    """The console command: this process is all its own."""
    leave(main)


def _train(arguments: Sequence[str]) -> int:
    """Train a policy: --recipe NAME [--config FILE.toml] [--section.key VALUE ...] [--dry-run]."""
    return train.main(arguments, prog=f"{PROG} train")


def _recipes(arguments: Sequence[str]) -> int:
    """List the recipes, and the bundled tasks that environment.name takes."""
    if arguments and arguments[0] not in ("-h", "--help"):
        say(f"{PROG} recipes", f"takes no arguments, got {' '.join(arguments)!r}")
        return EXIT_USAGE
    tasks = {name: first_line(import_user_module(target.partition(":")[0])) for name, target in SHORT_NAMES.items()}
    print(f"recipes ({PROG} train --recipe NAME)")
    print(_listing({name: first_line(recipe) for name, recipe in RECIPES.items()}))
    print("\ntasks (environment.name)")
    print(_listing(tasks))
    return 0


def _plan(arguments: Sequence[str]) -> int:
    """Simulate a run's throughput and staleness for splits of the devices, max staleness and weight sync."""
    from titan_rl.planner.command import VERB

    return VERB.run(arguments, prog=f"{PROG} plan")


def _serve(arguments: Sequence[str]) -> int:
    """Serve a checkpoint over HTTP, with OpenAI's API: --policy.path DIR [--port PORT]."""
    from titan_rl.serve import VERB

    return VERB.run(arguments, prog=f"{PROG} serve")


def _export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's weights in Hugging Face format: --run RUN --directory DIR."""
    from titan_rl.export import VERB

    return VERB.run(arguments, prog=f"{PROG} export")


def _worker(arguments: Sequence[str]) -> int:
    """Lend this host to runs that are started elsewhere: --listen ADDRESS:PORT."""
    from titan_rl.launch.hosts.worker import VERB

    return VERB.run(arguments, prog=f"{PROG} worker")


def _fleet(arguments: Sequence[str]) -> int:
    """Show the hosts and generators of a living run, add some, take some away: RUN [add|drain|remove ...]."""
    from titan_rl import fleet

    return fleet.main(arguments, prog=f"{PROG} fleet")


def _watch(arguments: Sequence[str]) -> int:
    """Show the newest recorded rollouts of a run while it goes on: RUN [--once]."""
    from titan_rl.commands import watch

    return watch.main(arguments, prog=f"{PROG} watch")


def _replay(arguments: Sequence[str]) -> int:
    """Play a recorded group again and say token by token whether it is the same: RUN --group N."""
    from titan_rl.commands import replay

    return replay.main(arguments, prog=f"{PROG} replay")


def _launch(arguments: Sequence[str]) -> int:
    """Submit a run as a job: slurm, kubernetes or skypilot, --nodes N -- arguments of train."""
    from titan_rl import submit

    return submit.main(arguments, prog=f"{PROG} launch")


def _report(arguments: Sequence[str]) -> int:
    """Write one HTML file that shows a run, or compares several: RUN [RUN2 ...] [--output FILE]."""
    from titan_rl.commands import report

    return report.main(arguments, prog=f"{PROG} report")


def _bubbles(arguments: Sequence[str]) -> int:
    """Show which part of a run waited for whom, and for how long: RUN [--json]."""
    from titan_rl.commands import bubbles

    return bubbles.main(arguments, prog=f"{PROG} bubbles")


def _try(arguments: Sequence[str]) -> int:
    """Play a task without training: prompts, tools, rewards, by hand or by a policy."""
    from titan_rl.commands.try_task import VERB

    return VERB.run(arguments, prog=f"{PROG} try")


def _eval(arguments: Sequence[str]) -> int:
    """Compare policies on a task's held-out prompts: exact match, reward, pass@k with intervals."""
    from titan_rl.commands.evaluate import VERB

    return VERB.run(arguments, prog=f"{PROG} eval")


def _doctor(arguments: Sequence[str]) -> int:
    """Look at this host: what would stop a run, what dead runs have left, and what to do about it."""
    from titan_rl.commands.doctor import VERB

    return VERB.run(arguments, prog=f"{PROG} doctor")


def _runs(arguments: Sequence[str]) -> int:
    """List the runs of a directory: state, step, score, how to go on."""
    from titan_rl.commands.runs import VERB

    return VERB.run(arguments, prog=f"{PROG} runs")


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "recipes": _recipes,
    "try": _try,
    "eval": _eval,
    "plan": _plan,
    "serve": _serve,
    "export": _export,
    "worker": _worker,
    "fleet": _fleet,
    "watch": _watch,
    "replay": _replay,
    "launch": _launch,
    "report": _report,
    "bubbles": _bubbles,
    "runs": _runs,
    "doctor": _doctor,
}


def _usage() -> str:
    verbs = _listing({name: first_line(verb) for name, verb in VERBS.items()})
    return f"usage: {PROG} [--help] [--version] VERB ...\n\nReinforcement learning for language models.\n\n{verbs}"


def _listing(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name.ljust(width)}  {line}" for name, line in lines.items())


if __name__ == "__main__":
    command()
