"""Anthropic's Messages: content blocks in, content blocks or events out.

Thinking is shown to clients that ask for it. Others take the first block for the answer's text.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from titan_rl.chat.renderer import AnswerForm
from titan_rl.gateway import bodies
from titan_rl.gateway.answers import Json, JsonResponse, PartedAnswer, respond
from titan_rl.gateway.bodies import MOST_TOOLS, STREAMS, Hint, JsonRoute, Many, Part, ReturnedPart, Strict, Text, Turns
from titan_rl.gateway.callers import CALLER
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall, Delta
from titan_rl.gateway.sampling import Sampler
from titan_rl.types import Message, ToolSpec

PATHS = re.compile("/v1/messages")
"""Whose errors have this dialect's form."""
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {503: "overloaded_error"}


class TextBlock(bodies.TextPart):
    cache_control: Hint = None
    citations: Hint = None


class ThinkingBlock(ReturnedPart):
    type: Literal["thinking"]
    reasoning: Annotated[str, Field(alias="thinking")]


class CallBlock(bodies.Call):
    type: Literal["tool_use"]
    arguments: Annotated[dict[str, Any], Field(alias="input")]


class ResultBlock(Part):
    type: Literal["tool_result"]
    speaker = "tool"
    tool_call_id: Annotated[str, Field(alias="tool_use_id")]
    content: Text[TextBlock] | None = None
    is_error: Hint = None
    """The policy reads what the content says."""
    cache_control: Hint = None


class ClientMessage(Strict):
    role: Literal["user", "system"]
    content: str | Many[Annotated[TextBlock | ResultBlock, Field(discriminator="type")]]


class AssistantMessage(ReturnedPart):
    role: Literal["assistant"]
    content: str | Many[Annotated[TextBlock | ThinkingBlock | CallBlock, Field(discriminator="type")]]


def _messages(message: ClientMessage | AssistantMessage) -> list[Message]:
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    return bodies.joined(block.message(message.role) for block in message.content) or [Message(message.role, "")]


class Tool(Strict):
    type: Literal["custom"] | None = None
    name: bodies.ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Hint = None
    eager_input_streaming: Hint = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    """Of type "tool"."""
    disable_parallel_tool_use: bool | None = None


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Hint = None
    format: JsonFormat | None = None


class CountTokensRequest(Strict):
    model: bodies.ModelName
    messages: Turns[Annotated[ClientMessage | AssistantMessage, Field(discriminator="role")]]
    system: Text[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputConfig = OutputConfig()
    thinking: dict[str, Any] | None = None
    """The policy thinks as it has learned to. Unless its type is "disabled", the client sees it."""
    cache_control: Hint = None

    def chat(self) -> Chat:
        declared = [] if self.tool_choice.type == "none" else self.tools or []
        tools = [ToolSpec(each.name, each.description or "", each.input_schema) for each in declared]
        system = [Message("system", str(self.system))] if self.system else []
        return Chat([*system, *(each for message in self.messages for each in _messages(message))], tools)


class MessagesRequest(CountTokensRequest):
    metadata: Hint = None
    service_tier: Hint = None
    max_new_tokens: Annotated[bodies.Count, Field(alias="max_tokens")]
    stream: bool | None = None
    stop: bodies.Stops | None = Field(None, alias="stop_sequences")
    temperature: bodies.Temperature | None = None
    top_p: bodies.TopP | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    def call(self, call_id: str) -> CompletionCall:
        chat, choice, wanted = self.chat(), self.tool_choice, self.output_config.format
        must_call, parallel = choice.type in ("any", "tool"), not choice.disable_parallel_tool_use
        form = AnswerForm(wanted.schema_ if wanted else None, chat.tools, parallel=parallel, must_call=must_call)
        names, strict = [choice.name] if choice.type == "tool" else None, any(tool.strict for tool in self.tools or ())
        answer = bodies.answer_form(form, "tool_choice", names, strict=strict)
        return bodies.call_of(call_id, [chat], self, "messages", answer=answer)


def routes(sampler: Sampler) -> APIRouter:
    router = APIRouter(prefix="/v1/messages", route_class=JsonRoute)

    @router.post("", responses=STREAMS)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        return await respond(sampler, MessageAnswer(body, sampler.policy.name), request, body.model, stream=body.stream)

    @router.post("/count_tokens")
    async def count_message_tokens(body: CountTokensRequest, request: Request) -> Response:
        """How many tokens the policy would read."""
        count = await sampler.count_tokens(body.chat(), request.scope[CALLER], model=body.model)
        return JsonResponse({"input_tokens": count})

    return router


def error_object(error: ApiError) -> Json:
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: Json = {"type": kind, "message": error.message, "code": error.code}
    if error.param == "thread":  # no conversation is kept: its client goes on by sending the whole one
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told}


class MessageAnswer(PartedAnswer):
    error_event = staticmethod(error_object)

    def __init__(self, body: MessagesRequest, model: str) -> None:
        self.call = body.call(f"msg_{uuid.uuid4().hex}")
        self.shows_thinking = (body.thinking or {}).get("type", "disabled") != "disabled"
        self._head = {"id": self.call.id, "type": "message", "role": "assistant", "model": model}
        self._content: list[Json] = []
        """The blocks that were begun, as far as they were written."""

    def whole(self, deltas: Sequence[Delta]) -> Json:
        *_, last, _ = self.events(deltas[0])
        return {**self._head, "content": self._content, **last["delta"], "usage": last["usage"]}

    def events(self, delta: Delta) -> Iterator[Json]:
        usage = {"input_tokens": len(delta.prompt), "output_tokens": self.call.usage["completion_tokens"]}
        if delta.first:
            begun: Json = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**begun, "usage": usage | {"output_tokens": 0}}}
        for step, what in self.steps(delta):
            match step:
                case "begin":
                    yield self._begin({"type": what, what: "", **({"signature": ""} if what == "thinking" else {})})
                case "write":
                    yield self._write(f"{self.open}_delta", self.open, what)
                case "end":
                    if what == "thinking":
                        yield self._write("signature_delta", "signature", self.call.id)
                    yield self._event("stop")
                case "call":
                    yield self._begin({"type": "tool_use", "id": what.id, "name": what.name, "input": {}})
                    self._content[-1]["input"] = what.arguments
                    told: Json = {"type": "input_json_delta", "partial_json": json.dumps(what.arguments)}
                    yield self._event("delta", delta=told)
                    yield self._event("stop")
        if (choice := delta.choice) is not None:
            reason = "max_tokens" if not choice.stopped else "tool_use" if choice.message.tool_calls else "end_turn"
            stop = choice.stop_text if reason == "end_turn" else ""
            told = {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop or None}
            yield {"type": "message_delta", "delta": told, "usage": usage}
            yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **fields}

    def _begin(self, block: Json) -> Json:
        self._content.append({**block})
        return self._event("start", content_block=block)

    def _write(self, kind: str, field: str, text: str) -> Json:
        self._content[-1][field] += text
        return self._event("delta", delta={"type": kind, field: text})
