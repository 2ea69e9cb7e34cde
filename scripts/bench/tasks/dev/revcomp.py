"""Reverse complement of a short DNA read, e.g. AACG -> CGTT."""
from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric
from titan_rl.environments.dataset import is_held_out

PAIR = {"A": "T", "T": "A", "C": "G", "G": "C"}
BASES = "ACGT"


def revcomp(read):
    return "".join(PAIR[b] for b in reversed(read))


def matched_bases(example, transcript):
    read = transcript.answer
    # bases right from the start on, minus a penalty for every base too many or missing
    good = sum(x == y for x, y in zip(read, example.answer))
    return max(-1.0, good / 4 - 0.25 * abs(len(read) - 4))


def exact_match(example, transcript):
    return float(transcript.answer == example.answer)


class RevComp(Environment):
    def __init__(self):
        reads = ["".join(BASES[(n >> s) & 3] for s in (6, 4, 2, 0)) for n in range(256)]
        self._test = [r for r in reads if is_held_out(r)]
        self._train = [r for r in reads if not is_held_out(r)]

    def example(self, index):
        return self._ask(self._train[index * 53 % len(self._train)])

    def held_out(self, count):
        return [self._ask(r) for r in self._test][:count]

    def rubric(self):
        return Rubric(matched_bases, Reward(exact_match, weight=0))

    def _ask(self, read):
        return Example(prompt=(Message("user", f"{read}="),), answer=revcomp(read))
