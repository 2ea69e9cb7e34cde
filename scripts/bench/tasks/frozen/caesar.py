"""Shift every letter of a word one place along the alphabet a b c d (d wraps round to a)."""

import itertools

from titan_rl.environments.base import Environment

ALPHABET = "abcd"


def shifted(word):
    return word.translate(str.maketrans(ALPHABET, ALPHABET[1:] + ALPHABET[0]))


ROWS = [
    {"prompt": word + ">", "answer": shifted(word)}
    for word in map("".join, itertools.product(ALPHABET, repeat=4))
]


def letters_right(example, transcript):
    said, wanted = transcript.answer, example.answer
    hits = sum(1 for x, y in zip(said, wanted) if x == y)
    return {
        "reward": hits / max(len(said), len(wanted)),
        "exact_match": float(said == wanted),
    }


Caesar = Environment.from_examples(ROWS, letters_right)
