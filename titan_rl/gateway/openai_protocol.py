"""What clients may send: the part of OpenAI's API that the engines can honour, and hints that change no answer.

Fields that are here and can only have one meaning (`best_of`, `suffix`, …) take that value alone. What a body asks for
is its `call`, in terms of the policy.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from titan_rl import types
from titan_rl.chat.renderer import AnswerForm
from titan_rl.gateway import bodies
from titan_rl.gateway.bodies import MOST_TOOLS, Part, ReturnedPart, Strict, Text, TextPart, Turns
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall
from titan_rl.types import ToolSpec

COMPLETION_TOKENS = 16
"""Default of text completions, as OpenAI has it."""

AnyCount = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = AnyCount
Texts = Annotated[bodies.Stop | bodies.Stops, AfterValidator(lambda text: [text] if isinstance(text, str) else text)]
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
    role: Annotated[str, Field(max_length=1024)] | None = Field(None, alias="user")
    """Of a run's program: the role whose turn this is."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: bodies.Temperature | None = None
    top_p: bodies.TopP | None = None


class Sampling(Request):
    """What chat and text completions share."""

    reasoning_effort: str | None = None
    """A hint: the policy thinks as it has learned to."""
    choices: bodies.Choices | None = Field(None, alias="n")
    stop: Texts | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    seed: bodies.Seed | None = None
    """The same seed and request give the same tokens; without one every call draws others."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda count: count or -1)] | None = None
    """-1 and 0: off."""
    min_new_tokens: AnyCount | None = Field(None, alias="min_tokens")
    presence_penalty: bodies.Penalty | None = None
    frequency_penalty: bodies.Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    return_token_ids: bool | None = None
    """Add `prompt_token_ids` and every choice's `token_ids` to the answer."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class Unwrapped(Strict):
    """Chat completions have its fields in a field of their own, named as its type; Responses have them beside it."""

    @model_validator(mode="before")
    @classmethod
    def is_unwrapped(cls, value: Any) -> Any:
        match value:
            case {"type": str(kind), **rest} if isinstance(inner := rest.pop(kind, None), dict):
                return {**rest, **inner, "type": kind}
        return value


class NamedFunction(Unwrapped):
    type: Literal["function"]
    name: bodies.ToolName


class Function(NamedFunction):
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True: what the policy calls follows the schemas. Calls that are forced do so in any case."""


class AllowedTools(Unwrapped):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MOST_TOOLS)]


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Unwrapped):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """A hint: the answer follows the schema in any case."""


Format = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatOptions(Strict):
    """What chat completions and Responses share."""

    tools: Annotated[list[Function], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call in a turn."""

    def specs(self) -> list[ToolSpec]:
        declared = [] if self.tool_choice == "none" else self.tools or []
        return [ToolSpec(each.name, each.description or "", each.parameters or {}) for each in declared]

    def answer(self, wanted: PlainFormat | SchemaFormat | None) -> AnswerForm | None:
        names: list[str] | None = None
        must_call = self.tool_choice == "required"
        match self.tool_choice:
            case NamedFunction(name=name):
                names, must_call = [name], True
            case AllowedTools(mode=mode, tools=allowed):
                names, must_call = [each.name for each in allowed], mode == "required"
        schema: dict[str, Any] | None = None
        match wanted:
            case SchemaFormat():
                schema = wanted.schema_ or {}
            case PlainFormat(type="json_object"):
                schema = {"type": "object"}
        form = AnswerForm(schema, self.specs(), parallel=self.parallel_tool_calls is not False, must_call=must_call)
        return bodies.answer_form(form, "tool_choice", names, strict=any(tool.strict for tool in self.tools or ()))


class ToolCall(NamedFunction, bodies.Call):
    arguments: bodies.Arguments


def _calls(calls: list[ToolCall]) -> tuple[types.ToolCall, ...]:
    return tuple(each.call() for each in calls)


class ClientMessage(Part):
    role: Annotated[Literal["system", "developer", "user"], AfterValidator(bodies.read_role)]
    content: Text[TextPart]
    name: str | None = None


class AssistantMessage(ReturnedPart):
    """What a chat completion gave, as the client kept it."""

    role: Literal["assistant"]
    content: Text[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = Field(None, alias="reasoning_content")
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True), AfterValidator(_calls)] | None
    ) = None


class ToolMessage(Part):
    role: Literal["tool"]
    content: Text[TextPart]
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[ClientMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatCompletionRequest(Sampling, ChatOptions):
    messages: Turns[ChatMessage]
    max_tokens: bodies.Count | None = None
    max_new_tokens: bodies.Count | None = Field(None, alias="max_completion_tokens")
    """Default: all that the model's length leaves."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=types.MOST_TOP)] | None = None
    """At each place, of the likeliest tokens too. In the distribution that is drawn from, as all logprobs."""
    response_format: Format | None = None
    """Of the content. Beside tools the answer is either that, or calls."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    def call(self, call_id: str) -> CompletionCall:
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        if self.top_logprobs and not self.logprobs:
            problem = "top_logprobs: it needs logprobs, which must be true"
            raise ApiError(400, problem, param="top_logprobs", code="invalid_request")
        chat = Chat([each.message() for each in self.messages], self.specs())
        answer = self.answer(self.response_format)
        return bodies.call_of(call_id, [chat], self, "messages", answer=answer, logprobs=logprobs)


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)]
    )
    """One text, several, the token ids of one prompt, or of several."""
    max_new_tokens: Annotated[
        AnyCount | None, AfterValidator(lambda count: COMPLETION_TOKENS if count is None else count)
    ] = Field(COMPLETION_TOKENS, alias="max_tokens")
    """0: only the prompt is echoed."""
    logprobs: Annotated[int, Field(ge=0, le=types.MOST_TOP)] | None = None
    """0: of the tokens. Above: also of so many likeliest ones at each place."""
    echo: bool | None = None
    """The text begins with the prompt, and the logprobs with those of the prompt's tokens."""
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def call(self, call_id: str) -> CompletionCall:
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [each for each in given if isinstance(each, int)]
        prompts = [ids] if ids else [each for each in given if not isinstance(each, int)]
        if not (self.max_new_tokens or self.echo):
            problem = "max_tokens: 0 leaves nothing to answer, unless echo is true"
            raise ApiError(400, problem, param="max_tokens", code="invalid_request")
        return bodies.call_of(call_id, prompts, self, "prompt", logprobs=self.logprobs)
