"""Config of the generator meshes, and the environment variables of their processes."""

import os
from dataclasses import dataclass
from typing import Literal

from titan_rl.bounds import Count, Positive
from titan_rl.errors import ConfigError

ANY_ORDER_RANKS = 2
"""Most tensor-parallel ranks that come to one sum, whatever the order of its additions."""

ENGINES = {
    "vllm": "titan_rl.generation.vllm.engine:VllmEngine",
    "simulated": "titan_rl.generation.simulated_engine:simulated_engine",
}
"""Short names of `GeneratorConfig.engine`."""

MAY_DIFFER = (
    "count",
    "tensor_parallel",
    "block_size",
    "burst_steps",
    "gpu_memory_utilization",
    "heartbeat_seconds",
    "kv_cache_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
    "prefix_caching",
    "shares_device",
)
"""Settings of `GeneratorConfig` that change nothing of what a deterministic run computes on CPU: a run may go on with
others."""

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
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM pins threads to cores, the same ones in every process
}
_CUDA = {
    "VLLM_LOGGING_LEVEL": "INFO",  # says what a start that takes minutes is at
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # cannot say what a token was drawn from, and compiles at the start
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # its noise is a function of seed and position
}
_FIXED_ORDER = {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
_DETERMINISTIC = {
    "cpu": {"VLLM_CPU_ATTN_SPLIT_KV": "0"},  # else the batch decides how a long context is split over threads
    "cuda": {"VLLM_BATCH_INVARIANT": "1"},  # vLLM's own kernels for it
}
"""Variables of a generator process. They must be set before its Python starts: OpenMP, torch and vLLM read them when
they are loaded."""


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """`count` generators of `tensor_parallel` ranks each; every one runs a vLLM engine in lockstep."""

    count: Count = 2
    tensor_parallel: Count = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype that the engine computes with; weights are published and fingerprinted in it."""
    max_model_len: Count = 64
    """Longest prompt + completion in tokens; longer requests are refused."""
    max_num_seqs: Count = 256
    """Requests that decode together; fewer than are in flight costs throughput."""
    max_num_batched_tokens: Count = 8192
    """Prompt tokens that one engine step may prefill; at least `max_model_len`: prompts are not chunked on CPU."""
    kv_cache_bytes: Count = 256 << 20
    """KV cache per rank on CPU, and where generators share a CUDA device; else `gpu_memory_utilization` decides."""
    gpu_memory_utilization: Positive = 0.85
    block_size: Count = 32
    """Tokens per KV block; on CPU a multiple of 32."""
    prefix_caching: bool = True
    """Reuse KV of equal prompt prefixes among requests of one version. `False`: every prompt is computed."""
    keep_prefix_cache: bool = False
    """Keep all KV through a change of weights. `False`: after every pull, running requests compute theirs again
    (`generation/recomputed_tokens`), which takes as long as prefilling so many tokens: 256 requests of 2,000 tokens at
    50,000 tokens a second take 10 s, in which nothing is sampled. `True` costs exactness instead: KV of older weights
    is reused for equal prefixes and for the tokens so far, so logprobs are those of no single version: that of a token
    says which weights sampled it, not which weights its context was computed with."""
    shares_device: bool = False
    """The engine's part of `placement.ranks_per_device`, which turns it on."""
    sleep_mode: bool = False
    """On CUDA: let `GeneratorRouter.sleep` give the memory of weights and KV back."""
    burst_steps: Count = 4
    """Engine steps per broadcast decision: more amortise the broadcast, fewer let requests and pulls in sooner."""
    heartbeat_seconds: Positive = 5.0
    """An idle rank 0 broadcasts at least this often, so that no follower's collective times out."""
    engine: str = "vllm"
    """"vllm", "simulated" (takes no time and makes its tokens up; for what stands above an engine), or
    `pkg.mod:function` of `(config, model_path, device)` that returns an `Engine`."""
    linear: Literal["auto", "plain", "packed"] = "auto"
    """How linear layers are computed on CPU: "plain" (`F.linear` on the live weight), "packed" (oneDNN's layout, which
    new weights are stored in: faster products; plain where the CPU cannot pack the dtype), "auto" (packed from a hidden
    size of 192 on)."""
    deterministic: bool = False
    """The engine's part of the run's `deterministic`, which turns it on. Then tokens and logprobs of a request depend
    on nothing but the request and the weights: not on the batch, the order of arrival, which generator serves it,
    `max_num_seqs`, `max_num_batched_tokens`, `prefix_caching`, a preemption, or `tensor_parallel` 1 against 2 (on CPU
    more ranks are refused). Takes the place of `linear`."""

    def __post_init__(self) -> None:
        if self.engine == "simulated" and self.tensor_parallel > 1:
            raise ConfigError(f"a simulated engine needs generator.tensor_parallel = 1, got {self.tensor_parallel}")
        if self.deterministic and self.keep_prefix_cache:
            raise ConfigError(
                "deterministic needs generator.keep_prefix_cache = false: with it, logprobs depend on what a generator "
                "served before"
            )
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"generator.max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"generator.max_model_len ({self.max_model_len}): a prompt is prefilled in one step"
            )


def refuse_more_ranks(tensor_parallel: int) -> None:
    """Raises ConfigError for what deterministic mode cannot keep on CPU."""
    if tensor_parallel > ANY_ORDER_RANKS:
        raise ConfigError(
            f"generator.tensor_parallel is {tensor_parallel}, and on CPU deterministic = true holds for 1 and "
            f"{ANY_ORDER_RANKS} ranks only: sums over more depend on a row's place in the batch"
        )


def generator_environment(
    device: str, *, tensor_parallel: int = 1, threads: int = 1, deterministic: bool = False
) -> dict[str, str]:
    """Variables for every rank of a generator, apart from the rendezvous (RANK, WORLD_SIZE, …). `threads`: of OpenMP,
    per process on a CPU."""
    order = _FIXED_ORDER if device == "cuda" and tensor_parallel > ANY_ORDER_RANKS else {}
    of_device = _CPU | {"OMP_NUM_THREADS": str(threads)} if device == "cpu" else _CUDA
    return _COMMON | of_device | order | (_DETERMINISTIC[device] if deterministic else {})


def check_environment(device: str, *, tensor_parallel: int, deterministic: bool = False) -> None:
    """Raises ConfigError, naming the variables, where `generator_environment` is not in place."""
    required = generator_environment(device, tensor_parallel=tensor_parallel, deterministic=deterministic)
    required.pop("OMP_NUM_THREADS", None)  # as many as there are
    if wrong := [f"{name}={value}" for name, value in required.items() if os.environ.get(name) != value]:
        raise ConfigError(f"a generator process must be started with {' '.join(wrong)}")
