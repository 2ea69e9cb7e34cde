"""Sort letters: `fbahc=` is to be answered by `abcfh` and the end of the answer.

What a warm-up is for: most demonstrations sort the wrong way round, so a policy that learned from them answers in the
right form and mostly wrongly, and reinforcement learning has to turn it.
"""

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Demonstration, Message, Rubric
from titan_rl.environments.copy import TextTask, exact_match
from titan_rl.errors import ConfigError
from titan_rl.overrides import variant

LETTERS = "abcdefghij"


class Sort(TextTask):
    """The task.

    Args:
        letters: length of a prompt, without its `=`; letters may repeat.
        right_share: share of the demonstrations that sort up, as the reward wants it; the others sort down.
        seed: decides the training stream and the demonstrations, not the held-out prompts.
    """

    name, symbols = "sort", LETTERS

    def __init__(self, letters: int = 5, right_share: float = 0.3, seed: int = 0):
        if letters < 2:
            raise ConfigError(f"environment.kwargs.letters must be at least 2, got {letters}")
        if not 0 <= right_share <= 1:
            raise ConfigError(f"environment.kwargs.right_share is a share and must be in 0..1, got {right_share}")
        super().__init__(seed, letters)
        self.right_share = right_share

    def right(self, text: str) -> str:
        return "".join(sorted(text))

    def rubric(self) -> Rubric:
        return Rubric(exact_match)

    def demonstration(self, index: int) -> Demonstration:
        text, stream = self.training_text(index, " demonstration")
        example, down = self.asked(text), stream.random() >= self.right_share
        answer = example.answer[::-1] if down else example.answer
        return Demonstration(prompt=example.prompt, messages=(Message("assistant", answer),), answer=example.answer)


def sort5() -> RunConfig:
    """Warm-up, then RL: a tiny policy that learned to sort letters mostly the wrong way is turned."""
    return variant(
        copy4(),
        {
            "policy.tiny.symbols": "abcdefghij=",
            "environment.name": f"{__file__}:Sort",
            "environment.kwargs": {"letters": 5, "right_share": 0.3},
            "rollout.sampling.max_new_tokens": 7,
            "trainer.warmup.steps": 250,
            "trainer.optimizer.lr": 2e-4,
            "trainer.loss.kwargs": {"clip_low": 0.2, "clip_high": 0.2},
            "loop.steps": 110,
        },
    )
