"""Each algorithm against the oracle of its paper, however a step is cut, and on two solved problems (10 s)."""

from __future__ import annotations

import importlib
import inspect
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import algorithm_oracles as oracles
import numpy as np
import pytest
import torch
from algorithm_oracles import rollout
from plans import plan_of_lengths

from titan_rl.policy import algorithms
from titan_rl.policy.algorithms.base import AGGREGATIONS, GradedRollout, TrainedTokens
from titan_rl.policy.losses import Objective

LOSSES = sorted(algorithms.catalogue("loss"))
CREDIT = sorted(algorithms.catalogue("advantages"))
OF_WHOLE_SAMPLES = {"gmpo", "gspo", "mis", "topr"}
"""Their papers give all tokens of an answer one advantage."""

Rows = list[list[tuple[float, ...]]]
"""Of each sample and token: logprob, behaviour logprob, advantage, and where a batch is trained in several optimizer
steps the logprob before the first; float32 numbers."""


def function(name: str, kind: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"titan_rl.policy.algorithms.{name}"), kind)


def rows(
    seed: int, *, spread: Sequence[float] = (0.0002, 0.02, 0.25, 1.5), far: bool = True, vary: bool = False
) -> Rows:
    """Samples of 1 to 12 tokens: ratios at 1, about the clips and far outside; advantages of all three signs."""
    draw = random.Random(seed)
    made: Rows = []
    for number in range(16):
        advantage = draw.choice([0.0, draw.gauss(0, 1), draw.gauss(0, 1), draw.gauss(0, 3)])
        sample = []
        for _ in range(draw.choice([1, 1, 2, 3, 6, 12])):
            log_ratio = draw.gauss(0, spread[number % len(spread)])
            if far and draw.random() < 0.05:
                log_ratio = draw.choice([-40.0, -8.0, 8.0, 40.0])
            behaviour = min(-0.01, -0.01 - log_ratio) - draw.expovariate(1)
            values = (behaviour + log_ratio, behaviour, draw.gauss(0, 1) if vary else advantage)
            sample.append(tuple(float(np.float32(value)) for value in values))
        made.append(sample)  # type: ignore[arg-type]
    return made


def trained(step: Rows, dtype: torch.dtype = torch.float64, entropy: float = 2.0, **numbers: float) -> TrainedTokens:
    flat = [token for sample in step for token in sample]
    logprobs, behaviour, advantages, *before = (torch.tensor(column, dtype=dtype) for column in zip(*flat, strict=True))
    return TrainedTokens(
        logprobs=logprobs.requires_grad_(),
        entropies=torch.full((len(flat),), entropy, dtype=dtype, requires_grad=True),
        behaviour_logprobs=behaviour,
        advantages=advantages,
        samples=torch.tensor([number for number, sample in enumerate(step) for _ in sample], dtype=torch.int64),
        proximal_logprobs=before[0] if before else None,
        **numbers,
    )


def moments(step: Rows) -> dict[str, float]:
    values = [token[2] for sample in step for token in sample]
    return {"advantage_mean": statistics.fmean(values), "advantage_std": statistics.pstdev(values)}


def plan_of(step: Rows, ranks: int = 1, budget: int = 1000):
    return plan_of_lengths([len(sample) for sample in step], group_size=4, ranks=ranks, budget=budget)


def objective_of(name: str, **kwargs: Any) -> Objective:
    of_every = {key: kwargs.pop(key) for key in list(kwargs) if key in inspect.signature(Objective).parameters}
    return Objective(function=function(name, "loss"), kwargs=kwargs, **of_every)


def computed(objective: Objective, tokens: TrainedTokens, divisor: int) -> tuple[float, torch.Tensor, int]:
    loss, metrics = objective(tokens)
    (gradient,) = torch.autograd.grad(loss / divisor, tokens.logprobs, allow_unused=True)
    return loss.item() / divisor, gradient, int(metrics["clip_share"])


def by_oracle(name: str, step: Rows, **of_every: float) -> tuple[float, list[float], int]:
    center, scale = moments(step).values() if name == "reinforce_pp" else (0.0, 1.0 - 1e-8)
    scalars = [[torch.tensor(t[0], dtype=torch.float64, requires_grad=True) for t in sample] for sample in step]
    tokens = [
        [
            oracles.Token(scalar, t[1], (t[2] - center) / (scale + 1e-8), *t[3:])
            for scalar, t in zip(sample, values, strict=True)
        ]
        for sample, values in zip(scalars, step, strict=True)
    ]
    value, lost = oracles.naive_objective(name, tokens, **of_every)
    leaves = [scalar for sample in scalars for scalar in sample]
    found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
    return value.item(), [0.0 if each is None else each.item() for each in found], lost


def close(found: Sequence[float] | torch.Tensor, expected: Sequence[float], tolerance: float) -> None:
    for number, (a, b) in enumerate(zip(list(found), expected, strict=True)):
        assert abs(float(a) - b) <= tolerance * max(1.0, abs(b)), (number, float(a), b)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_papers_equation(name, dtype, tolerance):
    for seed in range(6):
        step = rows(seed, vary=seed > 3 and name not in OF_WHOLE_SAMPLES)
        objective, numbers = objective_of(name), moments(step)
        value, gradient, lost = by_oracle(name, step)
        found = computed(objective, trained(step, dtype, **numbers), objective.divisor(plan_of(step)))
        size = sum(abs(t[0] * each) for t, each in zip(sum(step, []), gradient, strict=True))
        close([found[0]], [value], tolerance * max(1.0, size / max(1.0, abs(value))))
        close(found[1], gradient, tolerance)
        assert found[2] == lost


@pytest.mark.parametrize("name", sorted(oracles.VARIANTS))
def test_a_loss_is_its_papers_equation_with_other_arguments(name, monkeypatch):
    kwargs, gains_of = oracles.VARIANTS[name]
    monkeypatch.setitem(oracles.LOSSES, name, (oracles.LOSSES[name][0], gains_of))
    for seed in range(4):
        step = rows(seed)
        objective = objective_of(name, **kwargs)
        found = computed(objective, trained(step), objective.divisor(plan_of(step)))
        value, gradient, lost = by_oracle(name, step)
        close([found[0], *found[1]], [value, *gradient], 1e-10)
        assert found[2] == lost


def later_in_its_batch(step: Rows, seed: int) -> Rows:
    """The same tokens, when earlier optimizer steps have moved the policy: by little, and beyond the clips."""
    draw = random.Random(seed)
    return [
        [(*t, float(np.float32(min(-1e-4, t[0] + draw.gauss(0, draw.choice([0.01, 0.3])))))) for t in sample]
        for sample in step
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_only_ppo_asks_for_the_policy_before_the_batch(name):
    seen = set()
    for seed in range(6):
        step = later_in_its_batch(rows(seed), seed)
        objective, numbers = objective_of(name), moments(step)
        value, gradient, lost = by_oracle(name, step)
        found = computed(objective, trained(step, **numbers), objective.divisor(plan_of(step)))
        size = sum(abs(t[0] * each) for t, each in zip(sum(step, []), gradient, strict=True))
        close([found[0]], [value], 1e-10 * max(1.0, size / max(1.0, abs(value))))
        close(found[1], gradient, 1e-10)
        assert found[2] == lost
        before = computed(objective, trained([[t[:3] for t in s] for s in step], **numbers), 1)
        seen.add(torch.equal(before[1], computed(objective, trained(step, **numbers), 1)[1]))
    assert seen == {name not in ("decoupled_ppo", "ppo")}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_bonus_the_band_and_the_aggregation_are_the_same_around_every_loss(name, aggregation, monkeypatch):
    monkeypatch.setitem(oracles.LOSSES, name, (aggregation, oracles.LOSSES[name][1]))
    step = rows(11)
    objective = objective_of(
        name, aggregation=aggregation, entropy_bonus=0.2, entropy_decay=0.5, sequence_low=0.8, sequence_high=1.3
    )
    tokens = trained(step, progress=0.25, **moments(step))
    value, gradient, lost = by_oracle(name, step, bonus=0.1, entropy=2.0, low=0.8, high=1.3)
    found = computed(objective, tokens, objective.divisor(plan_of(step)))
    close([found[0], *found[1]], [value, *gradient], 1e-10)
    assert found[2] == lost


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_the_same_however_a_step_is_cut_and_ordered(name):
    step = rows(3, far=False)
    objective = objective_of(name)

    def gradients(order: Sequence[int], ranks: int, budget: int) -> dict[int, torch.Tensor]:
        ordered = [step[index] for index in order]
        plan = plan_of(ordered, ranks, budget)
        found = {}
        for microbatch in (each for rank in plan.microbatches for each in rank if each):
            part = [ordered[index] for index in microbatch]
            _, gradient, _ = computed(objective, trained(part, **moments(step)), objective.divisor(plan))
            pieces = gradient.split([len(sample) for sample in part])
            found |= {order[index]: piece for index, piece in zip(microbatch, pieces, strict=True)}
        return found

    whole = gradients(range(len(step)), 1, 1000)
    assert len(whole) == len(step)
    for seed, (ranks, budget) in enumerate([(1, 12), (1, 20), (2, 12), (3, 15)]):
        order = random.Random(seed).sample(range(len(step)), len(step))
        cut = gradients(order, ranks, budget)
        for number, gradient in whole.items():
            assert torch.allclose(cut[number], gradient, rtol=1e-12, atol=1e-12)
        again = gradients(order, ranks, budget)
        assert all(torch.equal(cut[number], again[number]) for number in cut)


GROUPS = {
    "one": [rollout(1.0, (3, b"a"), right=1.0, style=0.5)],
    "right and wrong": [
        rollout(float(i % 3 == 0), (2 + i, b"a"), right=float(i % 3 == 0), style=0.5) for i in range(8)
    ],
    "one success": [rollout(float(i == 2), (3, b"a"), right=float(i == 2), style=0.1 * i) for i in range(5)],
    "two": [rollout(0.3, (1, b"a"), right=0.3, style=2.0), rollout(0.7, (4, b"a"), right=0.7, style=1.0)],
    "all wrong": [rollout(0.0, (i + 1, b"a"), right=0.0, style=0.0) for i in range(4)],
    "all right": [rollout(1.0, (i + 1, b"a"), right=1.0, style=-1.0) for i in range(4)],
    "negative": [rollout(-0.5 * i, (9 - i, b"a"), right=-float(i), style=float(i)) for i in range(6)],
    "huge": [rollout(1e12 * (i - 2) ** 2, (i + 1, b"a"), right=1e12 * i, style=1e-9 * i) for i in range(5)],
    "of many turns": [
        rollout(
            float(i % 2) + 0.25 * i,
            *((1 + (i * j) % 4, bytes([97 + (i * j) % 3])) for j in range(1 + i % 4)),
            right=float(i % 2),
            style=0.25 * i,
        )
        for i in range(7)
    ],
    "rewarded turns": [
        rollout(
            float(i % 2) + sum(0.25 * ((i * j) % 3) for j in range(1 + i % 3)),
            *((1 + j, bytes([97 + (i + j) % 2]), 0.25 * ((i * j) % 3)) for j in range(1 + i % 3)),
            right=float(i % 2),
            style=0.5 * i,
        )
        for i in range(6)
    ],
    "two players": [
        rollout(
            won,
            *((1, bytes([97 + j]), 0.0, ("first", "second")[j % 2]) for j in range(2 + i % 2)),
            right=won,
            style=0.0,
            first=won,
            second=-won,
        )
        for i, won in enumerate([1.0, -2.0, 2.0, -1.0, 1.0])
    ],
    "helpers": [  # one of them is graded, and not everywhere there
        rollout(
            float(i % 2) + 0.5 * (i > 1),
            (2, b"a", 0.0, "writer"),
            *[(1, bytes([97 + i]), 0.5, "helper"), (3, b"b", 0.0, "critic")] * (i > 1),
            right=float(i % 2),
            style=0.25 * i,
            **{"critic": 0.25 * i} if i in (2, 3) else {},
        )
        for i in range(5)
    ],
    "nothing sampled": [rollout(float(i), (0, b"a"), right=float(i), style=0.0) for i in range(3)],
}


def per_turn(credit: Sequence[Any], group: Sequence[GradedRollout]) -> list[float]:
    pairs = zip(credit, group, strict=True)
    return [x for c, g in pairs for x in ([float(c)] * len(g.turns) if np.ndim(c) == 0 else [float(x) for x in c])]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", CREDIT)
def test_credit_is_its_papers_equation(name, group):
    members = GROUPS[group]
    for kwargs, expected in oracles.CREDIT[name]:
        found = per_turn(function(name, "advantages")(members, **kwargs), members)
        assert len(found) == sum(len(each.turns) for each in members)
        close(found, per_turn(expected(members), members), 1e-10)


def test_every_algorithm_has_an_oracle():
    assert sorted(oracles.LOSSES) == LOSSES
    assert sorted(oracles.CREDIT) == CREDIT
    assert set(LOSSES) | set(CREDIT) == set(algorithms.catalogue())
    assert {name: objective_of(name).aggregation for name in LOSSES} == {
        name: aggregation for name, (aggregation, _) in oracles.LOSSES.items()
    }


def test_every_algorithm_says_what_it_is_in_a_short_file():
    lengths = []
    for name, text in algorithms.catalogue().items():
        parts = [re.search(rf"^{part} +\S", text, re.MULTILINE) for part in ("When", "Is", "Is not", "Differs", "Run")]
        assert all(parts), name
        lengths.append(len(Path(str(algorithms.__file__)).with_name(f"{name}.py").read_text().splitlines()))
    assert max(lengths) <= 150
    assert statistics.median(lengths) <= 60


def pairs() -> list[tuple[str, str]]:
    """Of every algorithm, credit and loss as its Run line pairs them; what that does not name is the default."""
    found = set()
    for name, text in algorithms.catalogue().items():
        named = dict(re.findall(r"--(rollout\.advantage|trainer\.loss)\.name (\w+)", text))
        if name != "distillation":  # the KL term teaches, not the credit
            found.add((named.get("rollout.advantage", "grpo"), named.get("trainer.loss", "grpo")))
        assert name in named.values() or name == "grpo", name
    return sorted(found)


def systematic(probabilities: torch.Tensor, count: int, offset: float) -> torch.Tensor:
    """Each outcome as often as expected, to one: the mean over them is the expectation, almost."""
    places = (torch.arange(count, dtype=torch.float64) + offset) / count
    return torch.searchsorted(probabilities.cumsum(0), places).clamp(max=len(probabilities) - 1)


@pytest.mark.parametrize("problem", ["bandit of five arms", "chain of two steps"])
@pytest.mark.parametrize(("credit", "loss"), pairs())
def test_the_best_policy_becomes_likelier_with_every_step(credit, loss, problem):
    """Ways are pairs of a first and a second choice, of which one is rewarded; the bandit has no second choice."""
    first, second = (5, 1) if problem.startswith("bandit") else (3, 3)
    best = (first - 1) * second + second // 2
    kwargs = {"k": 2} if credit == "pass_at_k" else {}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits = [
            0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((first,), (first, second))
        ]
        chances = []
        for _ in range(5):
            heads = [each.clone().requires_grad_() for each in logits]
            scores = [head.log_softmax(-1) for head in heads]
            ways = (scores[0][:, None] + scores[1]).flatten().exp().detach()
            chances.append(ways[best].item())
            drawn = systematic(ways, 150, (seed + 0.5) / 3)
            group = [
                rollout(float(way == best), *[(1, b"start"), (1, bytes([way // second]))][: 2 if second > 1 else 1])
                for way in drawn.tolist()
            ]
            turns = len(group[0].turns)
            advantages = torch.tensor(per_turn(function(credit, "advantages")(group, **kwargs), group))
            picked = torch.stack([scores[0][drawn // second], scores[1].flatten()[drawn]], 1)[:, :turns].flatten()
            objective = objective_of(loss)
            value, _ = objective(
                TrainedTokens(
                    logprobs=picked,
                    entropies=torch.zeros_like(picked),
                    behaviour_logprobs=picked.detach(),
                    advantages=advantages,
                    samples=torch.arange(len(group)).repeat_interleave(turns),
                    advantage_mean=advantages.mean().item(),
                    advantage_std=advantages.std(correction=0).item(),
                )
            )
            (value / len(group)).backward()
            logits = [head.detach() - 0.5 * (0 if head.grad is None else head.grad) for head in heads]
        assert all(later > earlier for earlier, later in zip(chances, chances[1:], strict=False)), chances
        assert not math.isnan(chances[-1])
