"""A critic's values and what is made of them, against float64 and on several ranks. About 30 s on two free cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_scenarios import assemble, batch_of, on_layout, shards_of, train, trainer, transformer, updater
from support.ranks import Results, cells

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.policy.config import CriticConfig, LossConfig, OptimizerConfig, TinyPolicyConfig
from titan_rl.policy.critic import generalized_advantages
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.packing import split_by_group
from titan_rl.policy.state_copies import StateCopies
from titan_rl.types import NO_VERSION, PolicyVersion

TEMPERATURE, BATCHES = 0.7, 3
LR, EPS = 0.1, 1.0
BY_GRADIENT = OptimizerConfig(lr=LR, betas=(0.0, 0.0), eps=EPS, max_grad_norm=0.0)
CRITIC = CriticConfig(coefficient=0.5, lr=0.05, clip=0.1, discount=0.9, gae_lambda=0.8)
LAYOUTS = {"one": (1, 1), "two": (2, 1), "four": (2, 2)}
OF_CI = ["one", "four"]
every_layout = pytest.mark.parametrize("layout", cells(LAYOUTS, ci=OF_CI))

numbers = st.floats(-10, 10)
steps = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)
shares = st.floats(0, 1)


def by_definition(credit: list[float], values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """Equation 16 as it stands there."""
    count, found = len(credit), []
    if not count:
        return []
    later = [*values[1:], 0.0]
    rewards = [here - after for here, after in zip(credit, [*credit[1:], 0.0], strict=True)]
    errors = [r + discount * after - v for r, v, after in zip(rewards, values, later, strict=True)]
    for t in range(count):
        found.append(sum((discount * gae_lambda) ** (k - t) * errors[k] for k in range(t, count)))
    return found


@given(steps, shares, shares)
def test_advantages_are_those_of_the_definition(given_steps, discount, gae_lambda):
    credit, values = map(list, zip(*given_steps, strict=True))
    found = generalized_advantages(np.array(credit), np.array(values), discount=discount, gae_lambda=gae_lambda)
    np.testing.assert_allclose(found, by_definition(credit, values, discount, gae_lambda), atol=1e-9)


@given(st.lists(numbers, min_size=1, max_size=20), numbers, shares, shares)
def test_trap_2_a_reward_for_the_rollout_arrives_at_the_last_trained_token_whole(values, reward, discount, gae_lambda):
    """However little the tokens before see of it."""
    credit = np.full(len(values), reward)
    found = generalized_advantages(credit, np.array(values), discount=discount, gae_lambda=gae_lambda)
    assert found[-1] == pytest.approx(reward - values[-1], abs=1e-12)


@given(steps)
def test_without_discount_and_bias_an_advantage_is_what_came_less_what_was_expected(given_steps):
    credit, values = map(np.array, zip(*given_steps, strict=True))
    found = generalized_advantages(credit, values, discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(found, credit - values, atol=1e-9)


def credited(step: int) -> SampleBatch:
    """A batch in which some tokens have other credit than those before, as where turns have rewards."""
    rng, samples = np.random.default_rng(step), list(batch_of(step).samples)
    for place in range(0, len(samples), 3):
        mask = samples[place].loss_mask & (rng.random(len(samples[place].loss_mask)) < 0.7)  # and some are not sampled
        credit = np.where(mask, rng.standard_normal(len(mask)), 0.0).astype(np.float32)
        logprobs = np.where(mask, samples[place].logprobs, 0).astype(np.float32)
        versions = np.where(mask, samples[place].versions, NO_VERSION)
        samples[place] = replace(
            samples[place], loss_mask=mask, advantages=credit, logprobs=logprobs, versions=versions
        )
    return SampleBatch.of(samples)


def critic_steps(model_path: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    def new() -> Any:
        loss = LossConfig(name="ppo")
        config = trainer(data_parallel, tensor_parallel, critic=CRITIC, loss=loss, optimizer=BY_GRADIENT, minibatches=2)
        return updater(model_path, config, temperature=TEMPERATURE)

    policy = new()
    result: dict[str, Any] = {"loaded": shards_of(policy)}
    result["metrics"] = [train(policy, credited(step)) for step in range(BATCHES)]
    result["shards"], result["head"] = shards_of(policy), policy._critic.tensors["head"].numpy().copy()

    directory, again = Path(model_path).with_name(f"state{data_parallel}{tensor_parallel}"), new()
    for step in range(BATCHES - 1):
        train(again, credited(step))
    again.begin_save(directory)
    again.finish_save()
    rank, ranks = torch.distributed.get_rank(), data_parallel * tensor_parallel
    copies = StateCopies(owner_pid=1, rank=rank, ranks=ranks, directory=directory)
    again.copy_state(copies)
    for name in ("files", "copies"):
        resumed = new()
        if name == "files":
            resumed.restore(directory, 0)
        else:
            resumed.restore_from_copies(copies, PolicyVersion(0, BATCHES - 1))
        train(resumed, credited(BATCHES - 1))
        result[name] = shards_of(resumed), resumed._critic.tensors["head"].numpy().copy()
    return result


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def results(path, tmp_path_factory) -> Results:
    scenarios: dict[Any, Any] = {
        name: on_layout(critic_steps, layout, model_path=str(path)) for name, layout in LAYOUTS.items()
    }
    return Results(scenarios, OF_CI, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def by_hand(path: Path) -> tuple[dict[str, np.ndarray], np.ndarray, set[str]]:
    """Weights and head after all batches in float64, one sample at a time, and what happened to values and ratios."""
    model = transformer(path).double()
    head = torch.zeros(model.config.hidden_size + 1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.AdamW([head], lr=CRITIC.lr, weight_decay=0.0)
    seen = set()

    def scored(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and values of its trained tokens."""
        tokens, mask = torch.from_numpy(sample.token_ids.astype(np.int64)), torch.from_numpy(sample.loss_mask[1:])
        rows = model.model(tokens[None]).last_hidden_state[0, :-1][mask]
        logprobs = torch.log_softmax(model.lm_head(rows) / TEMPERATURE, -1)
        return logprobs.gather(1, tokens[1:][mask][:, None])[:, 0], rows @ head[:-1] + head[-1]

    for step in range(BATCHES):
        batch = credited(step)
        with torch.no_grad():
            before = [scored(sample) for sample in batch.samples]
        credit = [sample.advantages[sample.loss_mask].astype(np.float64) for sample in batch.samples]
        advantages = [
            np.array(by_definition(list(given), values.tolist(), CRITIC.discount, CRITIC.gae_lambda))
            for given, (_, values) in zip(credit, before, strict=True)
        ]
        returns = [raw + values.numpy() for raw, (_, values) in zip(advantages, before, strict=True)]
        every = np.concatenate(advantages)
        for places in split_by_group(batch, 2):
            total = torch.zeros((), dtype=torch.float64)
            for place in places:
                logprobs, values = scored(batch.samples[place])
                ratio = (logprobs - before[place][0]).exp()
                gain = torch.from_numpy((advantages[place] - every.mean()) / every.std())
                free, held = ratio * gain, ratio.clamp(0.8, 1.2) * gain
                wanted, old = torch.from_numpy(returns[place]), before[place][1]
                near = old + (values - old).clamp(-CRITIC.clip, CRITIC.clip)
                errors = torch.stack([(values - wanted).square(), (near - wanted).square()])
                total = total - free.minimum(held).sum() + CRITIC.coefficient / 2 * errors.amax(0).sum()
                seen |= {"clipped ratio"} if bool((held < free).any()) else set()
                seen |= {"clipped value"} if bool((errors[1] > errors[0]).any()) else set()
            model.zero_grad()
            adam.zero_grad()
            (total / sum(int(batch.samples[place].loss_mask.sum()) for place in places)).backward()
            torch.nn.utils.clip_grad_norm_([head], 1.0)
            adam.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad / (parameter.grad.abs() + EPS)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return weights, head.detach().numpy(), seen


@every_layout
def test_policy_and_head_are_those_of_float64_on_every_layout(results, by_hand, layout):
    wanted, head, seen = by_hand
    assert seen == {"clipped ratio", "clipped value"}
    ranks = results[layout]
    loaded = assemble([rank["loaded"] for rank in ranks])
    trained = assemble([rank["shards"] for rank in ranks])
    assert trained.keys() == wanted.keys(), "the head is no tensor of the policy"
    for rank in ranks:
        assert np.linalg.norm(rank["head"] - head) < 1e-3 * np.linalg.norm(head)
        np.testing.assert_array_equal(rank["head"], ranks[0]["head"])
    for name, exact in wanted.items():
        error, change = np.linalg.norm(trained[name] - exact), np.linalg.norm(exact - loaded[name])
        assert error < 1e-3 * change + 2e-7 * np.linalg.norm(exact), name


@every_layout
@pytest.mark.parametrize("way", ["files", "copies"])
def test_a_run_that_goes_on_from_its_state_has_the_same_bits(results, layout, way):
    for rank in results[layout]:
        shards, head = rank[way]
        np.testing.assert_array_equal(head, rank["head"])
        for one, other in zip(shards, rank["shards"], strict=True):
            np.testing.assert_array_equal(one[1], other[1])


@every_layout
def test_it_says_how_much_of_the_returns_the_values_knew(results, layout):
    for rank in results[layout]:
        first, *_ = rank["metrics"]
        assert first["value_explained"] == pytest.approx(0.0, abs=1e-6), "values begin at 0"
        alone = results["one"][0]["metrics"]
        for here, there in zip(rank["metrics"], alone, strict=True):
            assert here["value_explained"] == pytest.approx(there["value_explained"], abs=1e-3)
