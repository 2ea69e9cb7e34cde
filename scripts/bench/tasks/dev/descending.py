"""Three digits from the largest to the smallest: "5 1 9" -> "951"."""

import random
from itertools import combinations, product

from titan_rl.environments.base import Environment

digits = [d for d in product("123456789", repeat=3)]
random.Random(0).shuffle(digits)
data = [dict(numbers=" ".join(d), ranked="".join(sorted(d, reverse=True))) for d in digits]


def ranked(example, transcript):
    out = transcript.answer
    if len(out) != 3:
        return {"reward": 0.0, "exact_match": 0.0}
    missing = list(example.answer)
    for c in out:
        if c in missing:
            missing.remove(c)
    kept = 1 - len(missing) / 3  # share of the digits that are still there
    order = sum(a >= b for a, b in combinations(out, 2)) / 3  # share of pairs in order
    return {"reward": kept * order, "exact_match": float(out == example.answer), "kept": kept, "order": order}


Descending = Environment.from_examples(data, ranked, prompt="numbers", answer="ranked")
