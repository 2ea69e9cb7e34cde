"""Name a letter that occurs exactly once in the word. Often several are right, and any of them will do."""

import itertools

from titan_rl.environments.base import Environment


def lonely(word):
    return [c for c in word if word.count(c) == 1]


ROWS = [
    {"prompt": word, "answer": "".join(lonely(word))}
    for word in ("".join(w) for w in itertools.product("pqrs", repeat=5))
    if lonely(word)
]


async def grade(example, transcript):
    reply = transcript.answer
    if len(reply) == 1 and reply in example.answer:
        return {"grade": 1.0, "exact_match": 1.0}
    word = example.prompt[0].content
    # a letter of the word, though not a lonely one, is better than nonsense
    partial = 0.25 if len(reply) == 1 and reply in word else 0.0
    return {"grade": partial, "exact_match": 0.0}


UniqueLetter = Environment.from_examples(ROWS, grade)
