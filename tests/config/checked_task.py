"""A task that goes wrong where its argument `wrong` says so; `recipe` trains it."""

import dataclasses
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

from titan_rl.config_registry import copy4
from titan_rl.environments.base import Demonstration, Environment, Example, GroupReward, Message, Rubric, tool
from titan_rl.errors import AbsentError, ConfigError

DIGITS = "0123456789"
COUNT = itertools.count()


def recipe():
    base = copy4()
    return dataclasses.replace(
        base,
        environment=dataclasses.replace(base.environment, name=f"{__file__}:Checked"),
        trainer=dataclasses.replace(
            base.trainer, warmup=dataclasses.replace(base.trainer.warmup, steps=1, lr_warmup_steps=0)
        ),
    )


@tool
def count(text: str) -> int:
    """Counts characters."""
    return len(text)


class Checked(Environment):
    def __init__(self, wrong: str = "", seed: int = 0):
        self.wrong = wrong
        self.seed = seed
        match wrong:
            case "wants a key":
                os.environ["MY_GRADER_KEY"]
            case "cannot be made":
                raise ValueError("no data today")
            case "refuses":
                raise ConfigError("environment.kwargs.wrong must be right")
            case "warns":
                self.warning = "half of the rows are one"
            case "size":
                self.size = 0
            case "lacks":
                raise AbsentError("there is no file of words")

    def example(self, index):
        match self.wrong:
            case "example 17 raises" if index == 17:
                raise ValueError("two lines\n" + 5000 * "x")
            case "kills its host":
                reaper = Path(f"/proc/{os.getppid()}/stat").read_text()
                os.kill(int(reaper.rpartition(")")[2].split()[1]), signal.SIGKILL)
                time.sleep(60)
            case "long":
                return _ask(100 * "1", "1")
            case "example raises":
                raise ValueError("no example")
            case "no example":
                return None
            case "letters":
                return _ask("Let", "1")
        return _ask(f"{100 + self.seed + index}=", "nan" if self.wrong == "words" else "1")

    def tools(self):
        return [count] if self.wrong == "tool" else []

    def held_out(self, count):
        first = {"chance": random.randrange(50), "call": next(COUNT)}.get(self.wrong, 0)
        if self.wrong in ("nothing", "no list"):
            return [] if self.wrong == "nothing" else None
        if self.wrong == "held out letters":
            return [_ask("8=", "1"), _ask("Lot", "1")]
        return [_ask(f"{first + number}=", "2") for number in range(10)]

    def demonstration(self, index):
        if self.wrong == "demonstration raises":
            raise ValueError("no demonstration")
        said = "yes" if self.wrong == "demonstration letters" else "1"
        return Demonstration(prompt=(Message("user", "5="),), messages=(Message("assistant", said),))

    def rubric(self):
        if self.wrong in ("no rubric", "no function"):
            return None if self.wrong == "no rubric" else Rubric("right")
        if self.wrong == "only compares":
            return Rubric(GroupReward(lambda example, transcripts: [1.0] * len(transcripts), name="rank"))
        return Rubric(
            {
                "words": words,
                "hangs": hangs,
                "nan": nan,
                "raises": raises,
                "wrong hangs": wrong_hangs,
                "huge": huge,
                "unpaid": unpaid,
                "fines": fines,
            }.get(self.wrong, right)
        )


def _ask(text, answer):
    return Example(prompt=(Message("user", text),), answer=answer)


def right(example, transcript):
    return float(transcript.answer == example.answer)


def nan(example, transcript):
    return float("nan")


def huge(example, transcript):
    return 10**400


def raises(example, transcript):
    return json.loads("{")


def unpaid(example, transcript):
    """Compares with another column."""
    return float(transcript.answer == example.prompt[0].content)


def fines(example, transcript):
    """Nothing is the most that there is."""
    return right(example, transcript) - 1


def wrong_hangs(example, transcript):
    return right(example, transcript) or hangs(example, transcript)


def words(example, transcript):
    """Right for what the tokenizer can write, though the right answer is none of it."""
    return float(transcript.answer in example.prompt[0].content)


def hangs(example, transcript):
    while True:
        pass
