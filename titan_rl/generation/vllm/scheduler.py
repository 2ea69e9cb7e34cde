"""vLLM's scheduler, with a short way for what most steps are: every running request samples one token.

vLLM decides which requests run, wait and are preempted, and which KV blocks they hold. Two things are done here
without its general loops, which take as long as the model of a small policy:

- `plan`: a step in which each running request decodes one token and none can join has nothing to decide. Requests
  whose block begins or is full go through vLLM's cache manager; where free blocks might not do, vLLM's loop decides.
- `take`: what was sampled, as lists. vLLM makes objects per request and token, for options that nobody here has.

`schedule` and `update_from_output`, which `LLMEngine` calls, stay as they are. A test compares every plan and every
completion with vLLM's own, and one fails when vLLM changes a function whose work is done here (`REPLACED`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

REPLACED: tuple[Callable[..., Any], ...] = (
    EngineCore.preprocess_add_request,
    EngineCore.add_request,
    EngineCore.step,
    Scheduler.schedule,
    Scheduler._update_after_schedule,
    Scheduler._make_cached_request_data,
    Scheduler.update_from_output,
    Scheduler._update_request_with_output,
    Request.append_output_token_ids,
    check_stop,
)
"""What `VllmEngine.add`, `VllmEngine.step`, `plan` and `take` do in their own way."""


class Sampled(NamedTuple):
    """What one step sampled, in the order of the batch."""

    requests: list[Request]
    tokens: list[int]
    logprobs: list[float]
    ended: list[Request]
    """Of those; the scheduler knows them no more."""


class StepScheduler(Scheduler):
    """For requests of text that sample one token per step, with logprobs; steps do not overlap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = self.kv_cache_config.kv_cache_groups
        # Other kinds of attention free or move blocks in every step.
        self._keeps_blocks = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    def plan(self) -> SchedulerOutput:
        """What the next step computes: what `schedule` returns."""
        return (self._plan_decode() if self._keeps_blocks else None) or self.schedule()

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> Sampled:
        """Give requests their tokens and end those that are done, as `update_from_output` does."""
        rows, sampled = output.req_id_to_index, output.sampled_token_ids
        logprobs = [] if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        step = Sampled([], [], [], [])
        for request_id, count in plan.num_scheduled_tokens.items():
            request: Any = self.requests[request_id]  # what vLLM allows to be None is there
            row = rows[request_id]
            request.num_in_flight_tokens -= count
            if not sampled[row]:  # a part of a prompt
                continue
            token = sampled[row][0]
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            length = request.num_tokens
            if length % self.hash_block_size == 0:
                request.update_block_hashes()
            step.requests.append(request)
            step.tokens.append(token)
            step.logprobs.append(logprobs[row])
            if token in request.sampling_params.stop_token_ids:
                request.status = RequestStatus.FINISHED_STOPPED
            elif length >= request.num_prompt_tokens + request.max_tokens or length >= self.max_model_len:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            else:
                continue
            step.ended.append(request)
            self._free_request(request)
        if step.ended:
            self.running = [request for request in self.running if not request.is_finished()]
        return step

    def _plan_decode(self) -> SchedulerOutput | None:
        """The plan of a step in which there is nothing to decide; None if there is."""
        running = self.running
        if not 0 < len(running) <= self.max_num_scheduled_tokens or self.pause_state != PauseState.UNPAUSED:
            return None
        if (self.waiting or self.kv_holding_waiting) and len(running) < self.max_num_active_reqs:
            return None
        computed = [request.num_computed_tokens for request in running]
        if any(
            each.is_prefill_chunk or each.num_tokens != count + 1 for each, count in zip(running, computed, strict=True)
        ):
            return None
        # A block begins after a multiple of its size, and is shared from the token on that fills it.
        size = self.block_size
        edges = [place for place, count in enumerate(computed) if (count + 1) % size < 2]
        if len(edges) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_blocks: list[tuple[list[int], ...] | None] = [None] * len(running)
        for place in edges:
            blocks = self.kv_cache_manager.allocate_slots(running[place], 1)
            assert blocks is not None  # so many were free
            new_blocks[place] = blocks.get_block_ids(allow_none=True)
        for request in running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        ids = [request.request_id for request in running]
        plan = SchedulerOutput.make_empty()
        plan.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=computed,
            num_output_tokens=[request.num_output_tokens for request in running],
        )
        plan.num_scheduled_tokens = dict.fromkeys(ids, 1)
        plan.total_num_scheduled_tokens = len(ids)
        plan.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        plan.preempted_req_ids, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        plan.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        self.prev_step_scheduled_req_ids = set(ids)
        return plan
