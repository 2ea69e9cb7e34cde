"""Tasks that give rewards to turns, or turns to roles; named by tests as `turns.py:Class`."""

import uuid
from pathlib import Path

from titan_rl.environments.base import Environment, EnvironmentReply, Example, Message, Rubric, tool


def halves(example, transcript):
    return 0.5


def sampled(example, transcript):
    return float(sum(10**place * tokens for place, tokens in enumerate(transcript.tokens)))


class Rewarded(Environment):
    """The turn that says a digit gets as much, three times; `nan` is what the second one gets instead."""

    def __init__(self, nan: bool = False):
        self.nan = nan

    def example(self, index):
        return Example(prompt=(Message("user", f"{index}="),))

    def held_out(self, count):
        return []

    def rubric(self):
        return Rubric(halves)

    def respond(self, example, transcript):
        turns = len(transcript.finish_reasons)
        reward = float("nan") if self.nan and turns == 2 else None if turns == 1 else float(transcript.answer or 0)
        return EnvironmentReply(messages=(Message("user", "8="),), reward=reward, done=turns == 3)


class Measured(Rewarded):
    """Its reward says how many tokens each turn sampled: the units of the first one, the tens of the second …"""

    def rubric(self):
        return Rubric(sampled)


@tool
def measure(expression: str) -> str:
    return str(len(expression))


class Summing(Rewarded):
    """A helper that may use a tool answers first; then somebody who sees its answer alone."""

    def tools(self):
        return (measure,)

    def respond(self, example, transcript):
        if transcript.messages[0] == example.prompt[0]:
            summary = Message("user", f"{transcript.answer}+")
            return EnvironmentReply(messages=(summary,), anew=True, role="helper", reward=1.0)
        return EnvironmentReply(done=True, role="writer")


class Leasing(Rewarded):
    """Its first answer leaves a file, which the state names; cleaning up removes it. A rollout that said 9 keeps it
    and raises; one that begins with 0 has no state."""

    def __init__(self, directory: str):
        super().__init__()
        self._directory = Path(directory)

    def respond(self, example, transcript):
        if transcript.answer == "0":
            return EnvironmentReply(done=True)
        lease = transcript.state or self._directory / uuid.uuid4().hex
        lease.touch()
        done = len(transcript.finish_reasons) == 2
        return EnvironmentReply(messages=(Message("user", "8="),), state=lease, done=done)

    async def clean_up(self, example, transcript):
        if transcript.answer == "9":
            raise RuntimeError("the lease is stuck")
        transcript.state.unlink()
