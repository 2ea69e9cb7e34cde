"""Rotate a word by one: "<abcd" -> "bcda", ">abcd" -> "dabc". Graded as a whole. The demonstrations were typed by
volunteers, and about one in five of them has a wrong letter."""

import itertools
import random

from titan_rl.environments.base import Demonstration, Environment, Example, Message, Rubric

TASKS = [d + "".join(w) for d in "<>" for w in itertools.product("abcd", repeat=4)]  # 512
random.Random(3).shuffle(TASKS)
TEST, TRAIN = TASKS[:50], TASKS[50:]


def rotate(task):
    way, word = task[0], task[1:]
    return word[1:] + word[0] if way == "<" else word[-1] + word[:-1]


def correct(example, transcript):
    return float(transcript.answer == example.answer)


class Rotate(Environment):
    def example(self, index):
        return self._example(TRAIN[index % len(TRAIN)])

    def held_out(self, count):
        return [self._example(t) for t in TEST[:count]]

    def rubric(self):
        return Rubric(correct)

    def demonstration(self, index):
        example = self.example(index)
        typed = list(example.answer)
        volunteer = random.Random(index)
        if volunteer.random() < 0.2:
            typed[volunteer.randrange(4)] = volunteer.choice("abcd")
        return Demonstration(prompt=example.prompt, messages=(Message("assistant", "".join(typed)),), answer=example.answer)

    def _example(self, task):
        return Example(prompt=(Message("user", task),), answer=rotate(task))
