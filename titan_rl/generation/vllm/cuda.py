"""vLLM on CUDA, through its public face: arguments, seeds, and steps of its engine core that overlap.

Nothing of vLLM is replaced or reached into. A contract test holds what is read of it against its sources.

- **Noise.** vLLM's model runner V2, which `config.generator_environment` asks for, hashes the noise of a token from the
  request's seed, the token's position in the sequence (prompt included) and its id, as `steps` does on CPU.
- **Overlap.** `step` plans and dispatches a step, then waits for the one before it. One is under way between two calls,
  and `drain` waits for it. Weights and KV are touched only after that, so a token's version is the one that computed
  it.
- **Ranks.** Every rank plans and waits in the same calls, so that the steps overlap in the same way on all of them.
- **Order of sums.** Where FlashInfer adds over ranks, the order is not fixed, and ranks could sample different tokens.
  Two ranks add alike in any order; with more, vLLM's other all-reduces are used.
- **Order within a rank.** vLLM's batch-invariant mode leaves two choices to the batch. FlashAttention 3 takes its tiles
  by the longest prompt; deterministic engines attend with vLLM's Triton kernel. And logits are summed in an order that
  follows from their dtype and layout, which other requests decide; deterministic engines fix both (`AlikeRows`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.request import Request
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

from titan_rl.generation.config import ANY_ORDER_RANKS, GeneratorConfig
from titan_rl.generation.engine import RunningRequests


class Sampled(NamedTuple):
    """What one step sampled, on any device, in the order of the batch."""

    requests: list[Request]
    tokens: list[int]
    logprobs: list[float]
    ended: list[Request]
    """Of those; the scheduler knows them no more."""


class AlikeRows(LogitsProcessor):
    """Gives the logits of every step, which stay as they are, the same dtype and alignment.

    vLLM makes a float32 copy only where a request of the step asks for processing, as this one does for all. A single
    row keeps the stride of its padded vocabulary, several rows do not.
    """

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        rows, vocabulary = logits.shape
        aligned = logits.new_empty(rows, -(-vocabulary // _ALIGNED) * _ALIGNED)[:, :vocabulary]
        return aligned.copy_(logits)


_ALIGNED = 16
"""Elements: where rows begin at multiples of it, Triton reads them in wider pieces."""
_DETERMINISTIC = {"attention_backend": "TRITON_ATTN", "logits_processors": [AlikeRows]}


def cuda_arguments(config: GeneratorConfig) -> dict[str, Any]:
    """Those of `EngineArgs` that are for CUDA only."""
    # vLLM refuses to start where less than its share is free, and measures what others take as its own.
    shared = {"kv_cache_memory_bytes": config.kv_cache_bytes, "gpu_memory_utilization": 0.01}
    memory = shared if config.shares_device else {"gpu_memory_utilization": config.gpu_memory_utilization}
    fixed_order = {"pass_config": {"fuse_allreduce_rms": False}} if config.tensor_parallel > ANY_ORDER_RANKS else {}
    return {
        "async_scheduling": True,
        "compilation_config": fixed_order,
        "enable_sleep_mode": config.sleep_mode,
        **memory,
        **(_DETERMINISTIC if config.deterministic else {}),
    }


class OverlappedSteps:
    """Takes the steps of one engine."""

    def __init__(
        self, client: EngineCoreClient, core: EngineCore, requests: Mapping[str, Request], recorded: RunningRequests
    ) -> None:
        """`client`: of `core`, in this process. `requests`: all that run, by id. `recorded`: those of them that ask for
        more than their tokens."""
        self._client = client
        self._core = core
        self._requests = requests
        self._recorded = recorded

    def step(self) -> Sampled:
        """Dispatch a step and wait for the one before it, if there is one."""
        return self._sampled(self._client.get_output().outputs)

    def drain(self) -> Sampled:
        """Wait for what is under way."""
        outputs: list[EngineCoreOutput] = []
        self._core.pause_scheduler("keep", clear_cache=False)
        while self._core.batch_queue:
            outputs += self._client.get_output().outputs
        self._core.resume_scheduler()
        return self._sampled(outputs)

    def _sampled(self, outputs: Sequence[EngineCoreOutput]) -> Sampled:
        sampled = Sampled([], [], [], [])
        for output in outputs:
            request = self._requests[output.request_id]
            if output.new_logprobs is not None:  # every token has one
                sampled.requests.append(request)
                sampled.tokens.extend(output.new_token_ids)
                sampled.logprobs.append(float(output.new_logprobs.logprobs[0, 0]))
                if (running := self._recorded.get(output.request_id)) is not None:
                    told = output.new_logprobs  # first the sampled token, then the likeliest
                    if running.request.sampling.top_logprobs:
                        running.add_top(told.logprob_token_ids[0, 1:], told.logprobs[0, 1:])
                    if (prompt := output.new_prompt_logprobs_tensors) is not None:
                        running.add_prompt(prompt.logprob_token_ids.numpy(), prompt.logprobs.numpy())
            if output.finished:
                sampled.ended.append(request)
        return sampled
