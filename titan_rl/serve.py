"""`titan-rl serve --policy.path DIR`: a checkpoint behind an OpenAI-compatible HTTP server.

Loads neither torch nor Monarch before the config was found to be right.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from titan_rl import train
from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed, ConfigError, Stopped
from titan_rl.gateway.config import GatewayConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.launch.checks import check_serving
from titan_rl.launch.placement import detect_host
from titan_rl.launch.process import prepare_controller
from titan_rl.overrides import split_options
from titan_rl.policy.config import PolicyConfig, TrainerConfig
from titan_rl.policy.models.qwen3 import read_shape
from titan_rl.weights.transports.segment_files import sweep_dead_segments

CHECKPOINT_RECIPE = "titan_rl.serve:checkpoint"
LONGEST = 4096
"""Tokens of prompt and completion together, where neither the checkpoint nor the user says less."""

HELP = """\
usage: {prog} --policy.path DIR [--host HOST] [--port PORT] [--api-key KEY] [--model-name NAME]
       {pad} [--recipe NAME] [--config FILE.toml] [--section.key VALUE ...] [--dry-run]

Serve a checkpoint to any program that speaks the OpenAI API, at http://HOST:PORT/v1.

  --policy.path DIR   Qwen3 checkpoint in Hugging Face format
  --host HOST         address to listen on (127.0.0.1); any other than loopback needs --api-key
  --port PORT         port to listen on (8000); 0: any free one
  --api-key KEY       what clients must send; also read from the variable {variable}
  --model-name NAME   name of the model for clients (the directory's own name)

Generators and placement are settings of a run: --generator.count 2, --generator.max-model-len 8192,
--generator.dtype bfloat16, …; `titan-rl train --help` lists them all."""

KEY_VARIABLE = "TITAN_RL_API_KEY"
OPTIONS = {"--host": "host", "--port": "port", "--api-key": "api_key", "--model-name": "model"}
"""Option → field of `GatewayConfig`."""

_log = logging.getLogger(__name__)


def checkpoint() -> RunConfig:
    """What a checkpoint is served with: one generator, as long as the checkpoint allows."""
    return RunConfig(
        policy=PolicyConfig(path="."),
        generator=GeneratorConfig(
            count=1,
            max_model_len=LONGEST,
            max_num_batched_tokens=2 * LONGEST,
            kv_cache_bytes=1 << 30,
            linear="packed",
        ),
        trainer=TrainerConfig(max_tokens_per_microbatch=1 << 30),  # there is none; it must not limit a length
    )


def main(argv: Sequence[str], *, prog: str) -> int:
    """Serve until Ctrl-C; returns the exit code: 0 stopped by a signal, 1 failed, 2 wrong config."""
    try:
        own, rest = _own_options(argv)
        command = train.parse(rest)
        if command.help or not argv:
            print(HELP.format(prog=prog, pad=" " * len(prog), variable=KEY_VARIABLE))
            return 0 if argv else train.EXIT_USAGE
        given = {override.key for layer in command.layers for override in layer}
        if not command.recipe and not any(key.startswith("policy.") for key in given):
            raise ConfigError("name what to serve: --policy.path DIR, or --recipe NAME for the policy of a recipe")
        command.recipe = command.recipe or CHECKPOINT_RECIPE
        config, imports = train.resolve(command)
        if command.recipe == CHECKPOINT_RECIPE and "generator.max_model_len" not in given:
            config = _as_long_as_it_is(config)
        gateway = _gateway_config(config, own)
        sweep_dead_segments()
        host = detect_host()
        if not train.may_start(check_serving(config, host, gateway), prog, dry_run=command.dry_run):
            return train.EXIT_USAGE
        if command.dry_run:
            train.show(config, host, serving=True)
            return 0
        train.forget_torchrun(os.environ)
        return _serve(config, gateway, imports, prog)
    except ConfigError as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return train.EXIT_USAGE


def _own_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What is the gateway's, and the words that are left for the run config."""
    own: dict[str, str] = {}
    rest: list[str] = []
    for option, words in split_options(["--help" if word == "-h" else word for word in argv]):
        name = OPTIONS.get(option.replace("_", "-"))
        if name is None:
            rest += [option, *words]
        elif len(words) != 1:
            raise ConfigError(f"{option}: expected one value, got {' '.join(words) or 'nothing'!r}")
        else:
            own[name] = words[0]
    return own, rest


def _gateway_config(config: RunConfig, own: dict[str, str]) -> GatewayConfig:
    port = own.get("port", "8000")
    if not port.isdecimal():
        raise ConfigError(f"--port: expected a number, got {port!r}")
    default = Path(config.policy.path).name if config.policy.tiny is None else "tiny"
    values = {"model": default, "api_key": os.environ.get(KEY_VARIABLE, ""), **own}
    assert values.keys() <= {field.name for field in fields(GatewayConfig)}
    return GatewayConfig(
        host=values.get("host", "127.0.0.1"), port=int(port), api_key=values["api_key"], model=values["model"]
    )


def _as_long_as_it_is(config: RunConfig) -> RunConfig:
    """The config with the length of a checkpoint that is shorter than the default."""
    directory = Path(config.policy.path)
    if config.policy.tiny is not None or not (directory / "config.json").is_file():
        return config  # what is missing is reported with everything else
    length = read_shape(directory).max_length
    if length >= config.generator.max_model_len:
        return config
    return replace(config, generator=replace(config.generator, max_model_len=length))


def _serve(config: RunConfig, gateway: GatewayConfig, imports: tuple[str, ...], prog: str) -> int:
    prepare_controller()
    from titan_rl.controller.faults import Announcer
    from titan_rl.launch.run import EXIT_FAILED, make_run_directory
    from titan_rl.launch.signals import hold_signals
    from titan_rl.observability.logs import log_to_file

    hold_signals()
    directory = make_run_directory(replace(config, recipe="serve"))
    log_to_file(directory / "logs" / "controller.log")
    announce = Announcer(lambda text: print(f"{prog}: {text}", file=sys.stderr, flush=True), stopping="closing")
    try:
        asyncio.run(_until_stopped(config, gateway, imports, directory / "logs", announce))
    except Stopped:
        print("stopped", flush=True)
        return 0
    except Exception as error:
        announce(error)
        _log.error("serving failed", exc_info=error)
        print(f"logs: {directory / 'logs'}", file=sys.stderr)
        return train.EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    return 0


async def _until_stopped(
    config: RunConfig,
    gateway: GatewayConfig,
    imports: tuple[str, ...],
    log_directory: Path,
    announce: Callable[[Exception], None],
) -> None:
    from titan_rl.controller.faults import FaultBoard
    from titan_rl.launch.serve import serve
    from titan_rl.launch.signals import StopSignals

    faults = FaultBoard(announce)
    StopSignals(faults.report)

    def tell_fault(fault: ActorFailed) -> None:
        print(f"fault: {fault}", file=sys.stderr, flush=True)

    def tell_mesh(mesh: str, doing: str) -> None:
        print(f"{mesh}: {doing}", flush=True)

    async with serve(
        config,
        gateway,
        imports=imports,
        log_directory=log_directory,
        faults=faults,
        on_fault=tell_fault,
        on_mesh=tell_mesh,
        on_stop=functools.partial(print, flush=True),
    ) as up:
        key = "with the API key" if gateway.api_key else "without an API key"
        print(f"serving {gateway.model} at {up.url}/v1, {key}; Ctrl-C stops it", flush=True)
        await up.run()
