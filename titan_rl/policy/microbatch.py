"""Samples laid end to end in one row: a micro-batch. `RankSamples` fetches and packs those of one rank.

    sample 0   P P P P P a a a          the row   P P P P P | a a a | b b | c c c
    sample 1   P P P P P b b                      the prompt that neighbours of one group begin with stands there
    sample 2   P P P P P c c c                    once; what follows it sees it as if it stood before each of them

Position 0 of a document is never trained (`TrainingSample` refuses it), so every trained token is predicted by the one
before it, in the same document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SampleSource
from titan_rl.errors import SampleError, SamplesLost, TrainingError
from titan_rl.metrics.timeline import timeline
from titan_rl.policy.packing import PackingPlan
from titan_rl.support import Supports
from titan_rl.types import TrainingSample
from titan_rl.weights.ranks import Ranks

WORTH_SHARING = 0.07
"""Share of a group's tokens that must be saved. Attention to a shared prompt copies keys and values: with 5 to 6 %
saved a step takes as long as without, with 10 % it is 8 % faster."""
MOST_SCORES = 256
"""Scores of attention that a saved token may cost. What follows a shared prompt computes its masked scores too, so long
answers to short prompts are faster alone."""
LARGEST_MASK = 1 << 24
"""Scores of one answer. As float32 they take 64 MiB, beside those of all answers of its shape."""


class Run(NamedTuple):
    """Neighbours of one shape in the row: so many segments of so many tokens, each after so many shared ones."""

    segments: int
    length: int
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """D documents without their last tokens, which predict nothing, as a row of T tokens; N tokens are trained."""

    documents: tuple[TrainingSample, ...]
    """() for the dummy."""
    tokens: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64, from 0 in every document
    runs: tuple[Run, ...]
    """The row from left to right, segments without shared tokens first."""
    key_rows: Tensor | None
    """int64, index into T: of each segment in turn its shared tokens and its own. None: nothing is shared."""
    rows: Tensor  # [N] int64, index into T of the tokens that predict the trained ones
    targets: Tensor  # [N] int64, the trained tokens
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    samples: Tensor  # [N] int64, document of each trained token
    versions: Tensor  # [N] int64, encoded PolicyVersion
    supports: Supports | None
    """What the N trained tokens were drawn from. None: each from the whole vocabulary."""
    routes: Tensor | None = None
    """[T, layers, k] int16, the experts that computed each token; -1: the trainer's choice. None: all are that."""
    proximal_logprobs: Tensor | None = None
    """[N] float32, under the weights before the batch; None: these are the current ones."""
    values: Tensor | None = None
    """[N] float32 of a critic, likewise; None: there is none."""
    returns: Tensor | None = None
    """[N] float32, what a critic's values are trained to be."""


def _untrained(group_id: int, tokens: int) -> TrainingSample:
    return TrainingSample(
        group_id=group_id,
        sample=0,
        token_ids=np.zeros(tokens, np.int32),
        loss_mask=np.zeros(tokens, bool),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int64),
        advantages=np.zeros(tokens, np.float32),
        reward=0.0,
    )


def pack(samples: Sequence[TrainingSample], device: torch.device, *, share: bool, multiple: int = 1) -> MicroBatch:
    """One micro-batch of `samples` in their order; of none, or of single tokens only, one of one untrained token (a
    dummy). `share`: lay the prompt that neighbours of one group have in common only once, if that saves enough.
    `multiple`: what the number of tokens must be a multiple of; another document fills up."""
    samples = tuple(sample for sample in samples if len(sample.token_ids) > 1)
    documents = samples or (_untrained(-1, 2),)
    # All tokens of all documents, one document after the other.
    lengths = np.array([len(sample.token_ids) - 1 for sample in documents])
    offsets = np.cumsum(lengths) - lengths
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(document_of)) - offsets[document_of]
    tokens = np.concatenate([sample.token_ids[:-1] for sample in documents])
    mask = np.concatenate([sample.loss_mask[1:] for sample in documents])

    routes = None
    if shape := next((sample.route_shape for sample in documents if sample.routes is not None), None):
        routes = np.full((len(tokens), *shape), -1, np.int16)
        for start, sample in zip(offsets.tolist(), documents, strict=True):
            routes[start:][: len(sample.token_ids) - 1] = -1 if sample.routes is None else sample.routes[:-1]
    families, prompts = _families(documents, tokens, positions, routes)
    prompts *= share

    # The segments: what each document has of its own, then the families' prompts. Those of one shape become neighbours.
    prompt = np.repeat(prompts, families)  # of each document
    shared = np.concatenate([prompt, np.zeros_like(prompts)])
    sizes = np.concatenate([lengths - prompt, prompts])
    if missing := -int(sizes.sum()) % multiple:
        return pack((*documents, _untrained(-2, missing + 1)), device, share=share, multiple=multiple)
    order = np.lexsort((sizes, shared))
    order = order[sizes[order] > 0]
    starts = np.zeros_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    shapes = zip(sizes[order].tolist(), shared[order].tolist(), strict=True)
    runs = tuple(Run(len(list(run)), *shape) for shape, run in groupby(shapes))

    prompt_starts = np.repeat(starts[len(lengths) :], families)
    own_starts = starts[: len(lengths)] - prompt
    place = np.where(positions < prompt[document_of], prompt_starts[document_of], own_starts[document_of]) + positions
    row = np.zeros((3, sizes.sum()), np.int64)
    row[:, place] = tokens, positions, np.arange(len(tokens))
    key_rows = None
    if prompts.any():
        behind = order[shared[order] > 0]
        counts = lengths[behind]
        keys = np.arange(counts.sum()) + np.repeat(offsets[behind] - np.cumsum(counts) + counts, counts)
        key_rows = np.concatenate([np.arange(sizes[shared == 0].sum()), place[keys]])

    def tensor(array: np.ndarray, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device, non_blocking=True)

    supports = Supports.join((sample.supports, len(sample.token_ids)) for sample in documents)
    return MicroBatch(
        documents=samples,
        tokens=tensor(row[:1]),
        positions=tensor(row[1:2]),
        runs=runs,
        key_rows=None if key_rows is None else tensor(key_rows),
        rows=tensor(place[mask]),
        targets=tensor(np.concatenate([sample.token_ids[1:] for sample in documents])[mask]),
        behaviour_logprobs=tensor(np.concatenate([sample.logprobs[1:] for sample in documents])[mask], np.float32),
        advantages=tensor(np.concatenate([sample.advantages[1:] for sample in documents])[mask], np.float32),
        samples=tensor(document_of[mask]),
        versions=tensor(np.concatenate([sample.versions[1:] for sample in documents])[mask]),
        routes=None if routes is None else tensor(routes[row[2]], np.int16),
        supports=supports and supports.select(np.concatenate([sample.loss_mask for sample in documents])),
    )


def _families(
    samples: Sequence[TrainingSample], tokens: np.ndarray, positions: np.ndarray, routes: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """How many neighbours of one group there are each time, and with how many tokens before any trained one all of
    these begin: their prompt. 0 where sharing it is not worth it. Arrays are of all samples without their last tokens,
    one sample after the other."""
    families = np.array([len(list(family)) for _, family in groupby(samples, lambda sample: sample.group_id)])
    firsts = np.cumsum(families) - families
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=len(tokens))
    trained = np.concatenate([sample.loss_mask[:-1] for sample in samples])
    of_first = np.repeat(np.repeat(starts[firsts], families), lengths) + positions  # it may be shorter, see below
    ends = trained | (tokens != tokens.take(of_first, mode="clip"))
    if routes is not None:
        ends |= (routes != routes.take(of_first, axis=0, mode="clip")).any((1, 2))
    common = np.minimum.reduceat(np.where(ends, positions, len(tokens)), starts[firsts])
    prompts = np.minimum(common, np.minimum.reduceat(lengths, firsts))
    saved = prompts * (families - 1)
    own = lengths - np.repeat(prompts, families)
    scores = own * lengths
    more = np.add.reduceat(scores - lengths**2 // 2, firsts) + prompts**2 // 2
    worth = (saved >= WORTH_SHARING * np.add.reduceat(lengths, firsts)) & (more <= MOST_SCORES * saved)
    return families, prompts * (worth & (np.maximum.reduceat(scores, firsts) <= LARGEST_MASK))


class RankSamples:
    """One rank's samples of a batch. Iterate once over `microbatches`, to its end, then call `raise_if_lost`. All ranks
    do so alike: both are collective. `tensor_group`: those that compute the same samples; None: this one alone.

    A rank that cannot fetch a sample takes part in all remaining rounds without samples, so that no other rank waits
    for it in a collective. At the end it tries its groups one by one, and all ranks exchange which groups were lost.
    """

    def __init__(
        self,
        source: SampleSource,
        batch: SampleBatch,
        plan: PackingPlan,
        *,
        data_rank: int,
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        if plan.share_of not in (None, data_rank):
            raise TrainingError(f"data-parallel rank {data_rank} was given the share of rank {plan.share_of}")
        self._source = source
        self._tensor_ranks = Ranks(tensor_group)
        self._batches = [batch.select(indices) for indices in plan.microbatches[data_rank]]
        self._lost: list[SampleError] = []

    def microbatches(self, device: torch.device, *, share: bool, multiple: int) -> Iterator[MicroBatch]:
        """One for each round, as `pack` makes it; dummies from the round on whose samples cannot be had. The ranks of
        one tensor-parallel group compute the same samples, so they give up in the same round."""
        given_up = False
        for batch in self._batches:
            timeline.doing("pack")
            samples: Sequence[TrainingSample] = ()
            if not given_up:
                try:
                    samples = self._source.fetch(batch)
                except SampleError as error:
                    self._lost.append(error)
                given_up = self._tensor_ranks.any(bool(self._lost))
            yield pack(() if given_up else samples, device, share=share, multiple=multiple)

    def raise_if_lost(self, what: str) -> None:
        """Raises SamplesLost, the same on all ranks, if any rank lost a sample of `what`."""
        lost = self._lost_groups() if self._lost else []
        errors = {error.group_id: error for errors in Ranks(dist.group.WORLD).gather(lost) for error in errors}
        if not errors:
            return
        groups = tuple(sorted(errors))
        named = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        raise SamplesLost(f"{what}: {named} lost: {errors[groups[0]]}; the weights were not changed", groups)

    def _lost_groups(self) -> list[SampleError]:
        """One error per group of this rank that is lost: the first one hid the others."""
        mine = SampleBatch.concat(self._batches)
        lost = {error.group_id: error for error in self._lost}
        for group_id in set(mine.group_ids) - lost.keys():
            try:
                self._source.fetch(mine.select([n for n, each in enumerate(mine.group_ids) if each == group_id]))
            except SampleError as error:
                lost[group_id] = error
        return list(lost.values())
