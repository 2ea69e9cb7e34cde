"""Tasks of the package reasoning-gym, by name, each scored by its own verifier.

- A prompt is a function of the task, its config, the seed and the index; evaluation's do not depend on the seed.
- Which questions are held out is decided by their text (`dataset.is_held_out`), so none is also trained, even where a
  task has few. Ten are drawn for one that is held out.
- A verifier that raises at an answer gives it nothing, and `verifier_failed` counts that: some do so at text that is
  not in the form they expect, which is the policy's fault and must not hide it from training.
- The package is imported when the environment is made, in the process that plays it.

    [environment]
    name = "reasoning.py:ReasoningGym"
    [environment.kwargs]
    task = "chain_sum"
    config = { min_terms = 2, max_terms = 4 }
"""

from __future__ import annotations

import importlib.util
import random
import re
import string
import sys
import types
from typing import Any

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Demonstration, Environment, Example, Message, Reward, Rubric, Transcript
from titan_rl.environments.dataset import is_held_out
from titan_rl.errors import AbsentError, ConfigError, TaskError
from titan_rl.overrides import variant
from titan_rl.seeding import derive_seed

SOURCE_ONLY = {"cellpylib": ("game_of_life", "game_of_life_halting"), "pycosat": ("zebra_puzzles",), "zss": ("codeio",)}
"""Packages that reasoning-gym imports whatever the task, and the only tasks that use them. No wheels of them are
published (pycosat takes a C compiler), so an environment made of wheels does without."""

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer> at the end."

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HELD_OUT_ENTRIES = 10_000
"""Evaluation's prompts are found among so many questions."""
_MANY_DRAWS = 200
"""If so many questions in a row are held out, the task has hardly any others."""


class ReasoningGym(Environment):
    """The task.

    Args:
        task: its name in reasoning-gym, such as "chain_sum"; "composite" mixes several, its config then being
            `datasets`: a list of `name`, `weight` and `config`.
        config: its own settings.
        size: distinct training prompts.
        answer: what the verifier is given. "tags": the inside of the last `<answer>…</answer>`; without one, nothing is
            right. "text": all that the policy said.
        instruction: put behind the question; None: `INSTRUCTION` where the answer is looked for in tags.
        seed: decides the training stream and the demonstrations, not the held-out prompts.
    """

    def __init__(
        self,
        task: str,
        config: dict[str, Any] | None = None,
        size: int = 10_000,
        answer: str = "tags",
        instruction: str | None = None,
        seed: int = 0,
    ):
        if answer not in ("tags", "text"):
            raise ConfigError(f"environment.kwargs.answer must be one of tags, text, got {answer!r}")
        if size < 1:
            raise ConfigError(f"environment.kwargs.size must be at least 1, got {size}")
        self.size = self._entries = size
        self.task = task
        self.config = config or {}
        for name in {"seed", "size"} & self.config.keys():
            raise ConfigError(
                f"environment.kwargs.config.{name}: the {name} of task {task!r} is environment.kwargs.{name}"
            )
        self.tags = answer == "tags"
        self.instruction = instruction if instruction is not None else INSTRUCTION if self.tags else ""
        self.seed = seed
        self._gym = import_gym()
        self._check_task()
        self._datasets: dict[int, Any] = {}
        self._verifier = self._dataset(derive_seed("reasoning gym", seed, 0), size)  # any of them verifies every entry

    def example(self, index: int) -> Example:
        return self._example(self._training_entry("reasoning gym", index))

    def held_out(self, count: int) -> list[Example]:
        found: dict[str, Any] = {}  # a dict keeps the order of drawing
        for index in range(_HELD_OUT_ENTRIES):
            if len(found) == count:
                break
            entry = self._entry(derive_seed("reasoning gym held out"), index, _HELD_OUT_ENTRIES)
            if is_held_out(entry["question"]):
                found.setdefault(entry["question"], entry)
        return [self._example(entry) for entry in found.values()]

    def rubric(self) -> Rubric:
        return Rubric(Reward(self.verify, key="verified"))

    def demonstration(self, index: int) -> Demonstration:
        entry = self._training_entry("reasoning gym demonstration", index % self._entries)
        answer = entry["answer"]
        if not isinstance(answer, str):
            raise TaskError(f"reasoning-gym's task {self.task!r} comes without answers to demonstrate")
        said = f"<answer>{answer}</answer>" if self.tags else answer
        example = self._example(entry)
        return Demonstration(prompt=example.prompt, messages=(Message("assistant", said),), answer=example.answer)

    def verify(self, example: Example, transcript: Transcript) -> dict[str, float]:
        """`verified`: the verifier's score. `exact_match`: it is fully satisfied with an answer that the policy ended
        itself. `verifier_failed`: it raised."""
        answer, score, failed = transcript.answer, 0.0, False
        if self.tags:
            answer = next((found.strip() for found in reversed(_ANSWER.findall(answer))), "")
        try:
            score = float(self._verifier.score_answer(answer, example.answer)) if answer else 0.0
        except Exception:  # reported as a metric; any type of error, as verifiers index and convert what they are given
            failed = True
        return {"verified": score, "exact_match": transcript.stopped and score >= 1.0, "verifier_failed": failed}

    def _example(self, entry: dict[str, Any]) -> Example:
        text = "\n\n".join(filter(None, (entry["question"], self.instruction)))
        return Example(prompt=(Message("user", text),), answer=entry)

    def _training_entry(self, stream: str, index: int) -> dict[str, Any]:
        """Entry `index` of the first of a sequence of datasets in which its question is not held out."""
        for attempt in range(_MANY_DRAWS):
            entry = self._entry(derive_seed(stream, self.seed, attempt), index, self._entries)
            if not is_held_out(entry["question"]):
                return entry
        raise TaskError(f"reasoning-gym's task {self.task!r} has too few different questions to hold some out")

    def _entry(self, seed: int, index: int, size: int) -> dict[str, Any]:
        dataset = self._dataset(seed, size)
        state = random.getstate()
        random.seed(derive_seed("reasoning gym entry", seed, index))  # list_functions draws from the global generator
        try:
            return dataset[index]
        finally:
            random.setstate(state)

    def _dataset(self, seed: int, size: int) -> Any:
        """The task's dataset of this seed; cached, as some take seconds to make."""
        if seed in self._datasets:
            return self._datasets[seed]
        config = dict(self.config)
        if self.task == "composite":
            specs = config.get("datasets") or []
            config["datasets"] = [self._gym.composite.DatasetSpec(**spec) for spec in specs]
        try:
            # numpy's generators, which some tasks use, take 32 bits
            dataset = self._datasets[seed] = self._gym.create_dataset(self.task, **config, seed=seed % 2**31, size=size)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"environment.kwargs.config does not fit reasoning-gym's task {self.task!r}: {error}"
            ) from error
        return dataset

    def _check_task(self) -> None:
        known = self._gym.factory.DATASETS
        if self.task not in known:
            raise ConfigError(
                f"environment.kwargs.task: reasoning-gym has no task {self.task!r}; it has {', '.join(sorted(known))}"
            )
        used = {self.task, *(spec["name"] for spec in self.config.get("datasets", ()) if self.task == "composite")}
        for package, tasks in SOURCE_ONLY.items():
            if used & set(tasks) and importlib.util.find_spec(package) is None:
                raise AbsentError(
                    f"reasoning-gym's tasks {', '.join(tasks)} need the package {package}, published as source only: "
                    f"install it with `pip install {package}`"
                )


def import_gym() -> types.ModuleType:
    """The package `reasoning_gym`, also where packages of `SOURCE_ONLY` are missing: empty modules take their places
    while it is imported.

    Raises:
        AbsentError: it is not installed.
    """
    absent = [name for name in SOURCE_ONLY if importlib.util.find_spec(name) is None]
    sys.modules.update({name: types.ModuleType(name) for name in absent})
    try:
        import reasoning_gym
        import reasoning_gym.composite
    except ModuleNotFoundError as error:
        raise AbsentError(
            f"the environment 'reasoning_gym' needs the package reasoning-gym ({error}): install it with `pip install "
            "'titan-rl[reasoning-gym]'`"
        ) from error
    finally:
        for name in absent:
            del sys.modules[name]
    return reasoning_gym


def spell() -> RunConfig:
    """A task of reasoning-gym: a tiny policy that reverses few words learns to reverse more."""
    return variant(
        copy4(),
        {
            "policy.tiny.symbols": f" ()-:>{string.ascii_letters}",
            "environment.name": f"{__file__}:ReasoningGym",
            "environment.kwargs": {
                "task": "spell_backward",
                "config": {"min_word_len": 3, "max_word_len": 4},
                "answer": "text",
            },
            "rollout.sampling.max_new_tokens": 6,
            "trainer.warmup.steps": 200,
            "trainer.warmup.batch": 64,
            "trainer.optimizer.lr": 5e-4,
            "trainer.loss.kwargs": {"clip_low": 0.2, "clip_high": 0.2},
            "generator.count": 1,
            "generator.kv_cache_bytes": 256 << 20,
            "loop.steps": 60,
            "evaluation.every": 20,
            "evaluation.prompts": 200,
            "evaluation.target_exact_match": 0.0,
        },
    )
