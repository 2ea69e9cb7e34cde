"""A micro-batch with shared prompts computes what one without them does, for random groups. About 20 s, half of it
imports."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from titan_rl.policy.microbatch import MicroBatch, Run, pack
from titan_rl.policy.models.titan_adaptation import choose_device
from titan_rl.types import TrainingSample

choose_device("cpu")  # before the import below, as in a trainer process

from titan_rl.policy.models.model import DocumentAttention, PackedDocuments  # noqa: E402

CPU = torch.device("cpu")
SYMBOLS, POSITIONS, HEADS, KV_HEADS, SIZE = 3, 24, 4, 2, 32

answers = st.lists(st.tuples(st.integers(0, SYMBOLS - 1), st.booleans()), max_size=8)
groups = st.tuples(st.lists(st.integers(0, SYMBOLS - 1), max_size=10), st.lists(answers, min_size=1, max_size=5))
"""A prompt, and what each sample goes on with: token, and whether it is trained. Few symbols, so answers begin alike
too, and samples are equal."""


def samples_of(described) -> list[TrainingSample]:
    samples = []
    for group_id, (prompt, of_group) in enumerate(described):
        for number, answer in enumerate(of_group):
            tokens = np.array([*prompt, *(token for token, _ in answer)], np.int32)
            mask = np.array([False] * len(prompt) + [trained for _, trained in answer], bool)
            mask[:1] = False
            noise = np.random.default_rng(len(samples)).standard_normal(len(tokens)).astype(np.float32)
            samples.append(
                TrainingSample(
                    group_id=group_id,
                    sample=number,
                    token_ids=tokens,
                    loss_mask=mask,
                    logprobs=np.where(mask, noise, 0),
                    versions=np.where(mask, len(samples), -1),
                    advantages=float(len(samples)),
                    reward=0.0,
                )
            )
    return samples


def attend(batch: MicroBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What attention gives for the tokens in `rows`, and the gradients of a function of it. Queries, keys and values
    are those of a token at a position."""
    random = torch.Generator().manual_seed(0)
    tables = [
        torch.randn(SYMBOLS, POSITIONS, heads, SIZE, generator=random).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    inputs = [table[batch.tokens, batch.positions] for table in tables]
    documents = PackedDocuments.of(batch.runs, batch.key_rows, CPU)
    output = DocumentAttention.Config().build()(*inputs, attention_masks=documents, enable_gqa=True)
    seen = output[0].index_select(0, batch.rows)
    (seen * torch.linspace(-1, 1, seen.numel()).view_as(seen)).sum().backward()
    return seen.detach(), tuple(table.grad for table in tables)


@given(st.lists(groups, min_size=1, max_size=4))
@example([([0, 1, 2, 0], [[(1, True)], [(1, True), (2, True)], [(1, True)]])])  # answers of one token
@example([([0, 1, 2, 0], [[], [(1, True)], [(2, False), (1, True)]])])  # the prompt alone is a sample
def test_sharing_changes_no_document(described):
    samples = samples_of(described)
    shared, apart = (pack(samples, CPU, share=share) for share in (True, False))
    assert apart.key_rows is None and not any(run.shared for run in apart.runs)
    for name in ("targets", "behaviour_logprobs", "advantages", "samples", "versions"):
        assert torch.equal(getattr(shared, name), getattr(apart, name)), name
    for name in ("tokens", "positions"):
        assert torch.equal(getattr(shared, name)[0, shared.rows], getattr(apart, name)[0, apart.rows]), name
    assert shared.tokens.numel() == sum(run.segments * run.length for run in shared.runs) <= apart.tokens.numel()
    (ours, gradients), (theirs, wanted) = attend(shared), attend(apart)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-5)


def test_the_prompt_of_a_group_stands_in_the_row_once():
    batch = pack(samples_of([([0, 1, 2, 0], [[(1, True), (2, True)]] * 3)]), CPU, share=True)
    assert batch.runs == (Run(segments=1, length=4, shared=0), Run(segments=3, length=1, shared=4))
    assert batch.tokens.tolist() == [[0, 1, 2, 0, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 4, 4]]
    assert batch.rows.tolist() == [3, 4, 3, 5, 3, 6]
    assert batch.key_rows is not None
    assert batch.key_rows.tolist() == [0, 1, 2, 3, *(0, 1, 2, 3, 4), *(0, 1, 2, 3, 5), *(0, 1, 2, 3, 6)]


def test_nothing_is_shared_between_groups_or_behind_a_trained_token():
    two_groups = [([0, 1, 2, 0], [[(1, True), (2, True)]])] * 2
    trained_early = [([0], [[(1, True), (2, True), (0, True), (1, True)]] * 2)]
    assert pack(samples_of(two_groups), CPU, share=True).key_rows is None
    assert pack(samples_of(trained_early), CPU, share=True).runs == (Run(1, 1, 0), Run(2, 3, 1))


def test_a_short_prompt_of_long_answers_is_not_worth_it():
    long = [([0], [[(1, True)] * 20] * 2)]
    assert pack(samples_of(long), CPU, share=True).runs == (Run(2, 20, 0),)


def test_long_answers_to_a_prompt_that_is_shorter_are_computed_alone():
    def runs(prompt: int, answer: int) -> tuple[Run, ...]:
        return pack(samples_of([([0] * prompt, [[(1, True)] * (answer + 1)] * 8)]), CPU, share=True).runs

    assert runs(100, 200)[-1] == Run(8, 200, 100)
    assert runs(100, 900) == (Run(8, 1000, 0),)
    assert runs(400, 2000) == (Run(8, 2400, 0),)
    assert runs(3000, 3000)[-1] == Run(8, 6000, 0), "its mask would be too large"


def test_a_document_gets_the_same_bits_whatever_other_groups_are_beside_it():
    one = [([0, 1, 2, 0], [[(1, True), (2, True)], [(2, True), (2, True), (1, True)]])]
    alone = pack(samples_of(one), CPU, share=True)
    beside = pack(samples_of([*one, *one, ([1, 1], [[(1, True)] * 5])]), CPU, share=True)
    first = len(alone.rows)
    assert torch.equal(attend(alone)[0], attend(beside)[0][:first])
