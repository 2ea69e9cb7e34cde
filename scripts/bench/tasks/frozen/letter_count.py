import random

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric
from titan_rl.environments.dataset import is_held_out

LETTERS = "abc"
LENGTH = 5


def close(example, transcript):
    """1 for the right count, less the further off, 0 for what is no count at all."""
    said = transcript.answer
    if len(said) != 1 or said not in "0123456789":
        return 0.0
    return max(0.0, 1 - abs(int(said) - int(example.answer)) / LENGTH) ** 2


def exact_match(example, transcript):
    return float(transcript.answer == example.answer)


class LetterCount(Environment):
    """How often does a letter occur in a word? "abcab?a" -> "2"."""

    def example(self, index):
        # walk on until we hit a prompt that is not reserved for evaluation
        rng = random.Random(index)
        while True:
            word, letter = self._draw(rng)
            if not is_held_out(f"{word}?{letter}"):
                return self._make(word, letter)

    def held_out(self, count):
        rng = random.Random("held out")
        found = {}
        for _ in range(20000):
            word, letter = self._draw(rng)
            if is_held_out(f"{word}?{letter}"):
                found[word, letter] = self._make(word, letter)
            if len(found) >= count:
                break
        return list(found.values())

    def rubric(self):
        return Rubric(close, Reward(exact_match, weight=0.0))

    def _draw(self, rng):
        # choose the letter first and its probability after that, so that all counts are about as frequent
        letter = rng.choice(LETTERS)
        share = rng.random()
        others = LETTERS.replace(letter, "")
        word = "".join(letter if rng.random() < share else rng.choice(others) for _ in range(LENGTH))
        return word, letter

    def _make(self, word, letter):
        return Example(prompt=(Message("user", f"{word}?{letter}"),), answer=str(word.count(letter)))
