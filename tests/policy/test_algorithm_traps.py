"""Mistakes that other frameworks made and mended, each as a test of every algorithm that could make it (4 s).

 1  a reward of the rollout that is lost where its last token was not sampled
 2  value estimates that reach across tokens that were not sampled: in test_critic
 3  a return that ends at the first observation
 4  a masked sample that leaks into value, gradient or a KL term
 5  a KL penalty whose gradient is none of a KL's
 6  a sum that is divided by what a rank or a micro-batch happens to hold
 7  GSPO with the length in its ratio or its weight, or an unbounded exponential
 8  CISPO that is PPO's clip after all
 9  nearly equal rewards divided by their deviation; a rollout without siblings
10  advantages standardized twice; entropies and logprobs at another temperature: in test_losses
11  a clip share that counts something else
12  what was recorded when a token was sampled cuts its gradient: in test_losses, for supports; no router is replayed
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_oracles import rollout
from test_algorithms import CREDIT, LOSSES, computed, function, moments, objective_of, per_turn, plan_of, rows, trained

from titan_rl.policy.algorithms.base import LARGEST_LOG_RATIO, credit_by_role
from titan_rl.policy.losses import kl_penalty

COMPARED = [name for name in CREDIT if name not in ("ppo", "reinforce_pp")]
"""Credit that compares rollouts within their group; REINFORCE++ compares within the step, in its loss, and PPO with
values."""

KEEP_ALL = {"cispo", "kl_cov", "reinforce", "sapo", "tis", "topr"}
"""Losses that bound or hold back a token's gradient, and remove none."""


def value_of(name, step, **kwargs):
    objective = objective_of(name, **kwargs)
    return computed(objective, trained(step, **moments(step)), objective.divisor(plan_of(step)))


@pytest.mark.parametrize("name", sorted(set(CREDIT) - {"distillation"}))
def test_trap_1_a_reward_is_not_lost_where_the_last_turn_sampled_nothing(name):
    group = [rollout(1.0, (3, b"a"), (2, b"b"), (0, b"c")), rollout(0.0, (3, b"a"), (2, b"d"), (0, b"e"))]
    group += [rollout(0.0, (3, b"a"))] * 2
    kwargs = {"k": 2} if name == "pass_at_k" else {}
    credit = per_turn(function(name, "advantages")(group, **kwargs), group)
    assert credit[0] > 0
    assert credit[1] > 0
    assert credit[0] > credit[3]


def test_trap_3_reinforce_pp_returns_the_whole_reward_across_observations():
    group = [rollout(0.7, *[(2, bytes([turn]))] * 5) for turn in range(2)]
    assert function("reinforce_pp", "advantages")(group) == [0.7, 0.7]


@pytest.mark.parametrize("name", LOSSES)
def test_trap_4_a_masked_sample_leaks_into_nothing(name):
    """Whatever its tokens hold; it counts in the divisor."""
    step = rows(5, far=False, spread=[0.05])
    objective = objective_of(name, sequence_low=0.5, sequence_high=2.0)
    divisor = objective.divisor(plan_of(step))
    numbers = moments(step)
    worst = [[(-math.inf, -1.0, 1e30)] * 3, [(-1.0, -90.0, -1e30)]]
    alone = computed(objective, trained(step, **numbers), divisor)
    beside = computed(objective, trained(worst + step, **numbers), divisor)
    assert beside[0] == alone[0]
    assert not beside[1][:4].any()
    assert torch.equal(beside[1][4:], alone[1])


@pytest.mark.parametrize("name", LOSSES)
def test_trap_4_nothing_is_left_and_nothing_crashes(name):
    step = [[(-1.0, -60.0, 1.0)] * 2, [(-1.0, -60.0, -1.0)]]
    loss, metrics = objective_of(name, sequence_high=2.0)(tokens := trained(step, **moments(step)))
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    assert loss.item() == 0
    assert not gradient.any()
    assert metrics["masked_share"] == 3
    assert metrics["clip_share"] == 0


@pytest.mark.parametrize(("estimator", "reverse"), [("k1", False), ("k2", False), ("k3", True)])
def test_trap_5_the_gradient_of_a_kl_penalty_is_that_of_a_kl(estimator, reverse):
    """In expectation over five tokens, near and far from the reference; of the other direction for k3."""
    for scale in (0.01, 2.0):
        generator = torch.Generator().manual_seed(1)
        logits, other = scale * torch.randn(2, 5, generator=generator, dtype=torch.float64)
        now, reference = logits.requires_grad_().log_softmax(0), other.log_softmax(0)
        penalty = kl_penalty(estimator, now, reference, torch.ones(5))
        divergence = (now.exp() * (now - reference)).sum()
        of = (reference.exp() * (reference - now)).sum() if reverse else divergence
        found, expected = (
            torch.autograd.grad(each, logits, retain_graph=True)[0]
            for each in ((now.exp().detach() * penalty).sum(), of)
        )
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-14)
        if estimator != "k2":
            assert (now.exp() * penalty).sum().item() == pytest.approx(divergence.item())


@pytest.mark.parametrize("name", LOSSES)
def test_trap_6_a_step_twice_over_is_the_same_step(name):
    step = rows(7, far=False)
    once, twice = value_of(name, step), value_of(name, step + step)
    assert twice[0] == pytest.approx(once[0], rel=1e-12)
    assert torch.allclose(2 * twice[1], once[1].repeat(2), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_trap_7_log_ratios_of_100_and_minus_100_are_a_ratio_of_1(name):
    value, gradient, clipped = value_of(name, [[(-0.5, -100.5, 2.0), (-100.5, -0.5, 2.0)]])
    assert value == pytest.approx(-2.0)
    assert gradient.tolist() == pytest.approx([-1.0, -1.0])
    assert clipped == 0


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo"])
def test_trap_7_an_answer_does_not_weigh_by_its_length(name):
    token = (-1.0, -1.0001, 2.0)
    values = [value_of(name, [[token] * length])[0] for length in (1, 10)]
    assert values[0] == pytest.approx(values[1])


def test_trap_8_cispo_keeps_the_gradient_of_a_token_beyond_its_clip():
    value, gradient, clipped = value_of("cispo", [[(-0.5, -8.5, 2.0), (-8.5, -0.5, 2.0)]])
    assert gradient.tolist() == pytest.approx([-5.0, -math.exp(-8)])
    assert clipped == 1


@pytest.mark.parametrize("name", COMPARED)
def test_trap_9_nearly_equal_rewards_do_not_explode(name):
    for rewards in [[1e8 + 1, 1e8, 1e8, 1e8], [0.1 + 0.2, 0.3, 0.3], [1e-300, 0.0, 0.0], [1.0, 1.0 + 1e-15]]:
        group = [rollout(each) for each in rewards]
        credit = per_turn(function(name, "advantages")(group), group)
        assert all(abs(each) <= len(rewards) for each in credit)


@pytest.mark.parametrize("name", COMPARED)
def test_trap_9_equal_rewards_give_exactly_0(name):
    """A rollout without siblings too."""
    for reward in (0.0, 1.0, 0.1, -0.3, 1e8 + 0.1, 1e-9):
        for count in (1, 2, 3, 7, 10):
            group = [rollout(reward, (3, b"a"))] * count
            assert set(per_turn(function(name, "advantages")(group), group)) == {0.0}, (reward, count)


@pytest.mark.parametrize("name", CREDIT)
def test_a_player_is_not_paid_for_what_the_other_one_won(name):
    """Each role's credit is what it would be if its turns and its reward were all there is."""
    won, roles = [1.0, -1.0, 1.0, 1.0, -1.0], ("first", "second")
    group = [
        rollout(each, *((1, b"%d" % turn, 0.0, roles[turn % 2]) for turn in range(3)), first=each, second=-each)
        for each in won
    ]
    credit = credit_by_role(group, function(name, "advantages"))
    for role, sign in zip(roles, (1, -1), strict=True):
        alone = [
            rollout(sign * each, *((1, turn.prompt.tobytes()) for turn in whole.turns if turn.role == role))
            for each, whole in zip(won, group, strict=True)
        ]
        found = [x for turns in credit for x, turn in zip(turns, group[0].turns, strict=True) if turn.role == role]
        assert found == per_turn(function(name, "advantages")(alone), alone)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"clip_cov", "kl_cov"}))
def test_trap_10_a_loss_does_not_standardize_again(name):
    """Twice the advantages is twice the gradient; REINFORCE++, whose loss does standardize, does not notice. (The
    covariances have limits, which is their point.)"""
    step = rows(9)
    double = [[(a, b, 2 * c) for a, b, c in sample] for sample in step]
    once, twice = value_of(name, step), value_of(name, double)
    assert torch.allclose(twice[1], once[1] * (1 if name == "reinforce_pp" else 2), rtol=1e-7, atol=1e-14)
    assert once[2] == twice[2]


def test_trap_10_a_step_of_equal_advantages_is_standardized_to_0():
    step = [[(-1.0, -1.1, 0.1)] * 3, [(-1.0, -0.9, 0.1)] * 7]
    for dtype in (torch.float32, torch.float64):
        tokens = trained(step, dtype, **moments(step))
        loss, _ = objective_of("reinforce_pp")(tokens)
        assert loss.item() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_trap_11_the_clip_share_counts_what_lost_its_gradient(name):
    """Nothing else, and where a gradient is kept it is not 0. Without an advantage there is none to lose. (SAPO's gate
    is flat to the last bit far away.)"""
    for seed in range(5):
        far = 3 if name == "sapo" else LARGEST_LOG_RATIO
        near = [[token for token in sample if abs(token[0] - token[1]) < far] for sample in rows(seed)]
        step = [sample for sample in near if sample]
        tokens = trained(step, **moments(step))
        gains, bounded = function(name, "loss")(tokens)
        (gradient,) = torch.autograd.grad(gains.sum(), tokens.logprobs)
        pushes = (tokens.advantages != 0) | (name == "reinforce_pp")
        lost = torch.zeros_like(pushes) if name in KEEP_ALL else bounded
        assert torch.equal((gradient == 0) & pushes, lost & pushes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_no_ratio_makes_a_value_or_a_gradient_that_is_not_finite(name, dtype):
    """e^100 and e^-100, of good and bad tokens, of answers and beside ordinary tokens; probabilities of exactly 1."""
    for advantage in (1.0, -1.0, 0.0):
        for token in [(0.0, -100.0), (-100.0, 0.0), (-1e-8, -100.0), (0.0, 0.0), (-1000.0, 0.0)]:
            for beside in ([], [(-1.0, -1.1, advantage)], [(0.0, 0.0, advantage)] * 3):
                step = [[(*token, advantage)] * 4, [*beside, (*token, advantage), *beside], [(-1.0, -1.0, 0.5)]]
                tokens = trained(step, dtype, **moments(step))
                loss, _ = objective_of(name)(tokens)
                (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
                assert math.isfinite(loss.item())
                assert gradient.isfinite().all()
                assert gradient.square().sum().isfinite()


@pytest.mark.parametrize("name", LOSSES)
def test_samples_need_not_be_numbered_without_gaps(name):
    tokens = trained(step := rows(2), **moments(step))
    apart = replace(tokens, samples=3 * tokens.samples + 2)
    assert objective_of(name)(apart)[0].item() == objective_of(name)(tokens)[0].item()
