"""OpenAI's Responses: items in, items or events out.

- The items of an answer, given back, are one turn of the policy: reasoning, then a message, then calls.
- What is stored belongs to the key that asked for it. Nobody can tell what others have stored from what never was.
- What goes on from a stored response goes on from that very turn.
"""

import json
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from titan_rl import types
from titan_rl.gateway import bodies, openai_protocol
from titan_rl.gateway.answers import Answer, Json, respond, to_json
from titan_rl.gateway.bodies import MOST_TOOLS, Hint, Many, ReturnedPart, Strict, text_of
from titan_rl.gateway.callers import CALLER, Caller
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall, Delta
from titan_rl.gateway.openai_protocol import FunctionName, PlainFormat
from titan_rl.gateway.sampling import Sampler
from titan_rl.one_line import sendable
from titan_rl.types import Message, ToolSpec

STORED_BYTES = 256 << 20
"""Of all responses that are stored, with the conversations before them; the oldest makes room."""


class TextPart(ReturnedPart):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


class MessageItem(ReturnedPart):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Many[TextPart]

    def message(self) -> Message:
        return Message("system" if self.role == "developer" else self.role, text_of(self.content))


class ReasoningItem(ReturnedPart):
    type: Literal["reasoning"]
    content: Many[TextPart] | None = None

    def message(self) -> Message:
        return Message("assistant", "", reasoning=text_of(self.content))


class CallItem(ReturnedPart):
    type: Literal["function_call"]
    call_id: str
    name: bodies.ToolName
    arguments: bodies.Arguments

    def message(self) -> Message:
        return Message("assistant", "", (types.ToolCall(self.name, json.loads(self.arguments), id=self.call_id),))


class OutputItem(ReturnedPart):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[TextPart]

    def message(self) -> Message:
        return Message("tool", text_of(self.output), tool_call_id=self.call_id)


def _kind(item: Any) -> str:
    """Messages may have no type."""
    return str((item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


def messages_of(items: Iterable[Item]) -> list[Message]:
    messages: list[Message] = []
    turn: list[Message] = []  # its parts so far
    for part in (item.message() for item in items):
        said = any(each.content or each.tool_calls for each in turn)
        if part.role != "assistant" or (said and not part.tool_calls):
            messages += bodies.joined(turn)
            turn = []
        (turn if part.role == "assistant" else messages).append(part)
    return messages + bodies.joined(turn)


class FunctionTool(openai_protocol.FunctionDeclaration):
    type: Literal["function"]


class NamedFunction(FunctionName):
    type: Literal["function"]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MOST_TOOLS)]


class SchemaFormat(openai_protocol.Schema):
    type: Literal["json_schema"]


class TextOptions(Strict):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(openai_protocol.Request):
    reasoning: Hint = None
    max_tool_calls: Hint = None
    """Of tools that a server calls; there are none."""
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """A hint: reasoning is never encrypted."""
    instructions: str | None = None
    input: str | Many[Item]
    previous_response_id: str | None = None
    max_output_tokens: bodies.Count | None = None
    """Default: all that the model's length leaves."""
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None

    def messages(self) -> list[Message]:
        return [Message("user", self.input)] if isinstance(self.input, str) else messages_of(self.input)

    def call(self, call_id: str, messages: Sequence[Message]) -> CompletionCall:
        """`messages`: all but the instructions."""
        declared = [] if self.tool_choice == "none" else self.tools or []
        tools = [ToolSpec(each.name, each.description or "", each.parameters or {}) for each in declared]
        names: list[str] | None = None
        schema: Json | None = None
        must_call = self.tool_choice == "required"
        match self.tool_choice:
            case NamedFunction(name=name):
                names, must_call = [name], True
            case AllowedTools(mode=mode, tools=allowed):
                names, must_call = [each.name for each in allowed], mode == "required"
        match self.text and self.text.format:
            case SchemaFormat(schema_=wanted):
                schema = wanted or {}
            case PlainFormat(type="json_object"):
                schema = {"type": "object"}
        strict, parallel = any(tool.strict for tool in declared), self.parallel_tool_calls is not False
        form = bodies.answer_form(
            tools, "tool_choice", names, must_call=must_call, schema=schema, strict=strict, parallel=parallel
        )
        system = [Message("system", self.instructions)] if self.instructions else []
        return CompletionCall(
            id=call_id,
            prompts=[Chat([*system, *messages], tools)],
            max_new_tokens=self.max_output_tokens,
            role=sendable(self.user or ""),
            drawing=bodies.given(self, ("temperature", "top_p")),
            answer=form,
        )


class Stored(NamedTuple):
    owner: "weakref.ref[Caller]"
    messages: Sequence[Message]
    """Without instructions, with the answer."""
    response: bytes
    size: int


class ResponseStore:
    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, caller: Caller, messages: Sequence[Message], response: Json) -> None:
        written = to_json(response)
        size = len(written) + len(json.dumps(messages))
        self._stored[response["id"]] = Stored(weakref.ref(caller), messages, written, size)
        self._size += size
        while self._size > STORED_BYTES:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, caller: Caller, response_id: str, *, status: int, param: str) -> Stored:
        stored = self._stored.get(response_id)
        if stored is None or stored.owner() is not caller:
            problem = f"{param}: there is no stored response {response_id!r}"
            raise ApiError(status, problem, param=param, code="response_not_found")
        return stored


def routes(sampler: Sampler) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")
    store = ResponseStore()

    @router.post("")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        caller, messages = request.scope[CALLER], body.messages()
        if (previous := body.previous_response_id) is not None:
            stored = store.get(caller, previous, status=400, param="previous_response_id")
            messages = [*stored.messages, *messages]
        answer = ResponseAnswer(body, messages, sampler.policy.name, partial(store.put, caller))
        return await respond(sampler, answer, request, model=body.model, stream=bool(body.stream))

    @router.get("/{response_id}")
    async def stored_response(response_id: str, request: Request) -> Response:
        """A response that was stored with the same key."""
        stored = store.get(request.scope[CALLER], response_id, status=404, param="response_id")
        return Response(stored.response, media_type="application/json")

    return router


TOLD = {"instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning"}
TOLD |= {"store", "temperature", "text", "tool_choice", "tools", "top_p", "user"}
"""Fields of a body that its response repeats."""
PARTS = {"reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text")}
"""Kind of an item → how its id begins, and what its content is."""


class ResponseAnswer(Answer):
    def __init__(
        self, body: ResponsesRequest, messages: list[Message], model: str, keep: Callable[[list[Message], Json], None]
    ) -> None:
        """`keep` stores a conversation and its response."""
        self.call = body.call(f"resp_{uuid.uuid4().hex}", messages)
        self._messages = messages
        self._keep = keep if body.store is not False else None
        told = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        told |= body.model_dump(by_alias=True, exclude_none=True, include=TOLD)
        nothing: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        self._head = {"id": self.call.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._head |= {"status": "in_progress", **told, **nothing}
        self._events = 0
        self._index = 0  # of the item that is written
        self._open, self._text = "", ""  # its kind and its text, while that grows

    def whole(self, deltas: Sequence[Delta]) -> Json:
        return self._response(deltas[0])

    def events(self, delta: Delta) -> Iterator[Json]:
        if delta.first:
            yield self._event("created", response=self._head)
            yield self._event("in_progress", response=self._head)
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning)
        if delta.text or delta.is_empty:
            yield from self._write("message", delta.text)
        if delta.choice is None:
            return
        response = self._response(delta)
        yield from self._close(response["status"])
        for item in response["output"][self._index :]:
            place, arguments = {"output_index": self._index, "item_id": item["id"]}, item["arguments"]
            yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
            yield self._event("function_call_arguments.delta", **place, delta=arguments)
            yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
            yield self._item_event("done", item)
            self._index += 1
        yield self._event(response["status"], response=response)

    def error_event(self, error: ApiError) -> Json:
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        return {**told, "type": "error"}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events - 1, **fields}

    def _item_event(self, kind: str, item: Json) -> Json:
        return self._event(f"output_item.{kind}", output_index=self._index, item=item)

    def _part_event(self, kind: str, **fields: Any) -> Json:
        place = {"item_id": self._id(PARTS[self._open][0]), "output_index": self._index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _write(self, kind: str, text: str) -> Iterator[Json]:
        if self._open != kind:
            yield from self._close("completed")
            self._open = kind
            yield self._item_event("added", {**_item(kind, self._id(PARTS[kind][0]), "", "in_progress"), "content": []})
            yield self._part_event("content_part.added", part=_part(kind, ""))
        self._text += text
        more: Json = {"logprobs": []} if kind == "message" else {}
        yield self._part_event(f"{PARTS[kind][1]}.delta", delta=text, **more)

    def _close(self, status: str) -> Iterator[Json]:
        """End the item whose text grows, if there is one."""
        if kind := self._open:
            more: Json = {"logprobs": []} if kind == "message" else {}
            yield self._part_event(f"{PARTS[kind][1]}.done", text=self._text, **more)
            yield self._part_event("content_part.done", part=_part(kind, self._text))
            yield self._item_event("done", _item(kind, self._id(PARTS[kind][0]), self._text, status))
            self._open, self._text, self._index = "", "", self._index + 1

    def _id(self, prefix: str) -> str:
        return self.call.id.replace("resp", prefix)

    def _response(self, last: Delta) -> Json:
        """The whole response, which is stored unless the client says not to."""
        assert last.choice is not None
        message, stopped = bodies.with_call_ids(last.choice.message, self.call.id), last.choice.stopped
        status = "completed" if stopped else "incomplete"
        output = [_item("reasoning", self._id("rs"), message.reasoning, "")] if message.reasoning else []
        if message.content or not message.tool_calls:
            output.append(_item("message", self._id("msg"), message.content, status))
        for number, call in enumerate(message.tool_calls):
            named = {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
            output.append({"id": f"{self._id('fc')}_{number}", "type": "function_call", **named, "status": "completed"})
        prompt, sampled = self.call.usage["prompt_tokens"], self.call.usage["completion_tokens"]
        usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": sampled}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + sampled}
        response = {**self._head, "status": status, "output": output, "usage": usage}
        if not stopped:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._keep is not None:
            self._keep([*self._messages, message], response)
        return response


def _part(kind: str, text: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PARTS[kind][1], "text": text, **more}


def _item(kind: str, item_id: str, text: str, status: str) -> Json:
    more: Json = {"role": "assistant", "status": status} if kind == "message" else {"summary": []}
    return {"id": item_id, "type": kind, **more, "content": [_part(kind, text)]}
