"""The stages of a host's fork server: what the processes of a run import, and which of them share that."""

from titan_rl.config import RunConfig
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.placement import Device, Kind, engine_environment, resolve_device, threads, trainer_threads

_LIGHT_IMPORTS = (
    "tokenizers",
    "titan_rl.metrics.waits",
    "titan_rl.rollout.group_runner",
    "titan_rl.routing.dispatcher",
    "titan_rl.supervision.process",
)
_TORCH_IMPORTS = ("torch", "torch._inductor.lowering", "torch.distributed.fsdp", "torch.distributed.tensor", "numba")
_TRAINER_IMPORTS = ("titan_rl.policy.updater:import_torchtitan", "titan_rl.weights.fingerprint")
_ENGINE_IMPORTS: dict[Device, tuple[str, ...]] = {
    "cpu": (
        "titan_rl.generation.vllm.engine",
        "titan_rl.generation.vllm.adaptation",
        "titan_rl.generation.vllm.steps",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.worker.cpu_worker",
    ),
    "cuda": (
        "titan_rl.generation.vllm.engine",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.worker.gpu_worker",
    ),
}
"""What the processes of a stage import; none of it imports Monarch. Qwen3's module brings all that others' need."""


def fork_stages(config: RunConfig, host: HostFacts) -> Stage:
    """From which stages the processes of a host come. Where there is one host, all of them begin at once: each will be
    needed."""
    device, now = resolve_device(config, host), not config.placement.several_hosts
    own, titan = trainer_threads(host, device), _TRAINER_IMPORTS
    trainer = Stage(name="torchtitan", kinds=(Kind.TRAINER,), environment=own, imports=titan, device=device, now=now)
    computing = [trainer]
    if config.generator.engine == "vllm":
        engine, imports = engine_environment(config, device), _ENGINE_IMPORTS[device]
        computing.append(Stage(name="vLLM", kinds=(Kind.GENERATOR,), environment=engine, imports=imports, now=now))
    torch = Stage(name="torch", imports=_TORCH_IMPORTS, above=tuple(computing), now=now)
    others = tuple(kind for kind in Kind if kind not in torch.all_kinds)
    light = Stage(name="light", kinds=others, imports=_LIGHT_IMPORTS, now=now)
    return Stage(name="root", environment=threads(config.placement.threads), above=(light, torch))
