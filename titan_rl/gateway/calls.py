"""One call in terms of the policy, the same for every dialect.

    body ─dialect─▶ call ─▶ prompts ─▶ engines ─▶ Delta, Delta, …, the last with its Choice ─dialect─▶ body or events

- A choice's tokens and logprobs are all that were sampled, the stop token included, up to the token that completed a
  stop text. Its text is that of these tokens without the stop token, cut before the stop text.
- The deltas of a choice, put together, are that choice.
- What a client did wrong is a 4xx with a sentence about it, never a 500. What the fleet cannot do is a 503 with the
  cause. The router has already retried what can be retried, so every error carries `x-should-retry: false`, which the
  `openai` clients heed. Only a gateway that is closing asks for another try: another one may take its place.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from titan_rl import errors
from titan_rl.chat.renderer import AnswerForm, Renderer
from titan_rl.one_line import counted, one_line
from titan_rl.routing.health import GeneratorStatus
from titan_rl.types import Completion, GenerationRequest, Message, Piece, SamplingParams, ToolCall, ToolSpec

SHORT_TEXT = 1 << 16
"""Characters that are always tokenized: it takes less time than it matters."""
RETRY = {"x-should-retry": "true", "retry-after": "5"}
"""Seconds. A gateway that restarts is back by then, or not for long."""
MOST_PROBLEMS = 5
"""Named in one error: a list of a million wrong values has a million problems."""
LONGEST_PROBLEM = 300
"""Characters of one; a client may send any name and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    name: str
    renderer: Renderer
    max_model_len: int
    """Longest prompt and completion together, in tokens."""

    def check_name(self, model: str) -> None:
        if model != self.name:
            problem = f"there is no model {model!r}; this gateway serves {self.name!r}"
            raise ApiError(404, problem, param="model", code="model_not_found")


class Chat(NamedTuple):
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    """Shown to the policy; only with tools is anything that it says a tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    id: str
    """Never used before; the ids of its requests begin with it."""
    prompts: Sequence[Chat | str | list[int]]
    """A text is tokenized, token ids are taken as they are."""
    choices: int = 1
    """Completions of each prompt."""
    max_new_tokens: int | None = None
    """None: all that the prompt leaves. 0: nothing is wanted but the prompt; engines sample one token all the same."""
    stop: Sequence[str] = ()
    """Texts that end a completion; they are cut off."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """The policy's own stop tokens do not end a completion."""
    seed: int | None = None
    """None: any."""
    logprobs: int | None = None
    """At each place the client wants those of the sampled token and of so many likeliest ones, with their bytes."""
    echo: bool = False
    """The prompt comes before what is sampled: its text, and with `logprobs` those of its tokens."""
    role: str = ""
    """Whose turn it asks for, of a rollout with several roles."""
    drawing: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the client set and that change how tokens are drawn."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the client calls a field, by what its requests call it; `prompt` last."""
    answer: AnswerForm | None = None
    """What a chat's answer must be; None: anything."""
    usage: Counter[str] = field(default_factory=Counter)
    """Tokens of every prompt once, and of every choice that was answered so far."""

    def sampling(self, lengths: Sequence[int], policy: ServedPolicy) -> list[SamplingParams]:
        """How prompts of so many tokens are to be completed. Raises TaskError: no answer can be held to the form."""
        constraint = policy.renderer.constraint(self.answer) if self.answer is not None else ""
        ends = {"stop_token_ids": self.stop_tokens(policy.renderer), "constraint": constraint, **self.drawing}
        ends |= {"top_logprobs": self.logprobs or 0, "prompt_logprobs": self.echo and self.logprobs is not None}
        wanted, longest = self.max_new_tokens, policy.max_model_len
        most = (longest - length if wanted is None else wanted for length in lengths)
        return [SamplingParams(max_new_tokens=max(each, 1), **ends) for each in most]

    def stop_tokens(self, renderer: Renderer) -> tuple[int, ...]:
        """Those at which the engine itself ends, also of stop texts of one token. Others are looked for afterwards."""
        stops = [*(() if self.ignore_eos else renderer.stop_token_ids), *self.stop_token_ids]
        for text in self.stop if self.answer is None else ():  # a constraint may be closed only by the policy's own
            try:
                tokens = renderer.encode(text)
            except errors.TaskError:  # the policy cannot write it either, so it will never stop there
                continue
            stops += tokens if len(tokens) == 1 else ()
        return tuple(dict.fromkeys(stops))

    def refused(self, error: "ApiError") -> "ApiError":
        """The refusal of its requests, in the client's words."""
        for ours, theirs in self.names.items():
            if ours in error.message and not error.param:
                error.param = theirs
            if "_new_" in ours:
                error.message = error.message.replace(ours, theirs)
        error.param = error.param or self.names.get("prompt")
        return error

    def check_length(self, policy: ServedPolicy) -> int:
        """Refuse a prompt that cannot fit before it is tokenized, which takes the render thread a second per megabyte.
        Returns how many characters and tokens there are.

        No token stands for more than `renderer.longest_token` characters. Tokenizers may compose up to four characters
        outside of ASCII into one (NFC). Raises RequestTooLong: there is such a text.
        """
        most = max(SHORT_TEXT, policy.max_model_len * policy.renderer.longest_token)
        size = 0
        for prompt in self.prompts:
            if isinstance(prompt, list):
                size += len(prompt)
                if len(prompt) >= policy.max_model_len:
                    problem = f"{len(prompt)} prompt tokens do not fit into max_model_len ({policy.max_model_len})"
                    raise errors.RequestTooLong(problem)
                continue
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            size += len(text)
            bound = most if text.isascii() else 4 * most
            if len(text) > bound:
                problem = f"cannot fit: max_model_len ({policy.max_model_len}) tokens hold at most {bound}"
                raise errors.RequestTooLong(f"the text of {len(text)} characters {problem}")
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    completion: Completion
    """Without tokens sampled after a stop text."""
    message: Message
    """The parsed turn. Tool calls that could not be parsed are in its content. A text completion has only content."""
    stopped: bool
    """By a stop token or a stop text; else by its length."""
    stop_text: str = ""
    """Which of the call's stop texts ended it."""


class TokenLogprob(NamedTuple):
    token: bytes
    """Joined with those of the others, the bytes of the text and its stop token."""
    logprob: float | None
    """None: of a prompt's first token, which nothing precedes."""
    top: Sequence[tuple[bytes, float]] = ()
    """The possible ones of the likeliest tokens at its place, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of a choice that its client was not sent before."""

    index: int
    """Of the choice: first those of the first prompt, then those of the second, …"""
    first: bool
    prompt: list[int]
    echo: str = ""
    """The prompt's text, in the first delta of a call that wants it."""
    echoed: Sequence[TokenLogprob] = ()
    """Of each of the prompt's tokens, likewise."""
    reasoning: str
    """Thinking: before any text."""
    text: str
    calls: Sequence[ToolCall]
    """Those that are new; each comes whole, once it is certain, with an id to which its answer can refer."""
    first_call: int
    """How many calls came before them."""
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """Of each token; empty unless the call wants them."""
    choice: Choice | None = None
    """Set in the last delta."""


class Fleet(Protocol):
    """The generators behind the gateway."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Cancelling it aborts the engine's work. Raises RequestError: it is invalid; TitanError: none can serve it."""

    async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
        """The same; before, `on_piece` is called with its tokens in pieces, as they are sampled. It must not raise."""

    async def fleet_status(self) -> Sequence[GeneratorStatus]:
        """Raises TitanError when the router does not answer."""


@dataclass(eq=False)
class ApiError(Exception):
    """What a client is told instead of an answer."""

    status: int
    message: str
    code: str | None = field(default=None, kw_only=True)
    """A stable name of the problem, for programs."""
    param: str | None = field(default=None, kw_only=True)
    """The field of the body that is wrong."""
    headers: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        self.headers = {"x-should-retry": "false", **self.headers}


_ANSWERS: tuple[tuple[type[Exception], int, str, Mapping[str, str]], ...] = (
    (errors.GatewayClosing, 503, "gateway_closing", RETRY),
    (errors.RolloutOver, 403, "rollout_over", {}),
    (errors.RequestLost, 503, "engine_unavailable", {}),
    (errors.RequestTooLong, 400, "context_length_exceeded", {}),
    (errors.RequestError, 400, "invalid_request", {}),
    (errors.TaskError, 400, "invalid_request", {}),
    (errors.ActorGone, 503, "engine_unavailable", RETRY),  # it may be replaced
    (errors.TitanError, 503, "engine_unavailable", {}),
    (Exception, 500, "internal_error", {}),
)
"""Errors of a call, the first that fits, with their status, code and headers. Nobody expected the last."""


def api_error(error: Exception) -> ApiError:
    """What a client is told about any exception. One that nobody expected is a bug of ours: a 500."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _invalid_body(error.errors(), error.body)
        case HTTPException():  # no such path or method
            return ApiError(error.status_code, str(error.detail), headers=error.headers or {})
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", code="invalid_request")
    _, status, code, headers = next(each for each in _ANSWERS if isinstance(error, each[0]))
    message = f"{type(error).__name__}: {error}" if status >= 500 else str(error)
    return ApiError(status, message, code=code, headers=headers)


def _invalid_body(problems: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Names the first wrong fields, and says what is wrong in pydantic's words."""
    places, reasons = [], []
    for problem in problems[:MOST_PROBLEMS]:
        place = _place(problem, body)
        text = f"{place or 'request body'}: {problem['msg']}"
        if problem["type"] == "json_invalid":
            place, text = "", f"the request body is no JSON: {problem['ctx']['error']}"
        places.append(place[:LONGEST_PROBLEM])
        reasons.append(one_line(text, LONGEST_PROBLEM))
    if len(problems) > MOST_PROBLEMS:
        reasons.append(f"and {counted(len(problems) - MOST_PROBLEMS, 'more problem')}")
    reasons = [*dict.fromkeys(reasons)]  # of a field that may be of several types, some are the same
    return ApiError(400, "; ".join(reasons), param=next(filter(None, places), None), code="invalid_request")


def _place(problem: Mapping[str, Any], body: Any) -> str:
    """Where in the body a problem is. Pydantic's location also names the types that it tried there."""
    found = []
    for part in problem["loc"][1:]:
        try:
            if isinstance(body, dict) and part not in body and part in body[body["type"]]:  # see `Unwrapped`
                found.append(body["type"])
                body = body[body["type"]]
            body = body[part]
        except (LookupError, TypeError):  # a type, or the field that is missing
            if problem["type"] != "missing" or part != problem["loc"][-1]:
                continue
        found.append(str(part))
    return ".".join(found)
