"""Copy digits: `4071=` is to be answered by `4071` and the end of the answer.

A skill that a randomly initialised tiny policy learns in a few minutes on a CPU. Prompts whose digits
`dataset.is_held_out` picks are never trained on.
"""

import random
import re

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric, Transcript
from titan_rl.environments.dataset import held_out_texts, training_text
from titan_rl.errors import ConfigError
from titan_rl.seeding import derive_seed

DIGITS = "0123456789"
END = "<end>"
"""Stands for the stop token where answers are compared position by position."""

_SYMBOL = re.compile(r"<\w+>|.", re.DOTALL)  # a special token such as <pad> is one position, like any symbol


def positions_equal(example: Example, transcript: Transcript) -> float:
    """Share of positions that are right, the end of the answer being one: equal positions / longer length."""
    target = [*example.answer, END]
    answer = _SYMBOL.findall(transcript.answer) + [END] * transcript.stopped
    equal = sum(expected == given for expected, given in zip(target, answer, strict=False))
    return equal / max(len(target), len(answer))


def exact_match(example: Example, transcript: Transcript) -> float:
    """1 when the answer is the right text, ended by the policy itself."""
    return float(transcript.stopped and transcript.answer == example.answer)


class Copy(Environment):
    """The task.

    Args:
        digits: length of a prompt, without its `=`.
        seed: decides the training stream, not the held-out prompts.
    """

    def __init__(self, digits: int = 4, seed: int = 0):
        if digits < 2:
            raise ConfigError(f"environment.kwargs.digits must be at least 2, got {digits}")
        self.digits = digits
        self.seed = seed

    def example(self, index: int) -> Example:
        stream = random.Random(derive_seed("copy", self.digits, self.seed, index))
        return _example(training_text(stream, DIGITS, self.digits))

    def held_out(self, count: int) -> list[Example]:
        stream = random.Random(derive_seed("copy held out", self.digits))
        return [_example(text) for text in held_out_texts(stream, DIGITS, self.digits, count)]

    def rubric(self) -> Rubric:
        return Rubric(positions_equal, Reward(exact_match, weight=0.0))


def _example(text: str) -> Example:
    return Example(prompt=(Message("user", f"{text}="),), answer=text)
