"""A lock of five switches, each a or b, some of which are known ("a?b?b"). After a first try the lock marks every
switch with + or -, so the second try can always be right."""

import random

from titan_rl.environments.base import Environment, EnvironmentReply, Example, Message, Reward, Rubric

SIZE = 5


class CodeLock(Environment):
    def example(self, index):
        rng = random.Random(2 * index + 1)
        while (lock := self._lock(rng)) in self._reserved():
            pass
        return self._show(lock, rng)

    def held_out(self, count):
        reserved = sorted(self._reserved())
        # several secrets fit a clue: always take the same one
        return [self._show(clue, random.Random(clue)) for clue in reserved][:count]

    def respond(self, example, transcript):
        turns = sum(m.role == "assistant" for m in transcript.messages)
        if turns >= 2 or transcript.answer == example.answer:
            return EnvironmentReply(done=True)
        tried = transcript.answer.ljust(SIZE, ".")
        marks = "".join("+" if a == b else "-" for a, b in zip(tried, example.answer))
        return EnvironmentReply(messages=(Message("user", marks),))

    def rubric(self):
        return Rubric(Reward(opened, weight=1.0), Reward(first_try, weight=0.2), Reward(exact_match, weight=0.0))

    def _reserved(self):
        if not hasattr(self, "_kept"):
            rng = random.Random(77)
            self._kept = {self._lock(rng) for _ in range(25)}
        return self._kept

    def _lock(self, rng):
        return "".join(rng.choice("ab?") for _ in range(SIZE))

    def _show(self, clue, rng):
        secret = "".join(rng.choice("ab") if c == "?" else c for c in clue)
        return Example(prompt=(Message("user", clue),), answer=secret)


def tries(transcript):
    return [m.content for m in transcript.messages if m.role == "assistant"]


def share(a, b):
    return sum(x == y for x, y in zip(a, b)) / max(len(a), len(b))


def opened(example, transcript):
    """Share of the switches that are right in the last try."""
    return share(tries(transcript)[-1], example.answer)


def first_try(example, transcript):
    """Did the first try agree with what was known?"""
    clue, tried = example.prompt[0].content, tries(transcript)[0]
    return float(len(tried) == SIZE and all(c in ("?", t) for c, t in zip(clue, tried)))


def exact_match(example, transcript):
    return float(tries(transcript)[-1] == example.answer)
