"""Named recipes: functions without arguments that return a run config.

A recipe's first line is what `titan-rl recipes` shows. A variant of a recipe names the settings in which it differs.
One that only a single run needs is a TOML file or a few options instead.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace

from titan_rl.config import EvaluationConfig, LoopConfig, PlacementConfig, RunConfig
from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.importing import import_name, user_code
from titan_rl.overrides import did_you_mean, variant
from titan_rl.policy.config import LossConfig, OptimizerConfig, PolicyConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.rollout.config import EnvironmentConfig, RolloutConfig, SamplingConfig
from titan_rl.routing.config import RouterConfig


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
    return variant(copy4(), {"trainer.data_parallel": 2, "generator.tensor_parallel": 2})


def copy4_async() -> RunConfig:
    """copy4 asynchronously: 3 batches in flight, weights change under running rollouts."""
    settings = {
        "router.weight_sync": "hot_swap",
        # one is served, one is pulled, one is kept by the evaluation that goes on meanwhile
        "weights.max_live": 3,
        # at a constant rate, a policy that learns from old samples forgets now and then what it knew
        "trainer.optimizer.decay_ratio": 0.4,
        "trainer.optimizer.min_lr_factor": 0.1,
        "loop.max_staleness": 2,
        "evaluation.every": 5,
    }
    return variant(copy4(), settings)


def copy4_quick() -> RunConfig:
    """The quick start: copy4 as it suits two cores, one generator, one step ahead of the trainer."""
    settings = {
        "generator.count": 1,
        # few requests are under way when weights come: it costs less to finish them than to compute their KV again
        "router.weight_sync": "drain",
        "loop.max_staleness": 1,
        "evaluation.every": 20,
        "evaluation.prompts": 250,
        "checkpoint.every": 60,
    }
    return variant(copy4_async(), settings)


def task() -> RunConfig:
    """What `titan-rl train task.py` begins with; the rest is chosen for the task (`run.first_settings`)."""
    settings = {
        "rollout.samples_per_group": 16,
        "trainer.loss.kwargs": {"clip_low": 0.2, "clip_high": 0.2, "entropy_bonus": 0.3, "entropy_decay": 0.8},
        "generator.kv_cache_bytes": 256 << 20,
        "loop.steps": 500,
        "evaluation.every": 50,
        "evaluation.prompts": 200,
        "evaluation.target_exact_match": 0.0,
    }
    return variant(copy4_quick(), settings)


def cpu_smoke() -> RunConfig:
    """Three small steps of copy4_2x2: every part of the system once, nothing learned."""
    settings = {
        "loop.steps": 3,
        "loop.groups_per_step": 4,
        "evaluation.every": 0,
        "evaluation.prompts": 32,
        "evaluation.target_exact_match": 0.0,
    }
    return variant(copy4_2x2(), settings)


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe for recipe in (copy4, copy4_2x2, copy4_async, copy4_quick, task, cpu_smoke)
}
"""What `--recipe` takes by short name."""


def load_recipe(name: str) -> RunConfig:
    """The config of the recipe `name`: a key of `RECIPES`, `pkg.mod:function` or `path/to/file.py:function`. Raises
    ConfigError: there is no such recipe, it raises, or it returns no RunConfig."""
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


def first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]
