"""What clients may send: the part of OpenAI's API that the engines can honour, and hints that change no answer.

- A field that is not here is refused by name, never ignored: whoever sends it expects another answer.
- Hints are taken and not used, because agent frameworks send them with every call.
- An assistant message comes back from a client as its framework keeps it, with fields of its own: those are not read.
- A list is read up to its first wrong entry (`fail_fast`): to name a million of them would take a minute.
- Types are strict: no number is read out of a text, no flag out of a number.
- Fields that are here and can only have one meaning (`echo`, `best_of`, …) take that value alone.
- What a body asks for is its `call`, in terms of the policy.
"""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from titan_rl import types
from titan_rl.chat.renderer import AnswerForm
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall
from titan_rl.one_line import sendable
from titan_rl.types import Message, ToolSpec

MOST_FIELDS = 64
"""Of one object: each that is unknown has a sentence in the refusal."""
LARGEST_INTEGER = 2**63 - 1
MOST_STOPS = 16
MOST_TOOLS = 128
MOST_MESSAGES = 4096
"""Also parts and calls of all of them."""
DEFAULT_COMPLETION_TOKENS = 16
"""Of text completions, as OpenAI has it."""
DRAWING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Options that change how tokens are drawn, besides `min_tokens` and `seed`."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"an object has at most {MOST_FIELDS} fields, not {len(value)}")
        return value


class ReturnedPart(Strict):
    """Part of an earlier answer: what it has besides these fields says nothing to the policy."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Strict):
    include_usage: bool | None = None
    """Send one more chunk, without choices, that counts the tokens."""
    include_obfuscation: bool | None = None
    """A hint: no padding is sent."""


class Sampling(Strict):
    """What chat and text completions share."""

    # Hints: they are about OpenAI's service, or say what the policy does anyway.
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    """The policy thinks as it has learned to."""

    model: Annotated[str, Field(max_length=1024)]
    user: Annotated[str, Field(max_length=1024)] | None = None
    """Of a run's program: the role whose turn this is."""
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)] | None = None
    """The same seed and request give the same tokens; without one every call draws others."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1 and 0: off."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and every choice's `token_ids` to the answer."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def _call(
        self,
        call_id: str,
        prompts: list[Chat | str | list[int]],
        max_new_tokens: int | None,
        top: int,
        *,
        logprobs: bool,
    ) -> CompletionCall:
        drawing = {name: value for name in DRAWING if (value := getattr(self, name)) is not None}
        names = {name: name for name in (*DRAWING, "stop_token_ids")} | {"min_new_tokens": "min_tokens"}
        names["max_new_tokens"] = (
            "max_completion_tokens" if getattr(self, "max_completion_tokens", None) else "max_tokens"
        )
        if self.top_k == 0:
            drawing["top_k"] = -1
        if self.min_tokens is not None:
            drawing["min_new_tokens"] = self.min_tokens
        return CompletionCall(
            id=call_id,
            prompts=prompts,
            choices=self.n or 1,
            max_new_tokens=max_new_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            logprobs=logprobs,
            top_logprobs=top,
            names={**names, "prompt": "messages" if hasattr(self, "messages") else "prompt"},
            role=sendable(self.user or ""),
            drawing=drawing,
        )


class FunctionDeclaration(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True: what the policy calls follows the schemas. Calls that are forced do so in any case."""


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDeclaration


class FunctionCall(ReturnedPart):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    """A JSON object, as text; some frameworks write none as an empty text."""

    @field_validator("arguments")
    @classmethod
    def is_an_object(cls, text: str) -> str:
        text = text or "{}"
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(text), dict):
                return text
        raise ValueError("the arguments of a call must be a JSON object, as text")


class ToolCall(ReturnedPart):
    id: str
    type: Literal["function"]
    function: FunctionCall


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES, fail_fast=True)]


def _text(content: Content | None) -> str:
    return content or "" if isinstance(content, str | None) else "".join(part.text for part in content)


class ClientMessage(Strict):
    role: Literal["system", "developer", "user"]
    """"developer" is what newer clients call "system"."""
    content: Content
    name: str | None = None

    def message(self) -> Message:
        return Message("user" if self.role == "user" else "system", _text(self.content), name=self.name or "")


class AssistantMessage(ReturnedPart):
    """What a chat completion gave, as the client kept it."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None

    def message(self) -> Message:
        calls = tuple(
            types.ToolCall(call.function.name, json.loads(call.function.arguments), id=call.id)
            for call in self.tool_calls or ()
        )
        reasoning = self.reasoning_content or ""
        return Message("assistant", _text(self.content), calls, reasoning=reasoning, name=self.name or "")


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def message(self) -> Message:
        return Message("tool", _text(self.content), tool_call_id=self.tool_call_id, name=self.name or "")


ChatMessage = Annotated[ClientMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionName(Strict):
    name: str


class FunctionReference(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionReference], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedToolsChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class Schema(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """A hint: the answer follows the schema in any case."""


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: Schema


class ChatCompletionRequest(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Default: all that the model's length leaves."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=types.MOST_TOP)] | None = None
    """At each place, of the likeliest tokens too. In the distribution that is drawn from, as all logprobs."""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionReference | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call in a turn."""
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    """Of the content. Beside tools the answer is either that, or calls."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def has_few_parts(cls, messages: Any) -> Any:
        given = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
        lists = [
            value for each in given for name in ("content", "tool_calls") if isinstance(value := each.get(name), list)
        ]
        if (parts := sum(map(len, lists))) > MOST_MESSAGES:
            raise ValueError(f"all messages together have at most {MOST_MESSAGES} parts and calls, not {parts}")
        return messages

    def call(self, call_id: str) -> CompletionCall:
        declared = [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]
        tools = [ToolSpec(each.name, each.description or "", each.parameters or {}) for each in declared]
        chat = Chat([message.message() for message in self.messages], tools)
        most = self.max_completion_tokens or self.max_tokens
        if self.top_logprobs and not self.logprobs:
            problem = "top_logprobs: it needs logprobs, which must be true"
            raise ApiError(400, problem, param="top_logprobs", code="invalid_request")
        call = self._call(call_id, [chat], most, self.top_logprobs or 0, logprobs=bool(self.logprobs))
        return replace(call, answer=self._answer(tools))

    def _answer(self, tools: list[ToolSpec]) -> AnswerForm | None:
        match self.tool_choice:
            case FunctionReference(function=named):
                names, must_call = [named.name], True
            case AllowedToolsChoice(allowed_tools=allowed):
                names, must_call = [each.function.name for each in allowed.tools], allowed.mode == "required"
            case choice:
                names, must_call = [tool.name for tool in tools], choice == "required"
        missing = [name for name in names if all(tool.name != name for tool in tools)]
        if missing or (must_call and not names):
            problem = f"there is no tool {missing[0]!r}" if missing else "it needs tools"
            raise ApiError(400, f"tool_choice: {problem}", param="tool_choice", code="invalid_request")
        schema: dict[str, Any] | None = None
        match self.response_format:
            case SchemaFormat(json_schema=wanted):
                schema = wanted.schema_ or {}
            case PlainFormat(type="json_object"):
                schema = {"type": "object"}
        strict = any(tool.function.strict for tool in self.tools or ()) or self.parallel_tool_calls is False
        if schema is None and not (tools and (strict or must_call or len({*names}) < len(tools))):
            return None
        callable_ = [tool for tool in tools if tool.name in names]
        return AnswerForm(schema, callable_, parallel=self.parallel_tool_calls is not False, must_call=must_call)


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    """One text, several, the token ids of one prompt, or of several."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=types.MOST_TOP)] | None = None
    """0: of the sampled tokens. Above: also of so many likeliest ones at each place."""
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def call(self, call_id: str) -> CompletionCall:
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [each for each in given if isinstance(each, int)]
        prompts = [ids] if ids else [each for each in given if not isinstance(each, int)]
        most = self.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self._call(call_id, [*prompts], most, self.logprobs or 0, logprobs=self.logprobs is not None)
