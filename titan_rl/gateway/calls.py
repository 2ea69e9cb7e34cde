"""One call in terms of the policy, the same for every dialect.

    body ─dialect─▶ call ─▶ prompts ─▶ engines ─▶ Delta, Delta, …, the last with its Choice ─dialect─▶ body or events

- A choice's tokens and logprobs are all that were sampled, the stop token included, up to the token that completed a
  stop text. Its text is that of these tokens without the stop token, cut before the stop text.
- The deltas of a choice, put together, are that choice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import RequestTooLong, TaskError
from titan_rl.routing.health import GeneratorStatus
from titan_rl.types import Completion, GenerationRequest, Message, Piece, SamplingParams, ToolSpec

SHORT_TEXT = 1 << 16
"""Characters that are always tokenized: it takes less time than it matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """What a gateway serves."""

    name: str
    """That clients give as `model`."""
    renderer: Renderer
    max_model_len: int
    """Longest prompt and completion together, in tokens."""


class Chat(NamedTuple):
    """A conversation that the policy is to go on with."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    """Shown to the policy; only with tools is anything that it says a tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A client's call, in any dialect."""

    id: str
    """Never used before; the ids of its requests begin with it."""
    prompts: Sequence[Chat | str | list[int]]
    """A text is tokenized, token ids are taken as they are."""
    choices: int = 1
    """Completions of each prompt."""
    max_new_tokens: int | None = None
    """None: all that the prompt leaves."""
    stop: Sequence[str] = ()
    """Texts that end a completion; they are cut off."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """The policy's own stop tokens do not end a completion."""
    seed: int | None = None
    """None: any."""
    logprobs: bool = False
    """Whether the client wants those of the sampled tokens, with each token's text."""
    drawing: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the client set and that change how tokens are drawn."""

    def sampling(self, prompt_tokens: int, stops: tuple[int, ...], policy: ServedPolicy) -> SamplingParams:
        """How the client wants a prompt of so many tokens to be completed. `stops`: from `stop_tokens`."""
        room = max(policy.max_model_len - prompt_tokens, 1)
        return SamplingParams(max_new_tokens=self.max_new_tokens or room, stop_token_ids=stops, **self.drawing)

    def stop_tokens(self, renderer: Renderer) -> tuple[int, ...]:
        """Tokens at which the engine itself ends a completion: also of each stop text that is one token. Other stop
        texts are looked for in what was sampled."""
        stops = [*(() if self.ignore_eos else renderer.stop_token_ids), *self.stop_token_ids]
        for text in self.stop:
            try:
                tokens = renderer.encode(text)
            except TaskError:  # the policy cannot write it either, so it will never stop there
                continue
            stops += tokens if len(tokens) == 1 else ()
        return tuple(dict.fromkeys(stops))

    def check_length(self, policy: ServedPolicy) -> None:
        """Refuse a text that cannot fit before it is tokenized, which takes the render thread a second per megabyte.

        No token stands for more than `renderer.longest_token` characters. Tokenizers may compose up to four characters
        outside of ASCII into one (NFC).

        Raises:
            RequestTooLong: there is such a text.
        """
        most = max(SHORT_TEXT, policy.max_model_len * policy.renderer.longest_token)
        for prompt in self.prompts:
            if isinstance(prompt, list):
                continue
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            longest = len(text) if text.isascii() else len(text) // 4
            if longest > most:
                raise RequestTooLong(
                    f"the text of {longest} characters cannot fit: max_model_len ({policy.max_model_len}) tokens hold "
                    f"at most {most}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion, read."""

    index: int
    prompt: list[int]
    completion: Completion
    """Without tokens sampled after a stop text."""
    message: Message
    """The parsed turn. Tool calls that could not be parsed are in its content. A text completion has only content."""
    stopped: bool
    """By a stop token or a stop text; else by its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of a choice that its client was not sent before."""

    index: int
    first: bool
    prompt: list[int]
    text: str
    """Of the message's content."""
    tokens: list[int]
    token_texts: list[str]
    """Of each token by itself; empty unless the call wants logprobs."""
    logprobs: list[float]
    choice: Choice | None = None
    """Set in the last delta. Its tool calls and reasoning were not sent before."""


class Fleet(Protocol):
    """The generators behind the gateway."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion. Cancelling the call aborts the engine's work.

        Raises:
            RequestError: the request is invalid.
            TitanError: nobody can serve it; the cause is in the message.
        """

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Piece | Completion, None]:
        """The same in pieces, as they are sampled, and then whole. Closing it aborts the engine's work."""

    async def fleet_status(self) -> Sequence[GeneratorStatus]:
        """Every generator. Raises TitanError when the router does not answer."""
