"""One rank's samples of a batch: those of the next round are fetched while the current one is computed.

A rank that cannot fetch a sample takes part in all remaining rounds without samples, so that no other rank waits for
it in a collective. At the end it tries its groups one by one, and all ranks exchange which groups were lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleSource, prefetched
from titan_rl.errors import SampleError, SamplesLost, TrainingError
from titan_rl.metrics.timeline import timeline
from titan_rl.policy.packing import PackingPlan
from titan_rl.types import TrainingSample
from titan_rl.weights.ranks import Ranks

if TYPE_CHECKING:
    from titan_rl.policy.models.model import Policy


class RankSamples:
    """Iterate once over `rounds`, to its end, then call `raise_if_lost`. All ranks do so alike: both are collective."""

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

    def raise_if_lost(self, what: str) -> None:
        """Raises SamplesLost, the same on all ranks, if any rank lost a sample of `what`."""
        lost = self._lost_groups() if self._lost else []
        everyones = Ranks(dist.group.WORLD).gather(lost)
        errors = {error.group_id: error for errors in everyones for error in errors}
        if not errors:
            return
        groups = tuple(sorted(errors))
        named = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        raise SamplesLost(f"{what}: {named} lost: {errors[groups[0]]}; the weights were not changed", groups)

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
