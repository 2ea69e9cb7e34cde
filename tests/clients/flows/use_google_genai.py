"""Google's own client: generateContent."""

from typing import Literal

from flows import MODEL, play
from google import genai
from google.genai import types
from pydantic import BaseModel

client = genai.Client()
USER = "What is 3 + 4?"


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


DECLARED = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="add",
            description="Adds two numbers.",
            parameters=types.Schema(
                type="OBJECT",
                properties={"first": types.Schema(type="INTEGER"), "second": types.Schema(type="INTEGER")},
                required=["first", "second"],
            ),
        )
    ]
)
MUST_CALL = types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="ANY"))


def ask(contents=USER, **options):
    config = types.GenerateContentConfig(**options)
    return client.models.generate_content(model=MODEL, contents=contents, config=config)


def models():
    """`/v1/models` is OpenAI's list."""
    beta = genai.Client(http_options=types.HttpOptions(api_version="v1beta"))
    assert [each.name for each in beta.models.list()] == [f"models/{MODEL}"]


def text():
    answer = ask(
        system_instruction="Be brief.",
        max_output_tokens=16,
        temperature=1.0,
        top_p=0.95,
        top_k=20,
        seed=5,
        stop_sequences=["STOP!"],
        presence_penalty=0.0,
    )
    assert answer.candidates[0].finish_reason in ("STOP", "MAX_TOKENS")
    assert answer.usage_metadata.candidates_token_count <= 16


def stream():
    config = types.GenerateContentConfig(max_output_tokens=16)
    chunks = list(client.models.generate_content_stream(model=MODEL, contents=USER, config=config))
    assert chunks[-1].candidates[0].finish_reason in ("STOP", "MAX_TOKENS")


async def asynchronous():
    config = types.GenerateContentConfig(max_output_tokens=16)
    asked = {"model": MODEL, "contents": USER, "config": config}
    assert (await client.aio.models.generate_content(**asked)).candidates
    assert [chunk async for chunk in await client.aio.models.generate_content_stream(**asked)]


def several():
    assert len(ask(candidate_count=3, max_output_tokens=16).candidates) == 3


def chat():
    conversation = client.chats.create(model=MODEL, config=types.GenerateContentConfig(max_output_tokens=16))
    conversation.send_message(USER)
    conversation.send_message("And 4 + 5?")
    assert len(conversation.get_history()) == 4


def tools_auto():
    once = types.AutomaticFunctionCallingConfig(maximum_remote_calls=2)
    ask(tools=[add], automatic_function_calling=once, max_output_tokens=64)


def tool_required():
    calls = ask(tools=[DECLARED], tool_config=MUST_CALL).function_calls
    assert calls
    assert all(isinstance(add(**call.args), int) for call in calls)


def tool_named():
    config = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["add"])
    calls = ask(tools=[DECLARED], tool_config=types.ToolConfig(function_calling_config=config)).function_calls
    assert {call.name for call in calls} == {"add"}


def tool_conversation():
    answer = ask(tools=[DECLARED], tool_config=MUST_CALL)
    parts = [
        types.Part.from_function_response(name=call.name, response={"result": add(**call.args)})
        for call in answer.function_calls
    ]
    asked = types.Content(role="user", parts=[types.Part.from_text(text=USER)])
    said = [asked, answer.candidates[0].content, types.Content(role="user", parts=parts)]
    ask(said, tools=[DECLARED], max_output_tokens=16)


def tool_called_automatically():
    once = types.AutomaticFunctionCallingConfig(maximum_remote_calls=2)
    answer = ask(tools=[add], tool_config=MUST_CALL, automatic_function_calling=once)
    assert any(part.function_response for said in answer.automatic_function_calling_history for part in said.parts)


def parsed():
    answer = ask(response_mime_type="application/json", response_schema=Colour)
    assert isinstance(answer.parsed, Colour)


def count_tokens():
    assert client.models.count_tokens(model=MODEL, contents=USER).total_tokens > 0


if __name__ == "__main__":
    play(
        models,
        text,
        stream,
        asynchronous,
        several,
        chat,
        tools_auto,
        tool_required,
        tool_named,
        tool_conversation,
        tool_called_automatically,
        parsed,
        count_tokens,
    )
