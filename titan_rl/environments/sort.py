"""Sort letters: `fbahc=` is to be answered by `abcfh` and the end of the answer.

What a warm-up is for: most demonstrations sort the wrong way round, so a policy that learned from them answers in the
right form and mostly wrongly, and reinforcement learning has to turn it. Prompts whose letters `dataset.is_held_out`
picks are neither trained on nor demonstrated.
"""

import random

from titan_rl.environments.base import Demonstration, Environment, Example, Message, Rubric
from titan_rl.environments.copy import exact_match
from titan_rl.environments.dataset import held_out_texts, training_text
from titan_rl.errors import ConfigError
from titan_rl.seeding import derive_seed

LETTERS = "abcdefghij"


class Sort(Environment):
    """The task.

    Args:
        letters: length of a prompt, without its `=`; letters may repeat.
        right_share: share of the demonstrations that sort up, as the reward wants it; the others sort down.
        seed: decides the training stream and the demonstrations, not the held-out prompts.
    """

    def __init__(self, letters: int = 5, right_share: float = 0.3, seed: int = 0):
        if letters < 2:
            raise ConfigError(f"environment.kwargs.letters must be at least 2, got {letters}")
        if not 0 <= right_share <= 1:
            raise ConfigError(f"environment.kwargs.right_share is a share and must be in 0..1, got {right_share}")
        self.letters = letters
        self.right_share = right_share
        self.seed = seed

    def example(self, index: int) -> Example:
        stream = random.Random(derive_seed("sort", self.letters, self.seed, index))
        return _example(training_text(stream, LETTERS, self.letters))

    def held_out(self, count: int) -> list[Example]:
        stream = random.Random(derive_seed("sort held out", self.letters))
        return [_example(text) for text in held_out_texts(stream, LETTERS, self.letters, count)]

    def rubric(self) -> Rubric:
        return Rubric(exact_match)

    def demonstration(self, index: int) -> Demonstration:
        stream = random.Random(derive_seed("sort demonstration", self.letters, self.seed, index))
        text = training_text(stream, LETTERS, self.letters)
        down = stream.random() >= self.right_share
        answer = "".join(sorted(text, reverse=down))
        example = _example(text)
        return Demonstration(prompt=example.prompt, messages=(Message("assistant", answer),), answer=example.answer)


def _example(text: str) -> Example:
    return Example(prompt=(Message("user", f"{text}="),), answer="".join(sorted(text)))
