"""Copy digits: `4071=` is to be answered by `4071` and the end of the answer.

A skill that a randomly initialised tiny policy learns in a few minutes on a CPU.
"""

import random
import re
from abc import abstractmethod
from collections.abc import Iterable
from itertools import product
from typing import ClassVar

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric, Transcript, exact_match
from titan_rl.environments.dataset import HELD_OUT_SHARE, is_held_out
from titan_rl.errors import ConfigError
from titan_rl.seeding import derive_seed

END = "<end>"
"""Stands for the stop token where answers are compared position by position."""

_SYMBOL = re.compile(r"<\w+>|.", re.DOTALL)  # a special token such as <pad> is one position, like any symbol

_ENUMERABLE = 10_000
"""If a task has at most this many texts, all are enumerated; if it has more, some are drawn."""


def positions_equal(example: Example, transcript: Transcript) -> float:
    """Share of positions that are right, the end of the answer being one: equal positions / longer length."""
    target = [*example.answer, END]
    answer = _SYMBOL.findall(transcript.answer) + [END] * transcript.stopped
    equal = sum(expected == given for expected, given in zip(target, answer, strict=False))
    return equal / max(len(target), len(answer))


class TextTask(Environment):
    """`TEXT=` is to be answered by `right(TEXT)`. Prompts whose text `dataset.is_held_out` picks are neither trained on
    nor demonstrated.

    Args:
        seed: decides the streams of prompts, not which ones are held out.
        length: of a text in symbols; 0: the task says itself what texts there are.
    """

    name: ClassVar[str]
    """Part of the streams' seeds."""
    symbols: ClassVar[str] = ""

    def __init__(self, seed: int, length: int = 0):
        self.seed = seed
        self.length = length
        self._key = (length,) if length else ()

    @abstractmethod
    def right(self, text: str) -> str:
        """The reference answer."""

    def draw(self, stream: random.Random) -> str:
        return "".join(stream.choices(self.symbols, k=self.length))

    def all_texts(self) -> Iterable[str]:
        """All texts. Asked for where there are few."""
        return map("".join, product(self.symbols, repeat=self.length))

    def training_text(self, index: int, what: str = "") -> tuple[str, random.Random]:
        """Number `index` of the stream of this name; and what is left of its random numbers."""
        stream = random.Random(derive_seed(self.name + what, *self._key, self.seed, index))
        while is_held_out(text := self.draw(stream)):
            pass
        return text, stream

    def example(self, index: int) -> Example:
        return self.asked(self.training_text(index)[0])

    def held_out(self, count: int) -> list[Example]:
        """Different ones; fewer where there are fewer, or would be hard to find."""
        stream = random.Random(derive_seed(f"{self.name} held out", *self._key))
        possible = len(self.symbols) ** self.length
        if possible <= _ENUMERABLE:
            texts = list(filter(is_held_out, self.all_texts()))
            texts = stream.sample(texts, count) if len(texts) > count else texts
            return list(map(self.asked, texts))
        drawn: dict[str, None] = {}  # a dict keeps the order of drawing
        # at most a tenth of the held-out texts, so that duplicates stay rare and the loop ends
        while len(drawn) < min(count, possible // HELD_OUT_SHARE**2):
            if is_held_out(text := self.draw(stream)):
                drawn[text] = None
        return list(map(self.asked, drawn))

    def asked(self, text: str) -> Example:
        return Example(prompt=(Message("user", f"{text}="),), answer=self.right(text))


class Copy(TextTask):
    """The task.

    Args:
        digits: length of a prompt, without its `=`.
        seed: decides the training stream, not the held-out prompts.
    """

    name, symbols = "copy", "0123456789"

    def __init__(self, digits: int = 4, seed: int = 0):
        if digits < 2:
            raise ConfigError(f"environment.kwargs.digits must be at least 2, got {digits}")
        super().__init__(seed, digits)

    def right(self, text: str) -> str:
        return text

    def rubric(self) -> Rubric:
        return Rubric(positions_equal, Reward(exact_match, weight=0.0))
