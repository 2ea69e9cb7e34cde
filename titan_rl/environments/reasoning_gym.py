"""Tasks of the package reasoning-gym, by name, each scored by its own verifier.

- A prompt is a function of the task, its config, the seed and the index; evaluation's do not depend on the seed.
- A verifier that raises at an answer gives it nothing, and `verifier_failed` counts that: some do so at text that is
  not in the form they expect, which is the policy's fault and must not hide it from training.
- The package is imported when the environment is made, in the process that plays it.

    [environment]
    name = "reasoning_gym"
    [environment.kwargs]
    task = "chain_sum"
    config = { min_terms = 2, max_terms = 4 }
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from titan_rl.environments.base import Demonstration, Environment, Example, Message, Reward, Rubric, Transcript
from titan_rl.environments.dataset import is_held_out
from titan_rl.errors import AbsentError, ConfigError, TaskError
from titan_rl.seeding import derive_seed

SOURCE_ONLY = {
    "cellpylib": ("game_of_life", "game_of_life_halting"),
    "pycosat": ("zebra_puzzles",),
    "zss": ("codeio",),
}
"""Packages that reasoning-gym imports whatever the task, and the only tasks that use them. No wheels of them are
published (pycosat takes a C compiler), so an environment made of wheels does without."""

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer> at the end."

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MANY_DRAWS = 200
"""So many prompts drawn for one that belongs to the right split: the task then has hardly any others."""


class ReasoningGym(Environment):
    """The task.

    Args:
        task: its name in reasoning-gym, such as "chain_sum"; "composite" mixes several, its config then being
            `datasets`: a list of `name`, `weight` and `config`.
        config: its own settings.
        size: distinct training prompts.
        split: how evaluation's prompts are kept from training. "question": by the question's text, so that no question
            is both, even where a task has few; ten are drawn for one that is held out. "seed": drawn from another seed
            only, for tasks that take long to draw and never draw the same twice.
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
        split: str = "question",
        answer: str = "tags",
        instruction: str | None = None,
        seed: int = 0,
    ):
        for name, value, values in (("split", split, ("question", "seed")), ("answer", answer, ("tags", "text"))):
            if value not in values:
                raise ConfigError(f"environment.kwargs.{name} must be one of {', '.join(values)}, got {value!r}")
        if size < 1:
            raise ConfigError(f"environment.kwargs.size must be at least 1, got {size}")
        self.size = self._entries = size
        self.task = task
        self.config = _checked_config(task, config or {})
        self.split = split
        self.tags = answer == "tags"
        self.instruction = instruction if instruction is not None else INSTRUCTION if self.tags else ""
        self.seed = seed
        self._gym = import_gym()
        self._check_task()
        self._datasets: dict[int, Any] = {}
        self._verifier = self._dataset(derive_seed("reasoning gym", seed, 0))  # any of them verifies every entry

    def example(self, index: int) -> Example:
        return self._example(self._training_entry("reasoning gym", index))

    def held_out(self, count: int) -> list[Example]:
        found: dict[str, Any] = {}  # a dict keeps the order of drawing
        for drawn, entry in enumerate(self._held_out_stream()):
            if len(found) == count or drawn > _MANY_DRAWS * (len(found) + 1):
                break
            if self.split == "seed" or is_held_out(entry["question"]):
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

    def _answer_of(self, transcript: Transcript) -> str | None:
        if not self.tags:
            return transcript.answer
        found = _ANSWER.findall(transcript.answer)
        return found[-1].strip() if found else None

    def verify(self, example: Example, transcript: Transcript) -> dict[str, float]:
        """`verified`: the verifier's score. `exact_match`: it is fully satisfied with an answer that the policy ended
        itself. `verifier_failed`: it raised."""
        answer, score, failed = self._answer_of(transcript), 0.0, False
        try:
            score = float(self._verifier.score_answer(answer, example.answer)) if answer else 0.0
        except Exception:  # reported as a metric; any type of error, as verifiers index and convert what they are given
            failed = True
        return {"verified": score, "exact_match": transcript.stopped and score >= 1.0, "verifier_failed": failed}

    def _example(self, entry: dict[str, Any]) -> Example:
        text = "\n\n".join(filter(None, (entry["question"], self.instruction)))
        return Example(prompt=(Message("user", text),), answer=entry)

    def _training_entry(self, stream: str, index: int) -> dict[str, Any]:
        """Entry `index` of the first of a sequence of datasets in which that entry may be trained on."""
        for attempt in range(_MANY_DRAWS):
            entry = self._entry(derive_seed(stream, self.seed, attempt), index)
            if self.split == "seed" or not is_held_out(entry["question"]):
                return entry
        raise TaskError(f"reasoning-gym's task {self.task!r} has too few different questions to hold some out")

    def _held_out_stream(self) -> Iterator[dict[str, Any]]:
        chunk = 0
        while True:
            seed = derive_seed("reasoning gym held out", chunk)
            yield from (self._entry(seed, index) for index in range(self._entries))
            chunk += 1

    def _entry(self, seed: int, index: int) -> dict[str, Any]:
        dataset = self._dataset(seed)
        state = random.getstate()
        random.seed(derive_seed("reasoning gym entry", seed, index))  # list_functions draws from the global generator
        try:
            return dataset[index]
        finally:
            random.setstate(state)

    def _dataset(self, seed: int) -> Any:
        """The task's dataset of this seed; kept, as some take seconds to make."""
        if seed not in self._datasets:
            self._datasets[seed] = self._make_dataset(seed)
        return self._datasets[seed]

    def _make_dataset(self, seed: int) -> Any:
        config = dict(self.config)
        if self.task == "composite":
            specs = config.get("datasets") or []
            config["datasets"] = [self._gym.composite.DatasetSpec(**spec) for spec in specs]
        try:
            # numpy's generators, which some tasks use, take 32 bits
            return self._gym.create_dataset(self.task, **config, seed=seed % 2**31, size=self._entries)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"environment.kwargs.config does not fit reasoning-gym's task {self.task!r}: {error}"
            ) from error

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


def _checked_config(task: str, config: dict[str, Any]) -> dict[str, Any]:
    for name in ("seed", "size"):
        if name in config:
            raise ConfigError(
                f"environment.kwargs.config.{name}: the {name} of task {task!r} is environment.kwargs.{name}"
            )
    return config
