import json
import random
from pathlib import Path

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric
from titan_rl.environments.dataset import is_held_out
from titan_rl.environments.programs import run_script

AGENT = Path(__file__).with_name("maximum_agent.py")


def final(example, transcript):
    return float(json.loads(transcript.state)["last"] == example.answer)


def step(example, transcript):
    shown = example.prompt[0].content
    return float(json.loads(transcript.state)["first"] == max(shown[:2]))


def exact_match(example, transcript):
    return final(example, transcript)


class Maximum(Environment):
    """The greatest of three digits, by an agent that compares two at a time."""

    def example(self, index):
        rng = random.Random(f"maximum {index}")
        while is_held_out(numbers := "".join(rng.choices("0123456789", k=3))):
            pass
        return self._ask(numbers)

    def held_out(self, count):
        every = [f"{n:03d}" for n in range(1000)]
        return [self._ask(n) for n in every if is_held_out(n)][:count]

    def play(self, example, endpoint):
        return run_script(AGENT, example.prompt[0].content, endpoint=endpoint)

    def rubric(self):
        return Rubric(Reward(final, weight=0.7), Reward(step, weight=0.3), Reward(exact_match, weight=0))

    def _ask(self, numbers):
        return Example(prompt=(Message("user", numbers),), answer=max(numbers))
