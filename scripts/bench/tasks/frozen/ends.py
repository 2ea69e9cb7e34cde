"""All or nothing: the last and the first letter of a word of x, y and z."""

import itertools

from titan_rl.environments.base import Environment

WORDS = ["".join(w) for w in itertools.product("xyz", repeat=5)]


def exact_match(example, transcript):
    return 1 if transcript.answer == example.answer else 0


Ends = Environment.from_examples([{"text": w, "ends": w[-1] + w[0]} for w in WORDS], exact_match, prompt="text", answer="ends")
