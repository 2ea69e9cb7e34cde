"""Sampling noise is a function of seed, position and token id, and its tokens follow softmax(logits)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.platforms import current_platform

from titan_rl.generation.vllm.sampling import SeededSampling, exponential_noise, noise_keys, sample

current_platform.import_kernels()  # an engine does so when it is built

ROWS, VOCAB = 200_000, 37
DEGREES_OF_FREEDOM = VOCAB - 1
MOST = DEGREES_OF_FREEDOM + 5 * (2 * DEGREES_OF_FREEDOM) ** 0.5
"""Chi-squared beyond five standard deviations. The draws are fixed, so this test has no luck."""

WAYS = {
    "one request over its positions": (np.full(ROWS, 77), np.arange(ROWS)),
    "neighbouring seeds at one position": (np.arange(ROWS), np.full(ROWS, 3)),
    "both at once": (np.arange(ROWS), np.arange(ROWS)),
}


def by_hash(logits: Tensor, keys: Tensor) -> Tensor:
    """How devices other than the CPU sample."""
    return (logits - exponential_noise(keys, logits.shape[1]).log()).argmax(dim=-1)


@pytest.mark.parametrize("draw", [sample, by_hash])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_follow_the_distribution_and_are_independent(way: str, draw) -> None:
    probabilities = torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2, 0)
    seeds, positions = WAYS[way]
    keys = torch.from_numpy(noise_keys(seeds, positions))
    drawn = draw(probabilities.log().repeat(ROWS, 1), keys)
    expected = probabilities.double() * ROWS
    found = torch.bincount(drawn, minlength=VOCAB)
    assert float(((found - expected) ** 2 / expected).sum()) < MOST
    # Pairs of neighbours are as often equal as independent draws are.
    equal = float((drawn[1:] == drawn[:-1]).double().mean())
    chance = float((probabilities.double() ** 2).sum())
    assert abs(equal - chance) < 5 * (chance * (1 - chance) / ROWS) ** 0.5


def test_noise_is_exponential_down_to_its_smallest_values() -> None:
    noise = exponential_noise(torch.from_numpy(noise_keys(np.arange(64), np.zeros(64))), 30_000).flatten()
    assert 0 < float(noise.min()) < 1e-5 and float(noise.max()) < 37
    for limit in (1e-5, 1e-4, 1e-2, 0.5, 2.0, 8.0):
        below, expected = int((noise < limit).sum()), len(noise) * -np.expm1(-limit)
        assert abs(below - expected) < 5 * expected**0.5


def test_a_token_that_is_cut_off_is_never_drawn() -> None:
    logits = torch.full((1000, VOCAB), -torch.inf)
    logits[:, 5] = 0.0
    keys = torch.from_numpy(noise_keys(np.arange(1000), np.arange(1000)))
    assert sample(logits, keys).tolist() == by_hash(logits, keys).tolist() == [5] * 1000


def test_a_row_depends_on_its_own_request_alone() -> None:
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_tokens_no_spec=np.array([7, 900, 7]))
    runner = SimpleNamespace(input_batch=batch, sampler=SimpleNamespace(topk_topp_sampler=SimpleNamespace()))
    sampling = SeededSampling(runner)
    sampling.seeds |= {"a": 2**63 - 1, "b": 0, "c": 2**63 - 1}
    logits = torch.randn(3, 5000)
    logits[2] = logits[0]
    forward = runner.sampler.topk_topp_sampler.forward
    tokens, logprobs = forward(logits.clone(), {}, None, None)
    assert tokens[0] == tokens[2]
    assert torch.equal(logprobs, logits.log_softmax(-1))
    batch.req_ids, batch.num_tokens_no_spec = ["b", "a"], np.array([900, 7])
    turned, _ = forward(logits[[1, 0]], {}, None, None)
    assert turned.tolist() == [tokens[1], tokens[0]]
    batch.num_tokens_no_spec = np.array([901, 8])
    assert forward(logits[[1, 0]], {}, None, None)[0].tolist() != turned.tolist()
