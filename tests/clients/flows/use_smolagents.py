"""smolagents: its OpenAI model, the agent that calls tools and the one that writes code."""

import json

from flows import KEY, MODEL, URL, play
from smolagents import ChatMessage, CodeAgent, MessageRole, OpenAIModel, ToolCallingAgent, tool

USER = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "What is 3 + 4?"}])]
SHAPE = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SHAPE, "strict": True}}


@tool
def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: The one.
        second: The other.
    """
    return first + second


def model(**options):
    return OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, **options)


def text():
    assert model(max_tokens=16).generate(USER).token_usage.output_tokens <= 16


def stream():
    assert list(model(max_tokens=16).generate_stream(USER))


def tool_required():
    assert model().generate(USER, tools_to_call_from=[add]).tool_calls


def structured():
    assert json.loads(model().generate(USER, response_format=FORMAT).content)["colour"] in ("red", "green")


def calls_of(agent):
    agent.run("What is 3 + 4?")
    return [call.name for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]


def tool_calling_agent():
    assert calls_of(ToolCallingAgent(tools=[add], model=model(), max_steps=3))


def tool_calling_agent_streamed():
    assert calls_of(ToolCallingAgent(tools=[add], model=model(), max_steps=3, stream_outputs=True))


def code_agent():
    """The policy writes no code that runs, which the agent tells it."""
    agent = CodeAgent(tools=[add], model=model(max_tokens=64), max_steps=2)
    agent.run("What is 3 + 4?")
    assert len(agent.memory.steps) > 2


def code_agent_structured():
    agent = CodeAgent(tools=[add], model=model(), max_steps=2, use_structured_outputs_internally=True)
    assert "python_interpreter" in calls_of(agent)


if __name__ == "__main__":
    agents = tool_calling_agent, tool_calling_agent_streamed, code_agent, code_agent_structured
    play(text, stream, tool_required, structured, *agents)
