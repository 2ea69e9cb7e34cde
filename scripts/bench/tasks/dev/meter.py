"""Is the reading of a meter above a limit? "417>5" -> y or n. Readings are only known to the tool `read`."""

import random

from titan_rl.environments.base import (
    Demonstration,
    Environment,
    Example,
    Message,
    Rubric,
    ToolCall,
    tool,
)
from titan_rl.environments.dataset import is_held_out


def reading_of(number: int) -> int:
    return random.Random(f"meter {number}").randrange(10)


@tool
def read(number: int) -> str:
    """Reads a meter.

    Args:
        number: of the meter, three digits
    """
    return str(reading_of(number))


def judged(example, transcript):
    asked = any(m.role == "tool" for m in transcript.messages)
    right = transcript.answer == example.answer
    # a guess without looking earns nothing, even if it is lucky
    if not asked:
        return {"judged": 0.0, "exact_match": 0.0}
    return {"judged": 1.0 if right else 0.2, "exact_match": float(right)}


class Meter(Environment):
    def tools(self):
        return (read,)

    def rubric(self):
        return Rubric(judged)

    def example(self, index):
        rng = random.Random(index)
        while True:
            number, limit = rng.randrange(100, 1000), rng.randrange(1, 9)
            if not is_held_out(str(number)):
                return self.question(number, limit)

    def held_out(self, count):
        rng = random.Random(-1)
        numbers = [n for n in range(100, 1000) if is_held_out(str(n))]
        return [self.question(n, rng.randrange(1, 9)) for n in numbers][:count]

    def question(self, number, limit):
        answer = "y" if reading_of(number) > limit else "n"
        return Example(prompt=(Message("user", f"{number}>{limit}"),), answer=answer)

    def demonstration(self, index):
        example = self.example(index)
        number = int(example.prompt[0].content.split(">")[0])
        call = ToolCall(name="read", arguments={"number": number})
        return Demonstration(
            prompt=example.prompt,
            messages=(
                Message("assistant", "", tool_calls=(call,)),
                Message("tool", str(reading_of(number))),
                Message("assistant", example.answer),
            ),
            answer=example.answer,
        )
