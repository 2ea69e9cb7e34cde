"""The environment variables of a generator process. Standard library only, because the controller imports it.

They must be set before Python starts in that process: OpenMP, torch and vLLM read them when they are loaded.
"""

from __future__ import annotations

import os

from titan_rl.errors import ConfigError
from titan_rl.processes import RENDEZVOUS

_COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in this process, in lockstep with the other ranks
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first step that returns logprobs compiles for many seconds
}
_DETERMINISTIC = {
    "cpu": {"VLLM_CPU_ATTN_SPLIT_KV": "0"},  # else the batch decides how a long context is split over threads
    "cuda": {"VLLM_BATCH_INVARIANT": "1"},  # vLLM's own kernels for it
}


def generator_environment(device: str, *, threads: int = 1, deterministic: bool = False) -> dict[str, str]:
    """Variables for every rank of a generator, apart from the rendezvous (RANK, WORLD_SIZE, …).

    Args:
        device: "cpu" or "cuda".
        threads: OpenMP threads per process, on CPU.
        deterministic: `GeneratorConfig.deterministic`.
    """
    mode = _DETERMINISTIC[device] if deterministic else {}
    if device == "cpu":
        return _COMMON | _CPU | mode | {"OMP_NUM_THREADS": str(threads)}
    return _COMMON | mode


def check_environment(device: str, *, tensor_parallel: int, deterministic: bool = False) -> None:
    """Refuse to build an engine where its environment is not in place.

    Raises:
        ConfigError: naming the variables.
    """
    required = _COMMON | (_CPU if device == "cpu" else {}) | (_DETERMINISTIC[device] if deterministic else {})
    wrong = [f"{name}={value}" for name, value in required.items() if os.environ.get(name) != value]
    if wrong:
        raise ConfigError(f"a generator process must be started with {' '.join(wrong)}")
    needed = ("RANK", "LOCAL_RANK", *((RENDEZVOUS,) if tensor_parallel > 1 else ()))
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ConfigError(f"a generator process needs {', '.join(missing)} in its environment")
    if os.environ.get("WORLD_SIZE") != str(tensor_parallel):
        raise ConfigError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}, but generator.tensor_parallel is {tensor_parallel}"
        )
