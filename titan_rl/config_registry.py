"""Named recipes: functions without arguments that return a run config.

A recipe's first line is what `titan-rl recipes` shows. A variant of a recipe is that recipe with `replace`, so that
what two recipes share is written once; a variant that only one run needs is a TOML file or a few options instead.
"""

from __future__ import annotations

import ast
import inspect
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from titan_rl.config import EvaluationConfig, LoopConfig, PlacementConfig, RunConfig
from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.importing import import_name, user_code
from titan_rl.overrides import did_you_mean
from titan_rl.policy.config import (
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    TinyPolicyConfig,
    TrainerConfig,
    WarmupConfig,
)
from titan_rl.rollout.config import AgentsConfig, EnvironmentConfig, RolloutConfig, SamplingConfig
from titan_rl.routing.config import RouterConfig

Recipe = Callable[[], RunConfig]


def copy4() -> RunConfig:
    """A tiny policy learns to copy four digits on a CPU: 1 trainer rank, 2 generators of 1 rank."""
    return RunConfig(
        policy=PolicyConfig(tiny=TinyPolicyConfig(symbols="0123456789=")),
        environment=EnvironmentConfig(name="copy", kwargs={"digits": 4}),
        rollout=RolloutConfig(samples_per_group=8, sampling=SamplingConfig(temperature=1.0, max_new_tokens=6)),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-3, betas=(0.9, 0.95)),
            # without the bonus a digit can die: its probability goes to 0 everywhere and never comes back
            loss=LossConfig(kwargs={"clip_low": 0.2, "clip_high": 0.2, "entropy_bonus": 0.01}),
        ),
        # 32 KiB per block of this policy's KV: twice what 256 requests of 64 tokens take
        generator=GeneratorConfig(count=2, tensor_parallel=1, kv_cache_bytes=32 << 20),
        router=RouterConfig(strategy="least_loaded", weight_sync="drain"),
        loop=LoopConfig(steps=150, groups_per_step=32),
        evaluation=EvaluationConfig(every=50, prompts=1000, target_exact_match=0.95),
        # a policy this small is slower on a GPU, and one GPU would not do for three ranks
        placement=PlacementConfig(device="cpu"),
    )


def copy4_2x2() -> RunConfig:
    """copy4 in parallel: 2 FSDP trainer ranks, 2 generators of 2 tensor-parallel ranks."""
    recipe = copy4()
    return replace(
        recipe,
        trainer=replace(recipe.trainer, data_parallel=2),
        generator=replace(recipe.generator, tensor_parallel=2),
    )


def copy4_async() -> RunConfig:
    """copy4 asynchronously: 3 batches in flight, weights change under running rollouts."""
    recipe = copy4()
    return replace(
        recipe,
        router=replace(recipe.router, weight_sync="hot_swap"),
        # one is served, one is pulled, one is kept by the evaluation that goes on meanwhile
        weights=replace(recipe.weights, max_live=3),
        # at a constant rate, a policy that learns from old samples forgets now and then what it knew
        trainer=replace(
            recipe.trainer, optimizer=replace(recipe.trainer.optimizer, decay_ratio=0.4, min_lr_factor=0.1)
        ),
        loop=replace(recipe.loop, max_staleness=2),
        evaluation=replace(recipe.evaluation, every=5),
    )


def copy4_quick() -> RunConfig:
    """The quick start: copy4 as it suits two cores, one generator, one step ahead of the trainer."""
    recipe = copy4_async()
    return replace(
        recipe,
        generator=replace(recipe.generator, count=1),
        # few requests are under way when weights come: it costs less to finish them than to compute their KV again
        router=replace(recipe.router, weight_sync="drain"),
        loop=replace(recipe.loop, max_staleness=1),
        evaluation=replace(recipe.evaluation, every=20, prompts=250),
        checkpoint=replace(recipe.checkpoint, every=60),
    )


def sort5() -> RunConfig:
    """Warm-up, then RL: a tiny policy that learned to sort letters mostly the wrong way is turned."""
    recipe = copy4()
    return replace(
        recipe,
        policy=PolicyConfig(tiny=TinyPolicyConfig(symbols="abcdefghij=")),
        environment=EnvironmentConfig(name="sort", kwargs={"letters": 5, "right_share": 0.3}),
        rollout=replace(recipe.rollout, sampling=SamplingConfig(temperature=1.0, max_new_tokens=7)),
        trainer=TrainerConfig(
            warmup=WarmupConfig(steps=250, batch=128, lr=3e-3),
            optimizer=OptimizerConfig(lr=2e-4, betas=(0.9, 0.95)),
            loss=LossConfig(kwargs={"clip_low": 0.2, "clip_high": 0.2}),
        ),
        loop=replace(recipe.loop, steps=110),
    )


def tool_sum() -> RunConfig:
    """Several turns with a tool: a tiny policy that mostly guessed sums learns to ask for them."""
    recipe = sort5()
    markers = ("<tool>", "</tool>", "<result>", "</result>")
    return replace(
        recipe,
        policy=PolicyConfig(tiny=TinyPolicyConfig(symbols="0123456789+=", special_tokens=markers)),
        environment=EnvironmentConfig(name="tool_sum", kwargs={"tool_share": 0.25}),
        rollout=replace(
            recipe.rollout,
            max_turns=3,  # two calls and an answer
            max_sampled_tokens=15,
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=15),
        ),
        trainer=replace(
            recipe.trainer,
            warmup=WarmupConfig(steps=200, batch=128, lr=3e-3),
            optimizer=OptimizerConfig(lr=5e-4, betas=(0.9, 0.95)),
        ),
        loop=replace(recipe.loop, steps=120, groups_per_step=16),
        evaluation=replace(recipe.evaluation, target_exact_match=0.9),
    )


def tool_sum_openai() -> RunConfig:
    """tool_sum played by a script that only knows OpenAI's client, through the gateway."""
    recipe = tool_sum()
    return replace(
        recipe,
        environment=replace(recipe.environment, name="tool_sum_openai"),
        rollout=replace(
            recipe.rollout,
            # a turn has room for a call; together they need no bound, past which the program's next call would fail
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=9),
            max_sampled_tokens=0,
            agents=AgentsConfig(at_once=8),  # they compute as much as they wait
        ),
        # what takes the time is 128 programs a step, not their tokens
        generator=replace(recipe.generator, count=1),
        loop=replace(recipe.loop, steps=30),
        evaluation=replace(recipe.evaluation, every=15, prompts=200),
    )


def cpu_smoke() -> RunConfig:
    """Three small steps of copy4_2x2: every part of the system once, nothing learned."""
    recipe = copy4_2x2()
    return replace(
        recipe,
        loop=replace(recipe.loop, steps=3, groups_per_step=4),
        evaluation=EvaluationConfig(every=0, prompts=32),
    )


def qwen3_0_6b_alphabet_sort() -> RunConfig:
    """Qwen3-0.6B sorts names in up to 3 turns: 4 FSDP trainer ranks, 2 generators of 2 (8 GPUs)."""
    return RunConfig(
        policy=PolicyConfig(path="checkpoints/Qwen3-0.6B"),
        environment=EnvironmentConfig(
            name="alphabet_sort",
            kwargs={"min_names": 3, "max_names": 6, "min_turns": 1, "max_turns": 3, "min_added": 1, "max_added": 3},
        ),
        rollout=RolloutConfig(
            workers=4,
            samples_per_group=8,
            max_turns=3,
            renderer_kwargs={"enable_thinking": False},
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=256),
        ),
        trainer=TrainerConfig(
            data_parallel=4,
            dtype="bfloat16",
            # the logits of a micro-batch (151,936 per token, float32) are what fills the memory: 5 GB here
            max_tokens_per_microbatch=8192,
            optimizer=OptimizerConfig(lr=1e-6, warmup_steps=5),
            loss=LossConfig(kwargs={"clip_low": 0.2, "clip_high": 0.2}),
        ),
        generator=GeneratorConfig(
            # three turns: about 60 tokens for each answer of 12 names, 250 in all for what is asked
            count=2,
            tensor_parallel=2,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=256,
            block_size=16,
        ),
        loop=LoopConfig(steps=200, groups_per_step=64),
        evaluation=EvaluationConfig(every=20, prompts=256),
        placement=PlacementConfig(device="cuda"),
    )


def qwen3_0_6b_gsm8k() -> RunConfig:
    """Qwen3-0.6B solves grade-school math: 4 FSDP trainer ranks, 2 generators of 2 (8 GPUs)."""
    recipe = qwen3_0_6b_alphabet_sort()
    return replace(
        recipe,
        environment=EnvironmentConfig(
            name="gsm8k",
            kwargs={"train_file": "data/gsm8k/train.jsonl", "test_file": "data/gsm8k/test.jsonl"},
        ),
        rollout=replace(recipe.rollout, max_turns=1, sampling=SamplingConfig(temperature=1.0, max_new_tokens=1024)),
        evaluation=EvaluationConfig(every=20, prompts=1319),  # all that there are
    )


def alphabet_sort_smoke() -> RunConfig:
    """Two small steps of alphabet_sort on a CPU: a chat format, 2 turns, nothing learned."""
    recipe = copy4()
    return replace(
        recipe,
        policy=PolicyConfig(tiny=TinyPolicyConfig(tokenizer="chat", max_length=1024)),
        environment=EnvironmentConfig(
            name="alphabet_sort",
            kwargs={"min_names": 2, "max_names": 3, "min_turns": 2, "max_turns": 2, "min_added": 1, "max_added": 2},
        ),
        rollout=RolloutConfig(
            samples_per_group=4,
            max_turns=2,
            renderer_kwargs={"enable_thinking": False},
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=16),
        ),
        generator=GeneratorConfig(count=1, max_model_len=1024),
        loop=replace(recipe.loop, steps=2, groups_per_step=4),
        evaluation=EvaluationConfig(every=0, prompts=8),
    )


def reasoning_gym_spell() -> RunConfig:
    """A task of reasoning-gym: a tiny policy that reverses few words learns to reverse more."""
    recipe = sort5()
    return replace(
        recipe,
        policy=PolicyConfig(tiny=TinyPolicyConfig(symbols=f" ()-:>{string.ascii_letters}")),
        environment=EnvironmentConfig(
            name="reasoning_gym",
            kwargs={"task": "spell_backward", "config": {"min_word_len": 3, "max_word_len": 4}, "answer": "text"},
        ),
        rollout=replace(recipe.rollout, sampling=SamplingConfig(temperature=1.0, max_new_tokens=6)),
        trainer=replace(
            recipe.trainer,
            warmup=WarmupConfig(steps=200, batch=64, lr=3e-3),
            optimizer=OptimizerConfig(lr=5e-4, betas=(0.9, 0.95)),
        ),
        generator=GeneratorConfig(count=1),
        loop=replace(recipe.loop, steps=60),
        evaluation=EvaluationConfig(every=20, prompts=200),
    )


RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (
        copy4,
        copy4_2x2,
        copy4_async,
        copy4_quick,
        sort5,
        tool_sum,
        tool_sum_openai,
        cpu_smoke,
        qwen3_0_6b_alphabet_sort,
        qwen3_0_6b_gsm8k,
        alphabet_sort_smoke,
        reasoning_gym_spell,
    )
}
"""What `--recipe` takes by short name."""


def load_recipe(name: str) -> RunConfig:
    """The config of the recipe `name`: a key of `RECIPES`, `pkg.mod:function` or `path/to/file.py:function`.

    Raises:
        ConfigError: there is no such recipe, it raises, or it returns no RunConfig.
    """
    if name.endswith(".py") and Path(name).is_file():
        there = ", ".join(f"{name}:{function}" for function in _recipes_in(Path(name)))
        raise ConfigError(f"--recipe {name}: name one of its recipes as {name}:FUNCTION; there are {there or 'none'}")
    if name not in RECIPES and ":" not in name:
        raise ConfigError(
            f"--recipe {name}: there is no such recipe{did_you_mean(name, RECIPES)}; there are "
            f"{', '.join(RECIPES)}, and one of your own is named pkg.mod:function or file.py:function"
        )
    try:
        recipe = RECIPES[name] if name in RECIPES else import_name(name)
    except ConfigError as error:
        raise ConfigError(f"--recipe: {error}") from error
    if not callable(recipe):
        raise ConfigError(f"--recipe {name}: is no function that returns a RunConfig")
    with user_code(f"--recipe {name}"):
        config = recipe()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"--recipe {name}: must return a RunConfig, returned {type(config).__name__}")
    return replace(config, recipe=name)


def _recipes_in(file: Path) -> list[str]:
    """Public functions of a file that can be called without arguments: those that say that they return a RunConfig, if
    any does. Imports nothing."""
    try:
        nodes = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
    free = [each for each in functions if len(each.args.args) == len(each.args.defaults) and not each.args.posonlyargs]
    said = [each for each in free if each.returns is not None and "RunConfig" in ast.unparse(each.returns)]
    return [each.name for each in said or free]


def first_line(documented: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]
