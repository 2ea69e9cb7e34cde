"""Tokens that were sampled under a mask, from turns to the gradient of a step: against autograd in float64 (5 s)."""

from __future__ import annotations

import algorithm_oracles as oracles
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plan_of_lengths

from titan_rl.policy.algorithms.base import TrainedTokens
from titan_rl.policy.config import LossConfig
from titan_rl.policy.losses import build_loss
from titan_rl.policy.microbatch import pack
from titan_rl.policy.token_scores import token_scores
from titan_rl.rollout.samples import TokenTree, Turn, training_samples
from titan_rl.support import Supports, encode_support
from titan_rl.types import Completion, FinishReason, Message, TrainingSample

VOCAB, SIZE, TEMPERATURE = 48, 5, 0.7
FORCED = 1
LOSSES = ("grpo", "dr_grpo", "gspo", "gmpo", "tis")
"""One of each aggregation, and losses that look at a sample's tokens together."""


class Play:
    """A step of rollouts of one turn, under a policy that looks at the token before only: after token t it has the
    logits `head @ rows[t]`. No token comes twice, so that each place has a row of its own."""

    def __init__(self, seed: int, rollouts: list[list[int]]) -> None:
        """`rollouts`: of each token, how many ids were possible."""
        random = np.random.default_rng(seed)
        ids = iter(random.permutation(VOCAB).tolist())
        self.rows, self.head = (torch.from_numpy(random.normal(size=(VOCAB, SIZE))).float() for _ in range(2))
        old = self.rows + torch.from_numpy(random.normal(scale=0.1, size=(VOCAB, SIZE))).float()
        self.tokens = [[next(ids) for _ in range(len(counts) + 1)] for counts in rollouts]
        self.advantages = random.normal(size=len(rollouts)).astype(np.float32)
        self.possible = [
            np.array([self._mask(random, token, count) for token, count in zip(tokens[1:], counts, strict=True)])
            for tokens, counts in zip(self.tokens, rollouts, strict=True)
        ]
        self.behaviour = [
            self.logprobs(number, old.double(), self.head.double()).float() for number in range(len(rollouts))
        ]

    def _mask(self, random: np.random.Generator, token: int, count: int) -> np.ndarray:
        others = [each for each in range(VOCAB) if each != token]
        return np.isin(np.arange(VOCAB), [token, *random.choice(others, count - 1, replace=False)])

    def logprobs(self, number: int, rows: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Of a rollout's sampled tokens, each over what was possible: by the definition."""
        tokens, possible = torch.tensor(self.tokens[number]), torch.from_numpy(self.possible[number])
        weights = (rows[tokens[:-1]] @ head.T / TEMPERATURE).exp() * possible
        return (weights.gather(1, tokens[1:, None])[:, 0] / weights.sum(-1)).log()

    def samples(self) -> tuple[TrainingSample, ...]:
        graded = []
        for number, (tokens, possible) in enumerate(zip(self.tokens, self.possible, strict=True)):
            completion = Completion(
                request_id="r",
                token_ids=np.array(tokens[1:], np.int32),
                logprobs=self.behaviour[number].numpy(),
                versions=np.zeros(len(tokens) - 1, np.int64),
                finish_reason=FinishReason.STOP,
                supports=Supports.of(dict(enumerate(map(encode_support, possible))), 0, len(possible)),
            )
            turn = Turn(
                prompt_token_ids=np.array(tokens[:1], np.int32),
                completion=completion,
                message=Message("assistant", ""),
                finish_reason=FinishReason.STOP,
                advantage=float(self.advantages[number]),
            )
            tree = TokenTree()
            tree.add(turn)
            graded.append((number, 0.0, tree))
        return training_samples(0, graded, rollouts=len(graded))


possible_ids = st.sampled_from([FORCED, FORCED, 2, 3, VOCAB // 2, VOCAB - 1, VOCAB])


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rollouts=st.lists(st.lists(possible_ids, min_size=1, max_size=7), min_size=1, max_size=6),
)
def test_the_gradient_is_that_of_the_masked_distribution_and_forced_tokens_have_none(
    name: str, seed: int, rollouts: list[list[int]]
) -> None:
    play = Play(seed, rollouts)
    samples = play.samples()
    trained = [[count for count in counts if count != FORCED] for counts in rollouts]
    assert [int(sample.loss_mask.sum()) for sample in samples] == [*filter(None, map(len, trained))]
    if not samples:  # every token was forced
        return

    rows, head = play.rows.clone().requires_grad_(), play.head.clone().requires_grad_()
    batch = pack(samples, torch.device("cpu"), share=False)
    hidden = rows[batch.tokens[0]]
    logprobs, entropies = token_scores(
        hidden[batch.rows], head, batch.targets, temperature=TEMPERATURE, supports=batch.supports
    )
    loss = build_loss(LossConfig(name=name))
    total, _ = loss(
        TrainedTokens(
            logprobs=logprobs,
            entropies=entropies,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            samples=batch.samples,
        )
    )
    value = total / loss.divisor(plan_of_lengths([int(sample.loss_mask.sum()) for sample in samples]))
    value.backward()

    exact_rows, exact_head = play.rows.double().requires_grad_(), play.head.double().requires_grad_()
    step = []
    for number, counts in enumerate(rollouts):
        found, behaviour = play.logprobs(number, exact_rows, exact_head), play.behaviour[number].tolist()
        advantage = float(play.advantages[number])
        forced = [place for place, count in enumerate(counts) if count == FORCED]
        assert not found[forced].any() and not play.behaviour[number][forced].any(), "under any weights"
        kept = [place for place in range(len(counts)) if place not in forced]
        step += [[oracles.Token(found[place], behaviour[place], advantage) for place in kept]] if kept else []
        assert not rows.grad[[play.tokens[number][place] for place in forced]].any()
    exact, _ = oracles.naive_objective(name, step)
    assert value.item() == pytest.approx(exact.item(), abs=1e-5, rel=1e-4)
    (exact + 0 * (exact_rows.sum() + exact_head.sum())).backward()  # a clip may leave no gradient
    for ours, oracle in ((rows, exact_rows), (head, exact_head)):
        torch.testing.assert_close(ours.grad.double(), oracle.grad, atol=2e-5, rtol=1e-4)
