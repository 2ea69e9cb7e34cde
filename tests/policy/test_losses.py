"""Losses, each against the formula of its paper, the KL penalty, and token scores, on small tensors (5 s)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.supports import supports_of
from torch.distributed._tools.mem_tracker import MemTracker

from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.policy import token_scores as scores_module
from titan_rl.policy.algorithms import short_names
from titan_rl.policy.algorithms.base import TrainedTokens
from titan_rl.policy.config import LogprobAlarmConfig, LossConfig, WarmupConfig
from titan_rl.policy.losses import Objective, build_loss, kl_penalty
from titan_rl.policy.step_metrics import StepMetrics, logprob_alarm
from titan_rl.policy.token_scores import token_scores

SHORT_NAMES = sorted(short_names("loss"))


def loss_of(name: str, **kwargs: object) -> Objective:
    return build_loss(LossConfig(name=name, kwargs=kwargs))


def tokens_of(ratio: list[float], advantage: list[float]) -> TrainedTokens:
    """Tokens whose current logprob is -1 and whose behaviour logprob gives the ratio."""
    count = len(ratio)
    return TrainedTokens(
        logprobs=torch.full((count,), -1.0, requires_grad=True),
        entropies=torch.full((count,), 2.0, requires_grad=True),
        behaviour_logprobs=-1.0 - torch.tensor(ratio).log(),
        advantages=torch.tensor(advantage),
        samples=torch.zeros(count, dtype=torch.int64),
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
    batch = tokens_of([ratio], [advantage])
    loss, metrics = loss_of("grpo")(batch)
    loss.backward()
    assert batch.logprobs.grad.item() == pytest.approx(-advantage * ratio if pushes else 0.0)
    assert metrics["clip_share"].item() == (0 if pushes else 1)


@pytest.mark.parametrize(("done", "weight"), [(0.0, 0.1), (0.25, 0.05), (0.5, 0.0), (0.9, 0.0)])
def test_an_entropy_bonus_that_decays_is_gone_when_its_share_of_the_run_is_over(done, weight):
    entropies = torch.tensor([2.0, 0.5], requires_grad=True)
    batch = replace(tokens_of([1.0, 1.0], [0.0, 0.0]), entropies=entropies, progress=done)
    loss, _ = loss_of("grpo", entropy_bonus=0.1, entropy_decay=0.5)(batch)
    assert loss.item() == pytest.approx(-weight * 2.5)


def test_the_sides_of_the_clip_are_set_apart():
    batch = tokens_of([1.3, 0.6], [1.0, -1.0])
    loss, metrics = loss_of("grpo", clip_low=0.5, clip_high=0.2)(batch)
    loss.backward()
    assert metrics["clip_share"].item() == 1, "a sum"
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 0.6])


def test_the_loss_is_a_sum_and_entropy_lowers_it():
    one, _ = loss_of("grpo", entropy_bonus=0.1)(tokens_of([1.0], [2.0]))
    three, _ = loss_of("grpo", entropy_bonus=0.1)(tokens_of([1.0] * 3, [2.0] * 3))
    assert one.item() == pytest.approx(-2.0 - 0.1 * 2.0)
    assert three.item() == pytest.approx(3 * one.item())


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (LossConfig(name="grp"), "grpo"),
        (LossConfig(kwargs={"aggregation": "mean"}), "sample_mean"),
        (LossConfig(kwargs={"sequence_low": 2.0, "sequence_high": 1.0}), "sequence_low"),
    ],
)
def test_a_loss_that_cannot_be_built_is_a_config_error(config, word):
    with pytest.raises(ConfigError, match=word):
        build_loss(config)


OWN = """
import threading

over = threading.Event()


def raises(tokens):
    raise ValueError("there is no such thing")


def returns_nothing(tokens):
    return None


def never_returns(tokens):
    over.wait()


def loss(tokens, *, floor=0.5):
    return (tokens.weight > floor) * tokens.advantages * tokens.logprobs, tokens.weight <= floor


loss.aggregation = "sample_mean"
"""


def test_a_loss_of_ones_own_is_named_where_it_raises_or_does_not_return(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)

    def own(name: str, **settings: float) -> Objective:
        return build_loss(LossConfig(name=f"{file}:{name}", **settings))

    with pytest.raises(ConfigError, match=r"mine\.py, line 8: ValueError: there is no such thing"):
        own("raises")(random_tokens())
    with pytest.raises(ConfigError, match=r"trainer\.loss\.name .*mine\.py:returns_nothing: TypeError"):
        own("returns_nothing")(random_tokens())
    with pytest.raises(ConfigError, match=r"never_returns did not return within 0\.1 s \(trainer\.loss\.seconds\)"):
        own("never_returns", seconds=0.1)(random_tokens())
    import_name(f"{file}:over").set()
    assert own("loss").aggregation == "sample_mean"
    loss, metrics = own("loss")(tokens := random_tokens())
    loss.backward()
    assert metrics["clip_share"] == (tokens.weight <= 0.5).sum()
    assert torch.equal(tokens.logprobs.grad == 0, tokens.weight <= 0.5)


def random_tokens(seed: int = 0, lengths: tuple[int, ...] = (3, 1, 5, 2), spread: float = 1.0) -> TrainedTokens:
    """Tokens of four samples, far off-policy to both sides."""
    rng = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    logprobs = -3 * torch.rand(count, generator=rng)
    return TrainedTokens(
        logprobs=logprobs.clone().requires_grad_(),
        entropies=torch.rand(count, generator=rng).requires_grad_(),
        behaviour_logprobs=logprobs + spread * torch.randn(count, generator=rng),
        advantages=torch.randn(len(lengths), generator=rng).repeat_interleave(torch.tensor(lengths)),
        samples=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
    )


def gradient(loss: Objective, tokens: TrainedTokens) -> list[float]:
    value, metrics = loss(tokens)
    assert set(metrics) == {"clip_share", "masked_share", "entropy_bonus"}
    value.backward()
    return tokens.logprobs.grad.tolist()


def numbers(tokens: TrainedTokens) -> list[tuple[float, float, float]]:
    """Per token: logprob, behaviour logprob, advantage."""
    fields = (tokens.logprobs, tokens.behaviour_logprobs, tokens.advantages)
    return list(zip(*(field.tolist() for field in fields), strict=True))


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_all_losses_agree_on_policy(name):
    tokens = random_tokens(spread=0.0)
    loss = loss_of(name, entropy_bonus=0.1, aggregation="token_mean")
    assert gradient(loss, tokens) == pytest.approx([-a for *_, a in numbers(tokens)], rel=1e-6)
    assert tokens.entropies.grad.tolist() == pytest.approx([-0.1] * len(tokens.logprobs))
    _, metrics = loss(tokens)
    assert metrics["clip_share"].item() == metrics["masked_share"].item() == 0


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_a_sample_whose_mean_ratio_leaves_the_band_is_dropped_as_a_whole(name):
    tokens, plain = random_tokens(), random_tokens()
    kwargs = {"entropy_bonus": 0.1, "aggregation": "token_mean"}
    free = gradient(build_loss(LossConfig(name=name, kwargs=kwargs)), plain)
    loss = build_loss(LossConfig(name=name, kwargs=kwargs | {"sequence_low": 0.8, "sequence_high": 1.3}))
    kept = []
    for sample in tokens.samples.tolist():
        mine = (tokens.samples == sample).numpy()
        difference = (tokens.logprobs - tokens.behaviour_logprobs).detach().numpy()[mine]
        kept.append(0.8 <= math.exp(np.mean(difference)) <= 1.3)
    assert len(set(kept)) == 2
    assert gradient(loss, tokens) == pytest.approx([g if keep else 0.0 for g, keep in zip(free, kept, strict=True)])
    assert tokens.entropies.grad.tolist() == pytest.approx([-0.1 if keep else 0.0 for keep in kept])
    assert loss(tokens)[1]["masked_share"].item() == kept.count(False)


def test_a_step_of_nothing_but_masked_samples_has_a_zero_gradient():
    tokens = random_tokens()
    loss = loss_of("grpo", sequence_low=1e6, sequence_high=1e7)
    assert gradient(loss, tokens) == [0.0] * len(tokens.logprobs)
    assert loss(tokens)[1]["masked_share"].item() == len(tokens.logprobs)


def test_a_masked_sample_cannot_spoil_the_others_by_an_infinite_ratio():
    tokens = random_tokens(lengths=(1, 1))
    tokens.behaviour_logprobs[:] = torch.tensor([-200.0, tokens.logprobs[1].item()])
    got = gradient(loss_of("grpo", sequence_high=2.0), tokens)
    assert got == pytest.approx([0.0, -tokens.advantages[1].item()])


def test_what_is_not_a_number_is_never_masked():
    tokens = random_tokens()
    tokens.behaviour_logprobs[0] = math.nan
    value, _ = loss_of("grpo", sequence_low=0.9, sequence_high=1.1)(tokens)
    assert math.isnan(value.item())


LOSSES = [
    *((name, {}) for name in SHORT_NAMES),
    ("grpo", {"clip_high": math.inf, "entropy_bonus": 0.1}),
    ("tis", {"cap": math.inf}),
    ("grpo", {"sequence_low": 1e-6, "sequence_high": 1e6}),
]


@settings(deadline=None, max_examples=50)
@given(
    loss=st.sampled_from(LOSSES),
    log_ratios=st.lists(
        st.one_of(st.floats(-2, 2), st.floats(-1e4, 1e4), st.sampled_from([88.0, 89.0])), min_size=1, max_size=6
    ),
    advantage=st.floats(-100, 100),
    per_sample=st.integers(1, 6),
)  # fmt: skip
def test_no_log_ratio_makes_a_loss_or_a_gradient_that_is_not_finite(loss, log_ratios, advantage, per_sample):
    """Of current and behaviour logprobs."""
    name, kwargs = loss
    count = len(log_ratios)
    to_current = torch.tensor(log_ratios)
    behaviour = -to_current.clamp(min=0)
    tokens = TrainedTokens(
        logprobs=(behaviour + to_current).requires_grad_(),
        entropies=torch.ones(count, requires_grad=True),
        behaviour_logprobs=behaviour,
        advantages=torch.full((count,), advantage),
        samples=torch.arange(count) // per_sample,
    )
    value, _ = build_loss(LossConfig(name=name, kwargs=kwargs))(tokens)
    for estimator in ("k1", "k2", "k3", "k3_corrected"):
        value = value + 0.1 * kl_penalty(estimator, tokens.logprobs, tokens.behaviour_logprobs, tokens.ratio).sum()
    value.backward()
    assert math.isfinite(value.item())
    assert tokens.logprobs.grad.isfinite().all()
    assert tokens.logprobs.grad.norm().isfinite()


def test_a_good_token_that_became_far_likelier_no_longer_pushes():
    """In float32 its ratio would be infinite."""
    tokens = random_tokens(lengths=(1, 1))
    tokens.behaviour_logprobs[:] = torch.tensor([-200.0, tokens.logprobs[1].item()])
    tokens.advantages[:] = 1.0
    assert gradient(loss_of("grpo"), tokens) == [0.0, -1.0]


@pytest.mark.parametrize("log_ratio", [1e4, 400.0, -400.0, -1e4, 0.0])
def test_metrics_of_any_log_ratio_are_numbers(log_ratio):
    metrics = StepMetrics(counted=True, reference=True)
    metrics.add(
        loss=torch.tensor(1.0),
        loss_metrics={},
        entropies=torch.ones(2),
        log_ratio=torch.full((2,), log_ratio),
        log_ratio_before=torch.full((2,), log_ratio),
        on_policy=torch.tensor([True, False]),
        reference_log_ratio=torch.full((2,), log_ratio),
    )
    metrics.reduce_sums(1.0, gradient_finite=True)
    report = metrics.report(divisor=2)
    assert all(map(math.isfinite, report.values()))
    assert report["effective_sample_size"] == pytest.approx(1.0)


logits = st.lists(st.floats(-3, 3), min_size=2, max_size=6)


@settings(deadline=None, max_examples=50)
@given(current=logits, reference=st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_the_estimates_have_the_value_and_the_gradient_of_the_kl_in_expectation(current, reference):
    """Summed over all tokens, each as often as the policy, or for the corrected one another policy, samples it."""
    z = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(z, 0)
    other = torch.log_softmax(torch.tensor(reference[: len(current)], dtype=torch.float64), 0)
    exact = (logprobs.exp() * (logprobs - other)).sum()
    (wanted,) = torch.autograd.grad(exact, z, retain_graph=True)
    policies = {"on": logprobs.detach(), "off": torch.log_softmax(logprobs.detach() / 2 + other / 3, 0)}
    right = {"k1": ("value", "gradient"), "k2": ("gradient",), "k3": ("value",), "k3_corrected": ("value", "gradient")}
    for (policy, behaviour), estimator in itertools.product(policies.items(), right):
        if policy == "on" or estimator == "k3_corrected":
            penalty = kl_penalty(estimator, logprobs, other, (logprobs - behaviour).exp())
            value = (behaviour.exp() * penalty).sum()
            (got,) = torch.autograd.grad(value, z, retain_graph=True)
            if "value" in right[estimator]:
                assert value.item() == pytest.approx(exact.item(), abs=1e-9)
            if "gradient" in right[estimator]:
                assert got.tolist() == pytest.approx(wanted.tolist(), abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_pulls_every_token_towards_the_reference(estimator):
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    kl_penalty(estimator, logprobs, torch.tensor([-2.0, -1.0, -0.5]), torch.ones(3)).sum().backward()
    likelier, equal, rarer = logprobs.grad.tolist()
    assert likelier > 0 and equal == 0 and rarer < 0


def test_k3_is_that_of_grpo():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.7])
    ratio = math.exp(-0.7)
    assert kl_penalty("k3", logprobs, reference, torch.ones(1)).item() == pytest.approx(ratio - math.log(ratio) - 1)


@pytest.mark.parametrize(
    ("config", "mean", "outside", "words", "fatal"),
    [
        ({}, 0.1, 0.2, "", False),
        ({}, 0.11, 0.0, "trainer.logprob_alarm.mean", False),
        ({}, 0.0, 0.21, "trainer.logprob_alarm.outside_share", False),
        ({}, 1.0, 1.0, "trainer.logprob_alarm.mean", False),
        ({}, 1.1, 0.0, "stop_mean", True),
        ({"mean": 0.0, "outside_share": 0.0, "stop_mean": 0.0}, 50.0, 1.0, "", False),
        ({"mean": 0.0, "outside_share": 0.0, "stop_mean": 0.0}, math.nan, 0.0, "nan nats", True),
    ],
)
def test_the_alarm_warns_above_a_threshold_that_is_on_and_stops_above_the_limit(config, mean, outside, words, fatal):
    limits = LogprobAlarmConfig(**({"mean": 0.1, "outside_share": 0.2, "stop_mean": 1.0} | config))
    warning, stops = logprob_alarm(limits, mean, outside)
    assert (words in warning if words else not warning) and stops == fatal


def test_a_warm_up_of_rates_that_is_longer_than_the_warm_up_is_refused():
    with pytest.raises(ConfigError, match="trainer.warmup.lr_warmup_steps"):
        WarmupConfig(steps=10, lr_warmup_steps=20)


def expected_scores(logits, targets, temperature, possible=None):
    scaled = logits.double() / temperature
    every = torch.log_softmax(scaled if possible is None else scaled.masked_fill(~possible, -1e9), -1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.fixture(params=[scores_module.CHUNK_ELEMENTS["cpu"], 20], ids=["one chunk", "many chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setitem(scores_module.CHUNK_ELEMENTS, "cpu", request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3])
def test_trap_12_scores_and_their_gradients_are_those_of_log_softmax_over_what_was_possible(chunk, temperature, share):
    torch.manual_seed(0)
    hidden, head = torch.randn(17, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    targets, pull, push = torch.randint(0, 9, (17,)), torch.randn(17), torch.randn(17)
    possible = (torch.rand(17, 9) < share).scatter(1, targets[:, None], True)
    supports = supports_of(possible.numpy())
    assert (supports is None) == (share == 1.0)
    logprobs, entropies = token_scores(hidden, head, targets, temperature=temperature, supports=supports)
    (logprobs @ pull + entropies @ push).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    wanted_logprobs, wanted_entropies = expected_scores(exact[0] @ exact[1].T, targets, temperature, possible)
    (wanted_logprobs @ pull.double() + wanted_entropies @ push.double()).backward()
    torch.testing.assert_close(logprobs.double(), wanted_logprobs, atol=4e-6, rtol=1e-6)
    torch.testing.assert_close(entropies.double(), wanted_entropies, atol=4e-6, rtol=1e-6)
    for tensor, wanted in zip((hidden, head), exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), wanted.grad, atol=1e-5, rtol=1e-5)


def test_a_ratio_without_the_support_is_the_mass_that_truncation_kept_and_1_with_it():
    """By the very weights that sampled, at top_p 0.8 and top_k 50."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2000, 16), torch.randn(200, 16) / 4
    probabilities = (hidden.double() @ head.double().T).softmax(-1)
    ordered, ids = probabilities.sort(descending=True)
    kept = (ordered.cumsum(-1) - ordered < 0.8) & (torch.arange(200) < 50)
    possible = torch.zeros_like(kept).scatter(1, ids, kept)
    truncated = probabilities * possible
    targets, mass = truncated.multinomial(1)[:, 0], truncated.sum(-1)
    sampled = (truncated / mass[:, None]).gather(1, targets[:, None])[:, 0].log()
    for supports, ratio in ((supports_of(possible.numpy()), torch.ones(2000)), (None, mass)):
        logprobs, _ = token_scores(hidden, head, targets, temperature=1.0, supports=supports)
        found = (logprobs.double() - sampled).exp()
        torch.testing.assert_close(found, ratio.double(), atol=1e-5, rtol=0)
    assert 0.6 < mass.mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch, dtype):
    vocabulary, size, rows = 4096, 8, 64
    monkeypatch.setitem(scores_module.CHUNK_ELEMENTS, "cpu", rows * vocabulary)

    def peak(count):
        hidden, head = (torch.randn(n, size, dtype=dtype, requires_grad=True) for n in (count, vocabulary))
        targets = torch.randint(0, vocabulary, (count,))
        with MemTracker() as tracker:
            logprobs, entropies = token_scores(hidden, head, targets, temperature=0.7)
            (logprobs.sum() + entropies.sum()).backward()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    one, many = peak(rows), peak(16 * rows)
    assert one > 4 * rows * vocabulary  # it does count: a chunk as float32
    assert many < 1.3 * one


def test_a_sure_policy_loses_no_precision():
    logits = torch.tensor([[100.0, 80.0, 60.0]])
    logprobs, entropies = token_scores(logits, torch.eye(3), torch.tensor([0]), temperature=1.0)
    wanted_logprobs, wanted_entropies = expected_scores(logits, torch.tensor([0]), 1.0)
    assert abs(logprobs.item() - wanted_logprobs.item()) < 1e-8
    assert abs(entropies.item() - wanted_entropies.item()) < 1e-8


def test_logits_far_above_the_possible_ones_change_nothing():
    logits = torch.tensor([[300.0, 1.0, 0.0]], requires_grad=True)
    supports = supports_of(np.array([[False, True, True]]))
    logprobs, entropies = token_scores(logits, torch.eye(3), torch.tensor([1]), temperature=1.0, supports=supports)
    (logprobs.sum() + entropies.sum()).backward()
    wanted_logprobs, wanted_entropies = expected_scores(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), 1.0)
    torch.testing.assert_close((logprobs.double(), entropies.double()), (wanted_logprobs, wanted_entropies))
    assert logits.grad.isfinite().all() and logits.grad[0, 0] == 0


def test_bfloat16_logits_are_scored_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(5, 300).bfloat16().requires_grad_()
    targets = torch.randint(0, 300, (5,))
    logprobs, entropies = token_scores(logits, torch.eye(300).bfloat16(), targets, temperature=1.0)
    wanted, _ = expected_scores(logits.detach(), targets, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=0)
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad.dtype == torch.bfloat16


def test_no_rows_give_a_zero_with_a_gradient():
    hidden, head = torch.randn(0, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    logprobs, _ = token_scores(hidden, head, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, 5)
    assert head.grad.shape == (7, 5) and not head.grad.any()
