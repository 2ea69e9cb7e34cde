"""Mixtures of experts in the trainer: replayed routes, and what the router learns from them (20 s)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import policy_scenarios as scenario
import pytest
import torch
from policy_scenarios import assemble, gradients, mixed_batch, on_layout, relative_error
from support.ranks import Results
from torchtitan.models.common import Linear

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.experts import Experts
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import TrainingSample

EXPERTS, LAYERS = 8, 2


def routes_of(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[T, layers, 2] int16: two experts that no router has chosen, of each token and position others."""
    first = (7 * tokens[:, None] + 3 * positions[:, None] + 5 * np.arange(LAYERS)) % EXPERTS
    return np.stack([first, (first + 1 + tokens[:, None] % 7) % EXPERTS], -1).astype(np.int16)


def routed(sample: TrainingSample) -> TrainingSample:
    routes = routes_of(sample.token_ids, np.arange(len(sample.token_ids)))
    routes[-1] = -1
    return replace(sample, routes=routes, unrouted=2)


def routed_batch() -> SampleBatch:
    return SampleBatch.of(map(routed, mixed_batch().samples))


def replayed(model_path: str, data_parallel: int, tensor_parallel: int, **settings: Any) -> dict[str, Any]:
    """A step on routed samples; which experts computed each row, as hooks on the experts saw it."""
    config = scenario.trainer(data_parallel, tensor_parallel, optimizer=scenario.REVEALING, **settings)
    policy = scenario.updater(model_path, config)
    facts: dict[str, Any] = {"loaded": scenario.shards_of(policy), "wrong": 0, "rows": 0, "moved": 0}
    layers = [each for each in policy._policy.module.modules() if isinstance(each, Experts)]
    microbatches: list[Any] = []
    stock = policy._policy.module.forward

    def forward(tokens: Any, positions: Any, *rest: Any) -> Any:
        microbatches.append(routes_of(tokens[0].numpy(), positions[0].numpy()))
        return stock(tokens, positions, *rest)

    policy._policy.module.forward = forward
    seen: dict[int, dict[bytes, set[int]]] = {}

    for layer, module in enumerate(layers):

        def begin(module: Any, inputs: Any, layer: int = layer) -> None:
            seen[layer] = {}

        def end(module: Any, inputs: Any, output: Any, layer: int = layer) -> None:
            if module.routes is None:  # a dummy, which keeps another rank company
                return
            chosen = module.router(inputs[0][0]).topk(2).indices.numpy()
            for row, wanted, own in zip(inputs[0][0].detach().numpy(), microbatches[-1][:, layer], chosen, strict=True):
                facts["wrong"] += seen[layer][row.tobytes()] != set(wanted.tolist())
                facts["moved"] += set(own.tolist()) != set(wanted.tolist())
                facts["rows"] += 1

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
        for number, expert in enumerate(module.experts):

            def of_expert(expert: Any, inputs: Any, layer: int = layer, number: int = number) -> None:
                for row in inputs[0].detach().numpy():
                    seen[layer].setdefault(row.tobytes(), set()).add(number)

            expert.register_forward_pre_hook(of_expert)
    facts["metrics"] = scenario.train(policy, routed_batch())
    facts["weights"] = scenario.shards_of(policy)
    return facts


def spoilt(model_path: str, data_parallel: int, tensor_parallel: int) -> dict[str, str]:
    """What batches are refused with whose routes are none."""
    policy = scenario.updater(model_path, scenario.trainer(data_parallel, tensor_parallel))
    good = routed_batch().samples
    twice, outside = good[3].routes.copy(), good[3].routes.copy()
    twice[2, 1], outside[2, 1, 0] = 4, EXPERTS
    bad = {"none": None, "twice": twice, "outside": outside, "layers": good[3].routes[:, :1]}
    found = {}
    for name, routes in bad.items():
        changed = [replace(each, routes=routes) if each is good[3] else each for each in good]
        if name == "layers":
            changed = changed[3:4]
        try:
            found[name] = str(scenario.train(policy, SampleBatch.of(changed)))
        except TrainingError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> Results:
    model = make_tiny_policy(TinyPolicyConfig(architecture="qwen3_moe", seed=3), tmp_path_factory.mktemp("cache"))
    where = {"model_path": str(model)}
    scenarios = {
        "one": on_layout(replayed, (1, 1), **where),
        "again": on_layout(replayed, (1, 1), **where, activation_checkpointing="full"),
        "two": on_layout(replayed, (2, 1), **where),
        "spoilt": on_layout(spoilt, (1, 1), **where),
    }
    return Results(scenarios, scenarios, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", ["one", "again", "two"])
def test_every_row_is_computed_by_the_experts_that_were_recorded_and_no_other(results: Results, name: str) -> None:
    """In every packing, with shared prompts, on every rank, and when the backward pass computes it again."""
    for rank in results[name]:
        assert rank["rows"] > 100 and rank["moved"] > rank["rows"] / 2, "otherwise this compares nothing"
        assert rank["wrong"] == 0
        assert rank["metrics"]["unrouted_tokens"] == 2 * len(mixed_batch())


@pytest.mark.parametrize("name", ["again", "two"])
def test_gradients_of_replayed_routes_do_not_depend_on_ranks_or_recomputing(results: Results, name: str) -> None:
    alone, found = (
        gradients([rank["loaded"] for rank in ranks], [rank["weights"] for rank in ranks])
        for ranks in (results["one"], results[name])
    )
    assert assemble([rank["loaded"] for rank in results[name]]).keys() == alone.keys()
    assert relative_error(found, alone) < 1e-5
    assert all(np.abs(alone[f"model.layers.{layer}.mlp.gate.weight"]).max() > 0 for layer in range(LAYERS))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "does not say which experts it had"),
        *[(each, "no 2 different experts") for each in ("twice", "outside", "layers")],
    ],
)
def test_routes_that_cannot_be_are_refused(results: Results, name: str, words: str) -> None:
    assert words in results["spoilt"][0][name]


@pytest.mark.parametrize("normed", [True, False])
def test_the_routers_gradient_is_that_of_the_recorded_experts_shares(normed: bool) -> None:
    """Against float64: of share s and usefulness u = dL/d out . E(x), d L / d logit is s (u - sum s u) over the
    recorded experts where shares add up to 1, and p (u [recorded] - sum over the recorded p u) of all where not."""
    size, tokens, random = 16, 40, torch.Generator().manual_seed(5)
    inner = {"w1": (size, 24), "w2": (24, size), "w3": (size, 24)}
    linears = {name: Linear.Config(in_features=a, out_features=b) for name, (a, b) in inner.items()}
    router = Linear.Config(in_features=size, out_features=EXPERTS)
    layer = Experts.Config(**linears, router=router, chosen=2, normed=normed).build()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=random))
    x = torch.randn(1, tokens, size, generator=random)
    towards = torch.randn(tokens, size, generator=random)
    layer.routes = torch.from_numpy(routes_of(np.arange(tokens), np.arange(tokens))[:, 0].astype(np.int64))
    (layer(x)[0] * towards).sum().backward()

    rows, weights = (
        x[0].double().numpy(),
        {name: each.detach().double().numpy() for name, each in layer.named_parameters()},
    )
    logits = rows @ weights["router.weight"].T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    recorded = np.zeros_like(p)
    np.put_along_axis(recorded, layer.routes.numpy(), 1.0, 1)
    useful = np.zeros_like(p)
    for number in range(EXPERTS):
        w1, w2, w3 = (weights[f"experts.{number}.{name}.weight"] for name in ("w1", "w2", "w3"))
        gate = rows @ w1.T
        useful[:, number] = (gate / (1 + np.exp(-gate)) * (rows @ w3.T) @ w2.T * towards.double().numpy()).sum(1)
    share = recorded * p / (recorded * p).sum(1, keepdims=True) if normed else p
    mean = (recorded * share * useful).sum(1, keepdims=True)
    wanted = (share * (recorded * useful - mean)).T @ rows
    np.testing.assert_allclose(layer.router.weight.grad.numpy(), wanted, rtol=2e-4, atol=2e-5 * np.abs(wanted).max())
