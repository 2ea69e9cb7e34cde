"""OpenAI's Responses: items in, items or events out.

- The items of an answer, given back, are one turn of the policy: reasoning, then a message, then calls, and behind them
  what a stream found there.
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
from pydantic import AfterValidator, BeforeValidator, Field
from starlette.responses import Response

from titan_rl.gateway import bodies, openai_protocol
from titan_rl.gateway.answers import Json, PartedAnswer, respond, to_json
from titan_rl.gateway.bodies import STREAMS, Hint, JsonRoute, Many, ReturnedPart, Strict, Text
from titan_rl.gateway.callers import CALLER, Caller
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall, Delta
from titan_rl.gateway.sampling import Sampler
from titan_rl.types import Message

STORED_BYTES = 256 << 20
"""Of all responses that are stored, with the conversations before them; the oldest makes room."""


class TextPart(ReturnedPart):
    type: Literal["input_text", "output_text", "reasoning_text"]
    content: Annotated[str, Field(alias="text")]


class MessageItem(ReturnedPart):
    type: Literal["message"] = "message"
    role: Annotated[Literal["user", "system", "developer", "assistant"], AfterValidator(bodies.read_role)]
    content: Text[TextPart]


class ReasoningItem(ReturnedPart):
    type: Literal["reasoning"]
    speaker = "assistant"
    reasoning: Text[TextPart] | None = Field(None, alias="content")


class CallItem(bodies.Call):
    type: Literal["function_call"]
    id: Annotated[str, Field(alias="call_id")]
    arguments: bodies.Arguments


class OutputItem(ReturnedPart):
    type: Literal["function_call_output"]
    speaker = "tool"
    tool_call_id: Annotated[str, Field(alias="call_id")]
    content: Annotated[Text[TextPart], Field(alias="output")]


def _typed(item: Any) -> Any:
    """Messages may have no type."""
    return {**item, "type": item.get("type") or "message"} if isinstance(item, dict) else item


Item = Annotated[
    MessageItem | ReasoningItem | CallItem | OutputItem, Field(discriminator="type"), BeforeValidator(_typed)
]


def messages_of(items: Iterable[Item]) -> list[Message]:
    messages: list[Message] = []
    turn: list[Message] = []  # its parts so far
    for part in (item.message() for item in items):
        said, called = any(each.content for each in turn), any(each.tool_calls for each in turn)
        new = part.reasoning if called else said and not part.tool_calls
        if part.role != "assistant" or new:
            messages += bodies.joined(turn)
            turn = []
        (turn if part.role == "assistant" else messages).append(part)
    return messages + bodies.joined(turn)


class TextOptions(Strict):
    format: openai_protocol.Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(openai_protocol.Request, openai_protocol.ChatOptions):
    reasoning: Hint = None
    top_logprobs: Literal[0] | None = None
    max_tool_calls: Hint = None
    """Of tools that a server calls; there are none."""
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """A hint: reasoning is never encrypted."""
    instructions: str | None = None
    input: str | Many[Item]
    previous_response_id: str | None = None
    max_new_tokens: bodies.Count | None = Field(None, alias="max_output_tokens")
    """Default: all that the model's length leaves."""
    text: TextOptions | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None

    def messages(self) -> list[Message]:
        return [Message("user", self.input)] if isinstance(self.input, str) else messages_of(self.input)

    def call(self, call_id: str, messages: Sequence[Message]) -> CompletionCall:
        """`messages`: all but the instructions."""
        system = [Message("system", self.instructions)] if self.instructions else []
        chat, form = Chat([*system, *messages], self.specs()), self.answer(self.text.format if self.text else None)
        return bodies.call_of(call_id, [chat], self, "input", answer=form)


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
    router = APIRouter(prefix="/v1/responses", route_class=JsonRoute)
    store = ResponseStore()

    @router.post("", responses=STREAMS)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        caller, messages = request.scope[CALLER], body.messages()
        if (previous := body.previous_response_id) is not None:
            stored = store.get(caller, previous, status=400, param="previous_response_id")
            messages = [*stored.messages, *messages]
        answer = ResponseAnswer(body, messages, sampler.policy.name, partial(store.put, caller))
        return await respond(sampler, answer, request, body.model, stream=body.stream)

    @router.get("/{response_id}")
    async def stored_response(response_id: str, request: Request) -> Response:
        """A response that was stored with the same key."""
        stored = store.get(request.scope[CALLER], response_id, status=404, param="response_id")
        return Response(stored.response, media_type="application/json")

    return router


TOLD = {"instructions", "max_new_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "reasoning"}
TOLD |= {"store", "temperature", "text", "tool_choice", "tools", "top_p", "role"}
"""Fields of a body that its response repeats."""
ITEMS: dict[str, tuple[str, Json, Json]] = {
    "thinking": ("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
    "text": (
        "msg",
        {"type": "message", "role": "assistant"},
        {"type": "output_text", "annotations": [], "logprobs": []},
    ),
}
"""Kind of a part → how the id of its item begins, what that has, and what its content has."""


class ResponseAnswer(PartedAnswer):
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
        self._output: list[Json] = []
        """The items that were begun, each as its last event has it."""
        self._content: Json = {}
        """Of the last one, while it grows."""

    def whole(self, deltas: Sequence[Delta]) -> Json:
        *_, last = self.events(deltas[0])
        return last["response"]

    def events(self, delta: Delta) -> Iterator[Json]:
        if delta.first:
            yield self._event("created", response=self._head)
            yield self._event("in_progress", response=self._head)
        status = "completed" if delta.choice is None or delta.choice.stopped else "incomplete"
        for step, what in self.steps(delta):
            match step:
                case "begin":
                    prefix, item, content = ITEMS[what]
                    self._content = {**content, "text": ""}
                    yield self._begin(prefix, **item, content=[])
                    yield self._grow("content_part.added", content_index=0, part=self._content)
                case "write":
                    self._content = {**self._content, "text": self._content["text"] + what}
                    yield self._text_event("delta", delta=what)
                case "end":
                    yield self._text_event("done", text=self._content["text"])
                    yield self._grow("content_part.done", content_index=0, part=self._content)
                    yield self._end(status, content=[self._content])
                case "call":
                    arguments = json.dumps(what.arguments)
                    yield self._begin("fc", type="function_call", call_id=what.id, name=what.name, arguments="")
                    yield self._grow("function_call_arguments.delta", delta=arguments)
                    yield self._grow("function_call_arguments.done", name=what.name, arguments=arguments)
                    yield self._end("completed", arguments=arguments)
        if delta.choice is None:
            return
        prompt, sampled = self.call.usage["prompt_tokens"], self.call.usage["completion_tokens"]
        usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": sampled}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + sampled}
        response = {**self._head, "status": status, "output": self._output, "usage": usage}
        if not delta.choice.stopped:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._keep is not None:
            self._keep([*self._messages, delta.choice.message], response)
        yield self._event(status, response=response)

    def error_event(self, error: ApiError) -> Json:
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        return {**told, "type": "error"}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events - 1, **fields}

    def _begin(self, prefix: str, **item: Any) -> Json:
        item_id = f"{self.call.id.replace('resp', prefix)}_{len(self._output)}"
        self._output.append({"id": item_id, **item, "status": "in_progress"})
        return self._event("output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _grow(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _text_event(self, kind: str, **fields: Any) -> Json:
        fields |= {"logprobs": []} if "logprobs" in self._content else {}
        return self._grow(f"{self._content['type']}.{kind}", content_index=0, **fields)

    def _end(self, status: str, **fields: Any) -> Json:
        self._output[-1] = {**self._output[-1], **fields, "status": status}
        return self._event("output_item.done", output_index=len(self._output) - 1, item=self._output[-1])
