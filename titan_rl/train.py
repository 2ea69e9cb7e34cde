"""`python -m titan_rl.train --recipe NAME [--config FILE.toml] [--section.key VALUE …] [--name NAME] [--dry-run]`.

The command line wins over the TOML file, and that over the recipe. Whatever can be known to be wrong is said in one
sentence on standard error, with exit code 2, before any process starts; a dry run checks the same. `torchrun
--nproc-per-node 1 -m titan_rl.train …` does the same as starting it directly.

Relative file names start at the file that holds them (TOML, recipe) or at the working directory (command line).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_rl.config import CLASS_SETTINGS, DATA_FILES, RunConfig
from titan_rl.config_registry import RECIPES, load_recipe
from titan_rl.errors import ConfigError
from titan_rl.launch.checks import Problem, Severity, check_run
from titan_rl.launch.placement import TORCHRUN_VARIABLES, HostFacts, describe, detect_host, devices_needed, plan
from titan_rl.launch.process import prepare_controller
from titan_rl.overrides import (
    Override,
    Rules,
    absolute_files,
    apply,
    get_setting,
    option_overrides,
    read_toml,
    split_options,
    to_toml,
    toml_overrides,
)
from titan_rl.processes import leave
from titan_rl.weights.transports.segment_files import sweep_dead_segments

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titan_rl.train") -> int:
    """Run what the arguments say.

    Args:
        argv: without the program's name; None: those of this process.
        prog: the command as the user typed it, for messages.

    Returns:
        The exit code: 0 done, 1 failed or not learned, 2 wrong config, more than 128 stopped by a signal (see
        `launch.run`).
    """
    if (refusal := several_processes(os.environ)) is not None:
        if os.environ.get("RANK", "0") == "0":  # once, not once per process
            _say(prog, refusal)
        return EXIT_USAGE
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        if command.help:
            from titan_rl.overrides.help import print_help

            print_help(load_recipe(command.recipe) if command.recipe else RunConfig(), prog=prog)
            return 0
        config, imports = resolve(command)
        return _dry_run(config, imports, prog) if command.dry_run else _run(config, imports, prog)
    except ConfigError as error:
        _say(prog, error)
        return EXIT_USAGE


# --- from arguments to a config --------------------------------------------------------------------------------------


def absolute_name(name: str, base: Path) -> str:
    """`file.py:Name` with the absolute path of the file, which starts at `base`; other names as they are."""
    file, colon, attribute = name.rpartition(":")
    return f"{absolute_path(file, base)}:{attribute}" if colon and file.endswith(".py") else name


def absolute_path(path: str, base: Path) -> str:
    """`path`, which starts at `base`, absolute; an empty one stays empty."""
    return str((base / Path(path).expanduser()).resolve()) if path else path


_CLASSES = dict.fromkeys((*CLASS_SETTINGS, "environment.kwargs.reward"), absolute_name)
_DATA = dict.fromkeys(("policy.path", *DATA_FILES), absolute_path)
_RULES = Rules(
    alternatives=(("policy.path", "policy.tiny"),),
    arguments_of={
        "environment.name": "environment.kwargs",
        "trainer.loss.name": "trainer.loss.kwargs",
        "router.strategy": "router.strategy_kwargs",
    },
    file_settings={"logging.directory": absolute_path, **_DATA, **_CLASSES},
)


@dataclass(kw_only=True)
class Command:
    """The command line, read but not yet looked up."""

    recipe: str = ""
    """Absolute where it names a file."""
    layers: list[list[Override]] = field(default_factory=list)
    """TOML first, then the command line's own."""
    dry_run: bool = False
    help: bool = False


def parse(argv: Sequence[str]) -> Command:
    """Read the arguments and the TOML file that they name.

    Raises:
        ConfigError: an option without its value, or a TOML file that is missing or broken.
    """
    if "-h" in argv:
        argv = ["--help" if argument == "-h" else argument for argument in argv]
    command = Command()
    here = Path.cwd()
    recipe, file, settings = "", None, []
    for option, words in split_options(argv):
        match option.replace("_", "-"):
            case "--recipe":
                recipe = absolute_name(_single(option, words), here)
            case "--config":
                file = Path(_single(option, words)).expanduser()
            case "--name":
                settings.append(("--logging.name", words))
            case "--dry-run" | "--help":
                if words:
                    raise ConfigError(f"{option}: takes no value, got {' '.join(words)!r}")
                setattr(command, option[2:].replace("-", "_"), True)
            case _:
                settings.append((option, words))
    if file is not None:
        table = read_toml(file)
        named = table.pop("recipe", "")
        if not isinstance(named, str):
            raise ConfigError(f"{file}: recipe: expected one text, got {named!r}")
        recipe = recipe or absolute_name(named, file.resolve().parent)
        command.layers.append(toml_overrides(table, file))
    command.recipe = recipe
    command.layers.append(option_overrides(settings, here))
    return command


def _single(option: str, words: list[str]) -> str:
    if len(words) != 1 or not words[0]:
        raise ConfigError(f"{option}: expected one value, got {' '.join(words) or 'nothing'!r}")
    return words[0]


def resolve(command: Command) -> tuple[RunConfig, tuple[str, ...]]:
    """The config, its file names absolute, and the user's modules: what every process has to import first.

    Raises:
        ConfigError: unknown recipe or setting, wrong type, or values that do not fit together.
    """
    if not command.recipe:
        raise ConfigError(
            f'name a recipe, as --recipe NAME or as recipe = "NAME" in the file of --config ({", ".join(RECIPES)})'
        )
    config = load_recipe(command.recipe)
    where = command.recipe.rpartition(":")[0]
    base = Path(where).parent if where.endswith(".py") else Path.cwd()
    config = absolute_files(config, {**_DATA, **_CLASSES}, base)
    config = absolute_files(config, {"logging.directory": absolute_path}, Path.cwd())  # runs never land among sources
    config = apply(config, command.layers, _RULES)
    named = [command.recipe, *(get_setting(config, setting) for setting in CLASS_SETTINGS)]
    return config, tuple(dict.fromkeys(module for name in named for module in user_modules(name)))


def user_modules(name: str) -> Iterator[str]:
    """The module or file of a class that is named in a config, unless it is a bundled one."""
    module, colon, _ = name.rpartition(":")
    if colon and module.split(".")[0] != "titan_rl":
        yield module


# --- what to do with it ----------------------------------------------------------------------------------------------


def may_start(problems: Sequence[Problem], prog: str, *, dry_run: bool = False) -> bool:
    """Say why a run may not start, or what it is warned of; what only this host lacks does not end a dry run."""
    harmless = {Severity.WARNING, Severity.ABSENT} if dry_run else {Severity.WARNING}
    refusals = [problem.sentence for problem in problems if problem.severity not in harmless]
    for sentence in refusals or (f"warning: {problem.sentence}" for problem in problems):
        _say(prog, sentence)
    return not refusals


def _run(config: RunConfig, imports: tuple[str, ...], prog: str) -> int:
    sweep_dead_segments()  # so that /dev/shm has what it will have
    if not may_start(_problems(config, imports), prog):
        return EXIT_USAGE
    forget_torchrun(os.environ)
    prepare_controller()
    from titan_rl.launch.run import run

    return run(config, imports)


def _problems(config: RunConfig, imports: tuple[str, ...]) -> list[Problem]:
    """Everything that is wrong with the config; then the task is tried, unless something is."""
    problems = check_run(config, detect_host())
    if any(problem.severity is Severity.ERROR for problem in problems):
        return problems
    from titan_rl.launch.task_check import check_task

    return problems + [problem for problem in check_task(config, imports) if problem not in problems]


def _dry_run(config: RunConfig, imports: tuple[str, ...], prog: str) -> int:
    if not may_start(_problems(config, imports), prog, dry_run=True):
        return EXIT_USAGE
    show(config, detect_host())
    return 0


def show(config: RunConfig, host: HostFacts, *, serving: bool = False) -> None:
    """Print the config as TOML and the placement as comments below it."""
    placement = plan(config, with_devices(host, config), serving=serving)
    print(to_toml(config))
    print("\n".join(f"# {line}".rstrip() for line in describe(placement, host)))


def with_devices(host: HostFacts, config: RunConfig) -> HostFacts:
    """The host with as many devices as a run that asks for CUDA would need, where it has fewer."""
    if config.placement.device != "cuda" or len(host.cuda_devices) >= devices_needed(config):
        return host
    return replace(host, cuda_devices=tuple(range(devices_needed(config))))


def several_processes(environ: Mapping[str, str]) -> str | None:
    """Why a launcher's environment is refused: titan_rl starts its own processes. None: it is not."""
    world = environ.get("WORLD_SIZE", "1")
    if not world.isdigit() or int(world) <= 1:
        return None
    return (
        f"WORLD_SIZE is {world}: several hosts are not supported yet, and on one host titan_rl starts its own "
        f"processes (torchrun --nproc-per-node 1, or no torchrun)"
    )


def forget_torchrun(environ: MutableMapping[str, str]) -> None:
    """Remove what torchrun set: every mesh is a world of its own."""
    for name in TORCHRUN_VARIABLES:
        environ.pop(name, None)


def _say(prog: str, message: object) -> None:
    """One line on standard error."""
    print(f"{prog}: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    leave(main)
