"""DSPy: its language model, and its adapters, of which JSONAdapter asks for a schema."""

from typing import Literal

import dspy
from flows import KEY, MODEL, URL, play

CALLS = {"api_base": URL, "api_key": KEY, "cache": False}
lm = dspy.LM(f"openai/{MODEL}", **CALLS)
responses_lm = dspy.LM(f"openai/{MODEL}", model_type="responses", **CALLS)


class Describe(dspy.Signature):
    """Describe a colour."""

    question: str = dspy.InputField()
    colour: Literal["red", "green"] = dspy.OutputField()
    shades: list[int] = dspy.OutputField()


def describe(**options):
    with dspy.context(lm=lm, **options):
        told = dspy.Predict(Describe)(question="Which?")
    assert told.colour in ("red", "green")
    assert all(isinstance(each, int) for each in told.shades)


def text():
    assert len(lm("What is 3 + 4?", max_tokens=16)) == 1


def several():
    assert len(lm("What is 3 + 4?", max_tokens=16, n=3, temperature=1.0)) == 3


def responses():
    assert responses_lm("What is 3 + 4?", max_tokens=16)


def json_adapter():
    describe(adapter=dspy.JSONAdapter())


def chat_adapter():
    """What cannot be read as the adapter wants it is asked for again as JSON."""
    describe(adapter=dspy.ChatAdapter())


def chain_of_thought():
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        told = dspy.ChainOfThought(Describe)(question="Which?")
    assert isinstance(told.reasoning, str)


def tool_required():
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"first": number, "second": number}, "required": ["first", "second"]}
    add = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}
    (answer,) = lm("What is 3 + 4?", tools=[add], tool_choice="required")
    assert answer["tool_calls"]


async def stream():
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        told = [each async for each in dspy.streamify(dspy.Predict(Describe))(question="Which?")]
    assert isinstance(told[-1], dspy.Prediction)


if __name__ == "__main__":
    play(text, several, responses, json_adapter, chat_adapter, chain_of_thought, tool_required, stream)
