"""The policy looks up somebody's two-digit extension. It cannot know it, so it has to use the phone book."""

import itertools
import zlib

from titan_rl.environments.base import Demonstration, Environment, Example, Message, Rubric, ToolCall, ToolError, tool

NAMES = ["".join(n) for n in itertools.product("abcdef", repeat=3)]  # 216 people
BOOK = {name: f"{zlib.crc32(name.encode()) % 100:02d}" for name in NAMES}


@tool
def lookup(name: str) -> str:
    """Extension of a person.

    Args:
        name: three letters
    """
    if name not in BOOK:
        raise ToolError("nobody of that name")
    return BOOK[name]


def digits(example, transcript):
    said = transcript.answer
    right = sum(a == b for a, b in zip(said, example.answer)) / max(2, len(said))
    return {"digits": right, "exact_match": float(said == example.answer)}


class PhoneBook(Environment):
    def __init__(self):
        self.staff = [n for i, n in enumerate(NAMES) if i % 11]
        self.guests = NAMES[::11]

    def example(self, index):
        return self.ask(self.staff[index % len(self.staff)])

    def held_out(self, count):
        return [self.ask(n) for n in self.guests[:count]]

    def tools(self):
        return [lookup]

    def rubric(self):
        return Rubric(digits)

    def demonstration(self, index):
        example = self.example(index)
        name = example.prompt[0].content.rstrip("?")
        said = (
            Message("assistant", "", tool_calls=(ToolCall("lookup", {"name": name}),)),
            Message("tool", BOOK[name]),
            Message("assistant", example.answer),
        )
        return Demonstration(prompt=example.prompt, messages=said, answer=example.answer)

    def ask(self, name):
        return Example(prompt=(Message("user", name + "?"),), answer=BOOK[name])
