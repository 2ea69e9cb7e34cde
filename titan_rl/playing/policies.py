"""Which task `try` and `eval` play, and policies that are weights, behind router and generators."""

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from titan_rl import serve, train
from titan_rl.config import PlacementConfig, RunConfig, ServeConfig
from titan_rl.directories import CONFIG
from titan_rl.errors import ActorGone, ConfigError, ConfigWarning, RequestLost
from titan_rl.export import export_weights
from titan_rl.gateway.config import GatewayConfig
from titan_rl.hosts.facts import detect_host
from titan_rl.loop.checkpoint_files import CHECKPOINTS
from titan_rl.overrides import Command
from titan_rl.policy.config import PolicyConfig
from titan_rl.rollout.config import RolloutConfig, SamplingConfig
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.run.checks import check_run
from titan_rl.run.players import Player
from titan_rl.run.runs import find
from titan_rl.run.start import Serving, bring_up
from titan_rl.supervision.run_end import Options
from titan_rl.types import Completion, GenerationRequest

BARE = "titan_rl.playing.policies:bare_recipe"
LONGEST_TURN = 512
"""Tokens of a turn, where neither a recipe nor the user says how many."""


def bare_recipe() -> RunConfig:
    """The config for a task of which only the name is known."""
    return replace(serve.checkpoint(), rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=LONGEST_TURN)))


def read_task(command: Command, run: Path | None, *, remedy: str) -> RunConfig:
    """The task of the recipe, else of the run, else the one that is named alone, for this host; with the command's
    settings laid over. `remedy`: what to do where none of them is named. Raises ConfigError: see `train.resolve`."""
    if not command.recipe and run is not None:
        command.lay_over(train.settings_of(run))
    elif not command.recipe:
        if "environment.name" not in command.given:
            raise ConfigError(remedy)
        command.recipe = BARE
    config = train.resolve(command)
    return replace(config, placement=PlacementConfig(device=config.placement.device, threads=config.placement.threads))


def run_of(path: Path) -> Path | None:
    """The run to which a directory belongs: itself, its final weights or one of its checkpoints; None: to no run."""
    path = path.expanduser().absolute()
    above = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    return next((each for each in (path, above) if (each / CONFIG).is_file()), None)


def first_run(policies: Sequence[str]) -> Path | None:
    """The run of the first policy that belongs to one; None: none does. Raises ConfigError: a policy is not there, or
    is a directory without weights."""
    paths = [Path(policy) for policy in policies]
    for path in paths:
        if not path.expanduser().exists():
            raise ConfigError(f"there is no {path}: a policy is a run, a checkpoint or a Hugging Face directory")
        if not (path.expanduser() / "config.json").is_file():
            find(path)
    return next((run for path in paths if (run := run_of(path))), None)


def number_of(command: Command, option: str, default: int, *, least: int = 1) -> int:
    """The value of an option. Raises ConfigError if it is no such number."""
    text = command.values.get(option, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{option}: expected a number from {least} on, got {text!r}")
    return int(text)


@asynccontextmanager
async def weights_player(command: Command, config: RunConfig, weights: str, options: Options) -> AsyncIterator[Player]:
    """The task, played by weights (a Hugging Face directory, a run or one of its checkpoints) through router and
    generators of its own. Raises ConfigError, TitanError: there are no such weights, or a part did not start."""
    from titan_rl.actors.gateway import RolloutGatewayClient

    with tempfile.TemporaryDirectory() as scratch:
        directory = hf_directory(weights, Path(scratch), options["say"])
        config = replace(config, policy=PolicyConfig(path=str(directory), architecture=config.policy.family))
        if "generator.max_model_len" not in command.given:
            config = serve.with_checkpoint_length(config)
        config = ServeConfig.of(config, GatewayConfig(port=0, rollout_keys=True))
        problems = check_run(config, detect_host())
        if refusals := [str(each) for each in problems if not isinstance(each, ConfigWarning)]:
            raise ConfigError("; ".join(refusals))
        async with bring_up(config, **options) as up:

            async def generate(request: GenerationRequest) -> Completion:
                try:
                    return await up.router.generate(request)
                except RequestLost as error:
                    raise ActorGone(str(error)) from error

            runner = GroupRunner(config, model_path=str(directory))
            try:
                sessions = RolloutGatewayClient(up.gateway.actor)
                yield Player(config, runner, await runner.start(sessions), generate)
            finally:
                await runner.close()


def run_until_signal(verb: str, config: RunConfig, work: Serving, print_line: Callable[[str], None]) -> int:
    """`run_serving`, in a process that has loaded nothing of it so far."""
    train.become_controller()
    from titan_rl.run.run import run_serving

    return run_serving(verb, replace(config, logging=replace(config.logging, name="")), work, print_line)


def hf_directory(name: str, scratch: Path, print_line: Callable[[str], None]) -> Path:
    """A Hugging Face directory with the weights that somebody named: such a directory, a run (its newest sound
    checkpoint, or its final weights where it keeps no checkpoints), or one of its checkpoints, which is exported into
    the directory `scratch`. `print_line`: called with a sentence for each damaged checkpoint that is passed over.
    Raises ConfigError: there are no weights."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    resume = find(path)
    if (checkpoint := resume.checkpoint(print_line)) is None:
        if not (final := resume.run / "checkpoint").is_dir():
            raise ConfigError(f"{resume.run} has no weights yet")
        return final
    exported = scratch / checkpoint.directory.name
    export_weights(checkpoint, train.config_of_run(resume.run), exported)
    return exported
