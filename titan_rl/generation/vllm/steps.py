"""Steps on CPU: those in which every running request decodes one token go without vLLM's loops around the model.

vLLM decides which requests run, wait and are preempted, and which KV blocks they hold. Most steps leave nothing to
decide: each running request decodes one token and none can join. vLLM's general loops take as long for such a step as
the model of a small policy. Three things are therefore done here in another way:

- `StepScheduler.plan_decode` plans such a step. Requests whose block begins or is full go through vLLM's cache manager;
  where free blocks might not do, vLLM's `schedule` decides.
- `OwnSteps` runs it. Inputs are read from the batch in numpy: row i is query i. vLLM's sampler makes the distribution
  and draws; ranks of tokens and lists of the most likely ones are not computed.
- `StepScheduler.collect` returns what any step sampled, as lists. vLLM makes objects per request and token.

After each of these vLLM's scheduler and its persistent batch are as `schedule`, `execute_model`, `sample_tokens` and
`update_from_output` would have left them, with the same tokens and logprobs to the last bit. So either way may take any
step, and whatever is not plain decoding is left to vLLM. A test compares tokens, logprobs and the state after every
step with vLLM's own, and one fails when vLLM changes a function whose work is done here.

vLLM keeps a random generator per seeded request, whose state depends on where the request was sampled so far. Here the
noise of a token is hashed from the request's seed, the token's position in the sequence (prompt included) and its id: a
completion that goes on elsewhere, with its tokens as part of the prompt, meets the noise that it would have met. It is
Gumbel noise, and the token is the argmax of logits plus noise, which is exact sampling from the softmax. A row never
looks at another row. For requests that ask, logits that are -inf after all masks and truncation are recorded, and the
likeliest tokens with their logprobs.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from titan_rl.generation.engine import RunningRequests
from titan_rl.generation.vllm.cuda import Sampled
from titan_rl.support import encode_support
from titan_rl.weights.fingerprint import STEP, mix


class DecodePlan(NamedTuple):
    """A step in which every running request decodes one token."""

    requests: list[Request]
    new_blocks: dict[int, tuple[list[int], ...]]
    """By place in `requests`: the ids of the blocks that begin, per group."""
    change: SchedulerOutput | None
    """What `schedule` would have returned. None: the requests are those of the last step, which was planned here."""


class StepScheduler(Scheduler):
    """For requests of text that sample one token per step, with logprobs; steps do not overlap. Attention is
    causal and to all tokens (`read_shape` refuses others): kinds that free, move or clear blocks are not known.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned_step = -1  # the last step that `plan_decode` planned
        self._computed_tokens = np.empty(0, dtype=np.int64)  # tokens whose KV that step found, by place in `running`

    def plan_decode(self) -> DecodePlan | None:
        """The next step, if there is nothing to decide."""
        running = self.running
        if not 0 < len(running) <= self.max_num_scheduled_tokens or self.pause_state != PauseState.UNPAUSED:
            return None
        if (self.waiting or self.kv_holding_waiting) and len(running) < self.max_num_active_reqs:
            return None
        changed = self._planned_step != self.current_step or bool(self.finished_req_ids)
        if changed:
            if any(each.is_prefill_chunk or each.num_tokens != each.num_computed_tokens + 1 for each in running):
                return None
            if any(each.use_structured_output for each in running):
                return None
            computed = np.array([each.num_computed_tokens for each in running])
        else:
            computed = self._computed_tokens + 1
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
        self._planned_step, self._computed_tokens = self.current_step, computed
        return DecodePlan(running, new_blocks, self._change(computed, new_blocks) if changed else None)

    def collect(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> Sampled:
        """Append what was sampled to the requests and end those that are done, as `update_from_output` does."""
        rows, sampled = output.req_id_to_index, output.sampled_token_ids
        logprobs = [] if output.logprobs is None else output.logprobs.logprobs[:, 0].tolist()
        requests, places = [], []
        for request_id, count in plan.num_scheduled_tokens.items():
            request, row = self.requests[request_id], rows[request_id]
            request.num_in_flight_tokens -= count
            if sampled[row]:  # otherwise a part of a prompt
                requests.append(request)
                places.append(row)
        return self.append_tokens(requests, [sampled[row][0] for row in places], [logprobs[row] for row in places])

    def append_tokens(self, requests: list[Request], tokens: list[int], logprobs: list[float]) -> Sampled:
        """`collect`, for requests that all sampled a token."""
        ended = []
        shared_every, longest = self.hash_block_size, self.max_model_len
        request: Any  # what vLLM allows to be None is there
        for request, token in zip(requests, tokens, strict=True):
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            length = len(request._all_token_ids)
            if request.structured_output_request is not None:
                self.structured_output_manager.accept_tokens(request, [token])
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


class OwnSteps:
    """Takes the steps of one engine: itself where there is nothing to decide, else by vLLM's scheduler and runner."""

    def __init__(self, core: EngineCore, runner: Any, running: RunningRequests, recorded: RunningRequests) -> None:
        """`runner`: vLLM's, of this rank, after its warm-up. `running`: every request that is sampled, by id; vLLM has
        no seeds. `recorded`: those of them that ask for more than their tokens."""
        self._recorded = recorded
        self._scheduler: Any = core.scheduler  # a StepScheduler
        self._executor: Any = core.model_executor
        self._runner = runner
        self._batch = runner.input_batch
        self._group = runner.attn_groups[0][0]
        self._row_numbers = np.arange(self._batch.max_num_reqs)
        self._query_starts = torch.arange(self._batch.max_num_reqs + 1, dtype=torch.int32)
        # By place in the plan, renewed when requests join or leave:
        self._rows = np.empty(0, dtype=np.int64)
        self._states: list[Any] = []  # vLLM's `CachedRequestState`
        SeededSampling(runner, running, recorded)

    def step(self) -> Sampled:
        if (decode := self._scheduler.plan_decode()) is not None:
            return self._decode(decode)
        plan = self._scheduler.schedule()
        output = self._executor.execute_model(plan) or self._executor.sample_tokens(self._possible(plan))
        for request_id, told in output.prompt_logprobs_dict.items():
            self._recorded[request_id].add_prompt(told.logprob_token_ids.numpy(), told.logprobs.numpy())
        return self._scheduler.collect(plan, output)

    def drain(self) -> Sampled:
        """Nothing is under way between two steps."""
        return Sampled([], [], [], [])

    @torch.inference_mode()
    def _decode(self, plan: DecodePlan) -> Sampled:
        self._update(plan)
        tokens, logprobs = self._sample(self._forward(len(plan.requests)))
        batch, rows = self._batch, self._row_numbers[: len(tokens)]
        positions = batch.num_tokens_no_spec[: len(tokens)]
        batch.token_ids_cpu[rows, positions] = tokens
        batch.is_token_ids[rows, positions] = True
        positions += 1
        drawn = tokens[self._rows].tolist()
        for state, token in zip(self._states, drawn, strict=True):
            state.output_token_ids.append(token)
        return self._scheduler.append_tokens(plan.requests, drawn, logprobs[self._rows].tolist())

    def _update(self, plan: DecodePlan) -> None:
        """Bring the batch up to the plan, as `_update_states` does."""
        batch = self._batch
        if plan.change is not None:
            self._runner._update_states(plan.change)
            ids = [request.request_id for request in plan.requests]
            self._rows = np.array([batch.req_id_to_index[each] for each in ids])
            self._states = [self._runner.requests[each] for each in ids]
            return
        batch.num_computed_tokens_cpu[: len(plan.requests)] += 1
        for state in self._states:
            state.num_computed_tokens += 1
        for place, new_blocks in plan.new_blocks.items():
            for blocks, new in zip(self._states[place].block_ids, new_blocks, strict=True):
                blocks.extend(new)
            batch.block_table.append_row(new_blocks, self._rows[place])
        batch.refresh_metadata()

    def _forward(self, count: int) -> Tensor:
        """The model over one token of each row: [N, V] logits."""
        batch, rows = self._batch, self._row_numbers[:count]
        computed = batch.num_computed_tokens_cpu[:count]
        table = batch.block_table[0]
        slots = table.block_table.np[rows, computed // table.block_size] * np.int64(table.block_size)
        slots += computed % table.block_size
        slot_mapping = torch.from_numpy(slots)
        lengths = computed + 1
        starts = self._query_starts[: count + 1]
        metadata = self._group.build_metadata(
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.from_numpy(lengths),
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=int(lengths.max()),
                block_table_tensor=table.block_table.cpu[:count],
                slot_mapping=slot_mapping,
            )
        )
        runner, layers = self._runner, self._group.layer_names
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            runner.vllm_config,
            num_tokens=count,
            slot_mapping=dict.fromkeys(layers, slot_mapping),
        ):
            hidden = runner.model(
                input_ids=torch.from_numpy(batch.token_ids_cpu[rows, computed]),
                positions=torch.from_numpy(computed.astype(np.int64)),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return runner.model.compute_logits(hidden)

    def _sample(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """One token per row and its logprob in the distribution that it was drawn from: [N] int64, [N] float32."""
        sampler, metadata = self._runner.sampler, self._batch.sampling_metadata
        logits = sampler.apply_logits_processors(logits.to(torch.float32), metadata, False)
        drawn, logprobs = sampler.sample(logits, metadata)
        tokens = drawn.numpy()
        return tokens, logprobs.numpy()[self._row_numbers[: len(tokens)], tokens]

    def _possible(self, plan: SchedulerOutput) -> Any:
        """Which tokens constraints allow. Where none does, as in a schema that nothing fits, a stop token ends it."""
        if (grammar := self._scheduler.get_grammar_bitmask(plan)) is not None:
            words = grammar.grammar_bitmask.view(np.uint32)
            for row, request_id in enumerate(grammar.structured_output_request_ids):
                if not words[row].any():
                    for token in self._scheduler.requests[request_id].sampling_params.stop_token_ids:
                        words[row, token // 32] |= np.uint32(1 << token % 32)
        return grammar


class SeededSampling:
    """Takes the place of vLLM's sampler of random rows in one model runner, and records what requests ask for."""

    def __init__(self, runner: Any, running: RunningRequests, recorded: RunningRequests) -> None:
        self._batch = runner.input_batch
        self._running, self._recorded = running, recorded
        runner.sampler.topk_topp_sampler.forward = self._forward
        self._stock_sample, runner.sampler.sample = runner.sampler.sample, self._sample

    def _sample(self, logits: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """See vLLM's `Sampler.sample`: one token per row, greedy rows too, and the logprobs [N, V] of all tokens."""
        drawn, logprobs = self._stock_sample(logits, *options)
        if self._recorded:
            for row, request_id in enumerate(self._batch.req_ids[: len(drawn)]):
                running = self._recorded.get(request_id)
                if running is not None and (count := min(running.request.sampling.top_logprobs, logprobs.shape[1])):
                    values, ids = logprobs[row].topk(count)
                    del running.tops[len(running.tokens) :]
                    running.add_top(ids.numpy(), values.numpy())
        return drawn, logprobs

    def _forward(
        self, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See vLLM's `TopKTopPSampler`. logits [N, V] float32, one row per request of the batch."""
        rows = logits.shape[0]
        seeds = np.fromiter((self._running[each].request.seed for each in self._batch.req_ids[:rows]), np.int64, rows)
        logits = apply_top_k_top_p(logits, k, p)
        if self._recorded:
            possible = logits.numpy() != -np.inf
            for row, request_id in enumerate(self._batch.req_ids[:rows]):
                if (running := self._recorded.get(request_id)) is not None and running.request.sampling.support:
                    running.supports[len(running.tokens)] = encode_support(possible[row])
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        keys = torch.from_numpy(noise_keys(seeds, self._batch.num_tokens_no_spec[:rows]))
        # vLLM's kernel: splitmix64 of key and token id; one token per row from softmax(logits)
        return torch.ops._C.fused_gumbel_argmax(logits, keys), logprobs


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key per row, well mixed: [N] int64 of seeds [N] int64 and positions [N]."""
    return mix(seeds + (positions.astype(np.int64) + 1) * STEP)
