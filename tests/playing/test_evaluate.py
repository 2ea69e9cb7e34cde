"""`titan-rl eval` without engines: a scripted policy plays real tasks, and its scores are counted by hand (seconds)."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from rich.console import Console

from titan_rl.cli import main
from titan_rl.errors import GeneratorFailed, TaskError
from titan_rl.metrics.rollout_record import RolloutRecord, read_record
from titan_rl.playing.evaluate import Scores, estimate, names_of, play, table
from titan_rl.playing.policies import bare_recipe, run_of, run_until_signal
from titan_rl.rollout.config import EnvironmentConfig
from titan_rl.run.players import message_player
from titan_rl.types import FinishReason, Message, Purpose
from titan_rl.view.conversation import draw_rollout
from titan_rl.view.read import read_listed

PROMPTS = 20
FLAKY = """
from titan_rl.environments.copy import Copy, exact_match
from titan_rl.environments.base import Rubric


def sometimes(example, transcript):
    if example.answer[0] in "02468":
        raise RuntimeError("no reward today")
    return {"exact_match": exact_match(example, transcript), "sometimes": 0.25}


class Flaky(Copy):
    def rubric(self):
        return Rubric(sometimes)


class Empty(Copy):
    def held_out(self, count):
        return []
"""


def right_on(chosen):
    """Copies what `chosen` picks, by the prompt's digits and the request; else says 0000."""

    async def say(messages, tools, request):
        text = messages[-1].content.removesuffix("=")
        return Message("assistant", text if chosen(int(text), request) else "0000"), FinishReason.STOP

    return say


def config_of(name="copy"):
    config = bare_recipe()
    config.environment = EnvironmentConfig(name=name)
    config.evaluation.prompts = PROMPTS
    return config


async def scores_of(say, *, samples=4, name="copy", config=None):
    scores, results = Scores("it"), io.StringIO()
    async with message_player(config or config_of(name), say) as player:
        await play(player, scores, samples=samples, temperature=1.0, results=results)
    return scores, [json.loads(line) for line in results.getvalue().splitlines()]


async def test_greedy_and_sampled_scores_are_those_of_what_was_said():
    greedy = lambda number, request: request.sampling.temperature == 0 and number % 2 == 0  # noqa: E731
    scores, lines = await scores_of(right_on(greedy))
    assert len(lines) == PROMPTS * 5 and {line["policy"] for line in lines} == {"it"}
    even = [line for line in lines if line["temperature"] == 0 and int(line["messages"][0]["content"][:4]) % 2 == 0]
    measures = scores.measures(4)
    assert estimate(measures["exact match, greedy"]).value == len(even) / PROMPTS
    assert all(line["exact_match"] == 1 and line["wanted"] == line["messages"][1]["content"] for line in even)
    assert set(measures["pass@1"].values()) == set(measures["pass@4"].values()) == {0.0}
    assert {line["stop_reason"] for line in lines} == {"stop"}
    assert "reward     1.000" in draw_rollout(read_record(even[0])).plain, "what reads rollouts.jsonl reads these lines"
    assert read_listed(even[0], 0).answer == even[0]["wanted"]


async def test_a_sample_that_passes_counts_in_pass_at_k_as_the_estimator_says():
    first = lambda number, request: request.request_id.split("-")[2] == "0"  # noqa: E731
    scores, lines = await scores_of(right_on(first))
    assert [line["exact_match"] for line in lines if line["temperature"]].count(1) == PROMPTS
    measures = scores.measures(4)
    for k, value in {1: 0.25, 2: 0.5, 4: 1.0}.items():
        assert {*measures[f"pass@{k}"].values()} == {value}
    assert len(measures["reward, sampled"]) == PROMPTS


async def test_every_sample_has_a_seed_of_its_own_that_is_the_same_again():
    seeds = []

    async def say(messages, tools, request):
        seeds.append(request.seed)
        return Message("assistant", "1"), FinishReason.STOP

    await scores_of(say)
    assert len(set(seeds)) == PROMPTS * 4, "the first sample of a prompt and the greedy rollout share one"
    before, seeds[:] = sorted(seeds), []
    await scores_of(say)
    assert sorted(seeds) == before


async def test_rollouts_that_user_code_fails_are_counted_and_left_out(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    scores, lines = await scores_of(right_on(lambda *_: True), name=f"{tmp_path / 'flaky.py'}:Flaky")
    failed = [line for line in lines if line["error"]]
    assert 0 < len(failed) == len(scores.errors) < len(lines)
    assert "no reward today" in scores.errors[0] and "flaky.py:" in scores.errors[0]
    assert {*scores.measures(4)["exact match, greedy"].values()} == {1.0}
    assert len(scores.greedy) == (len(lines) - len(failed)) / 5


async def test_a_task_without_held_out_prompts_cannot_be_evaluated(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    with pytest.raises(TaskError, match="no held-out prompts"):
        await scores_of(right_on(lambda *_: True), name=f"{tmp_path / 'flaky.py'}:Empty")


async def test_a_policy_that_cannot_answer_is_named_and_not_a_group_of_exceptions():
    async def say(messages, tools, request):
        raise GeneratorFailed("the router is gone")

    with pytest.raises(GeneratorFailed, match="the router is gone"):
        await scores_of(say)


def test_a_signal_or_a_fatal_fault_ends_the_playing(tmp_path, capsys):
    config = config_of()
    config.logging.directory = str(tmp_path)

    async def work(directory, options):
        options["run_end"].report(GeneratorFailed("the router is gone"))
        await asyncio.Event().wait()

    assert run_until_signal("eval", config, work, print) == 1
    assert "failed: GeneratorFailed: the router is gone" in capsys.readouterr().out


async def test_policies_stand_side_by_side_with_paired_differences():
    never, _ = await scores_of(right_on(lambda *_: False), samples=2)
    always, _ = await scores_of(right_on(lambda *_: True), samples=2)
    never.name, always.name = "before", "after"
    console = Console(width=120, file=io.StringIO())
    console.print(table([never, always], 2))
    shown = {line.split("  ")[0]: line for line in console.file.getvalue().splitlines()}
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "exact match, greedy" in shown and "pass@2" in shown and "reward, sampled" in shown
    assert "exact match, greedy before 0.000 0.000 – 0.161" in rows
    assert "after 1.000 0.839 – 1.000 +1.000 +1.000 – +1.000" in rows


def test_k_grows_by_powers_of_two():
    record = RolloutRecord(purpose=Purpose.EVALUATE, group=0, sample=0)
    measures = Scores("it", sampled={0: [record] * 6}).measures(6)
    assert [*measures] == ["reward, sampled", "pass@1", "pass@2", "pass@4", "pass@6"]


def test_policies_are_named_as_short_as_possible():
    assert names_of(["runs/a/checkpoints/step-1", "weights"]) == ["step-1", "weights"]
    assert names_of(["a/checkpoint", "b/checkpoint"]) == ["a/checkpoint", "b/checkpoint"]


def test_a_checkpoint_belongs_to_its_run(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "config.toml").touch()
    assert run_of(run) == run_of(run / "checkpoints" / "step-1") == run_of(run / "checkpoint") == run
    assert run_of(tmp_path) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to evaluate"),
        (["weights"], "name the task"),
        (["a", "a", "--task", "copy"], "a twice"),
        (["no-such-run"], "there is no no-such-run: a policy is a run, a checkpoint or a Hugging Face directory"),
        (["weights", "--task", "kopy"], "did you mean copy?"),
        (["weights", "--task", "copy", "--temperature", "0"], "--temperature: expected a finite number of more than 0"),
        (["weights", "--task", "copy", "--samples", "-1"], "--samples: expected a number from 0 on"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, arguments, words):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments]) == 2
    assert words in capsys.readouterr().err
