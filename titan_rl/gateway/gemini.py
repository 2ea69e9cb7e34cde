"""Google's Gemini API: contents in, candidates out.

- Neighbouring contents of the model are one turn of the policy: clients keep each chunk of a stream as a content.
- What a function gave belongs to the call whose id it has, or else to the first unanswered one of its name.
- Field names are taken in camel case, as clients send them, and in snake case, as Google's servers take them too.
- Thoughts are shown to clients that ask for them.
"""

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, AliasChoices, AliasGenerator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from starlette.responses import Response

from titan_rl import types
from titan_rl.chat.renderer import AnswerForm
from titan_rl.gateway import bodies
from titan_rl.gateway.answers import Answer, Json, JsonResponse, respond
from titan_rl.gateway.bodies import MOST_TOOLS, STREAMS, Hint, JsonRoute, Many, Strict, Turns
from titan_rl.gateway.callers import CALLER
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall, Delta
from titan_rl.gateway.sampling import Sampler
from titan_rl.types import Message, ToolSpec

PATHS = re.compile("/v1beta/|/v1/models/.*:(generateContent|streamGenerateContent|countTokens)$")
"""Whose errors have this dialect's form."""
STATUSES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
STATUSES |= {503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
ROLES = {"model": "assistant", "system": "system"}
"""Any other is the user's."""
OURS = {"max_new_tokens": "max_output_tokens", "choices": "candidate_count", "stop": "stop_sequences"}
"""Fields that have another name here."""


def _camel(name: str) -> str:
    return to_camel(OURS.get(name, name))


class Camel(Strict):
    model_config = ConfigDict(
        alias_generator=AliasGenerator(
            alias=_camel, validation_alias=lambda name: AliasChoices(_camel(name), OURS.get(name, name))
        )
    )


class FunctionCall(bodies.Call, Camel):
    id: str = ""
    arguments: Annotated[dict[str, Any], Field(alias="args")] = {}


class FunctionResponse(Camel):
    id: str = ""
    name: str
    response: dict[str, Any]
    """Clients put a text under `result` or `output`."""

    def text(self) -> str:
        match self.response:
            case {"output": str(text)} | {"result": str(text)} if len(self.response) == 1:
                return text
        return json.dumps(self.response)


class Part(Camel):
    text: str | None = None
    thought: bool | None = None
    thought_signature: Hint = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None

    @model_validator(mode="after")
    def is_one_thing(self) -> "Part":
        if sum(each is not None for each in (self.text, self.function_call, self.function_response)) > 1:
            raise ValueError("a part is a text, a functionCall or a functionResponse")
        return self

    def message(self, role: str) -> Message:
        """Of a functionResponse: with the function's name."""
        if self.function_call is not None:
            return self.function_call.message()
        if (answer := self.function_response) is not None:
            return Message("tool", answer.text(), tool_call_id=answer.id, name=answer.name)
        return Message("assistant", "", reasoning=self.text or "") if self.thought else Message(role, self.text or "")


class Content(Camel):
    role: Literal["user", "model", "function", "system"] | None = None
    parts: Many[Part] = []


def messages_of(contents: Iterable[Content]) -> list[Message]:
    messages: list[Message] = []
    for role, group in groupby(contents, lambda content: ROLES.get(content.role or "", "user")):
        parts = [content.parts for content in group]
        for each in [[part for some in parts for part in some]] if role == "assistant" else parts:
            messages += bodies.joined(part.message(role) for part in each) or [Message(role, "")]
    unanswered: list[types.ToolCall] = []
    for place, message in enumerate(messages):
        if message.role == "assistant":
            unanswered = list(message.tool_calls)
        elif message.role == "tool":
            call_id = message.tool_call_id
            calls = [each for each in unanswered if each.name == message.name and call_id in ("", each.id)]
            for call in calls[:1]:
                unanswered.remove(call)
                call_id = call.id
            messages[place] = message._replace(name="", tool_call_id=call_id)
    return messages


def json_schema(schema: Any) -> Any:
    """JSON Schema of a schema as Google has it, with types in capitals and `nullable`."""
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key not in ("nullable", "propertyOrdering", "format")}
    if isinstance(kind := found.get("type"), str):
        found["type"] = kind.lower()
    if isinstance(fields := found.get("properties"), dict):
        found["properties"] = {name: json_schema(each) for name, each in fields.items()}
    if isinstance(kinds := found.get("anyOf"), list):
        found["anyOf"] = [json_schema(each) for each in kinds]
    if "items" in found:
        found["items"] = json_schema(found["items"])
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


Schema = Annotated[dict[str, Any], AfterValidator(json_schema)]


class FunctionDeclaration(Camel):
    name: bodies.ToolName
    description: str = ""
    parameters: Schema | None = None
    parameters_json_schema: dict[str, Any] | None = None
    response: Hint = None
    response_json_schema: Hint = None

    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description, self.parameters or self.parameters_json_schema or {})


class Tool(Camel):
    function_declarations: Annotated[list[FunctionDeclaration], Field(max_length=MOST_TOOLS)]


class FunctionCallingConfig(Camel):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: Annotated[list[str], Field(max_length=MOST_TOOLS)] = []


class ToolConfig(Camel):
    function_calling_config: FunctionCallingConfig = FunctionCallingConfig()


class ThinkingConfig(Camel):
    """The policy thinks as it has learned to."""

    include_thoughts: bool | None = None
    thinking_budget: Hint = None
    thinking_level: Hint = None


class GenerationConfig(Camel):
    max_new_tokens: bodies.Count | None = None
    choices: bodies.Choices = 1
    stop: bodies.Stops = []
    seed: bodies.Seed | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.TopP | None = None
    top_k: Annotated[float, Field(ge=1, lt=2**31, multiple_of=1), AfterValidator(int)] | None = None
    """Clients write it with a fraction."""
    presence_penalty: bodies.Penalty | None = None
    frequency_penalty: bodies.Penalty | None = None
    response_mime_type: Literal["text/plain", "application/json"] = "text/plain"
    response_schema: Schema | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[Literal["TEXT"]] | None = None
    thinking_config: ThinkingConfig = ThinkingConfig()


class CountContentRequest(Camel):
    contents: Turns[Content]


class GenerateContentRequest(CountContentRequest):
    model: Hint = None
    """The path names it."""
    safety_settings: Hint = None
    service_tier: Hint = None
    system_instruction: Content = Content()
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_config: ToolConfig = ToolConfig()
    generation_config: GenerationConfig = GenerationConfig()

    def chat(self) -> Chat:
        declared = [each.spec() for tool in self.tools for each in tool.function_declarations]
        none = self.tool_config.function_calling_config.mode == "NONE"
        instruction = "".join(part.text or "" for part in self.system_instruction.parts)
        system = [Message("system", instruction)] if instruction else []
        return Chat([*system, *messages_of(self.contents)], [] if none else declared)

    def call(self, call_id: str) -> CompletionCall:
        chat, calling, config = self.chat(), self.tool_config.function_calling_config, self.generation_config
        any_object = {"type": "object"} if config.response_mime_type == "application/json" else None
        schema, names = config.response_schema or config.response_json_schema, calling.allowed_function_names
        form = AnswerForm(schema or any_object, chat.tools, parallel=True, must_call=calling.mode == "ANY")
        answer = bodies.answer_form(form, "toolConfig", names or None, strict=calling.mode == "VALIDATED")
        return bodies.call_of(call_id, [chat], config, "contents", place="generationConfig.", answer=answer)


def routes(sampler: Sampler) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    name, length = sampler.policy.name, sampler.policy.max_model_len
    listed = {"name": f"models/{name}", "displayName": name, "inputTokenLimit": length, "outputTokenLimit": length}
    listed["supportedGenerationMethods"] = ["generateContent", "countTokens"]

    @router.post("/v1/models/{model:path}:generateContent")
    @router.post("/v1beta/models/{model:path}:generateContent")
    async def generate_content(model: str, body: GenerateContentRequest, request: Request) -> Response:
        """What the policy says next in a conversation."""
        return await respond(sampler, ContentAnswer(body, name), request, model, stream=False)

    @router.post("/v1/models/{model:path}:streamGenerateContent", responses=STREAMS)
    @router.post("/v1beta/models/{model:path}:streamGenerateContent", responses=STREAMS)
    async def stream_content(
        model: str, body: GenerateContentRequest, alt: Literal["sse"], request: Request
    ) -> Response:
        """The same as it is sampled."""
        return await respond(sampler, ContentAnswer(body, name), request, model, stream=True)

    @router.post("/v1/models/{model:path}:countTokens")
    @router.post("/v1beta/models/{model:path}:countTokens")
    async def count_content_tokens(model: str, body: CountContentRequest, request: Request) -> Response:
        """How many tokens the policy would read."""
        count = await sampler.count_tokens(Chat(messages_of(body.contents)), request.scope[CALLER], model=model)
        return JsonResponse({"totalTokens": count})

    @router.get("/v1beta/models")
    async def listed_models() -> Response:
        """The one model there is."""
        return JsonResponse({"models": [listed]})

    return router


def error_object(error: ApiError) -> Json:
    status = STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.code or "", "domain": "titan_rl"}
    return {"error": {"code": error.status, "message": error.message, "status": status, "details": [info]}}


class ContentAnswer(Answer):
    error_event = staticmethod(error_object)

    def __init__(self, body: GenerateContentRequest, model: str) -> None:
        self.call = body.call(uuid.uuid4().hex)
        self._thinks = body.generation_config.thinking_config.include_thoughts
        self._head = {"modelVersion": model, "responseId": self.call.id}

    def whole(self, deltas: Sequence[Delta]) -> Json:
        prompt, sampled = self.call.usage["prompt_tokens"], self.call.usage["completion_tokens"]
        counts = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
        return {"candidates": [self._candidate(each) for each in deltas], "usageMetadata": counts, **self._head}

    def events(self, delta: Delta) -> Iterator[Json]:
        if delta.choice is not None:
            yield self.whole([delta])
        elif delta.text or delta.calls or (self._thinks and delta.reasoning):
            yield {"candidates": [self._candidate(delta)], **self._head}

    def _candidate(self, delta: Delta) -> Json:
        parts: list[Json] = [{"text": delta.reasoning, "thought": True}] if self._thinks and delta.reasoning else []
        parts += [{"text": delta.text}] if delta.text else []
        parts += [{"functionCall": {"id": each.id, "name": each.name, "args": each.arguments}} for each in delta.calls]
        told = {"content": {"role": "model", "parts": parts or [{"text": ""}]}, "index": delta.index}
        if delta.choice is not None:
            told["finishReason"] = "STOP" if delta.choice.stopped else "MAX_TOKENS"
        return told
