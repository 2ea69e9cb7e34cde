"""One rank's samples of a batch: fetched, and laid end to end in one row per round.

- Samples of the next round are fetched while the current round is computed.
- A rank that cannot fetch a sample takes part in all remaining rounds without samples, so that no other rank waits for
  it in a collective. At the end it tries its groups one by one, and all ranks exchange which groups were lost.
- Position 0 of a document is never trained (`TrainingSample` refuses it), so every trained token is predicted by the
  one before it, in the same document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleSource, prefetched
from titan_rl.errors import SampleError, SamplesLost, TrainingError
from titan_rl.observability.timeline import timeline
from titan_rl.policy.packing import PackingPlan
from titan_rl.types import TrainingSample

if TYPE_CHECKING:
    from titan_rl.policy.models.model import Policy


class RankSamples:
    """Iterate once over `rounds`, to its end, then call `losses`. All ranks do so alike: both are collective."""

    def __init__(self, source: SampleSource, policy: Policy, batch: SampleBatch, plan: PackingPlan) -> None:
        if plan.share_of not in (None, policy.data_rank):
            raise TrainingError(f"data-parallel rank {policy.data_rank} was given the share of rank {plan.share_of}")
        self._source = source
        self._policy = policy
        self._batches = [batch.select(indices) for indices in plan.microbatches[policy.data_rank]]
        self._lost: list[SampleError] = []

    def rounds(self) -> Iterator[Sequence[TrainingSample]]:
        """The samples of each round; none from the round on whose samples cannot be had.

        The ranks of one tensor-parallel group compute the same samples, so they give up in the same round.
        """
        fetching = prefetched(self._source, self._batches)
        given_up = False
        for _ in self._batches:
            timeline.doing("pack")
            samples: Sequence[TrainingSample] = ()
            if not given_up:
                try:
                    samples = next(fetching)
                except SampleError as error:
                    self._lost.append(error)
                given_up = self._policy.any_of_tensor_group(bool(self._lost))
            yield () if given_up else samples
        fetching.close()

    def losses(self, what: str) -> SamplesLost | None:
        """The error to be raised, the same on all ranks, if any rank lost a sample of `what`."""
        lost = self._lost_groups() if self._lost else []
        everyones: list[list[SampleError]] = [lost]
        if dist.get_world_size() > 1:
            everyones = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyones, lost)
        errors = {error.group_id: error for errors in everyones for error in errors}
        if not errors:
            return None
        groups = tuple(sorted(errors))
        named = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        return SamplesLost(f"{what}: {named} lost: {errors[groups[0]]}; the weights were not changed", groups)

    def _lost_groups(self) -> list[SampleError]:
        """One error per group of this rank that is lost: the first one hid the others."""
        mine = SampleBatch.concat(self._batches)
        positions: dict[int, list[int]] = {}
        for position, group_id in enumerate(mine.group_ids):
            positions.setdefault(group_id, []).append(position)
        lost = {error.group_id: error for error in self._lost}
        for group_id, places in positions.items():
            if group_id not in lost:
                try:
                    self._source.fetch(mine.select(places))
                except SampleError as error:
                    lost[group_id] = error
        return list(lost.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """D documents without their last tokens, which predict nothing: T tokens and what follows each, N trained."""

    documents: tuple[TrainingSample, ...]
    """() for the dummy."""
    tokens: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, from 0 in every document
    offsets: tuple[int, ...]
    """D + 1 document boundaries, from 0 to T."""
    next_tokens: Tensor  # [T] int64, what each token should predict
    rows: Tensor  # [N] int64, index into T of the tokens that predict the trained ones
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    samples: Tensor  # [N] int64, document of each trained token
    versions: Tensor  # [N] int64, encoded PolicyVersion

    @property
    def targets(self) -> Tensor:
        """[N] int64, the trained tokens."""
        return self.next_tokens[self.rows]


def pack(samples: Sequence[TrainingSample], device: torch.device) -> MicroBatch:
    """One micro-batch of `samples` in their order; of none, or of single tokens only, one of one untrained token (a
    dummy)."""
    samples = tuple(sample for sample in samples if len(sample.token_ids) > 1)
    if samples:
        lengths = np.array([len(sample.token_ids) - 1 for sample in samples])
        tokens = np.concatenate([sample.token_ids[:-1] for sample in samples])
        next_tokens = np.concatenate([sample.token_ids[1:] for sample in samples])
        mask = np.concatenate([sample.loss_mask[1:] for sample in samples])
        logprobs = np.concatenate([sample.logprobs[1:] for sample in samples])
        versions = np.concatenate([sample.versions[1:] for sample in samples])
        advantages = np.array([sample.advantage for sample in samples])
    else:
        lengths, mask = np.ones(1, np.int64), np.zeros(1, bool)
        tokens = next_tokens = np.zeros(1, np.int32)
        logprobs, versions, advantages = np.zeros(1), np.zeros(1, np.int64), np.zeros(1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.flatnonzero(mask)

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device, non_blocking=True)

    return MicroBatch(
        documents=samples,
        tokens=tensor(tokens[None], np.int64),
        positions=tensor((np.arange(len(tokens)) - offsets[documents])[None], np.int64),
        offsets=tuple(offsets.tolist()),
        next_tokens=tensor(next_tokens, np.int64),
        rows=tensor(rows, np.int64),
        behaviour_logprobs=tensor(logprobs[rows], np.float32),
        advantages=tensor(advantages[documents[rows]], np.float32),
        samples=tensor(documents[rows], np.int64),
        versions=tensor(versions[rows], np.int64),
    )
