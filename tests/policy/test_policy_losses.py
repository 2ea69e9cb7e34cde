"""Losses and token scores on small tensors. About 3 s."""

from __future__ import annotations

import pytest
import torch

from titan_rl.errors import ConfigError
from titan_rl.policy import token_scores as scores_module
from titan_rl.policy.config import LossConfig
from titan_rl.policy.losses import GRPOLoss, TrainedTokens, build_loss
from titan_rl.policy.token_scores import token_scores


def tokens(ratio: list[float], advantage: list[float], logprob: float = -1.0) -> TrainedTokens:
    """Tokens whose current logprob is `logprob` and whose behaviour logprob gives the ratio."""
    count = len(ratio)
    return TrainedTokens(
        logprobs=torch.full((count,), logprob, requires_grad=True),
        entropies=torch.full((count,), 2.0, requires_grad=True),
        behaviour_logprobs=logprob - torch.tensor(ratio).log(),
        advantages=torch.tensor(advantage),
        samples=torch.zeros(count, dtype=torch.int64),
        global_count=count,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "pushes"),
    [
        (1.0, 1.0, True),
        (1.0, -1.0, True),
        (1.3, 1.0, False),  # already likelier than the clip allows
        (1.3, -1.0, True),  # likelier but bad: pull it back
        (0.7, 1.0, True),  # rarer but good: pull it back
        (0.7, -1.0, False),  # already rarer than the clip allows
        (1.15, 1.0, True),
        (0.85, -1.0, True),
    ],
)
def test_the_clip_removes_the_gradient_exactly_where_it_should(ratio, advantage, pushes):
    batch = tokens([ratio], [advantage])
    loss, metrics = GRPOLoss()(batch)
    loss.backward()
    assert batch.logprobs.grad.item() == pytest.approx(-advantage * ratio if pushes else 0.0)
    assert metrics["clip_share"].item() == (0 if pushes else 1)


def test_the_sides_of_the_clip_are_set_apart():
    batch = tokens([1.3, 0.6], [1.0, -1.0])
    loss, _ = GRPOLoss(clip_low=0.5, clip_high=0.2)(batch)
    loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 0.6])


def test_the_loss_is_a_sum_and_entropy_lowers_it():
    one, _ = GRPOLoss(entropy_bonus=0.1)(tokens([1.0], [2.0]))
    three, _ = GRPOLoss(entropy_bonus=0.1)(tokens([1.0] * 3, [2.0] * 3))
    assert one.item() == pytest.approx(-2.0 - 0.1 * 2.0)
    assert three.item() == pytest.approx(3 * one.item())


def test_metrics_are_sums_over_tokens():
    _, metrics = GRPOLoss()(tokens([2.0, 0.5, 1.0, 1.5], [1.0, 1.0, 1.0, 1.0]))
    assert metrics["clip_share"].item() == 2
    assert metrics["masked_share"].item() == 0
    assert set(metrics) == set(GRPOLoss.metrics)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (LossConfig(name="grp"), "grpo"),
        (LossConfig(name="pathlib:Path"), "PolicyLoss"),
        (LossConfig(kwargs={"clip": 0.2}), "clip"),
        (LossConfig(kwargs={"clip_low": 1.5}), "clip_low"),
        (LossConfig(kwargs={"clip_high": -1}), "clip_high"),
        (LossConfig(kwargs={"sequence_low": 2.0, "sequence_high": 1.0}), "sequence_low"),
        (LossConfig(name="tis", kwargs={"cap": 0.5}), "cap"),
        (LossConfig(name="decoupled_ppo", kwargs={"weight_cap": 1.0}), "weight_cap"),
        (LossConfig(name="decoupled_ppo", kwargs={"clip_low": 0.2}), "clip_low"),
        (LossConfig(name="policy_gradient", kwargs={"clip_low": 0.2}), "clip_low"),
    ],
)
def test_a_loss_that_cannot_be_built_is_a_config_error(config, word):
    with pytest.raises(ConfigError, match=word):
        build_loss(config)


def expected_scores(logits, targets, temperature):
    every = torch.log_softmax(logits.double() / temperature, -1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.fixture(params=[scores_module.CHUNK_ELEMENTS, 20], ids=["one chunk", "many chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(scores_module, "CHUNK_ELEMENTS", request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_and_their_gradient_are_those_of_log_softmax(chunk, temperature):
    torch.manual_seed(0)
    logits = (4 * torch.randn(17, 9)).requires_grad_()
    targets, pull, push = torch.randint(0, 9, (17,)), torch.randn(17), torch.randn(17)
    logprobs, entropies = token_scores(logits, targets, temperature=temperature)
    (logprobs @ pull + entropies @ push).backward()
    wanted = logits.detach().double().requires_grad_()
    wanted_logprobs, wanted_entropies = expected_scores(wanted, targets, temperature)
    (wanted_logprobs @ pull.double() + wanted_entropies @ push.double()).backward()
    torch.testing.assert_close(logprobs.double(), wanted_logprobs, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropies.double(), wanted_entropies, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad.double(), wanted.grad, atol=2e-6, rtol=1e-5)


def test_a_sure_policy_loses_no_precision():
    logits = torch.tensor([[100.0, 80.0, 60.0]])
    logprobs, entropies = token_scores(logits, torch.tensor([0]), temperature=1.0)
    wanted_logprobs, wanted_entropies = expected_scores(logits, torch.tensor([0]), 1.0)
    assert abs(logprobs.item() - wanted_logprobs.item()) < 1e-8
    assert abs(entropies.item() - wanted_entropies.item()) < 1e-8


def test_bfloat16_logits_are_scored_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(5, 300).bfloat16().requires_grad_()
    targets = torch.randint(0, 300, (5,))
    logprobs, entropies = token_scores(logits, targets, temperature=1.0)
    wanted, _ = expected_scores(logits.detach(), targets, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=0)
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad.dtype == torch.bfloat16


def test_no_rows_give_a_zero_with_a_gradient():
    logits = torch.randn(0, 5).requires_grad_()
    logprobs, _ = token_scores(logits, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    logprobs.sum().backward()
    assert logits.grad.shape == (0, 5)
