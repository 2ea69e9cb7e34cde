"""How clients of each dialect tell a conversation, and what they keep of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from support.gateway import MODEL, http_client
from titan_rl.gateway.anthropic import MessagesRequest
from titan_rl.gateway.calls import Chat, CompletionCall
from titan_rl.gateway.gemini import GenerateContentRequest
from titan_rl.gateway.openai_protocol import ChatCompletionRequest
from titan_rl.gateway.responses import ResponsesRequest
from titan_rl.types import Message, ToolSpec

Json = dict[str, Any]


@dataclass
class Answer:
    said: list[Json]
    """Entries of the conversation, as the client keeps them."""
    text: str
    reason: str | None
    reasoning: str = ""
    calls: list[tuple[str, str, Json]] = field(default_factory=list)
    """Id, name and arguments of each."""
    whole: Any = None
    """As the SDK has it."""

    @property
    def content(self) -> tuple[str, str, list[tuple[str, Json]], str | None]:
        """All but ids, which differ from answer to answer."""
        return self.text, self.reasoning, [call[1:] for call in self.calls], self.reason


def present(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value}


def join_calls(calls: list[Json], parts: Sequence[Json]) -> None:
    """Put parts of streamed calls together, as clients do: the first one of each has its id and name."""
    for part in parts:
        if part["index"] == len(calls):
            assert part["id"] and part["function"]["name"] and not part["function"]["arguments"]
            calls.append(part)
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


class Chats:
    path = "/v1/chat/completions"

    def body(self, entries: Sequence[Json], system: str = "", tools: Sequence[ToolSpec] = (), **options: Any) -> Json:
        told = [{"role": "system", "content": system}] if system else []
        declared = [{"type": "function", "function": tool._asdict()} for tool in tools]
        return {"model": MODEL, "messages": [*told, *entries], **present(tools=declared), **options}

    def call(self, body: Json) -> CompletionCall:
        return ChatCompletionRequest.model_validate(body).call("c")

    def entries(self, messages: Sequence[Message]) -> list[Json]:
        return [
            {"role": each.role, "content": each.content}
            | present(
                tool_call_id=each.tool_call_id,
                reasoning_content=each.reasoning,
                tool_calls=[
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                    }
                    for call in each.tool_calls
                ],
            )
            for each in messages
        ]

    def answer(self, completion: Any) -> Answer:
        """From OpenAI's client, or from its JSON."""
        choice = (completion if isinstance(completion, dict) else completion.model_dump())["choices"][0]
        said = choice["message"]
        calls = [(each["id"], each["function"]) for each in said.get("tool_calls") or ()]
        return Answer(
            said=[said],
            text=said["content"] or "",
            reasoning=said.get("reasoning_content") or "",
            calls=[(call_id, call["name"], json.loads(call["arguments"])) for call_id, call in calls],
            reason=choice["finish_reason"],
        )

    async def ask(self, clients: Clients, body: Json, *, stream: bool) -> Answer:
        api = clients.openai().chat.completions
        if not stream:
            return self.answer(await api.create(**body))
        said: Json = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        async for chunk in await api.create(**body, stream=True):
            choice = chunk.model_dump()["choices"][0]
            for name in ("content", "reasoning_content"):
                said[name] += choice["delta"].get(name) or ""
            join_calls(said["tool_calls"], choice["delta"].get("tool_calls") or [])
        return self.answer({"choices": [{"message": said, "finish_reason": choice["finish_reason"]}]})


class Responses:
    path = "/v1/responses"

    def body(self, entries: Sequence[Json], system: str = "", tools: Sequence[ToolSpec] = (), **options: Any) -> Json:
        declared = [{"type": "function", **tool._asdict(), "strict": False} for tool in tools]
        return {"model": MODEL, "input": list(entries), **present(instructions=system, tools=declared), **options}

    def call(self, body: Json) -> CompletionCall:
        request = ResponsesRequest.model_validate(body)
        return request.call("c", request.messages())

    def entries(self, messages: Sequence[Message]) -> list[Json]:
        items: list[Json] = []
        for each in messages:
            if each.role == "tool":
                items.append({"type": "function_call_output", "call_id": each.tool_call_id, "output": each.content})
                continue
            if each.reasoning:
                thought = [{"type": "reasoning_text", "text": each.reasoning}]
                items.append({"type": "reasoning", "id": "rs", "summary": [], "content": thought})
            if each.content or not each.tool_calls:
                items.append({"role": each.role, "content": each.content})
            for call in each.tool_calls:
                told = {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
                items.append({"type": "function_call", **told})
        return items

    def answer(self, response: Any) -> Answer:
        whole = response if isinstance(response, dict) else response.model_dump(mode="json", exclude_unset=True)
        items = whole["output"]
        parts = [(each["type"], part["text"]) for each in items for part in each.get("content") or ()]
        return Answer(
            said=items,
            text="".join(text for kind, text in parts if kind == "message"),
            reasoning="".join(text for kind, text in parts if kind == "reasoning"),
            calls=[
                (each["call_id"], each["name"], json.loads(each["arguments"]))
                for each in items
                if each["type"] == "function_call"
            ],
            reason=whole["status"],
            whole=response,
        )

    async def ask(self, clients: Clients, body: Json, *, stream: bool) -> Answer:
        api = clients.openai().responses
        if not stream:
            return self.answer(await api.create(**body))
        async with api.stream(**body) as events:
            async for event in events:
                if event.type == "response.incomplete":  # the client's final response is one that was completed
                    return self.answer(event.response)
                if event.type == "error":
                    raise RuntimeError(event.message)
            return self.answer(await events.get_final_response())


class Anthropic:
    path = "/v1/messages"

    def body(self, entries: Sequence[Json], system: str = "", tools: Sequence[ToolSpec] = (), **options: Any) -> Json:
        declared = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters} for tool in tools
        ]
        limits = {"max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        told = {"model": MODEL, "messages": list(entries), **limits, **options}
        return {**told, **present(system=system, tools=declared)}

    def call(self, body: Json) -> CompletionCall:
        return MessagesRequest.model_validate(body).call("c")

    def entries(self, messages: Sequence[Message]) -> list[Json]:
        told = []
        for role, group in groupby(messages, lambda each: "assistant" if each.role == "assistant" else "user"):
            blocks: list[Json] = []
            for each in group:
                if each.role == "tool":
                    blocks.append({"type": "tool_result", "tool_use_id": each.tool_call_id, "content": each.content})
                    continue
                if each.reasoning:
                    blocks.append({"type": "thinking", "thinking": each.reasoning, "signature": "s"})
                if each.content:
                    blocks.append({"type": "text", "text": each.content})
                for call in each.tool_calls:
                    blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
            told.append({"role": role, "content": blocks})
        return told

    def answer(self, message: Any) -> Answer:
        whole = message if isinstance(message, dict) else message.model_dump(mode="json", exclude_unset=True)
        blocks = whole["content"]
        return Answer(
            said=[{"role": "assistant", "content": blocks}],
            text="".join(each["text"] for each in blocks if each["type"] == "text"),
            reasoning="".join(each["thinking"] for each in blocks if each["type"] == "thinking"),
            calls=[(each["id"], each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"],
            reason=whole["stop_reason"],
            whole=message,
        )

    async def ask(self, clients: Clients, body: Json, *, stream: bool) -> Answer:
        api = clients.anthropic().messages
        if not stream:
            return self.answer(await api.create(**body))
        async with api.stream(**body) as events:
            return self.answer(await events.get_final_message())


class Gemini:
    path = f"/v1beta/models/{MODEL}:generateContent"

    def body(self, entries: Sequence[Json], system: str = "", tools: Sequence[ToolSpec] = (), **options: Any) -> Json:
        declared = [
            {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.parameters}
            for tool in tools
        ]
        config = {"thinkingConfig": {"includeThoughts": True}, **options.pop("generationConfig", {})}
        told = {"contents": list(entries), "generationConfig": config, **options}
        instruction = {"parts": [{"text": system}], "role": "user"} if system else None
        return {
            **told,
            **present(systemInstruction=instruction, tools=declared and [{"functionDeclarations": declared}]),
        }

    def call(self, body: Json) -> CompletionCall:
        return GenerateContentRequest.model_validate(body).call("c")

    def entries(self, messages: Sequence[Message]) -> list[Json]:
        """Answers of functions do not say which call they answer."""
        names: list[str] = []
        told = []
        for each in messages:
            parts: list[Json] = []
            if each.role == "tool":
                parts.append({"functionResponse": {"name": names.pop(0), "response": {"result": each.content}}})
            else:
                if each.reasoning:
                    parts.append({"text": each.reasoning, "thought": True})
                if each.content or not each.tool_calls:
                    parts.append({"text": each.content})
                names = [call.name for call in each.tool_calls]
                for call in each.tool_calls:
                    parts.append({"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}})
            told.append({"role": "model" if each.role == "assistant" else "user", "parts": parts})
        return told

    def answer(self, *chunks: Json) -> Answer:
        candidates = [chunk["candidates"][0] for chunk in chunks]
        parts = [part for each in candidates for part in each["content"]["parts"]]
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        return Answer(
            said=[each["content"] for each in candidates],
            text="".join(part.get("text", "") for part in parts if not part.get("thought")),
            reasoning="".join(part["text"] for part in parts if part.get("thought")),
            calls=[(call["id"], call["name"], call["args"]) for call in calls],
            reason=candidates[-1]["finishReason"],
            whole=chunks[-1],
        )

    async def ask(self, clients: Clients, body: Json, *, stream: bool) -> Answer:
        async with http_client(clients.app) as http:
            headers = {"x-goog-api-key": clients.key}
            if not stream:
                return self.answer((await http.post(self.path, json=body, headers=headers)).raise_for_status().json())
            path = self.path.replace(":generate", ":streamGenerate")
            answer = (await http.post(path, params={"alt": "sse"}, json=body, headers=headers)).raise_for_status()
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
        if "error" in chunks[-1]:
            raise RuntimeError(chunks[-1]["error"]["message"])
        return self.answer(*chunks)


Dialect = Chats | Responses | Anthropic | Gemini
DIALECTS: dict[str, Dialect] = {"chat": Chats(), "responses": Responses(), "anthropic": Anthropic(), "gemini": Gemini()}


@dataclass
class Clients:
    """SDKs of one key, straight into an app."""

    app: Any
    key: str = "none"

    def openai(self) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=self.key, http_client=http_client(self.app))

    def anthropic(self) -> Any:
        import anthropic
        import httpx2

        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport, base_url="http://gateway")
        return anthropic.AsyncAnthropic(base_url="http://gateway", api_key=self.key, http_client=http)


def chat_of(dialect: Dialect, body: Json) -> Chat:
    (chat,) = dialect.call(json.loads(json.dumps(body))).prompts
    assert isinstance(chat, Chat)
    return chat
