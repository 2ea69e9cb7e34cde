"""vLLM's scheduler, with a short way for what most steps are: every running request samples one token.

vLLM decides which requests run, wait and are preempted, and which KV blocks they hold. Two things are done here
without its general loops, which take as long as the model of a small policy:

- `plan_decode`: a step in which each running request decodes one token and none can join has nothing to decide.
  Requests whose block begins or is full go through vLLM's cache manager; where free blocks might not do, vLLM's
  `schedule` decides.
- `take`: what was sampled, as lists. vLLM makes objects per request and token, for options that nobody here has.

`schedule` and `update_from_output`, which `LLMEngine` calls, stay as they are. A test compares every step and every
completion with vLLM's own, and one fails when vLLM changes a function whose work is done here (`REPLACED`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
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
"""What `VllmEngine.add`, `VllmEngine.step`, `plan_decode` and `take` do in their own way."""


class DecodePlan(NamedTuple):
    """A step in which every running request decodes one token."""

    requests: list[Request]
    new_blocks: dict[int, tuple[list[int], ...]]
    """By place in `requests`: the ids of the blocks that begin, per group."""
    change: SchedulerOutput | None
    """What `schedule` would have returned. None: the requests are those of the last step, which was planned here."""


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
        self.keeps_blocks = (
            len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec and not self.needs_kv_cache_zeroing
        )
        """Other kinds of attention free, move or clear blocks in every step, so `schedule` must plan all of them."""
        self._planned = -1  # the last step that `plan_decode` planned
        self._computed = np.empty(0, dtype=np.int64)  # tokens whose KV that step found, by place in `running`

    def plan_decode(self) -> DecodePlan | None:
        """The next step, if there is nothing to decide."""
        running = self.running
        if not 0 < len(running) <= self.max_num_scheduled_tokens or self.pause_state != PauseState.UNPAUSED:
            return None
        if (self.waiting or self.kv_holding_waiting) and len(running) < self.max_num_active_reqs:
            return None
        changed = self._planned != self.current_step or bool(self.finished_req_ids)
        if changed:
            if any(each.is_prefill_chunk or each.num_tokens != each.num_computed_tokens + 1 for each in running):
                return None
            computed = np.array([each.num_computed_tokens for each in running])
        else:
            computed = self._computed + 1
        # A block begins after a multiple of its size, and is shared from the token on that fills it.
        edges = np.flatnonzero((computed + 1) % self.block_size < 2).tolist()
        if len(edges) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_blocks = {}
        for place in edges:
            blocks = self.kv_cache_manager.allocate_slots(running[place], 1)
            assert blocks is not None  # so many were free
            if ids := blocks.get_block_ids(allow_none=True):
                new_blocks[place] = ids
        for request in running:
            request.num_computed_tokens += 1
        self._get_new_block_ids_to_zero()  # none, but vLLM lists them until they are asked for
        self._planned, self._computed = self.current_step, computed
        return DecodePlan(running, new_blocks, self._change(computed, new_blocks) if changed else None)

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> Sampled:
        """Give requests their tokens and end those that are done, as `update_from_output` does."""
        rows, sampled = output.req_id_to_index, output.sampled_token_ids
        logprobs = [] if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        requests, places = [], []
        for request_id, count in plan.num_scheduled_tokens.items():
            request, row = self.requests[request_id], rows[request_id]
            request.num_in_flight_tokens -= count
            if sampled[row]:  # otherwise a part of a prompt
                requests.append(request)
                places.append(row)
        return self.give(requests, [sampled[row][0] for row in places], [logprobs[row] for row in places])

    def give(self, requests: list[Request], tokens: list[int], logprobs: list[float]) -> Sampled:
        """`take`, for requests that all sampled a token."""
        ended = []
        shared_every, longest = self.hash_block_size, self.max_model_len
        request: Any  # what vLLM allows to be None is there
        for request, token in zip(requests, tokens, strict=True):
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            length = len(request._all_token_ids)
            if length % shared_every == 0:
                request.update_block_hashes()
            if token in request.sampling_params.stop_token_ids:
                request.status = RequestStatus.FINISHED_STOPPED
            elif length >= request.num_prompt_tokens + request.max_tokens or length >= longest:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            else:
                continue
            ended.append(request)
            self._free_request(request)
        if ended:
            self.running = [request for request in self.running if not request.is_finished()]
        return Sampled(requests, tokens, logprobs, ended)

    def _change(self, computed: np.ndarray, new_blocks: dict[int, tuple[list[int], ...]]) -> SchedulerOutput:
        ids = [request.request_id for request in self.running]
        plan = SchedulerOutput.make_empty()
        plan.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[new_blocks.get(place) for place in range(len(ids))],
            num_computed_tokens=computed.tolist(),
            num_output_tokens=[request.num_output_tokens for request in self.running],
        )
        plan.num_scheduled_tokens = dict.fromkeys(ids, 1)
        plan.total_num_scheduled_tokens = len(ids)
        plan.preempted_req_ids, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        plan.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        self.prev_step_scheduled_req_ids = set(ids)
        return plan
