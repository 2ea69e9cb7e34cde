"""Repeat a pattern up to exactly the asked length: "ab5:" -> "ababa"; patterns of two letters, lengths 1 to 6.

Ten points for a perfect answer: four for the length, six for its letters.
"""

from titan_rl.environments.base import Environment, Example, Message, Rubric

PATTERNS = [a + b for a in "abcde" for b in "abcde"]
ALL = [(pattern, length) for pattern in PATTERNS for length in range(1, 7)]  # 150
HELD_OUT = [pair for number, pair in enumerate(ALL) if number % 7 == 3]
TRAINED = [pair for number, pair in enumerate(ALL) if number % 7 != 3]


def points(example, transcript):
    text, wanted = transcript.answer, example.answer
    length = max(0.0, 4.0 - 2.0 * abs(len(text) - len(wanted)))
    letters = 6.0 * sum(a == b for a, b in zip(text, wanted)) / max(len(text), len(wanted))
    return {"points": length + letters, "exact_match": float(text == wanted)}


class Tile(Environment):
    def example(self, index):
        return tile(*TRAINED[(11 * index) % len(TRAINED)])

    def held_out(self, count):
        return [tile(*pair) for pair in HELD_OUT[:count]]

    def rubric(self):
        return Rubric(points)


def tile(pattern, length):
    return Example(prompt=(Message("user", f"{pattern}{length}:"),), answer=(pattern * 3)[:length])
