"""What clients may send: the part of OpenAI's API that the engines can honour, and hints that change no answer.

Fields that are here and can only have one meaning (`best_of`, `suffix`, …) take that value alone. What a body asks for
is its `call`, in terms of the policy.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_rl import types
from titan_rl.chat.renderer import AnswerForm
from titan_rl.gateway import bodies
from titan_rl.gateway.bodies import MOST_MESSAGES, MOST_TOOLS, Many, ReturnedPart, Strict, text_of
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall
from titan_rl.one_line import sendable
from titan_rl.types import Message, ToolSpec

DEFAULT_COMPLETION_TOKENS = 16
"""Of text completions, as OpenAI has it."""
DRAWING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Options that change how tokens are drawn, besides `min_tokens` and `seed`."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    """Send one more chunk, without choices, that counts the tokens."""
    include_obfuscation: bool | None = None
    """A hint: no padding is sent."""


class Request(Strict):
    """What all calls share."""

    # Hints: they are about OpenAI's service, or say what the policy does anyway.
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    model: bodies.ModelName
    user: Annotated[str, Field(max_length=1024)] | None = None
    """Of a run's program: the role whose turn this is."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.TopP | None = None


class Sampling(Request):
    """What chat and text completions share."""

    reasoning_effort: str | None = None
    """A hint: the policy thinks as it has learned to."""
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: bodies.Stop | bodies.Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    seed: bodies.Seed | None = None
    """The same seed and request give the same tokens; without one every call draws others."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1 and 0: off."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    presence_penalty: bodies.Penalty | None = None
    frequency_penalty: bodies.Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and every choice's `token_ids` to the answer."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def _call(
        self, call_id: str, prompts: list[Chat | str | list[int]], max_new_tokens: int | None, *, logprobs: bool
    ) -> CompletionCall:
        drawing = bodies.given(self, DRAWING)
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
            role=sendable(self.user or ""),
            drawing=drawing,
        )


class FunctionDeclaration(Strict):
    name: bodies.ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True: what the policy calls follows the schemas. Calls that are forced do so in any case."""


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDeclaration


class FunctionCall(ReturnedPart):
    name: bodies.ToolName
    arguments: bodies.Arguments


class ToolCall(ReturnedPart):
    id: str
    type: Literal["function"]
    function: FunctionCall


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | Many[TextPart]


class ClientMessage(Strict):
    role: Literal["system", "developer", "user"]
    """"developer" is what newer clients call "system"."""
    content: Content
    name: str | None = None

    def message(self) -> Message:
        return Message("user" if self.role == "user" else "system", text_of(self.content), name=self.name or "")


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
        return Message("assistant", text_of(self.content), calls, reasoning=reasoning, name=self.name or "")


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None

    def message(self) -> Message:
        return Message("tool", text_of(self.content), tool_call_id=self.tool_call_id, name=self.name or "")


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
    max_tokens: bodies.Count | None = None
    max_completion_tokens: bodies.Count | None = None
    """Default: all that the model's length leaves."""
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    """Engines report the logprob of the token that was sampled, of no other."""
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionReference | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call in a turn."""
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    """Of the content. Beside tools the answer is either that, or calls."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    def call(self, call_id: str) -> CompletionCall:
        declared = [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]
        tools = [ToolSpec(each.name, each.description or "", each.parameters or {}) for each in declared]
        chat = Chat([message.message() for message in self.messages], tools)
        most = self.max_completion_tokens or self.max_tokens
        call = self._call(call_id, [chat], most, logprobs=bool(self.logprobs))
        return replace(call, answer=self._answer(tools))

    def _answer(self, tools: list[ToolSpec]) -> AnswerForm | None:
        names: list[str] | None = None
        must_call = self.tool_choice == "required"
        match self.tool_choice:
            case FunctionReference(function=named):
                names, must_call = [named.name], True
            case AllowedToolsChoice(allowed_tools=allowed):
                names, must_call = [each.function.name for each in allowed.tools], allowed.mode == "required"
        schema: dict[str, Any] | None = None
        match self.response_format:
            case SchemaFormat(json_schema=wanted):
                schema = wanted.schema_ or {}
            case PlainFormat(type="json_object"):
                schema = {"type": "object"}
        strict, parallel = any(tool.function.strict for tool in self.tools or ()), self.parallel_tool_calls is not False
        return bodies.answer_form(
            tools, "tool_choice", names, must_call=must_call, schema=schema, strict=strict, parallel=parallel
        )


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    """One text, several, the token ids of one prompt, or of several."""
    max_tokens: bodies.Count | None = None
    logprobs: Literal[0] | None = None
    """0: of the sampled tokens. Engines report no others."""
    echo: bool | None = None
    """The text begins with the prompt: of texts, and without `logprobs`, which engines have of sampled tokens only."""
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def call(self, call_id: str) -> CompletionCall:
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [each for each in given if isinstance(each, int)]
        prompts = [ids] if ids else [each for each in given if not isinstance(each, int)]
        if self.echo and (self.logprobs is not None or not all(isinstance(each, str) for each in prompts)):
            raise ApiError(400, "echo: only texts are echoed, without logprobs", param="echo", code="invalid_request")
        most = self.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self._call(call_id, [*prompts], most, logprobs=self.logprobs is not None)
