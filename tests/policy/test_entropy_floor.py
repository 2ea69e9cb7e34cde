"""The entropy below which a token gets a bonus, on several ranks and when a run goes on. About 20 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_scenarios import batch_of, on_layout, train, trainer, updater
from support.ranks import Results, cells

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.policy.algorithms.base import TrainedTokens
from titan_rl.policy.config import LossConfig, OptimizerConfig, TinyPolicyConfig
from titan_rl.policy.losses import LARGEST_BONUS, build_loss
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.state_copies import StateCopies
from titan_rl.types import PolicyVersion

STEPS, TOTAL, BONUS = 5, 100, 0.01
LAYOUTS = {"one": (1, 1), "two": (2, 1), "tensor": (1, 2)}
nats = st.floats(0.01, 20)


def bonuses_of(entropies: Sequence[float], floor: float, **kwargs: float) -> list[float]:
    """The weight of each token's entropy in a loss, which is what its gradient says."""
    count = len(entropies)
    given_entropies, zeros = torch.tensor(entropies, dtype=torch.float64, requires_grad=True), torch.zeros(count)
    tokens = TrainedTokens(
        logprobs=torch.zeros(count, requires_grad=True),
        entropies=given_entropies,
        behaviour_logprobs=zeros,
        advantages=zeros,
        samples=torch.arange(count),
    )
    loss, metrics = build_loss(LossConfig(kwargs={"clip_low": 0.2, "clip_high": 0.2, **kwargs}))(tokens, floor)
    loss.backward()
    found = (-given_entropies.grad).tolist() if given_entropies.grad is not None else [0.0] * count
    assert metrics["entropy_bonus"].item() == pytest.approx(sum(found))
    return found


@given(st.lists(nats, min_size=1, max_size=8), nats, st.sampled_from([0.0, 0.1]))
def test_a_token_gets_a_bonus_for_what_is_missing_to_the_floor_whatever_others_have(entropies, floor, bonus):
    found = bonuses_of(entropies, floor, entropy_bonus=bonus)
    assert found == pytest.approx([bonus + LARGEST_BONUS * max(0.0, 1 - each / floor) for each in entropies])
    assert bonuses_of(entropies[:1], floor, entropy_bonus=bonus) == pytest.approx(found[:1])


@given(st.lists(nats, min_size=1, max_size=8), nats, st.sampled_from([0.25, 2.0, 64.0]))
def test_it_is_the_same_for_vocabularies_of_any_size(entropies, floor, scale):
    larger = bonuses_of([scale * each for each in entropies], scale * floor)
    assert larger == pytest.approx(bonuses_of(entropies, floor))


@pytest.mark.parametrize("floor", [0.0, -1.0])
def test_without_a_floor_only_the_constant_bonus_is_there(floor):
    assert bonuses_of([0.0, 1.0], floor) == [0, 0] and bonuses_of([0.0, 1.0], floor, entropy_bonus=0.25) == [0.25] * 2


def praised(step: int) -> SampleBatch:
    """Every token is right, so entropy falls."""
    return SampleBatch.of(replace(sample, advantages=1.0) for sample in batch_of(step).samples)


def steps(model_path: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """Reports of a run, and of its last step by those that go on from what was saved before it."""

    def new() -> Any:
        loss = LossConfig(name="reinforce", kwargs={"entropy_bonus": BONUS, "entropy_floor": 1.0})
        config = trainer(data_parallel, tensor_parallel, loss=loss, optimizer=OptimizerConfig(lr=3e-2))
        return updater(model_path, config, total_steps=TOTAL)

    policy, result = new(), {}
    reports = [train(policy, praised(step)) for step in range(STEPS - 1)]
    directory = Path(model_path).with_name(f"state{data_parallel}{tensor_parallel}")
    policy.begin_save(directory)
    policy.finish_save()
    rank, ranks = torch.distributed.get_rank(), data_parallel * tensor_parallel
    copies = StateCopies(owner_pid=1, rank=rank, ranks=ranks, directory=directory)
    policy.copy_state(copies)
    result["run"] = [*reports, train(policy, praised(STEPS - 1))]
    for name in ("files", "copies"):
        resumed = new()
        if name == "files":
            resumed.restore(directory, 0)
        else:
            resumed.restore_from_copies(copies, PolicyVersion(0, STEPS - 1))
        result[name] = train(resumed, praised(STEPS - 1))
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("entropy") / "policy")
    scenarios = {name: on_layout(steps, layout, model_path=str(path)) for name, layout in LAYOUTS.items()}
    return Results(scenarios, ["one", "two"], tmp_path_factory.mktemp("ranks"))


every_layout = pytest.mark.parametrize("layout", cells(LAYOUTS, ci=["one", "two"]))


@every_layout
def test_tokens_get_more_the_further_entropy_falls_the_same_on_every_rank(results, layout):
    run, *others = (rank["run"] for rank in results[layout])
    entropies, bonuses = ([report[name] for report in run] for name in ("entropy", "entropy_bonus"))
    assert bonuses[0] == pytest.approx(BONUS), "there is no floor before anything is known"
    for step in range(1, STEPS):  # the mean of a convex function
        missing = 1 - entropies[step] / entropies[0] / (1 - step / TOTAL)
        assert bonuses[step] >= BONUS + LARGEST_BONUS * missing - 1e-5
    assert bonuses[-1] > 3 * BONUS
    assert all([report["entropy_bonus"] for report in other] == bonuses for other in others)
    if layout != "one":
        assert bonuses == pytest.approx([report["entropy_bonus"] for report in results["one"][0]["run"]], rel=1e-3)


@every_layout
def test_a_run_goes_on_with_the_floor_that_it_had(results, layout):
    for rank in results[layout]:
        assert rank["files"] == rank["copies"] == rank["run"][-1]
