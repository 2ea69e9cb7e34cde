"""One tensor-parallel rank of vLLM as an `Engine`.

vLLM's LLMEngine is built and configured as usual. Requests go directly to its scheduler, and this class runs the steps
and collects the sampled tokens: two list appends per token, arrays at the end. LLMEngine's own output objects cost more
per token, and an abort would lose the tokens so far unless they were built at every step. How a step is taken differs
by device (`steps.OwnSteps`, `cuda.OverlappedSteps`).

Every rank gets the same calls in the same order. vLLM's scheduler is deterministic, so the ranks stay in step without
communication other than the model's own collectives. All ranks use the caller's request ids.

Needs the environment of `config.generator_environment`. Tests run on CPU how it steps on CUDA.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from titan_rl.errors import ConfigError, GeneratorFailed
from titan_rl.generation.config import GeneratorConfig, check_environment
from titan_rl.generation.engine import Engine, RunningRequest, StepOutput
from titan_rl.generation.vllm import weights
from titan_rl.generation.vllm.constraints import Constraints
from titan_rl.generation.vllm.cuda import OverlappedSteps, Sampled, cuda_arguments
from titan_rl.processes import RENDEZVOUS, join_world
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD, TensorShard

if TYPE_CHECKING:  # they import what belongs to vLLM on CPU
    from titan_rl.generation.vllm.adaptation import Linears
    from titan_rl.generation.vllm.experts import RouteTable
    from titan_rl.generation.vllm.steps import OwnSteps

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_CACHED_SAMPLINGS = 1024
"""Distinct sampling options that are kept as vLLM knows them: making them costs more than the rest of a request."""
_SLEEP_LEVEL = 2
"""vLLM discards weights and KV: a wake-up brings published weights in any case."""


def engine_arguments(config: GeneratorConfig, model_path: Path, device: str) -> dict[str, Any]:
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
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        **(_cpu_arguments(config) if device == "cpu" else cuda_arguments(config)),
    }


def _cpu_arguments(config: GeneratorConfig) -> dict[str, Any]:
    from titan_rl.generation.vllm.steps import StepScheduler

    return {
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # was never tried
        "scheduler_reserve_full_isl": False,  # a prompt that is not chunked fits as a whole in any case
        "scheduler_cls": StepScheduler,
        "async_scheduling": False,  # there is no device to wait for
    }


class VllmEngine(Engine):
    """Build and use it in one thread, on a `device` "cpu" or "cuda". `model_path`: checkpoint directory in Hugging Face
    format, for the architecture and the first weights. Raises ConfigError: the process lacks a generator's environment
    variables, or `config.deterministic` cannot be kept on this CPU."""

    def __init__(self, config: GeneratorConfig, model_path: str | Path, device: str = "cpu") -> None:
        check_environment(device, tensor_parallel=config.tensor_parallel, deterministic=config.deterministic)
        self._device, self.tells_support = device, device == "cpu"
        self._linears: Linears | None = None
        if device == "cpu":
            from titan_rl.generation.vllm.adaptation import adapt

            self._linears = adapt(config, Path(model_path))
        tqdm.set_lock(threading.RLock())  # its own is in shared memory: a killed process leaves it behind
        join_world("gloo" if device == "cpu" else "nccl")  # vLLM would listen on a port
        if config.tensor_parallel > 1:
            # A killed rank leaves its socket behind. In this directory it is removed with the run.
            os.environ["VLLM_RPC_BASE_PATH"] = str(Path(os.environ[RENDEZVOUS]).parent)
        arguments = EngineArgs(**engine_arguments(config, Path(model_path), device))
        gc.freeze()  # vLLM collects garbage five times now, among all that was imported: half of the time
        self.llm_engine = LLMEngine.from_engine_args(arguments)  # vLLM's own; not for use while requests run here
        self._client = self.llm_engine.engine_core
        in_process: Any = self._client  # for which vLLM's interface does not speak
        core: EngineCore = in_process.engine_core
        self._scheduler: Any = core.scheduler
        self._block_hasher = core.request_block_hasher
        self._params = lru_cache(_CACHED_SAMPLINGS)(self._vllm_params)
        if self.llm_engine.model_config.using_transformers_backend():
            raise ConfigError(
                "vLLM has no model of its own for this family: it would compute with transformers' layers"
            )
        vocab_size = self.llm_engine.model_config.get_vocab_size()
        super().__init__(max_model_len=config.max_model_len, vocab_size=vocab_size)
        self._tied: bool = self.llm_engine.model_config.hf_text_config.tie_word_embeddings
        self._shards: list[TensorShard] = []  # where verification has last looked, and new weights are stored
        self._can_sleep, self._asleep = device == "cuda" and config.sleep_mode, False
        self._kv_use = 0.0  # share of the KV cache, after the last step
        self._requests: dict[str, Request] = {}  # vLLM's, by id
        self._prefills: dict[str, Any] = {}  # vLLM's numbers of their prompts, by id
        self._constraints = Constraints(core.structured_output_manager, Path(model_path))
        self._finished: list[Completion] = []  # since the last step was reported
        self._sampled: list[int] = []  # likewise
        self._stepper = self._make_stepper(core)
        self._routes: RouteTable | None = None
        if device == "cpu" and self.llm_engine.model_config.is_moe:
            from titan_rl.generation.vllm.experts import RouteTable

            self._routes = RouteTable(self._worker.model_runner, self._scheduler)
        if self._linears is not None and config.deterministic:
            from titan_rl.generation.vllm.adaptation import check_rows

            check_rows(self.model)

    def _make_stepper(self, core: EngineCore) -> OwnSteps | OverlappedSteps:
        if self._device == "cuda":
            return OverlappedSteps(self._client, core, self._requests, self._recorded)
        from titan_rl.generation.vllm.steps import OwnSteps

        return OwnSteps(core, self._worker.model_runner, self._running, self._recorded)

    @property
    def model(self) -> Any:
        return self._worker.get_model()

    @property
    def _worker(self) -> Any:
        return self.llm_engine.model_executor.driver_worker

    def add(self, request: GenerationRequest) -> None:
        params = self._params(request.sampling)
        if isinstance(self._stepper, OverlappedSteps):  # vLLM draws; `OwnSteps` knows the seed without it
            params = copy.copy(params)  # which others share
            params.seed = request.seed
        added = Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._block_hasher,
        )
        if request.sampling.constraint:
            end = len(request.prompt_token_ids)
            self._constraints.begin(added, request.prompt_token_ids[end - request.sampled :].tolist())
        self._requests[request.request_id], self._prefills[request.request_id] = added, added.prefill_stats
        self._scheduler.add_request(added)
        self._begin(request)

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        completions = super().abort(request_ids)
        self._client.abort_requests([each.request_id for each in completions])
        ended, self._finished = self._finished, []  # no step may come that would report them
        return ended + completions

    def has_work(self) -> bool:
        return super().has_work() or bool(self._finished)

    def step(self) -> StepOutput:
        self._take(self._stepper.step())
        output = StepOutput(self._finished, np.array(self._sampled, dtype=np.int32))
        self._finished, self._sampled = [], []
        return output

    def _take(self, step: Sampled) -> None:
        """Append what a step sampled; the end of the next `step` reports it."""
        requests, tokens, logprobs, ended = step
        now = self._clock()
        # What has ended is not in vLLM's own numbers any more.
        kv_use, self._kv_use = self._kv_use, self._scheduler.get_kv_cache_usage()
        waiting = self._scheduler.get_request_counts()[1]
        batch = len(self._running) - waiting
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            running = self._running[request.request_id]
            if self._routes is not None and running.request.sampling.routes:
                self._routes.tell(running)
            running.add(token, logprob, now)
        finished = [self._finish(request, now) for request in ended]
        if finished:  # one tells of the step: every number of a completion is sent twice
            levels = {
                "generation/requests_running": float(batch),
                "generation/requests_waiting": float(waiting),
                "generation/kv_use": kv_use,
            }
            finished[0].metrics.update(levels)
        self._finished += finished
        self._sampled += tokens

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        self._take(self._stepper.drain())
        whole = dict(tensors)
        named = {LM_HEAD: whole[EMBEDDING], **whole} if EMBEDDING in whole and self._tied else whole
        if not self._shards:
            self.model.load_weights((name, tensor[()]) for name, tensor in whole.items())  # it knows no adapters
            weights.check_places(named, weights.served_shards(self.model, packed=False))
            if self._linears is not None:
                self._linears.drop_originals(self.model)
            self._shards = list(weights.served_shards(self.model))
        weights.load(named, self._shards)
        self._serve(version)

    def served_shards(self) -> Iterator[TensorShard]:
        # A generator function: an error is raised during verification, where all ranks learn of it.
        if self._linears is not None:
            self._linears.check(self.model)
        shards = list(weights.served_shards(self.model))
        self._shards = self._shards and shards  # they come from vLLM's own loader first
        yield from shards

    def drop_cache(self) -> None:
        self._take(self._stepper.drain())
        for request in self._scheduler.running:
            running = self._running[request.request_id]
            running.kv_drops += 1
            running.recomputed += request.num_computed_tokens
        if not self._client.reset_prefix_cache(reset_running_requests=True):
            raise GeneratorFailed("vLLM did not drop its KV cache: tokens of old weights would be reused")

    def sleep(self) -> int:
        """Without `config.sleep_mode`, and on CPU, vLLM can free nothing."""
        self.drop_cache()
        if not self._can_sleep or self._asleep:
            return 0
        free_before, _ = torch.cuda.mem_get_info()
        self.llm_engine.sleep(level=_SLEEP_LEVEL)
        self._asleep = True
        return torch.cuda.mem_get_info()[0] - free_before

    def wake(self) -> None:
        if self._asleep:
            self.llm_engine.wake_up()
            self._asleep, self._shards = False, []  # vLLM may have moved them

    def close(self) -> None:
        """Shut vLLM down, with the process groups that it made."""
        collect: Any = gc.collect
        gc.collect = lambda generation=2: 0  # vLLM would search all that was imported for garbage, twice
        try:
            self._client.shutdown()
        finally:
            gc.collect = collect

    def _end(self, request_id: str) -> RunningRequest:
        running = super()._end(request_id)
        running.cached = self._prefills.pop(request_id).num_cached_tokens
        del self._requests[request_id]
        return running

    def _finish(self, request: Request, now: float) -> Completion:
        if (reason := str(request.get_finished_reason())) not in _FINISH_REASONS:
            raise GeneratorFailed(f"vLLM ended request {request.request_id!r} with {reason!r}")
        running = self._end(request.request_id)
        completion = running.complete(_FINISH_REASONS[reason], now)
        if preemptions := request.num_preemptions - running.kv_drops:
            completion.metrics["generation/preemptions"] = float(preemptions)
        return completion

    def _check_constraint(self, request: GenerationRequest) -> None:
        self._constraints.check(request)

    def _vllm_params(self, sampling: SamplingParams) -> VllmSamplingParams:
        """As vLLM completes them. Requests share them: vLLM only reads them then."""
        count = min(sampling.top_logprobs, self._vocab_size)
        params = VllmSamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            min_tokens=sampling.min_new_tokens,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logprobs=count if isinstance(self._stepper, OverlappedSteps) else 0,
            prompt_logprobs=count if sampling.prompt_logprobs else None,  # then vLLM reads no prefix from its cache
            ignore_eos=True,
            detokenize=False,
        )
        tasks = self.llm_engine.get_supported_tasks()
        completed = self.llm_engine.input_processor.process_inputs("", tokens_input([0]), params, tasks)
        assert completed.sampling_params is not None
        if sampling.min_new_tokens or sampling.constraint:
            # vLLM would also look at the model's own end-of-sequence token, which stops nothing here.
            completed.sampling_params.all_stop_token_ids.intersection_update(sampling.stop_token_ids)
        if sampling.constraint:
            completed.sampling_params.structured_outputs = self._constraints.params(sampling)
        return completed.sampling_params
