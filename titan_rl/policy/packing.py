"""Which sample is computed by which rank in which micro-batch, decided from lengths and groups alone.

For every plan: each sample is in exactly one micro-batch; no micro-batch holds more tokens than the budget; all
ranks have the same number of micro-batches, because each one is a round of collectives that every rank must
enter (a rank with fewer gets empty ones). The same lengths and groups give the same plan on every rank and in every
run.

Mini-batches divide a batch by groups, as a hash of their ids says: not by order, length or reward. The micro-batches of
one follow each other, and each has a trained token.

The samples of a group, which begin alike, stay together unless ranks would then differ by more than the longest sample,
or a rank would need more micro-batches. The budget counts every sample whole: tokens that are shared count each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.policy.config import TrainerConfig
from titan_rl.seeding import derive_seed


class MiniBatch(NamedTuple):
    """What one optimizer step trains: so many next rounds, with these numbers over all ranks."""

    rounds: int
    samples: int
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """`microbatches[rank][round]` holds indices of samples, those of a group next to each other."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    minibatches: tuple[MiniBatch, ...]
    """Of one epoch, in the order of their rounds."""
    imbalance: float
    """Token slots that the ranks spend, waiting included, ÷ tokens: the sum over rounds of the fullest rank's tokens,
    times ranks, divided by all tokens. 1.0 is perfect."""

    samples: int
    tokens: int
    longest: int
    """Tokens of the longest sample."""
    trained_tokens: int
    """Of the whole batch, as all numbers here: a rank needs them and has only its own samples."""
    unrouted: int | None
    """Sampled tokens that are left out of them, see `TrainingSample`. None: a sample that is trained has no routes."""
    advantage_mean: float
    advantage_std: float
    """Over trained tokens, each with its sample's mean advantage; the deviation is of all, n in its denominator."""
    share_of: int | None = None
    """The data-parallel rank whose share this is; None: the whole batch's plan."""

    @property
    def rounds(self) -> int:
        return len(self.microbatches[0])

    def share(self, rank: int) -> tuple[tuple[int, ...], PackingPlan]:
        """A data-parallel rank's samples, as positions in the batch, and the plan for these samples in this order."""
        positions = tuple(index for microbatch in self.microbatches[rank] for index in microbatch)
        numbers = iter(range(len(positions)))
        own = tuple(tuple(itertools.islice(numbers, len(microbatch))) for microbatch in self.microbatches[rank])
        nothing = ((),) * self.rounds
        shares = tuple(own if other == rank else nothing for other in range(len(self.microbatches)))
        return positions, replace(self, microbatches=shares, share_of=rank)


def plan_step(batch: SampleBatch, config: TrainerConfig) -> PackingPlan:
    """Which rank computes which sample of a step in which micro-batch of which mini-batch, and the step's numbers.

    The samples of a mini-batch are spread over ranks evenly, then over as few micro-batches as first-fit-decreasing
    needs, or fewer. Raises TrainingError: a sample is empty or longer than the budget.
    """
    lengths, groups, budget = batch.lengths, batch.group_ids, config.max_tokens_per_microbatch
    for index, length in enumerate(lengths):
        if not 1 <= length <= budget:
            raise TrainingError(f"sample {index} has {length} tokens; trainer.max_tokens_per_microbatch is {budget}")
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(config.data_parallel)]
    minibatches = []
    for part in split_by_group(batch, config.minibatches):
        shares = _spread(part, lengths, groups, config.data_parallel)
        bins = [_fewest_bins(share, lengths, groups, budget) for share in shares]
        rounds = max(1, *map(len, bins))
        for microbatches, own in zip(ranks, bins, strict=True):
            microbatches += map(tuple, own + [[]] * (rounds - len(own)))
        trained_tokens = sum(batch.refs[index].trained_tokens for index in part)
        minibatches.append(MiniBatch(rounds, len(part), trained_tokens))
    fullest = [
        max(sum(lengths[index] for index in microbatch) for microbatch in together)
        for together in zip(*ranks, strict=True)
    ]
    mean, deviation = batch.advantages
    routed = (0 not in ref.route_shape for ref in batch.refs if ref.trained_tokens)
    return PackingPlan(
        microbatches=tuple(map(tuple, ranks)),
        minibatches=tuple(minibatches),
        imbalance=len(ranks) * sum(fullest) / sum(lengths) if lengths else 1.0,
        samples=len(batch),
        tokens=sum(lengths),
        longest=max(lengths, default=0),
        trained_tokens=batch.trained_tokens,
        unrouted=sum(ref.unrouted for ref in batch.refs) if all(routed) else None,
        advantage_mean=mean,
        advantage_std=deviation,
    )


def split_by_group(batch: SampleBatch, count: int) -> list[list[int]]:
    """Positions of the samples of `count` mini-batches, or of fewer: each has a group with a trained token, and they
    differ by one such group at most."""
    members: dict[int, list[int]] = {}
    for position, group in enumerate(batch.group_ids):
        members.setdefault(group, []).append(position)
    trains = {ref.group_id for ref in batch.refs if ref.trained_tokens}
    dealt = sorted(members, key=lambda group: (group not in trains, derive_seed("mini-batch", group)))
    count = max(1, min(count, len(trains)))
    return [sorted(each for group in dealt[number::count] for each in members[group]) for number in range(count)]


def _spread(part: Sequence[int], lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Each rank's samples, group by group: ranks differ by the longest sample at most."""
    members: dict[int, list[int]] = {}
    for index in part:
        members.setdefault(groups[index], []).append(index)
    tokens = {group: sum(lengths[index] for index in indices) for group, indices in members.items()}
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(members, key=lambda group: (-tokens[group], members[group])):
        rank = loads.index(min(loads))
        shares[rank] += members[group]
        loads[rank] += tokens[group]
    longest = max((lengths[index] for index in part), default=0)
    while max(loads) - min(loads) > longest:
        # One sample after the other, so that it is the same group that is divided.
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        shares[emptiest].append(moved := shares[fullest].pop())
        loads[fullest] -= lengths[moved]
        loads[emptiest] += lengths[moved]
    return shares


def _fewest_bins(share: Sequence[int], lengths: Sequence[int], groups: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of at most `budget` tokens, fullest first, so that full bins of different ranks share a round. Groups are
    kept together unless first-fit-decreasing, which takes them apart, needs fewer bins."""
    longest_first = sorted(share, key=lambda index: (-lengths[index], index))
    bins = min((_first_fit(order, lengths, budget) for order in (share, longest_first)), key=len)
    bins.sort(key=lambda bin_: -sum(lengths[index] for index in bin_))
    return [sorted(bin_, key=lambda index: (groups[index], index)) for bin_ in bins]


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        for number, free in enumerate(room):
            if lengths[index] <= free:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(budget - lengths[index])
    return bins
