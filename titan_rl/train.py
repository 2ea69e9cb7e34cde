"""`python -m titan_rl.train` and `titan-rl train`: from arguments to a config, its checks, and the run.

The command line wins over the TOML file, and that over the recipe. Whatever can be known to be wrong is said in one
sentence on standard error, with exit code 2, before any process starts; a dry run checks the same. Under torchrun
every rank but 0 is a worker (`hosts.worker`).

Relative file names start at the file that holds them (TOML, recipe) or at the working directory (command line).
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from titan_rl.config import CLASS_SETTINGS, DATA_FILES, RunConfig
from titan_rl.config_registry import RECIPES, load_recipe
from titan_rl.directories import CONFIG, SUMMARY, check_replaceable
from titan_rl.environments.base import task_settings
from titan_rl.errors import AbsentError, ActorGone, ConfigError, ConfigWarning, TaskError
from titan_rl.hosts.facts import HostFacts, detect_host
from titan_rl.hosts.worker import hosts_of, serve_rank, workers
from titan_rl.importing import absolute_name, absolute_path
from titan_rl.loop.checkpoint_files import checkpoints
from titan_rl.overrides import EXIT_USAGE, Command, Rules, Verb, apply, option_overrides, print_error, to_toml, variant
from titan_rl.policy.losses import OF_EVERY_LOSS
from titan_rl.processes import run_and_exit
from titan_rl.run.checks import check_run
from titan_rl.run.memory import describe_memory, shape_of
from titan_rl.run.runs import Resume, check_differences, differences, find, unfinished
from titan_rl.supervision.placement import TORCHRUN_VARIABLES, assumed_hosts, describe, plan, with_devices
from titan_rl.supervision.process import prepare_controller
from titan_rl.weights.segment_files import sweep_dead_segments

C = TypeVar("C", bound=RunConfig)

TRUSTED = "--trusted-network"
HOST_OPTIONS = {
    "--hosts ADDRESS:PORT,...": ("placement.hosts", "workers on other hosts (`titan-rl worker`), as --placement.hosts"),
    TRUSTED: (
        "placement.trusted_network",
        "needed with other hosts, unless there is TLS: whoever reaches a port of the run can run any code",
    ),
}


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titan_rl.train") -> int:
    """Run what the arguments say; returns the exit code. `prog`: the command as the user typed it, for messages."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if hosts_of(os.environ) > 1 and os.environ["RANK"] != "0":
            serve_rank(os.environ)
    except ConfigError as error:
        print_error(prog, error)
        return EXIT_USAGE
    return VERB.run(words, prog=prog)


def _act(command: Command, prog: str) -> int:
    config, resume = _what_to_run(command, prog)
    if resume is not None:
        resume.check_steps(config.loop.steps)
        if config.logging.save_final:
            check_replaceable(resume.run / "checkpoint")  # now, and not when it is to be written
    if (ranks := hosts_of(os.environ)) > 1:
        where = config.placement
        hosts = workers(os.environ, ranks, trusted=where.trusted_network)
        config = replace(config, placement=replace(where, hosts=hosts))
    return check_and_run(config, resume, prog, dry_run="--dry-run" in command.flags)


def check_and_run(
    config: RunConfig, resume: Resume | None, prog: str, *, dry_run: bool = False, replay_until: int = 0
) -> int:
    sweep_dead_segments()  # so that /dev/shm has what it will have
    if not may_start(problems(config), prog, dry_run=dry_run):
        return EXIT_USAGE
    if dry_run:
        return show(config, detect_host())
    become_controller()
    from titan_rl.run.run import run

    return run(config, resume, replay_until=replay_until)


def _what_to_run(command: Command, prog: str) -> tuple[RunConfig, Resume | None]:
    """The config, and the run that goes on."""
    where = command.values.get("--resume")
    if task := command.word("task", ""):
        return for_task(task, command, prog), None
    if where is None:
        return resolve(command), None
    if where == "auto":
        return _newest_unfinished(command, prog)
    resume = find(Path(where))
    if not command.recipe:
        command.lay_over(settings_of(resume.run))
    config = resolve(command)
    found = differences(config_of_run(resume.run), config)
    check_differences(found, resume.run)
    for difference in found:
        print_error(prog, difference)
    if (resume.run / SUMMARY).exists():
        if not checkpoints(resume.run):
            raise ConfigError(
                f"{resume.run} is done and has no checkpoint to go on from; start a new run from its weights: "
                f"--policy.path {resume.run / 'checkpoint'}"
            )
        if not any(difference.setting == "loop.steps" for difference in found):
            raise ConfigError(f"{resume.run} is done; to train it further, ask for more steps: --loop.steps")
    return config, resume


def for_task(task: str, command: Command, prog: str) -> RunConfig:
    """The settings that suit a task, under those of the command; what is chosen is printed."""
    from titan_rl.run.first_settings import choose, survey

    if command.recipe or "--resume" in command.values:
        raise ConfigError(f"{task}: leave it out beside --recipe and --resume, which name a task themselves")
    if task in RECIPES:
        raise ConfigError(f"{task} is a recipe and no task: --recipe {task}")
    command.recipe = "task"
    named = option_overrides([("TASK", *each) for each in task_settings(task)], Path.cwd())
    command.layers = [named, *command.layers]
    before = resolve(command)
    try:
        found = asyncio.run(survey(before))
    except (TaskError, ActorGone) as error:
        raise ConfigError(f"{task}: {error}") from error
    tiny = before.policy.tiny
    given, by_bytes = command.given, tiny is not None and tiny.tokenizer == "chat"
    warmup = before.trainer.warmup.steps if "trainer.warmup.steps" in given else None
    shape = shape_of(before) if tiny is None else None
    positions = 0 if tiny is not None else shape.max_length if shape is not None else sys.maxsize
    settings = choose(found, by_bytes=by_bytes, positions=positions, warmup=warmup)
    as_said = {"trainer.optimizer.lr": "trainer.optimizer.kl_band", "rollout.samples_per_group": "rollout.most_samples"}
    fixed = {changes for name, changes in as_said.items() if name in given}  # nothing changes what the user says
    settings = [each for each in settings if each.setting not in fixed]
    chosen = [each for each in settings if each.setting not in given]
    width = max((len(each.setting) for each in chosen), default=0)
    print(f"{prog}: settings for {task}, each of which can be given")
    for setting, value, reason in chosen:
        print(f"  --{setting.replace('_', '-').ljust(width)}  {value!r:12}  {reason}")
    begun = replace(load_recipe("task"), policy=before.policy)
    values = {each.setting: each.value for each in settings} | {"logging.name": Path(task.partition(":")[0]).stem}
    return apply_command(variant(begun, values), command)  # the user's settings come on top


def _newest_unfinished(command: Command, prog: str) -> tuple[RunConfig, Resume | None]:
    config = resolve(command)
    prepare_controller()
    from titan_rl.loop.ledger import read_ledger

    for run in unfinished(Path(config.logging.directory).expanduser()):
        try:
            before = config_of_run(run)
            if before.recipe == config.recipe and all(each.allowed for each in differences(before, config)):
                found = Resume(run).checkpoint(lambda text: print_error(prog, text), read_ledger)
                print_error(prog, f"going on with {run}")
                return config, Resume(run, found)
        except ConfigError as error:
            print_error(prog, f"{run} is passed over: {error}")
    print_error(prog, "no unfinished run has this config: a new one starts")
    return config, None


def config_of_run(run: Path) -> RunConfig:
    """The config that a run had when it last started."""
    return resolve(settings_of(run))


def settings_of(run: Path) -> Command:
    """The command line that means the settings of a run."""
    return VERB.read(["--config", str(run / CONFIG)])


# --- from arguments to a config --------------------------------------------------------------------------------------


_RULES = Rules(
    alternatives=(("policy.path", "policy.tiny"),),
    arguments_of={
        "environment.name": "environment.kwargs",
        "rollout.advantage.name": "rollout.advantage.kwargs",
        "trainer.loss.name": "trainer.loss.kwargs",
        "router.strategy": "router.strategy_kwargs",
    },
    kept=OF_EVERY_LOSS,
    file_settings={
        **dict.fromkeys(("logging.directory", "policy.path", "trainer.kl.teacher", *DATA_FILES), absolute_path),
        **dict.fromkeys(("policy.architecture", "policy.tiny.architecture"), absolute_name),
        **dict.fromkeys((*CLASS_SETTINGS, "environment.kwargs.reward"), absolute_name),
    },
)


VERB = Verb(
    act=_act,
    config=lambda command: recipe_of(command) if command.recipe else RunConfig(),
    about="""
usage: {prog} TASK [--section.key VALUE ...]
       {prog} --recipe NAME [--config FILE.toml] [--section.key VALUE ...] [--name NAME] [--dry-run]
       {prog} --resume RUN [--section.key VALUE ...] [--dry-run]

Train a policy. TASK is a file of yours with one task in it, file.py:Class, or a file of rows (.jsonl, .parquet) with
a prompt and its right answer: what it needs is chosen and said.
Constructor arguments of a class are set as --environment.kwargs.NAME VALUE.

exit codes: 0 done; 1 failed, or below evaluation.target_exact_match; 2 wrong config: nothing was started;
            130, 143, 129 stopped by Ctrl-C, SIGTERM, SIGHUP
signals:    SIGUSR1 prints the stacks of all threads and tasks of every process into the logs""",
    options={
        "--recipe NAME": "a recipe (`titan-rl recipes` lists them), or your own: pkg.mod:function, file.py:function",
        "--config FILE.toml": "a recipe's name and settings; relative file names in it start at its directory",
        "--name NAME": ("logging.name", "name of the run, as --logging.name"),
        "--resume RUN": "go on with a run: its directory or one of its checkpoints; its settings need not be repeated; "
        "`auto`: the newest unfinished run of this recipe and config (one with a checkpoint first), or a new one",
        **HOST_OPTIONS,
        "--dry-run": "print the resolved config and the placement, and start nothing; exit code 2 if this host has too "
        "few CUDA devices",
    },
    takes_words=True,
)


def recipe_of(command: Command) -> RunConfig:
    """What the command's settings are laid over. Raises ConfigError."""
    if not command.recipe:
        raise ConfigError(
            f'name a recipe, as --recipe NAME or as recipe = "NAME" in the file of --config ({", ".join(RECIPES)})'
        )
    return load_recipe(command.recipe)


def resolve(command: Command) -> RunConfig:
    """The config, its file names absolute. Raises ConfigError: unknown recipe or setting, wrong type, or values that do
    not fit together."""
    return apply_command(recipe_of(command), command)


def apply_command(config: C, command: Command) -> C:
    """The same, of a config that the command's recipe gave."""
    where = command.recipe.rpartition(":")[0]
    base = Path(where).parent if where.endswith(".py") else Path.cwd()
    runs = absolute_path(config.logging.directory, Path.cwd())  # and not where the recipe is, among sources
    config = replace(config, logging=replace(config.logging, directory=runs))
    return apply(config, command.layers, _RULES, base)


# --- what to do with it ----------------------------------------------------------------------------------------------


def may_start(problems: Sequence[ConfigError], prog: str, *, dry_run: bool = False) -> bool:
    """Say why a run may not start, or what it is warned of; what only this host lacks does not end a dry run."""
    harmless = (ConfigWarning, AbsentError) if dry_run else ConfigWarning
    refusals = [problem for problem in problems if not isinstance(problem, harmless)]
    for sentence in refusals or (f"warning: {problem}" for problem in problems):
        print_error(prog, sentence)
    return not refusals


def problems(config: RunConfig) -> list[ConfigError]:
    """Everything that is wrong with the config; then the task is tried, unless something is."""
    problems = check_run(config, detect_host())
    if not all(isinstance(problem, (AbsentError, ConfigWarning)) for problem in problems):
        return problems
    from titan_rl.run.task_check import check_task

    return problems + [each for each in check_task(config) if str(each) not in map(str, problems)]


def show(config: RunConfig, host: HostFacts) -> int:
    """Print the config as TOML and the placement as comments below it. Returns the exit code: 2 if the run needs CUDA
    devices that this host has not, and no other host is named."""
    hosts = assumed_hosts(config, with_devices(host, config))
    placement = plan(config, *hosts)
    print(to_toml(config))
    lines, shape = describe(placement, *hosts), shape_of(config)
    if placement.device == "cuda" and shape is not None:
        lines += describe_memory(config, shape, host.device_memory)
    print("\n".join(f"# {line}".rstrip() for line in lines))
    return EXIT_USAGE if hosts[0].devices_there is not None and len(hosts) == 1 else 0


def become_controller() -> None:
    """Call before anything that imports Monarch. Removes what torchrun set: every mesh is a world of its own."""
    for name in TORCHRUN_VARIABLES:
        os.environ.pop(name, None)
    prepare_controller()


if __name__ == "__main__":
    run_and_exit(main)
