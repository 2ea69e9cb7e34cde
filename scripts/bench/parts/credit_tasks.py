"""Tasks that GRPO learns slower than an algorithm that is made for them; algorithms.py --slower trains them."""

from __future__ import annotations

from titan_rl.environments.base import EnvironmentReply, Example, Message, Reward, Rubric, Transcript, exact_match
from titan_rl.environments.copy import Copy


class Questions(Copy):
    """Each digit is asked for by itself, and a right answer earns its turn its share of 1."""

    def example(self, index: int) -> Example:
        return self._first(super().example(index))

    def held_out(self, count: int) -> list[Example]:
        return [self._first(each) for each in super().held_out(count)]

    def initial_state(self, example: Example) -> int:
        return 0

    def respond(self, example: Example, transcript: Transcript) -> EnvironmentReply:
        asked, wanted = transcript.state, example.answer
        earned = float(transcript.answer == wanted[asked]) / len(wanted)
        if asked + 1 == len(wanted):
            return EnvironmentReply(reward=earned, state=asked + 1, done=True)
        question = Message("user", f"{wanted[asked + 1]}=")
        return EnvironmentReply(reward=earned, state=asked + 1, messages=(question,), anew=True)

    def rubric(self) -> Rubric:
        return Rubric(lambda example, transcript: 0.0)

    @staticmethod
    def _first(example: Example) -> Example:
        return Example(prompt=(Message("user", f"{example.answer[0]}="),), answer=example.answer)


def unequal(example: Example, transcript: Transcript) -> dict[str, float]:
    said = transcript.answer[:2].ljust(2)
    first, second = (float(a == b) for a, b in zip(said, example.answer, strict=True))
    rest = second + float(len(transcript.answer) == 2 and transcript.stopped)
    return {"reward": 10 * first + 0.5 * rest, "first": first, "rest": rest}


class TwoScales(Copy):
    """The first digit earns twenty times what the second one and the end earn."""

    def rubric(self) -> Rubric:
        return Rubric(unequal, Reward(exact_match, weight=0.0))
