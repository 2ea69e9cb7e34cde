"""A step in which every running request decodes one token, without vLLM's model runner around the model.

After a step of `Decoder`, vLLM's scheduler and its persistent batch are as `schedule`, `execute_model`, `sample_tokens`
and `update_from_output` would have left them, with the same tokens and logprobs to the last bit. So either way may take
any step, and whatever is not plain decoding is left to vLLM: prompts, preemption, and all steps of a model or a device
that `decoder_of` refuses.

`execute_model` prepares inputs for CUDA graphs, drafts, images and adapters at every step, in many small operations
that take as long as the model of a small policy. Here one token per request is all there is:

- Where requests joined or left, vLLM's own `_update_states` brings the batch up to date. Where none did, each row has
  one computed token more, and some have a new block.
- Inputs are read from the batch in numpy: row i is query i, so nothing is padded, gathered or copied to a device.
- vLLM's sampler makes the distribution and draws. Ranks of tokens and lists of the most likely ones are not computed.

A test compares tokens, logprobs and the state after every step with vLLM's own, and one fails when vLLM changes a
function whose work is done here (`REPLACED`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from titan_rl.generation.vllm.scheduler import DecodePlan, Sampled, StepScheduler

REPLACED: tuple[Callable[..., Any], ...] = (
    GPUModelRunner._update_states,
    GPUModelRunner.execute_model,
    GPUModelRunner.sample_tokens,
    GPUModelRunner._prepare_inputs,
    GPUModelRunner._prepare_input_ids,
    GPUModelRunner._preprocess,
    GPUModelRunner._init_model_kwargs,
    GPUModelRunner._get_slot_mappings,
    GPUModelRunner._build_attention_metadata,
    GPUModelRunner._model_forward,
    GPUModelRunner._sample,
    GPUModelRunner._update_states_after_model_execute,
    GPUModelRunner._bookkeeping_sync,
    BlockTable.compute_slot_mapping,
    Sampler.forward,
    Sampler.gather_logprobs,
)
"""What a step of `Decoder` does in its own way."""


def decoder_of(scheduler: Any, runner: Any) -> Decoder | None:
    """For the steps of one engine; None where more than what is done here belongs to a decode step.

    Looks at what a checkpoint decides; `engine_arguments` configures nothing else that would matter.

    Args:
        scheduler: a `StepScheduler`.
        runner: vLLM's model runner of this rank, after its warm-up.
    """
    unusual = (
        runner.uses_mrope
        or runner.supports_mm_inputs
        or runner.is_pooling_model
        or runner.is_mm_prefix_lm
        or runner.lookback_token_ids is not None
        or runner.model_config.is_encoder_decoder
        or runner.model_config.rswa_window is not None
        or runner.speculative_config is not None
        or runner.lora_config is not None
    )
    plain = (
        type(runner) is CPUModelRunner
        and scheduler.keeps_blocks
        and [group.backend for groups in runner.attn_groups for group in groups] == [CPUAttentionBackend]
    )
    return Decoder(scheduler, runner) if plain and not unusual else None


class Decoder:
    """Takes the steps of one engine in which there is nothing to decide."""

    def __init__(self, scheduler: StepScheduler, runner: Any) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._batch = runner.input_batch
        self._group = runner.attn_groups[0][0]
        self._row_numbers = np.arange(self._batch.max_num_reqs)
        self._query_starts = torch.arange(self._batch.max_num_reqs + 1, dtype=torch.int32)
        # By place in the plan, renewed when requests join or leave:
        self._rows = np.empty(0, dtype=np.int64)
        self._states: list[Any] = []  # vLLM's `CachedRequestState`

    @torch.inference_mode()
    def step(self) -> Sampled | None:
        """Take the next step; None, with nothing done, if that is vLLM's."""
        plan = self._scheduler.plan_decode()
        if plan is None:
            return None
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
        return self._scheduler.give(plan.requests, drawn, logprobs[self._rows].tolist())

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
