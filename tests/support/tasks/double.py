"""A task in one file, as a user writes it."""

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric


def right(example, transcript):
    return float(transcript.answer == example.answer)


async def brief(example, transcript):
    return 1.0 / (1 + len(transcript.answer))


class Double(Environment):
    size = 500

    def __init__(self, factor: int = 2):
        self.factor = factor

    def example(self, index):
        return self._ask(100 + index)

    def held_out(self, count):
        return [self._ask(number) for number in range(min(count, 100))]

    def rubric(self):
        return Rubric(Reward(right, name="exact_match"), Reward(brief, weight=0.1))

    def _ask(self, number):
        return Example(prompt=(Message("user", f"{number}="),), answer=str(self.factor * number))
