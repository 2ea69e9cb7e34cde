"""usage: {prog} --policy.path DIR [--host HOST] [--port PORT] [--api-key KEY] [--model-name NAME]
       [--recipe NAME] [--config FILE.toml] [--section.key VALUE ...] [--dry-run]

Serve a checkpoint to any program that speaks the OpenAI API, at http://HOST:PORT/v1.

exit codes: 0 stopped by Ctrl-C, SIGTERM or SIGHUP; 1 failed; 2 wrong config, or a port in use: nothing was started
signals:    SIGUSR1 prints the stacks of all threads and tasks of every process into the logs
"""

import os
from dataclasses import replace
from pathlib import Path

from titan_rl import train
from titan_rl.config import RunConfig, ServeConfig
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.hosts.facts import detect_host
from titan_rl.overrides import EXIT_USAGE, Command, Verb
from titan_rl.policy.config import PolicyConfig, TrainerConfig
from titan_rl.policy.models.architecture import read_shape
from titan_rl.run.checks import check_run
from titan_rl.weights.segment_files import sweep_dead_segments

CHECKPOINT_RECIPE = "titan_rl.serve:checkpoint"
LONGEST = 4096
"""Tokens of prompt and completion together, where neither the checkpoint nor the user says less."""
KEY_VARIABLE = "TITAN_RL_API_KEY"


def checkpoint() -> RunConfig:
    """What a checkpoint is served with: one generator, as long as the checkpoint allows."""
    return RunConfig(
        policy=PolicyConfig(path="."),
        generator=GeneratorConfig(
            count=1, max_model_len=LONGEST, max_num_batched_tokens=2 * LONGEST, kv_cache_bytes=1 << 30, linear="packed"
        ),
        trainer=TrainerConfig(max_tokens_per_microbatch=1 << 30),  # there is none; it must not limit a length
    )


def _act(command: Command, prog: str) -> int:
    if not command.recipe and not any(key.startswith("policy.") for key in command.given):
        raise ConfigError("name what to serve: --policy.path DIR, or --recipe NAME for the policy of a recipe")
    command.recipe = command.recipe or CHECKPOINT_RECIPE
    config = train.apply_command(_with_gateway(train.recipe_of(command)), command)
    if command.recipe == CHECKPOINT_RECIPE and "generator.max_model_len" not in command.given:
        config = with_checkpoint_length(config)
    if "gateway.model" not in command.given:
        name = Path(config.policy.path).name if config.policy.tiny is None else "tiny"
        config = replace(config, gateway=replace(config.gateway, model=name))
    sweep_dead_segments()
    host, dry_run = detect_host(), "--dry-run" in command.flags
    if not train.may_start(check_run(config, host), prog, dry_run=dry_run):
        return EXIT_USAGE
    if dry_run:
        secret = "***" if config.gateway.api_key else ""
        return train.show(replace(config, gateway=replace(config.gateway, api_key=secret)), host)
    train.become_controller()
    from titan_rl.run.run import run_service

    return run_service(config)


VERB = Verb(
    act=_act,
    config=lambda command: _with_gateway(checkpoint()),
    about=__doc__,
    options={
        "--policy.path DIR": "checkpoint of Qwen3 or Llama 3 in Hugging Face format",
        "--host HOST": ("gateway.host", "address to listen on (127.0.0.1); any other than loopback needs --api-key"),
        "--port PORT": ("gateway.port", "port to listen on (8000); 0: any free one"),
        "--api-key KEY": ("gateway.api_key", f"what clients must send; also read from the variable {KEY_VARIABLE}"),
        "--model-name NAME": ("gateway.model", "name of the model for clients (the directory's own name)"),
        "--recipe NAME": "serve the policy of a recipe, with its settings",
        "--name NAME": ("logging.name", "name of the directory of its logs, as --logging.name"),
        "--config FILE.toml": "settings; relative file names in it start at its directory",
        **train.HOST_OPTIONS,
        "--dry-run": "print the resolved config and the placement, and start nothing",
    },
)


def _with_gateway(config: RunConfig) -> ServeConfig:
    return ServeConfig.of(config, GatewayConfig(api_key=os.environ.get(KEY_VARIABLE, "")))


def with_checkpoint_length(config: train.C) -> train.C:
    """The config with the length of a checkpoint that is shorter than the default."""
    directory = Path(config.policy.path)
    if config.policy.tiny is not None or not (directory / "config.json").is_file():
        return config  # what is missing is reported with everything else
    length = read_shape(directory, config.policy.family).max_length
    if length >= config.generator.max_model_len:
        return config
    return replace(config, generator=replace(config.generator, max_model_len=length))
