"""LangChain's ChatOpenAI and its agents, through chat completions and through the Responses API."""

from typing import Literal

from flows import MODEL, play
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

USER = "What is 3 + 4?"


class Colour(BaseModel):
    """A colour and its shades."""

    colour: Literal["red", "green"]
    shades: list[int]


class AnyObject(BaseModel):
    """Of the JSON mode the client asks only for an object."""

    model_config = ConfigDict(extra="allow")


@tool
def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


@tool
def wait() -> str:
    """Waits."""
    return "done"


def text(model):
    assert model.bind(max_tokens=16).invoke([("system", "Be brief."), ("user", USER)]).usage_metadata


def stream(model):
    assert list(model.bind(max_tokens=16).stream(USER))


async def asynchronous(model):
    short = model.bind(max_tokens=16)
    assert await short.ainvoke(USER)
    assert [chunk async for chunk in short.astream(USER)]


def tools_auto(model):
    model.bind_tools([add, wait]).bind(max_tokens=64).invoke(USER)


def called(answer, *tools):
    assert answer.tool_calls
    assert not answer.invalid_tool_calls
    return [next(each for each in tools if each.name == call["name"]).invoke(call) for call in answer.tool_calls]


def tool_required(model):
    called(model.bind_tools([add, wait], tool_choice="any").invoke(USER), add, wait)


def tool_named_and_strict(model):
    answer = model.bind_tools([add, wait], tool_choice="add", strict=True, parallel_tool_calls=False).invoke(USER)
    assert len(called(answer, add)) == 1


def tool_streamed(model):
    chunks = list(model.bind_tools([add], tool_choice="any").stream(USER))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    called(whole, add)


def tool_conversation(model):
    answer = model.bind_tools([add], tool_choice="any").invoke(USER)
    results = called(answer, add)
    assert all(isinstance(each, ToolMessage) for each in results)
    model.bind_tools([add]).bind(max_tokens=16).invoke([("user", USER), answer, *results])


def structured_by_schema(model):
    assert isinstance(model.with_structured_output(Colour, method="json_schema").invoke(USER), Colour)


def structured_strictly(model):
    strict = model.with_structured_output(Colour, method="json_schema", strict=True, include_raw=True)
    assert isinstance(strict.invoke(USER)["parsed"], Colour)


def structured_by_call(model):
    assert isinstance(model.with_structured_output(Colour, method="function_calling").invoke(USER), Colour)


def structured_by_json_mode(model):
    assert isinstance(model.with_structured_output(AnyObject, method="json_mode").invoke(USER), AnyObject)


def agent(model):
    told = create_agent(model.bind(max_tokens=64), [add]).invoke({"messages": [("user", USER)]})
    assert told["messages"]


def agent_with_output_by_call(model):
    # it gives up on several outputs beside a call of a tool, which this policy makes once in a hundred times
    once = model.model_copy(update={"model_kwargs": {"parallel_tool_calls": False}})
    told = create_agent(once, [add], response_format=ToolStrategy(Colour)).invoke({"messages": [("user", USER)]})
    assert isinstance(told["structured_response"], Colour)


def agent_with_output_by_schema(model):
    told = create_agent(model, [], response_format=ProviderStrategy(Colour)).invoke({"messages": [("user", USER)]})
    assert isinstance(told["structured_response"], Colour)


def several(model):
    told = ChatOpenAI(model=MODEL, n=3, max_tokens=16).generate([[HumanMessage(USER)]])
    assert len(told.generations[0]) == 3


def logprobs(model):
    answer = model.bind(logprobs=True, max_tokens=8).invoke(USER)
    assert all(token["logprob"] <= 0 for token in answer.response_metadata["logprobs"]["content"])


def top_logprobs(model):
    answer = model.bind(logprobs=True, top_logprobs=2, max_tokens=8).invoke(USER)
    assert all(len(token["top_logprobs"]) == 2 for token in answer.response_metadata["logprobs"]["content"])


if __name__ == "__main__":
    flows = (
        text,
        stream,
        asynchronous,
        tools_auto,
        tool_required,
        tool_named_and_strict,
        tool_streamed,
        tool_conversation,
        structured_by_schema,
        structured_strictly,
        structured_by_call,
        structured_by_json_mode,
        agent,
        agent_with_output_by_call,
        agent_with_output_by_schema,
    )
    chat = ChatOpenAI(model=MODEL)
    play(*flows, over={"chat": chat, "responses": ChatOpenAI(model=MODEL, use_responses_api=True)})
    play(several, logprobs, top_logprobs, over={"chat": chat})
