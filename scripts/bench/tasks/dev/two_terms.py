"""Two digits that add up to a number, without a forbidden digit: "12 !5" -> 39, 48, 66, 84 or 93."""

from titan_rl.environments.base import Environment


def solutions(total, forbidden):
    pairs = ((a, total - a) for a in range(10))
    return {f"{a}{b}" for a, b in pairs if 0 <= b <= 9 and forbidden not in (a, b)}


ROWS = [
    {"prompt": f"{total} !{forbidden}", "answer": [total, forbidden]}
    for total in range(19)
    for forbidden in range(10)
    if solutions(total, forbidden)
]


def sums(example, transcript):
    total, forbidden = example.answer
    text = transcript.answer
    solved = float(text in solutions(total, forbidden))
    reward = solved
    if not solved and len(text) == 2 and text.isdecimal() and text.isascii():
        distance = abs(int(text[0]) + int(text[1]) - total)
        reward = 0.5 * (1 - distance / 18)  # also where the only fault is the forbidden digit
    return {"reward": reward, "exact_match": solved}


TwoTerms = Environment.from_examples(ROWS, sums)
