"""`titan-rl VERB …`: the console command; `titan-rl --help` lists its verbs.

Loads neither torch, vLLM nor Monarch before a run really starts.
"""

import os
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import NoReturn

from titan_rl import __version__
from titan_rl.config_registry import RECIPES, first_line
from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import DatasetEnvironment
from titan_rl.importing import import_user_module
from titan_rl.overrides import EXIT_USAGE, did_you_mean, print_error
from titan_rl.policy.algorithms import catalogue
from titan_rl.processes import run_and_exit

PROG = "titan-rl"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a recipe may be a module of the working directory
    if not arguments or arguments[0] in ("-h", "--help"):
        verbs = _listing({name: about for name, (_, about) in VERBS.items()})
        print(f"usage: {PROG} [--help] [--version] VERB ...\n\nReinforcement learning for language models.\n\n{verbs}")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"{PROG} {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        print_error(PROG, f"there is no verb {verb!r}{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
        return EXIT_USAGE
    module, _, function = VERBS[verb][0].partition(":")
    return resolve_name(f"titan_rl.{module}:{function or 'VERB.run'}")(rest, prog=f"{PROG} {verb}")


def command() -> NoReturn:
    """The console command: this process is all its own."""
    run_and_exit(main)


def list_recipes(arguments: Sequence[str], *, prog: str) -> int:
    if arguments and arguments[0] not in ("-h", "--help"):
        print_error(prog, f"takes no arguments, got {' '.join(arguments)!r}")
        return EXIT_USAGE
    tasks = {name: first_line(import_user_module(target.partition(":")[0])) for name, target in SHORT_NAMES.items()}
    tasks["dataset"] = first_line(DatasetEnvironment)  # its module is that of all tasks
    print(f"recipes ({PROG} train --recipe NAME)")
    print(_listing({name: first_line(recipe) for name, recipe in RECIPES.items()}))
    print("\ntasks (environment.name)")
    print(_listing(tasks))
    return 0


def list_algorithms(arguments: Sequence[str], *, prog: str) -> int:
    """Print the algorithms, or all that one says of itself; returns the exit code."""
    known = catalogue()
    if arguments and arguments[0] in known:
        print(known[arguments[0]])
        return 0
    if arguments and arguments[0] not in ("-h", "--help"):
        names = f"{did_you_mean(arguments[0], known)}; there are {', '.join(known)}"
        print_error(prog, f"there is no algorithm {arguments[0]!r}{names}")
        return EXIT_USAGE
    print(f"A: credit, rollout.advantage.name; L: loss, trainer.loss.name; all of one: {prog} NAME\n")
    credit, losses = catalogue("advantages"), catalogue("loss")
    lines = {}
    for name, text in known.items():
        summary, when = text.split("\n\n")[0].replace("\n", " "), text.partition("\nWhen ")[2].partition("\nIs ")[0]
        what = ("A" if name in credit else " ") + ("L" if name in losses else " ")
        lines[f"{what}  {name}"] = f"{summary}\n{' ' * 31}when {' '.join(when.split())}"
    print(_listing(lines))
    return 0


VERBS = {
    "train": ("train:main", "Train a policy: TASK.py or --recipe NAME [--section.key VALUE ...]."),
    "tune": ("playing.tune", "Search learning rate, entropy bonus and group size for a task: TASK.py."),
    "recipes": ("cli:list_recipes", "List the recipes, and the bundled tasks that environment.name takes."),
    "algorithms": ("cli:list_algorithms", "List algorithms (credit, losses), their papers, when to use which: [NAME]."),
    "try": ("playing.try_task", "Play a task without training: prompts, tools, rewards, by hand or by a policy."),
    "eval": ("playing.evaluate", "Compare policies on held-out prompts: exact match, reward, pass@k with intervals."),
    "plan": ("planner.command", "Simulate throughput and staleness for device splits, max staleness and weight sync."),
    "serve": ("serve", "Serve a checkpoint over HTTP, with OpenAI's API: --policy.path DIR [--port PORT]."),
    "export": ("export", "Write a checkpoint's weights in Hugging Face format: --run RUN --directory DIR."),
    "worker": ("hosts.worker", "Lend this host to runs that are started elsewhere: --listen ADDRESS:PORT."),
    "fleet": ("hosts.elastic", "Show a living run's hosts and generators, add or remove some: RUN [add|remove ...]."),
    "watch": ("view.watch", "Show the newest recorded rollouts of a run while it goes on: RUN [--once]."),
    "replay": ("playing.replay", "Play a recorded group again and compare it token by token: RUN --group N."),
    "launch": ("submit:main", "Submit a run as a job: slurm or kubernetes, --nodes N -- arguments of train."),
    "report": ("view.report", "Write one HTML file that shows a run, or compares several: RUN [RUN2 ...]."),
    "runs": ("run.runs", "List the runs of a directory: state, step, score, how to go on."),
    "doctor": ("run.doctor", "Look at this host: what would stop a run, and what to do."),
}
"""Verb → the module of its `VERB`, or the function that is given its arguments and `prog`; and what it does."""


def _listing(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {name.ljust(width)}  {line}" for name, line in lines.items())


if __name__ == "__main__":
    command()
