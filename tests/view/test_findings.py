"""What the report says of a run, from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from titan_rl.metrics.metric_table import METRICS, Metric
from titan_rl.types import FailureKind, Purpose, StopReason
from titan_rl.view.findings import LOOKED_AT, Finding, Kind, compare, findings
from titan_rl.view.read import ListedRollout, Run
from titan_rl.view.timelines import Account, Lane, Timeline

STEPS = 30
BUSY = {"generator0": 0.3, "generator1": 0.4}
FLAT = [0.3 + 0.02 * (-1) ** step for step in range(STEPS)]
RISING = [step / STEPS for step in range(STEPS)]
ROLLOUT = ListedRollout(
    offset=0, step=STEPS, purpose=Purpose.TRAIN, group=1, sample=0, kept=("random",), reward=1.0, advantage=0.0,
    stop_reason=StopReason.STOP, wanted="12", prompt="", answer="12", sampled_tokens=3, gap=None,
)  # fmt: skip


def run_of(
    *,
    rollouts: Sequence[ListedRollout] = (),
    config: dict[str, Any] | None = None,
    lanes: Sequence[Lane] = (),
    **metrics: list[float | None],
) -> Run:
    """Metrics are named with `__` for `/`."""
    series = {name.replace("__", "/"): dict(enumerate(values, 1)) for name, values in metrics.items()}
    series.setdefault("train/loss", dict.fromkeys(range(1, STEPS + 1), 0.0))
    timelines = [Timeline("steps", 0.0, 10.0, [*lanes])] if lanes else []
    return Run(Path("run"), config or {}, {"steps": STEPS}, series, timelines, [*rollouts], len(rollouts))


def titles(run: Run) -> set[str]:
    return {each.title for each in findings(run)}


def said(run: Run, title: str) -> Finding:
    (found,) = (each for each in findings(run) if each.title == title)
    return found


def test_a_run_without_numbers_says_nothing():
    assert findings(run_of()) == []


def test_a_rising_score_is_good_news():
    found = said(run_of(evaluation__exact_match=[0.01, 0.9]), "The policy learned")
    assert found.kind is Kind.GOOD and "1% to 90%" in found.text


def test_a_missed_target_says_whether_the_score_still_rose():
    config = {"evaluation.target_exact_match": 0.8}
    rising = run_of(config=config, evaluation__exact_match=[0.0, 0.2, 0.3, 0.5])
    both = "The policy learned, and missed its target"
    assert "still rose" in said(rising, both).do and titles(rising) == {both}
    flat = run_of(config=config, evaluation__exact_match=[0.0, 0.2, 0.4, 0.4])
    assert "--trainer.loss.kwargs.entropy-bonus 0.3" in said(flat, both).do
    assert "--loop.steps 60" in said(rising, both).do
    never = run_of(config=config, evaluation__exact_match=[0.0, 0.0])
    assert titles(never) == {"The run missed its target"}
    reached = run_of(config=config, evaluation__exact_match=[0.0, 0.8])
    assert titles(reached) == {"The policy learned"}


def test_a_score_that_fell_from_its_best_says_how_far():
    run = run_of(evaluation__exact_match=[0.1, 0.8, 0.5])
    assert {"The policy learned", "The best score was earlier"} <= titles(run)
    assert "80%" in said(run, "The best score was earlier").text


@pytest.mark.parametrize(
    ("last_reward", "do"), [(0.9, "pay for something else"), (0.5, "--trainer.optimizer.lr 0.0003")]
)
def test_a_reward_pays_for_something_else_only_where_it_did_not_fall_with_the_score(last_reward, do):
    series = {"evaluation__exact_match": [0.6, 0.5], "evaluation__reward": [0.6, last_reward]}
    run = run_of(config={"trainer.optimizer.lr": 0.001}, **series)
    assert do in said(run, "The held-out score fell").do
    assert "The held-out score fell" not in titles(run_of(evaluation__exact_match=[1.0, 0.967]))


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        (FLAT, {("Reward is flat", Kind.PROBLEM)}),
        (RISING, {("It was still learning when the run ended", Kind.WARNING)}),
        ([0.1] * 10 + [0.5] * 20, set()),  # it had risen long before
        (RISING[::-1], {("Reward falls", Kind.PROBLEM)}),
        ([0.99, 1.0] * 15, set()),  # at its top
        ([0.3] * 5, set()),  # too few steps to judge
    ],
)
def test_a_reward_that_does_not_rise_is_a_problem_unless_it_is_at_its_top(rewards: list[float | None], found: set[Any]):
    assert {
        (each.title, each.kind) for each in findings(run_of(rollout__reward_mean=rewards, rollouts=[ROLLOUT]))
    } == found


@pytest.mark.parametrize(
    ("numbers", "do"),
    [
        ({"train__kl_k3": [0.3] * STEPS}, "--trainer.optimizer.lr 0.0002; it is 0.001"),
        ({"train__entropy": [2.0] * 10 + [0.01] * 20}, "--trainer.loss.kwargs.entropy-bonus 0.6; it is 0.2"),
        ({"train__kl_k3": [1e-5] * STEPS}, "--trainer.optimizer.lr 0.003; it is 0.001"),
        ({"train__kl_k3": [5e-3] * STEPS}, "--rollout.samples-per-group 16; it is 8"),
        ({"groups__equal_rewards": [0.9] * STEPS}, "--rollout.samples-per-group 16; it is 8"),
    ],
)
def test_a_flat_reward_ends_with_the_setting_that_most_likely_keeps_it_flat(numbers, do):
    settings = {"trainer.optimizer.lr": 1e-3, "rollout.samples_per_group": 8, "trainer.loss.kwargs.entropy_bonus": 0.2}
    run = run_of(config=settings, rollout__reward_mean=FLAT, rollouts=[ROLLOUT], **numbers)
    assert do in said(run, "Reward is flat").do


@pytest.mark.parametrize(
    ("metric", "config", "do"),
    [
        ("rollout__stop_max_turns", {"rollout.max_turns": 4}, "Set --rollout.max-turns 8; it is 4."),
        (
            "train__logprob_outside_share",
            {"trainer.dtype": "float32", "generator.dtype": "bfloat16"},
            "Set --generator.dtype float32; it is bfloat16.",
        ),
        (
            "rollout__stop_context_full",
            {"generator.max_model_len": 32, "policy.tiny.max_length": 32},
            "Set --generator.max-model-len 64; it is 32, and --policy.tiny.max-length 64; it is 32.",
        ),
        ("rollout__stop_token_budget", {"rollout.max_sampled_tokens": 0}, "."),  # it is off, so another limit cuts
    ],
)
def test_a_limit_of_the_table_ends_with_what_to_set_in_this_run(metric: str, config: dict[str, Any], do: str):
    (found,) = findings(run_of(config=config, **{metric: [1.0] * STEPS}))
    assert found.do.endswith(do) and ("Set --" in found.do) is (do != ".")


def test_a_rising_mismatch_is_told_from_rounding():
    growing = [2e-5 * (1 + step) for step in range(STEPS)]
    assert "Mismatch is rising" in titles(run_of(train__logprob_difference_mean=growing))
    assert titles(run_of(train__logprob_difference_mean=[each * 1e-3 for each in growing])) == set()


def test_an_alarm_counts_its_steps():
    run = run_of(train__logprob_alarm=[0.0, 1.0, 1.0])
    assert "In 2 of 30 steps" in said(run, "Trainer and generator disagree").text


def test_a_mesh_that_waits_more_than_half_of_its_time_is_named_with_whom_it_waits_for():
    lanes = [
        Lane("trainer", 1, [], Account("trainer", 1, 0.35, {"rollouts": 0.55, "weights": 0.1})),
        Lane("generator0", 1, [], Account("generator0", 1, 0.6, {"slots": 0.4})),
        Lane("router", 1, [], Account("router", 1, 0.1, {"rollouts": 0.9})),
    ]
    title, config = "trainer is idle more than half of the time", {"rollout.workers": 1}
    found = said(run_of(lanes=lanes), title)
    assert "65%" in found.text and "the rollout workers" in found.text and "rollout.workers" in found.do
    assert said(run_of(lanes=lanes, config=config), title).do.endswith("Set --rollout.workers 2; it is 1.")
    assert len(findings(run_of(lanes=lanes))) == 1


def test_generators_that_wait_for_the_same_make_one_finding():
    lanes = [Lane(name, 1, [], Account(name, 1, busy, {"slots": 1 - busy})) for name, busy in BUSY.items()]
    (found,) = findings(run_of(lanes=lanes))
    assert found.title == "2 generators are idle more than half of the time" and "They waited 60% to 70%" in found.text
    assert found.kind is Kind.WARNING
    (found,) = findings(run_of(lanes=lanes, config={"loop.max_staleness": 0}))
    assert found.kind is Kind.NOTE, "trainer and generators of a synchronous run take turns"
    assert findings(run_of(lanes=lanes, train__loss=[0.0] * 3)) == [], "too few steps to judge"


def test_answers_that_are_cut_and_rollouts_that_fail_are_counted():
    config = {"rollout.samples_per_group": 4, "loop.groups_per_step": 5}
    run = run_of(
        rollout__truncated_share=[0.25] * STEPS,
        rollout__failed=[4] * STEPS,
        groups__failed=[5 * STEPS] * STEPS,
        config=config,
        rollouts=[
            structs.replace(ROLLOUT, error="late", stop_reason=StopReason.TIMEOUT),
            structs.replace(ROLLOUT, error="ValueError: no"),
        ],
    )
    assert "25%" in said(run, "Answers are cut by length").text
    assert "10%" in said(run, "Rollouts fail").text and "1 × task: ValueError: no" in str(said(run, "Rollouts fail"))
    grown = {"rollout__failed": [2] * STEPS, "groups__samples": [4] * (STEPS // 2) + [32] * (STEPS - STEPS // 2)}
    assert "Rollouts fail" not in titles(run_of(config=config, **grown)), "2 of 20 at first, and then of 160"


@pytest.mark.parametrize("metric", [each for each in METRICS if each.limit is not None and each.name not in LOOKED_AT])
def test_every_metric_beyond_its_limit_is_a_finding_with_the_advice_of_the_table(metric: Metric):
    assert metric.limit is not None
    beyond = 1.1 if metric.above is not None else 0.9

    def late(value: float) -> Run:
        return run_of(**{metric.name: [0.0] * (STEPS * 2 // 3) + [value] * (STEPS // 3)})

    assert findings(late(metric.limit)) == []
    (found,) = findings(late(beyond * metric.limit or 1.0))
    assert found.see == metric.name and metric.meaning in found.text and metric.do[1:].replace("RUN", "run") in found.do


def test_entropy_that_is_gone_while_the_reward_is_low_is_a_problem():
    falling = [1.0 / (1 + step) ** 2 for step in range(STEPS)]
    assert "The policy settled too soon" in titles(run_of(train__entropy=falling, rollout__reward_mean=FLAT))
    assert "The policy settled too soon" not in titles(run_of(train__entropy=falling, rollout__reward_mean=RISING))
    right = {"evaluation__exact_match": [0.0, 1.0], "train__entropy": falling, "rollout__reward_mean": FLAT}
    assert "The policy settled too soon" not in titles(run_of(**right)), "its best answers are right"
    rollouts = [structs.replace(ROLLOUT, reward=float(number > 15)) for number in range(40)]  # the worst are recorded
    late = {"train__entropy": falling, "rollout__reward_mean": [0.4] * 25 + [0.97] * 5, "rollouts": rollouts}
    assert "The policy settled too soon" not in titles(run_of(**late)), "so many cannot be wrong now"
    late["rollout__reward_mean"] = [0.4] * 30
    found = said(run_of(**late, config={"trainer.loss.kwargs.entropy_bonus": 0.9}), "The policy settled too soon")
    assert "reward is 0.40 and 40%" in found.text and "entropy-bonus" not in found.do, "no bonus is tripled for ever"


def test_a_run_whose_best_answers_are_right_is_told_nothing_to_do():
    run = run_of(evaluation__exact_match=[0.0, 1.0], rollout__reward_mean=RISING, rollouts=[ROLLOUT])
    assert titles(run) == {"The policy learned"} and not said(run, "The policy learned").do


@pytest.mark.parametrize(
    ("wrong", "entropy", "expected"),
    [
        (12, 0.05, True),  # of 40
        (12, 0.5, False),  # it still searches
        (2, 0.05, False),  # what is left is little
    ],
)
def test_a_policy_that_settled_on_wrong_answers_is_not_told_to_go_on_nor_to_take_more_samples(wrong, entropy, expected):
    rollouts = [structs.replace(ROLLOUT, reward=float(number >= wrong)) for number in range(40)]
    run = run_of(
        config={"rollout.samples_per_group": 16, "trainer.loss.kwargs.entropy_bonus": 0.3},
        train__entropy=[2.0] * 20 + [entropy] * 10,
        rollout__reward_mean=[0.7 * step / STEPS for step in range(STEPS)],
        groups__equal_rewards=[0.95] * STEPS,
        rollouts=rollouts,
    )
    settled, others = (
        "The policy settled too soon",
        {"It was still learning when the run ended", "Groups teach nothing"},
    )
    assert titles(run) & {settled, *others} == ({settled} if expected else others)
    if expected:
        assert "30% of the answers" in said(run, settled).text and "entropy-bonus 0.9" in said(run, settled).do


def test_a_number_that_is_not_finite_names_its_first_step():
    assert "first in step 2" in said(run_of(train__grad_norm=[1.0, None, None]), "A number is not finite").text


def test_a_run_that_is_not_done_says_how_to_go_on():
    run = replace(run_of(config={"loop.steps": 50}), summary={})
    assert "30 of 50 steps" in said(run, "The run is not done").text


def test_of_two_runs_the_better_one_is_named_with_the_settings_that_differ():
    good = run_of(evaluation__exact_match=[0.0, 0.9], config={"trainer.optimizer.lr": 0.001, "seed": 0})
    bad = replace(
        run_of(evaluation__exact_match=[0.0, 0.2], config={"trainer.optimizer.lr": 0.1}), directory=Path("bad")
    )
    (found,) = compare([bad, good])
    assert found.title == "run did better than bad"
    assert found.do == "They differ in `trainer.optimizer.lr` (0.001 and 0.1), `seed` (0 and None)."
    assert compare([good]) == [] == compare([good, run_of()])


def test_problems_come_first():
    run = run_of(evaluation__exact_match=[0.1, 0.9], rollout__reward_mean=FLAT, rollout__truncated_share=[0.5] * STEPS)
    assert [each.kind for each in findings(run)] == [Kind.PROBLEM, Kind.WARNING, Kind.GOOD]


LR = {"trainer.optimizer.lr": 2e-3, "loop.max_staleness": 1}


def test_a_learning_rate_that_is_too_high_is_named_and_not_the_entropy_that_it_costs():
    far = {"train__kl_k3": [0.3] * STEPS, "rollout__reward_mean": FLAT, "rollout__reward_std": [0.1] * STEPS}
    run = run_of(config=LR, train__entropy=[2.0] * 10 + [0.01] * 20, rollouts=[ROLLOUT], **far)
    assert "The policy settled too soon" not in titles(run)
    assert "--trainer.optimizer.lr 0.0004" in said(run, "The learning rate is too high").do


def test_a_learning_rate_that_is_too_low_moves_nothing():
    still = {"train__kl_k3": [1e-8] * STEPS, "train__entropy": [2.0, 2.01] * (STEPS // 2)}
    run = run_of(config=LR, rollout__reward_mean=FLAT, rollouts=[ROLLOUT], **still)
    assert "--trainer.optimizer.lr 0.02" in said(run, "The learning rate is too low").do
    synchronous = run_of(config=LR | {"loop.max_staleness": 0}, rollout__reward_mean=FLAT, rollouts=[ROLLOUT], **still)
    assert "The learning rate is too low" not in titles(synchronous), "nothing lies between on-policy samples and steps"


@pytest.mark.parametrize(
    ("equal", "reward", "samples", "title", "do"),
    [
        (0.95, 0.0, 16, "Groups teach nothing", "--trainer.warmup.steps 200"),
        (0.85, 0.5, 8, "Groups teach nothing", "--rollout.samples-per-group 16"),
        (0.6, 0.5, 2, "Groups are small", "--rollout.samples-per-group 8"),
    ],
)
def test_groups_of_equal_rewards_are_told_with_what_was_answered(equal, reward, samples, title, do):
    run = run_of(
        config={"rollout.samples_per_group": samples},
        groups__equal_rewards=[equal] * STEPS,
        rollout__reward_mean=[reward] * STEPS,
        rollouts=[structs.replace(ROLLOUT, answer="7", reward=each) for each in (0.0, 1.0)],
    )
    found = said(run, title)
    assert do in found.do and (title == "Groups are small" or "'7' 100%" in found.text)


def test_groups_that_grew_are_told_as_large_as_they_are():
    run = run_of(
        config={"rollout.samples_per_group": 2},
        groups__equal_rewards=[0.85] * STEPS,
        groups__samples=[2] * 9 + [64] * (STEPS - 9),
        rollout__reward_mean=[0.5] * STEPS,
        rollouts=[structs.replace(ROLLOUT, reward=each) for each in (0.0, 1.0)],
    )
    assert "--rollout.samples-per-group 128; it is 64" in said(run, "Groups teach nothing").do
    run.series["groups/equal_rewards"] = dict.fromkeys(run.series["groups/equal_rewards"], 0.6)
    assert "Groups are small" not in titles(run)


def test_a_reward_that_pays_for_length_is_named():
    lengths = [structs.replace(ROLLOUT, sampled_tokens=each, reward=each / 10) for each in range(1, 41)]
    metrics = {"rollout__reward_mean": RISING, "evaluation__exact_match": [0.0, 0.0]}
    assert "Longer answers" in said(run_of(rollouts=lengths, **metrics), "The reward pays for something else").text
    metrics["evaluation__exact_match"] = [0.0, 0.5]
    assert "The reward pays for something else" not in titles(run_of(rollouts=lengths, **metrics))
    for nothing_yet in ([], [0.0]):
        metrics["evaluation__exact_match"] = nothing_yet
        assert "The reward pays for something else" not in titles(run_of(rollouts=lengths, **metrics))
    metrics["evaluation__exact_match"] = [1.0, 1.0]  # learned before the first evaluation
    assert "The reward pays for something else" not in titles(run_of(rollouts=lengths, **metrics))


def test_a_reward_that_rises_while_nothing_held_out_becomes_right_pays_for_something_else():
    run = run_of(rollout__reward_mean=RISING, evaluation__exact_match=[0.0, 0.01], rollouts=[ROLLOUT])
    assert "The reward pays for something else" not in titles(run), "parts of what is right may come first"
    risen = [0.1] * (STEPS // 2) + [0.4] * (STEPS - STEPS // 2)
    run = run_of(rollout__reward_mean=risen, evaluation__exact_match=[0.0, 0.01], rollouts=[ROLLOUT])
    found = said(run, "The reward pays for something else")
    assert "held-out exact match not" in found.text and "`titan-rl watch run`" in found.do
    wrong = [structs.replace(ROLLOUT, wanted="12", answer="RUN", reward=reward) for reward in (0.9, 0.2)]
    run = replace(run, rollouts=wrong)
    assert "'RUN' got 0.90 where '12' was wanted" in said(run, "The reward pays for something else").text


def test_held_out_prompts_that_do_worse_are_told():
    run = run_of(rollout__reward_mean=[0.9] * STEPS, evaluation__reward=[0.1, 0.5], rollouts=[ROLLOUT])
    found = said(run, "Evaluation differs from training")
    assert "0.90 in training and 0.50" in found.text and "`titan-rl try run --policy run`" in found.do
    few = replace(run, config={"loop.prompts": 50})
    assert "--loop.prompts 200; it is 50" in said(few, "Evaluation differs from training").do


@pytest.mark.parametrize("cut", [0.0, 0.99])
def test_where_most_answers_are_cut_nothing_else_is_blamed(cut: float):
    run = run_of(
        train__entropy=[1.0] * 15 + [0.01] * 15,
        rollout__reward_mean=[0.1] * 15 + [0.4] * 15,
        evaluation__exact_match=[0.0, 0.0],
        rollout__truncated_share=[cut] * STEPS,
        config={"rollout.sampling.max_new_tokens": 2},
    )
    others = {"The policy settled too soon", "The reward pays for something else"}
    assert titles(run) == ({"Answers are cut by length"} if cut else others)


def test_answers_that_are_cut_get_twice_the_room():
    run = run_of(config={"rollout.sampling.max_new_tokens": 3}, rollout__truncated_share=[0.4] * STEPS)
    assert "--rollout.sampling.max-new-tokens 6" in said(run, "Answers are cut by length").do


CUT = structs.replace(ROLLOUT, stop_reason=StopReason.DONE, truncated=True, reward=0.5, last_turn=9)


@pytest.mark.parametrize(
    ("right", "cut", "title", "do"),
    [
        ([6, 6, 6, 7, 6], CUT, "The policy does not end its answers", "The reward pays for it (1.00, 0.50"),
        ([6] * 5, structs.replace(CUT, reward=1.0), "The policy does not end its answers", "Let the reward pay"),
        ([3, 4, 6, 8, 8], CUT, "Answers are cut by length", "--rollout.sampling.max-new-tokens 18"),  # others need more
        ([6] * 4, CUT, "Answers are cut by length", "--rollout.sampling.max-new-tokens 18"),  # too few to tell
        ([6] * 5, structs.replace(CUT, last_turn=4), "Answers are cut by length", "Another limit"),
    ],
)
def test_a_policy_that_does_not_end_its_answers_is_told_from_a_room_that_is_too_small(right, cut, title, do):
    ended = [structs.replace(ROLLOUT, stop_reason=StopReason.DONE, last_turn=each) for each in right]
    settings, share = {"rollout.sampling.max_new_tokens": 9}, [0.4] * STEPS
    run = run_of(config=settings, rollout__truncated_share=share, rollouts=[*ended, cut, cut, cut])
    assert do in said(run, title).do


@pytest.mark.parametrize(
    ("wanted", "best", "tokenizer", "title"),
    [
        ("12345678", 0.6, "symbols", "The policy does not end its answers"),
        ("123456789", 0.6, "symbols", "Answers are cut by length"),  # no token is left to end it
        ("12345678", 0.6, "chat", "Answers are cut by length"),  # nobody knows how many tokens that takes
        ("12345678", 0.4, "symbols", "Answers are cut by length"),  # those that go on are better
    ],
)
def test_before_anything_is_right_the_wanted_answer_tells_how_much_room_it_needs(wanted, best, tokenizer, title):
    settings = {"rollout.sampling.max_new_tokens": 9, "policy.tiny.symbols": "1", "policy.tiny.tokenizer": tokenizer}
    ended = structs.replace(ROLLOUT, wanted=wanted, reward=best, last_turn=9)
    rollouts = [ended, structs.replace(CUT, wanted=wanted)]
    assert title in titles(run_of(config=settings, rollout__truncated_share=[0.4] * STEPS, rollouts=rollouts))


def test_causes_of_failures_are_counted():
    error = "tool calls of train prompt {}: KeyError: 'x' (a.py:3)\nmore"
    failing = [structs.replace(ROLLOUT, error=error.format(prompt), failure=FailureKind.TOOL) for prompt in (3, 5, 57)]
    failing += [structs.replace(ROLLOUT, error="did not finish within 1 s", failure=FailureKind.TIMEOUT)]
    run = run_of(
        config={"rollout.samples_per_group": 2, "loop.groups_per_step": 2},
        rollout__failed=[2.0] * STEPS,
        rollout__failed_tool=[0.4] * STEPS,
        rollout__failed_timeout=[0.1] * STEPS,
        rollouts=failing,
    )
    found = said(run, "Rollouts fail")
    cause = "tool: tool calls of train prompt: KeyError: 'x' (a.py:3)"
    assert found.counts == ((3, cause), (1, "timeout: did not finish within 1 s"))
    assert f"3 × {cause}; 1 × timeout: did not finish" in str(found)
    assert found.see == "rollout/failed_tool" and found.do.startswith("Correct the tool")


def test_a_limit_that_most_failures_name_is_to_be_twice_as_long():
    late = "respond of train prompt 3: did not finish within 1 s (environment.step_seconds)"
    run = run_of(
        config={"rollout.samples_per_group": 2, "loop.groups_per_step": 2, "environment.step_seconds": 1.0},
        rollout__failed=[2.0] * STEPS,
        rollout__failed_timeout=[0.5] * STEPS,
        rollouts=[structs.replace(ROLLOUT, error=late, failure=FailureKind.TIMEOUT)],
    )
    assert said(run, "Rollouts fail").do.endswith("Set --environment.step-seconds 2.0; it is 1.0.")
