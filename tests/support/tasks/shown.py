"""A task of several turns with demonstrations, some of which go wrong."""

from titan_rl.environments.base import Demonstration, Environment, Example, Message, Rubric


class Shown(Environment):
    def __init__(self, wrong: str = ""):
        self.wrong = wrong

    def example(self, index):
        return Example(prompt=(Message("user", f"{index}="),))

    def held_out(self, count):
        return []

    def rubric(self):
        return Rubric(lambda example, transcript: 0.0)

    def demonstration(self, index):
        messages = (
            Message("assistant", f"{index}"),
            Message("tool", "7"),
            Message("user", "8="),
            Message("assistant", "99"),
        )
        if index == 2:
            match self.wrong:
                case "raises":
                    raise ValueError("no demonstration today")
                case "type":
                    return "99"
                case "silent":
                    messages = messages[1:]
                case "unknown symbol":
                    messages = (Message("assistant", "é"),)
        return Demonstration(prompt=self.example(index).prompt, messages=messages)
