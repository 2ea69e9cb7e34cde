"""Subtraction, with results below zero. minus.jsonl has 800 of the 961 exercises with numbers from 0 to 30."""
import os

from titan_rl.environments.base import Environment, Rubric, Example, Message, Reward
from titan_rl.environments.dataset import is_held_out
import json

HERE = os.path.dirname(os.path.abspath(__file__))


def sign(example, transcript):
    """Is there a minus where there should be one?"""
    text = transcript.answer
    return float(bool(text) and text.startswith("-") == (example.answer < 0))


def value(example, transcript):
    try:
        said = int(transcript.answer)
    except ValueError:
        return 0.0
    return 1.0 / (1.0 + abs(said - example.answer) / 3)


def exact_match(example, transcript):
    return float(transcript.answer == str(example.answer))


class Minus(Environment):
    def __init__(self, path=os.path.join(HERE, "minus.jsonl")):
        with open(path) as file:
            rows = [json.loads(line) for line in file]
        self.train = [r for r in rows if not is_held_out(r["question"])]
        self.test = [r for r in rows if is_held_out(r["question"])]

    def example(self, index):
        return self.ask(self.train[index % len(self.train)])

    def held_out(self, count):
        return [self.ask(r) for r in self.test[:count]]

    def rubric(self):
        return Rubric(Reward(value, weight=0.5), Reward(exact_match, weight=0.4), Reward(sign, weight=0.1))

    @staticmethod
    def ask(row):
        return Example(prompt=(Message("user", row["question"] + "="),), answer=row["result"])
