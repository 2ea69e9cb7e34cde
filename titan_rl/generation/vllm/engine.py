"""One tensor-parallel rank of vLLM as an `Engine`.

vLLM's LLMEngine is built and configured as usual. Requests go directly to its engine core, and this class collects the
sampled tokens: two list appends per token, arrays at the end. LLMEngine's own output objects cost more per token, and
an abort would lose the tokens so far unless they were built at every step.

Every rank gets the same calls in the same order. vLLM's scheduler is deterministic, so the ranks stay in step without
communication other than the model's own collectives. All ranks use the caller's request ids.

Needs the environment of `config.generator_environment`. The arguments for CUDA were never run.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs.engine import tokens_input
from vllm.v1.engine import EngineCoreOutput

from titan_rl.errors import GeneratorFailed
from titan_rl.generation.config import GeneratorConfig, check_environment, refuse_more_ranks
from titan_rl.generation.engine import RunningRequest, StepOutput, validate_request
from titan_rl.generation.vllm import adaptation, deterministic, weights
from titan_rl.generation.vllm.sampling import SeededSampling
from titan_rl.processes import RENDEZVOUS, join_world
from titan_rl.types import NO_VERSION, Completion, FinishReason, GenerationRequest, Piece, PolicyVersion
from titan_rl.weights.manifest import TensorShard

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SLEEP_LEVEL = 1
"""vLLM keeps the weights in host memory and discards the KV cache."""


def engine_arguments(config: GeneratorConfig, model_path: Path, device: str) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`.

    CPU and CUDA differ in memory, compilation and chunking only. Chunked prompts were never tried on CPU. The CUDA
    arguments were never run.
    """
    by_device: dict[str, dict[str, Any]] = {
        "cpu": {
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        },
        "cuda": {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": True,
        },
    }
    return {
        "model": str(model_path),
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,  # versions and lockstep need a step's tokens from that step
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        **by_device[device],
    }


class VllmEngine:
    """An `Engine`. Build and use it in one thread.

    Args:
        model_path: checkpoint directory in Hugging Face format, for the architecture and the first weights.
        device: "cpu" or "cuda".
        clock: seconds, for metrics.

    Raises:
        ConfigError: the process lacks a generator's environment variables, `config.linear` cannot be imported, or
            `config.deterministic` cannot be kept on this CPU.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model_path: str | Path,
        device: str = "cpu",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_environment(device, tensor_parallel=config.tensor_parallel, deterministic=config.deterministic)
        self._config = config
        self._device = device
        self._clock = clock
        self._rank = int(os.environ["RANK"])
        self._linears: adaptation.Linears | None = None  # on CPU
        if device == "cpu":
            if config.deterministic:
                refuse_more_ranks(config.tensor_parallel)
            products = adaptation.DETERMINISTIC if config.deterministic else config.linear
            self._linears = adaptation.adapt_linear(products)
            deterministic.adapt_attention(config.deterministic)
            adaptation.adapt_kernel_search()
            adaptation.adapt_group_names()
        adaptation.adapt_progress_bars()
        join_world("gloo" if device == "cpu" else "nccl")  # vLLM would listen on a port
        if config.tensor_parallel > 1:
            # A killed rank leaves its socket behind. In this directory it is removed with the run.
            os.environ["VLLM_RPC_BASE_PATH"] = str(Path(os.environ[RENDEZVOUS]).parent)
        arguments = EngineArgs(**engine_arguments(config, Path(model_path), device))
        gc.freeze()  # vLLM collects garbage five times now, among all that was imported: half of the time
        self._engine: LLMEngine | None = LLMEngine.from_engine_args(arguments)
        self._core = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._running: dict[str, RunningRequest] = {}
        self._streaming: dict[str, RunningRequest] = {}  # of those
        self._asleep = False
        self._scheduled: dict[str, Any] = {}  # vLLM's own requests
        self._dropped: Counter[str] = Counter()  # by request: how often a new version took its KV
        self._kv_use = 0.0  # share of the KV cache, after the last step
        self._core.set_weight_version(str(NO_VERSION))
        self._sampling = SeededSampling(self._worker.model_runner)
        if config.deterministic and device == "cpu":
            deterministic.check_rows(self.model)

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's own engine, for tests and benchmarks. Not for use while requests run here."""
        if self._engine is None:
            raise GeneratorFailed("the engine was closed")
        return self._engine

    @property
    def model(self) -> Any:
        """The model of this rank's worker."""
        return self._worker.get_model()

    @property
    def _scheduler(self) -> Any:
        core: Any = self._core  # in this process, for which vLLM's interface does not speak
        return core.engine_core.scheduler

    @property
    def _worker(self) -> Any:
        return self.llm_engine.model_executor.driver_worker

    def validate(self, request: GenerationRequest) -> None:
        validate_request(request, max_model_len=self._config.max_model_len, vocab_size=self._vocab_size)

    def add(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        params = VllmSamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            min_tokens=sampling.min_new_tokens,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            skip_clone=True,
        )
        core_request = self.llm_engine.input_processor.process_inputs(
            request.request_id, tokens_input(request.prompt_token_ids.tolist()), params, self._tasks
        )
        if sampling.min_new_tokens and core_request.sampling_params is not None:
            # vLLM would also suppress the model's own end-of-sequence token, which stops nothing here.
            core_request.sampling_params.all_stop_token_ids.intersection_update(sampling.stop_token_ids)
        # LLMEngine would add a random suffix, a different one on every rank.
        core_request.external_req_id = request.request_id
        self._sampling.seeds[request.request_id] = request.seed
        self._core.add_request(core_request)
        running = self._running[request.request_id] = RunningRequest(request, self._clock())
        self._scheduled[request.request_id] = self._scheduler.requests[request.request_id]
        if request.streams:
            self._streaming[request.request_id] = running

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        aborted = [self._end(request_id) for request_id in request_ids if request_id in self._running]
        self._core.abort_requests([running.request_id for running in aborted])
        now = self._clock()
        return [running.complete(FinishReason.ABORT, now) for running in aborted]

    def step(self) -> StepOutput:
        outputs = self._core.get_output()
        now = self._clock()
        # What has ended is not in vLLM's own numbers any more.
        kv_use, self._kv_use = self._kv_use, self._scheduler.get_kv_cache_usage()
        waiting = self._scheduler.get_request_counts()[1]
        batch = len(self._running) - waiting
        version = int(outputs.weight_version or NO_VERSION)
        sampled: list[int] = []
        finished: list[Completion] = []
        for output in outputs.outputs:
            running = self._running[output.request_id]
            tokens = output.new_token_ids
            if tokens:
                if not running.tokens and output.prefill_stats is not None:
                    running.cached = output.prefill_stats.num_cached_tokens
                running.add(tokens, _sampled_logprobs(output), version, now)
                sampled += tokens
            if output.finish_reason is not None:
                finished.append(self._finish(running, str(output.finish_reason), now))
        if finished:  # one tells of the step: every number of a completion is sent twice
            levels = {"requests_running": float(batch), "requests_waiting": float(waiting), "kv_use": kv_use}
            finished[0].metrics.update(levels)
        return StepOutput(finished, np.array(sampled, dtype=np.int32))

    def take_pieces(self) -> list[Piece]:
        return [each.piece() for each in self._streaming.values() if each.handed_out < len(each.tokens)]

    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    def has_work(self) -> bool:
        return bool(self._running)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        self.model.load_weights(tensors)
        if self._linears is not None:
            self._linears.renew(self.model)
        self._core.set_weight_version(str(version.encode()))

    def served_shards(self) -> Iterator[TensorShard]:
        # A generator function: an error is raised during verification, where all ranks learn of it.
        if self._linears is not None:
            self._linears.check(self.model)
        yield from weights.served_shards(self.model, self._rank)

    def drop_cache(self) -> None:
        self._dropped.update(request.request_id for request in self._scheduler.running)
        if not self._core.reset_prefix_cache(reset_running_requests=True):
            raise GeneratorFailed("vLLM did not drop its KV cache: tokens of old weights would be reused")

    def sleep(self) -> int:
        """On CPU vLLM can free nothing. Never run on CUDA."""
        self.drop_cache()
        if self._device == "cpu" or self._asleep:
            return 0
        free_before, _ = torch.cuda.mem_get_info()
        self.llm_engine.sleep(level=_SLEEP_LEVEL)
        self._asleep = True
        return torch.cuda.mem_get_info()[0] - free_before

    def wake(self) -> None:
        if self._asleep:
            self.llm_engine.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Shut vLLM down, with the process groups that it made."""
        collect: Any = gc.collect
        gc.collect = lambda generation=2: 0  # vLLM would search all that was imported for garbage, twice
        try:
            self._core.shutdown()
        finally:
            gc.collect = collect
        self._engine = None

    def _end(self, request_id: str) -> RunningRequest:
        self._streaming.pop(request_id, None)
        del self._sampling.seeds[request_id], self._scheduled[request_id]
        self._dropped.pop(request_id, None)
        return self._running.pop(request_id)

    def _finish(self, running: RunningRequest, reason: str, now: float) -> Completion:
        if reason not in _FINISH_REASONS:
            raise GeneratorFailed(f"vLLM ended request {running.request_id!r} with {reason!r}")
        completion = running.complete(_FINISH_REASONS[reason], now)
        if preemptions := self._scheduled[running.request_id].num_preemptions - self._dropped[running.request_id]:
            completion.metrics["preemptions"] = float(preemptions)
        self._end(running.request_id)
        return completion


def _sampled_logprobs(output: EngineCoreOutput) -> list[np.float32]:
    logprobs = output.new_logprobs
    if logprobs is None:
        raise GeneratorFailed(f"vLLM gave no logprobs for request {output.request_id!r}")
    return list(logprobs.logprobs[:, 0])
