# Sort four letters. dbea -> abde. Partial credit by position.
from itertools import product

from titan_rl.environments.base import Environment, Example, Message, Rubric

WORDS = ["".join(w) for w in product("abcde", repeat=4)]  # 625
TEST = WORDS[::9]
TRAIN = [w for w in WORDS if w not in set(TEST)]


def sorted_right(example, transcript):
    guess = transcript.answer
    if guess == example.answer:
        return 1.0
    if len(guess) != 4:
        return 0.0
    same_place = sum(g == a for g, a in zip(guess, example.answer))
    same_letters = sorted(guess) == list(example.answer)
    return 0.2 * same_place + 0.1 * same_letters


class SortFour(Environment):
    def example(self, index):
        return self.make(TRAIN[index * 101 % len(TRAIN)])

    def held_out(self, count):
        return [self.make(w) for w in TEST[:count]]

    def rubric(self):
        return Rubric(sorted_right)

    def make(self, word):
        return Example(prompt=(Message("user", word + "|"),), answer="".join(sorted(word)))
