"""Swap a and b, keep c ("abcca" -> "baccb"), with a draft and a second look by swap_client.py."""

import itertools
import pathlib

import openai  # noqa: F401  so that the client finds it imported

from titan_rl.environments.base import Environment, Example, Message, Rubric
from titan_rl.environments.programs import run_script

CLIENT = pathlib.Path(__file__).resolve().parent / "swap_client.py"
WORDS = ["".join(w) for w in itertools.product("abc", repeat=5)]  # 243


def swapped(example, transcript):
    final = transcript.state  # what the client prints
    right = sum(a == b for a, b in zip(final, example.answer))
    return {
        "swapped": right / max(len(final), 5),
        "exact_match": float(final == example.answer),
    }


class Swap(Environment):
    def example(self, index):
        train = [w for i, w in enumerate(WORDS) if i % 10 != 4]
        return self.ask(train[index * 29 % len(train)])

    def held_out(self, count):
        return [self.ask(w) for w in WORDS[4::10]][:count]

    def play(self, example, endpoint):
        return run_script(CLIENT, example.prompt[0].content, endpoint=endpoint)

    def rubric(self):
        return Rubric(swapped)

    def ask(self, word):
        return Example(prompt=(Message("user", word),), answer=word.translate(str.maketrans("ab", "ba")))
