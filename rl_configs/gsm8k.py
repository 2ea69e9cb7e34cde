"""Grade-school math word problems, read from the published files and checked by math-verify.

- A line of such a file is a JSON object with `question` and `answer`, a worked solution that ends in `#### N`. A line
  that is anything else is refused, with its file and number, when the environment is made.
- The right number counts however it is written; whether it stands in the box that the prompt asks for is a metric.
- No question of the test file is trained on, nor one that `dataset.is_held_out` picks where there is no test file.
- math-verify is imported when the environment is made, in the process that plays it. Its own time limits work in the
  main thread only, where reward functions run; `environment.grade_seconds` bounds it everywhere.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config import RunConfig
from titan_rl.config_registry import load_recipe
from titan_rl.environments.base import DatasetEnvironment, Demonstration, Example, Message, Reward, Transcript
from titan_rl.environments.dataset import Rows, read_rows
from titan_rl.errors import AbsentError, ConfigError
from titan_rl.overrides import variant

INSTRUCTION = "Think step by step, and put the final answer, a number, in \\boxed{}."
VERIFY_SECONDS = 5
"""Longest time to read an answer, and again to compare it: `9^{9^{9}}` would take for ever. What ends takes
milliseconds, so that no right answer is late on a busy machine."""
LAST_CHARACTERS = 500
"""An answer outside a box is looked for in so many characters at the end."""

_FINAL = re.compile(r"####[ \t]*(-?[\d,]*\.?\d+)[ \t]*$")
_CALCULATION = re.compile(r"<<[^<>]*>>")
"""Notes in the worked solutions, such as `<<48/2=24>>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved(Example):
    """With the demonstration of its row."""

    solution: str


class Gsm8k(DatasetEnvironment):
    """The task.

    Args:
        train_file: what is trained on, JSON lines or (with pyarrow) Parquet. A relative name starts at the TOML file
            that holds it, else at the working directory.
        test_file: what is evaluated on; empty: a tenth of the training file's questions.
        instruction: put behind every question.
        seed: decides the order of the training problems.

    Raises:
        AbsentError: math-verify is not installed.
    """

    stream = "gsm8k"
    settings = ("train_file", "test_file")

    def __init__(self, train_file: str, test_file: str = "", instruction: str = INSTRUCTION, seed: int = 0):
        self.instruction = instruction
        super().__init__(train_file, Reward(self.verify, key="right_number"), test_path=test_file, seed=seed)
        try:
            import math_verify
        except ModuleNotFoundError as error:
            raise AbsentError(
                f"the environment 'gsm8k' needs the package math-verify ({error}): install it with `pip install "
                "'titan-rl[math]'`"
            ) from error
        self._math: Any = math_verify
        self._math.parse("\\boxed{1}", parsing_timeout=_limit())  # what only the first one has to wait for

    def demonstration(self, index: int) -> Demonstration:
        example = self.example(index)
        assert isinstance(example, Solved)
        solution = Message("assistant", example.solution)
        return Demonstration(prompt=example.prompt, messages=(solution,), answer=example.answer)

    def verify(self, example: Example, transcript: Transcript) -> dict[str, float]:
        """`right_number`: math-verify finds the answer equal to the number, however it is written. `exact_match`: the
        policy also ended its answer itself. `boxed`: the answer has the form that the prompt asks for."""
        seconds = _limit()
        inside = last_box(transcript.answer)
        text = transcript.answer[-LAST_CHARACTERS:] if inside is None else f"\\boxed{{{inside}}}"
        said = self._math.parse(text, parsing_timeout=seconds)
        wanted = self._math.parse(f"\\boxed{{{example.answer}}}", parsing_timeout=seconds)
        right = bool(self._math.verify(wanted, said, timeout_seconds=seconds))
        return {"right_number": right, "exact_match": right and transcript.stopped, "boxed": inside is not None}

    def _examples(self, setting: str, rows: Rows) -> Iterator[tuple[str, Example]]:
        for where, row in read_rows(f"environment.kwargs.{setting}", rows):
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
                raise ConfigError(f"{where}: expected an object with the texts `question` and `answer`")
            question, answer = row["question"].strip(), row["answer"].strip()
            if not question:
                raise ConfigError(f"{where}: the question is empty")
            found = _FINAL.search(answer)
            if found is None:
                raise ConfigError(f"{where}: the answer does not end in `#### N` with a number N: …{answer[-40:]!r}")
            number = found[1].replace(",", "")
            text = "\n\n".join(filter(None, (question, self.instruction)))
            solution = f"{_CALCULATION.sub('', answer[: found.start()]).strip()}\n\\boxed{{{number}}}"
            yield question, Solved(prompt=(Message("user", text),), answer=number, solution=solution)


def _limit() -> int | None:
    """`VERIFY_SECONDS`; None, which is no limit, elsewhere than in the main thread."""
    return VERIFY_SECONDS if threading.current_thread() is threading.main_thread() else None


def last_box(text: str) -> str | None:
    r"""The inside of the last `\boxed{…}` that is closed; None without one."""
    for start in reversed([found.end() for found in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if not depth:
                return text[start:position]
    return None


def qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B solves grade-school math: 4 FSDP trainer ranks, 2 generators of 2 (8 GPUs)."""
    return variant(
        load_recipe(f"{Path(__file__).with_name('alphabet_sort.py')}:qwen3_0_6b"),
        {
            "environment.name": f"{__file__}:Gsm8k",
            "environment.kwargs": {"train_file": "../data/gsm8k/train.jsonl", "test_file": "../data/gsm8k/test.jsonl"},
            "rollout.max_turns": 1,
            "rollout.sampling.max_new_tokens": 1024,
            "evaluation.prompts": 1319,  # all that there are
        },
    )


def qwen3_8b() -> RunConfig:
    """Qwen3-8B learns math on 8 GPUs, never run: 4 FSDP ranks, 2 generators of 2; answers of up to 8,192 tokens."""
    return variant(
        qwen3_0_6b(),
        {
            "policy.path": "../checkpoints/Qwen3-8B",
            "rollout.sampling.max_new_tokens": 7168,
            "generator.max_model_len": 8192,
            # without it the activations of a row alone take 67 GiB
            "trainer.activation_checkpointing": "full",
            # copies of the state would take 196 GB of /dev/shm
            "checkpoint.in_memory": False,
            "loop.max_staleness": 1,
            "router.weight_sync": "hot_swap",
            "weights.max_live": 3,
        },
    )


def qwen3_32b() -> RunConfig:
    """Qwen3-32B learns math on 2 hosts of 8 GPUs, never run: 12 trainer ranks (FSDP 6, TP 2), 2 generators of 2."""
    return variant(
        qwen3_8b(),
        {
            "policy.path": "../checkpoints/Qwen3-32B",
            # weights, gradients and moments are 16 bytes per parameter: 61 GiB a rank on 8, 41 on 12
            "trainer.data_parallel": 6,
            "trainer.tensor_parallel": 2,
            "loop.groups_per_step": 48,  # six data-parallel ranks share them
        },
    )
