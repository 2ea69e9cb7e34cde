"""Whole runs as a user starts them: how they end, what they write, that nothing stays behind; then the small recipes
of the bundled tasks. Each run is real and small (one generator, a few steps), about 15 s.

What is learned: in CI `tests/packaging/test_base_installation.py` asks that of the quick start.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leftovers import REPOSITORY, RUN_SECONDS, assert_nothing_is_left, finish, start_run

from tests.support.metrics import assert_metrics_are_known
from tests.support.timelines import assert_timeline_is_whole

FULL = functools.partial(pytest.param, marks=pytest.mark.acceptance)  # a cell of the full matrix


TOOL_SUM = "rl_configs/tool_sum.py:tool_sum"


def readme_example() -> str:
    """The README's file with a task of one's own."""
    return (REPOSITORY / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


OWN_FAMILY = """
from typing import ClassVar

from torchtitan.models.common.param_init import skip_param_init

from titan_rl.policy.models.llama3 import Llama3

NAMES = {f"self_attn.{each}": f"attention.qkv_linear.w{each}" for each in "qkv"} | {"self_attn.o": "attention.wo"}
NAMES |= {"mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2"}


class Biased(Llama3, frozen=True, kw_only=True):
    computed: ClassVar = Llama3.computed | {"attention_bias": (True,), "mlp_bias": (True,)}

    def layer_tensors(self):
        shapes = super().layer_tensors()
        return shapes | {f"{name}_proj.bias": shapes[f"{name}_proj.weight"][:1] for name in NAMES}

    def layer(self, attention):
        layer = super().layer(attention)
        qkv, ffn = layer.attention.qkv_linear, layer.feed_forward
        for linear in (qkv.wq, qkv.wkv, layer.attention.wo, ffn.w1, ffn.w2, ffn.w3):
            linear.bias, linear.param_init = True, linear.param_init | {"bias": skip_param_init}
        return layer

    def adapter(self, config):
        adapter = super().adapter(config)
        for theirs, ours in NAMES.items():
            adapter.from_hf_map[f"model.layers.{{}}.{theirs}_proj.bias"] = f"layers.{{}}.{ours}.bias"
        return adapter
"""
"""Llama with a bias in every matrix of a layer."""


def run_directory(runs: Path) -> Path:
    (directory,) = runs.iterdir()
    return directory


@pytest.mark.parametrize("steps", [30, FULL(250)])
def test_the_task_of_the_readme_is_trained_and_shown_under_torchrun_and_its_checkpoint_scores_the_same(
    tmp_path: Path, steps: int
) -> None:
    """By the reward alone, which 250 steps are enough for to learn it. In 30 by a family of models of one's own."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "titan_rl.train")
    task = tmp_path / "double.py"
    task.write_text(readme_example())
    settings = ("--loop.steps", str(steps), "--trainer.warmup.steps", "0", "--evaluation.prompts", "50")
    if steps == 30:
        family = tmp_path / "biased.py"
        family.write_text(OWN_FAMILY)
        settings += ("--policy.tiny.architecture", f"{family}:Biased")
    run = start_run(str(task), *settings, runs=tmp_path / "runs", program=torchrun)
    output = finish(run)
    assert run.returncode == 0, output
    assert_nothing_is_left(run)
    directory = run_directory(tmp_path / "runs")
    assert directory.name.startswith("double-")

    summary = json.loads((directory / "summary.json").read_text())
    assert summary["tokens_generated"] > 0
    assert summary["exact_match_before"] <= 0.1 and summary["reward_before"] <= 0.5, output
    for part in ("  entropy ", "  truncated ", "  wrong  '", ", wanted '", "exact match 0.000 → "):
        assert part in output
    if steps == 250:
        assert summary["exact_match_after"] >= 0.8 and summary["reward_after"] >= 0.9, output
        assert "  right  '" in output
    assert f"reward {summary['reward_before']:.3f} → {summary['reward_after']:.3f}" in output

    assert_metrics_are_known(directory)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == list(range(1, summary["steps"] + 1))
    # Rounding: of most tokens in the seventh digit, of one that was most unlikely, as there are few, more.
    assert all(line["train/logprob_difference_mean"] <= 1e-6 for line in trained)
    assert all(line["train/logprob_difference_max"] <= 2e-4 for line in trained)
    assert list((directory / "tensorboard").iterdir())
    logs = {path.name for path in (directory / "logs").iterdir()}
    assert {"controller.log", "trainer.log", "generator0.log", "router.log", "rollout0.log"} <= logs

    assert_timeline_is_whole(directory)
    if steps == 250:  # test_updater_ranks compares what is saved
        assert_checkpoint_scores_like_the_policy(directory / "checkpoint")
    assert_eval_agrees_with_the_run(directory, summary, tmp_path / "evaluations")


def assert_eval_agrees_with_the_run(run: Path, summary: dict[str, Any], evaluations: Path) -> None:
    """The same prompts, played by the saved weights through generators of their own."""
    evaluation = start_run("eval", str(run), "--samples", "2", runs=evaluations, program=("-m", "titan_rl.cli"))
    output = finish(evaluation)
    assert evaluation.returncode == 0, output
    assert_nothing_is_left(evaluation)
    lines = [json.loads(line) for line in (run_directory(evaluations) / "results.jsonl").read_text().splitlines()]
    greedy = [line for line in lines if line["temperature"] == 0]
    assert len(lines) == 3 * len(greedy) > 0 and not any(line["error"] for line in lines)
    assert sum(line["exact_match"] for line in greedy) / len(greedy) == summary["exact_match_after"]
    assert np.isclose(sum(line["reward"] for line in greedy) / len(greedy), summary["reward_after"], atol=1e-12)
    for part in ("exact match, greedy", f" {summary['exact_match_after']:.3f} ", "pass@2", "95 % interval"):
        assert part in output


def assert_checkpoint_scores_like_the_policy(checkpoint: Path) -> None:
    """transformers loads it, and a fresh trainer on it gives the same logprobs."""
    program = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained({str(checkpoint)!r})
tokens = tokenizer("4=8", return_tensors="pt").input_ids
print(torch.log_softmax(model(tokens).logits[0], -1)[:-1].gather(-1, tokens[0, 1:, None]).flatten().tolist())
"""
    theirs = json.loads(python(program))
    program = f"""
import json, numpy as np
from pathlib import Path
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.policy.updater import PolicyUpdater
from titan_rl.types import TrainingSample
import os
os.environ.update(RANK="0", WORLD_SIZE="1")
updater = PolicyUpdater(
    TrainerConfig(), model_path=Path({str(checkpoint)!r}), temperature=1.0, total_steps=1, device="cpu", seed=0
)
tokens = np.array([5, 8, 7], np.int32)
sample = TrainingSample(group_id=0, sample=0, token_ids=tokens, loss_mask=np.array([False, True, True]),
    logprobs=np.zeros(3, np.float32), versions=np.zeros(3, np.int64), advantages=0.0, reward=0.0)
batch, recorder = SampleBatch.of([sample]), TokenScoreRecorder([(0, 0)])
updater.train_step(batch, updater.plan(batch), recorder)
print(recorder.scores[0, 0].logprobs.tolist())
"""
    ours = json.loads(python(program))
    assert np.allclose(ours, theirs, atol=1e-6)


def python(program: str) -> str:
    """The last line that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, text=True, capture_output=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.acceptance  # in CI: test_synchronous_is_staleness_0 calls all of it but the command line
def test_the_minimal_loop_runs() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/minimal_loop.py", "--steps", "2"],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "held-out exact match" in done.stdout


def steps_of(name: str, *arguments: str, runs: Path, learned: bool = True) -> list[dict[str, Any]]:
    """What each step of the run of a recipe measured."""
    run = start_run("--recipe", name, *arguments, runs=runs)
    output = finish(run)
    assert run.returncode == (0 if learned else 1), output
    assert ("missed its target" in output) is not learned, output
    assert_nothing_is_left(run)
    assert_metrics_are_known(run_directory(runs))
    lines = [json.loads(line) for line in (run_directory(runs) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def test_names_are_sorted_over_two_turns_in_a_chat_format_and_two_steps_are_too_few_to_learn_it(tmp_path: Path) -> None:
    wanted = ("--evaluation.target-exact-match", "0.95")
    steps = steps_of("rl_configs/alphabet_sort.py:smoke", *wanted, runs=tmp_path / "runs", learned=False)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/turns_mean"] == 2 and step["rollout/branched"] == step["rollout/failed"] == 0
        assert step["train/trained_tokens"] == step["rollout/tokens"] > 0
        assert step["train/logprob_difference_max"] <= 2e-5
        assert step["train/grad_norm"] > 0
        assert {"reward/names_in_order", "reward/exact_match"} <= step.keys()


@pytest.mark.acceptance  # in CI: the verifier itself, tests/environments/test_reasoning_gym.py
def test_words_are_spelled_backward_for_a_verifier_of_reasoning_gym_and_two_steps_are_too_few_to_learn_it(
    tmp_path: Path,
) -> None:
    warmup = ("--trainer.warmup.steps", "4", "--trainer.warmup.lr-warmup-steps", "1")
    smaller = (*warmup, "--loop.steps", "2", "--loop.groups-per-step", "4", "--evaluation.prompts", "20")
    smaller += ("--generator.engine", "simulated")
    wanted = ("--evaluation.target-exact-match", "0.95")
    steps = steps_of("rl_configs/reasoning.py:spell", *smaller, *wanted, runs=tmp_path / "runs", learned=False)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/failed"] == step["reward/verifier_failed"] == 0
        assert 0 <= step["reward/exact_match"] <= step["reward/verified"] == step["rollout/reward_mean"] <= 1


def test_the_script_of_the_quick_start_sets_up_and_hands_its_arguments_to_the_run() -> None:
    """What the run learns: tests/packaging/test_base_installation.py."""
    command = ["scripts/quickstart.sh", "--dry-run", "--seed", "7"]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    assert 'recipe = "copy4_quick"' in done.stdout and "seed = 7" in done.stdout


@pytest.mark.parametrize(
    "recipe", [FULL("copy4_2x2"), FULL("copy4_trainer_tp2"), FULL("rl_configs/sort.py:sort5"), TOOL_SUM]
)
def test_a_recipe_of_the_manual_starts(tmp_path: Path, recipe: str) -> None:
    """Those that no other test starts, for one small step. CI's has tools, a warm-up, and two tensor-parallel ranks of
    the trainer."""
    file = REPOSITORY / "rl_configs" / f"{recipe}.toml"
    chosen = ("--config", str(file)) if file.exists() else ("--recipe", recipe)
    smaller = ("--loop.steps", "1", "--loop.groups-per-step", "2", "--evaluation.prompts", "8")
    warmed = ".py:" in recipe
    warmup = ("--trainer.warmup.steps", "2", "--trainer.warmup.lr-warmup-steps", "1") if warmed else ()
    one_rank = recipe != "copy4_2x2"  # a simulated engine has no other
    cheap = (*("--generator.engine", "simulated") * one_rank, "--evaluation.target-exact-match", "0")
    parallel = ("--trainer.tensor-parallel", "2") if recipe == TOOL_SUM else ()
    run = start_run(*chosen, *smaller, *warmup, *cheap, *parallel, runs=tmp_path)
    output = finish(run)
    assert run.returncode == 0, output
    assert "the run is done after step 1" in output
    assert_nothing_is_left(run)
