"""Direct preference optimization: learns from pairs which of two answers is better. (arXiv:2305.18290)

    m = beta ((log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected))      of a pair, pi_ref as it began
    loss = the mean over pairs of -log sigmoid(m), eq. 7

The gradient of a pair's loss is -beta sigmoid(-m) (grad log pi(chosen) - grad log pi(rejected)). So one forward pass
over the whole batch gives each pair its m, on whatever ranks and in whatever micro-batches its answers are, and each
trained token an advantage, ± beta sigmoid(-m). The sum of advantage times logprob, divided by the number of pairs, then
has that gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.microbatch import MicroBatch
from titan_rl.types import TrainingSample
from titan_rl.weights.ranks import Ranks

if TYPE_CHECKING:
    from titan_rl.policy.models.model import Policy


class Preferences:
    """pi_ref, and what a batch of pairs is worth beside it."""

    def __init__(self, policy: Policy, config: TrainerConfig, *, temperature: float) -> None:
        from titan_rl.policy.models.model import frozen_policy

        self._begun = frozen_policy(policy, config)
        self._beta = config.warmup.dpo_beta
        self._temperature = temperature
        self.metrics: dict[str, float] = {}
        """Of the last batch: `loss`, and `preferred`, the share of its pairs with m above 0."""

    def judged(self, held: Sequence[MicroBatch], *, counted: bool) -> list[MicroBatch]:
        """The same micro-batches, which have `proximal_logprobs`, with these advantages. Collective. The answers of a
        pair have the numbers 2n and 2n + 1 in their group; the chosen one has the advantage 1, the rejected one -1.
        `counted`: False on ranks that repeat another's tokens."""
        parts: list[tuple[tuple[int, int], float]] = []
        for each in held:
            reference, _ = self._begun.logprobs(each, temperature=self._temperature)
            assert each.proximal_logprobs is not None
            away = (each.advantages * (each.proximal_logprobs - reference)).double().cpu()
            sums = torch.zeros(len(each.documents), dtype=torch.float64).index_add(0, each.samples.cpu(), away)
            answers = zip(each.documents, sums.tolist(), strict=True)
            parts += [(_pair(document), part) for document, part in answers if document.advantage]  # else it fills up
        totals: defaultdict[tuple[int, int], float] = defaultdict(float)
        for pair, part in chain.from_iterable(Ranks(dist.group.WORLD).gather(parts if counted else [])):
            totals[pair] += part
        margins = self._beta * torch.tensor(list(totals.values()), dtype=torch.float64)
        slopes = dict(zip(totals, (self._beta * torch.sigmoid(-margins)).tolist(), strict=True))
        loss = torch.nn.functional.softplus(-margins).mean()
        self.metrics = {"loss": float(loss), "preferred": float((margins > 0).double().mean())}

        def judged(each: MicroBatch) -> MicroBatch:
            of_document = each.advantages.new_tensor([slopes.get(_pair(document), 0.0) for document in each.documents])
            return replace(each, advantages=each.advantages * of_document[each.samples]) if each.documents else each

        return list(map(judged, held))


def _pair(document: TrainingSample) -> tuple[int, int]:
    return document.group_id, document.sample // 2
