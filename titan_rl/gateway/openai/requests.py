"""From a client's request to the engines' requests.

Everything that can be known to be wrong is refused before any of a call's requests is sent.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import TaskError
from titan_rl.gateway.openai.errors import ApiError
from titan_rl.gateway.openai.protocol import (
    AssistantMessage,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Content,
    Sampling,
    SystemMessage,
    ToolMessage,
)
from titan_rl.generation.engine import validate_request
from titan_rl.rollout.session import Prompt
from titan_rl.seeding import derive_seed
from titan_rl.types import GenerationRequest, Message, SamplingParams, ToolCall, ToolSpec

SHORT_TEXT = 1 << 16
"""Characters that are always tokenized: it takes less time than it matters."""
DEFAULT_COMPLETION_TOKENS = 16
"""Of text completions, as OpenAI has it."""


class Asker(Protocol):
    """Who asks: makes prompts of what they say."""

    def prompt_of_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt: ...
    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt: ...


def prompt_works(
    body: CompletionRequest | ChatCompletionRequest, renderer: Renderer, asker: Asker
) -> list[Callable[[], Prompt]]:
    """What every choice is to go on from, a function per prompt: each tokenizes, and raises TaskError where the
    renderer cannot write it."""
    if isinstance(body, ChatCompletionRequest):
        return [lambda: asker.prompt_of_chat([chat_message(message) for message in body.messages], shown_tools(body))]
    return [functools.partial(_read_prompt, each, renderer, asker) for each in text_prompts(body)]


def _read_prompt(prompt: str | list[int], renderer: Renderer, asker: Asker) -> Prompt:
    return asker.prompt_of_tokens(renderer.encode(prompt) if isinstance(prompt, str) else prompt)


def check_length(body: CompletionRequest | ChatCompletionRequest, renderer: Renderer, *, max_model_len: int) -> None:
    """Refuse a text that cannot fit before it is tokenized, which holds up all other calls for a second per megabyte.

    No token stands for more than `renderer.longest_token` characters. Tokenizers may compose characters outside of
    ASCII (NFC) of up to four, and chat templates strip messages, so only what is certain to be left is counted.
    """
    most = max(SHORT_TEXT, max_model_len * renderer.longest_token)
    if isinstance(body, ChatCompletionRequest):
        longest = sum(map(_least_characters, _written(body)))
    else:
        longest = max(_least_characters(each) if isinstance(each, str) else 0 for each in text_prompts(body))
    if longest > most:
        raise ApiError(
            400,
            f"the text of {longest} characters cannot fit: max_model_len ({max_model_len}) tokens hold at most {most}",
            code="context_length_exceeded",
        )


def _written(body: ChatCompletionRequest) -> Iterator[str]:
    """The texts that a chat's prompt is made of."""
    for message in body.messages:
        yield _text(message.content).strip()
        if isinstance(message, AssistantMessage):
            yield message.reasoning_content or ""
            for call in message.tool_calls or ():
                yield call.function.arguments
    for tool in body.tools or () if body.tool_choice != "none" else ():
        yield tool.function.description or ""
        yield json.dumps(tool.function.parameters or {}, ensure_ascii=False)


def _least_characters(text: str) -> int:
    return len(text) if text.isascii() else len(text) // 4


def shown_tools(body: ChatCompletionRequest) -> list[ToolSpec]:
    """The declarations that the policy is shown, and whose calls are looked for in what it says."""
    if body.tool_choice == "none":
        return []
    return [
        ToolSpec(tool.function.name, tool.function.description or "", tool.function.parameters or {})
        for tool in body.tools or ()
    ]


def count_prompts(body: CompletionRequest | ChatCompletionRequest) -> int:
    return 1 if isinstance(body, ChatCompletionRequest) else len(text_prompts(body))


def text_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Every prompt, as a text or as token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [each for each in prompt if isinstance(each, int)]
    return [ids] if ids else [each for each in prompt if isinstance(each, str | list)]


def stop_texts(body: Sampling) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or ())


def build_requests(
    call_id: str,
    prompts: Sequence[np.ndarray],
    body: CompletionRequest | ChatCompletionRequest,
    renderer: Renderer,
    *,
    max_model_len: int,
) -> list[GenerationRequest]:
    """One request per choice: the choices of the first prompt, then those of the second, …

    Raises:
        RequestError: what no engine could serve; the sentence says what.
    """
    count = body.n or 1
    seed = secrets.randbits(62) if body.seed is None else body.seed
    stops = stop_tokens(body, renderer)
    requests: list[GenerationRequest] = []
    for number, prompt in enumerate(prompts):
        sampling = client_sampling(body, stops, room=max_model_len - len(prompt))
        for choice in range(count):
            request = GenerationRequest(
                request_id=f"{call_id}-{len(requests)}",
                prompt_token_ids=prompt,
                sampling=sampling,
                seed=derive_seed("gateway", seed, number, choice),
            )
            validate_request(request, max_model_len=max_model_len, vocab_size=renderer.vocab_size)
            requests.append(request)
    return requests


def client_sampling(
    body: CompletionRequest | ChatCompletionRequest, stops: tuple[int, ...], *, room: int
) -> SamplingParams:
    """How a client wants a completion to be sampled.

    Args:
        stops: `stop_tokens`, found once per call.
        room: tokens that the prompt leaves; what a chat may have where its client does not say.
    """
    if isinstance(body, CompletionRequest):
        new_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    else:
        new_tokens = body.max_completion_tokens or body.max_tokens or max(room, 1)
    return SamplingParams(
        max_new_tokens=new_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or -1,
        stop_token_ids=stops,
        min_new_tokens=body.min_tokens or 0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
    )


def stop_tokens(body: Sampling, renderer: Renderer) -> tuple[int, ...]:
    """Tokens at which the engine itself ends a completion."""
    of_model = () if body.ignore_eos else renderer.stop_token_ids
    return tuple(dict.fromkeys((*of_model, *(body.stop_token_ids or ()), *_stop_text_tokens(body, renderer))))


def _stop_text_tokens(body: Sampling, renderer: Renderer) -> Iterator[int]:
    """Of the stop texts that are one token. Others are found in what was sampled."""
    for stop in stop_texts(body):
        try:
            tokens = renderer.encode(stop)
        except TaskError:  # the policy cannot write it either, so it will never stop there
            continue
        if len(tokens) == 1:
            yield tokens[0]


def chat_message(message: ChatMessage) -> Message:
    """A client's message: its texts joined, the arguments of its calls as objects."""
    content, name = _text(message.content), message.name or ""
    match message:
        case SystemMessage():  # "developer" is what newer clients call it
            return Message("system", content, name=name)
        case AssistantMessage():
            calls = tuple(
                ToolCall(call.function.name, json.loads(call.function.arguments), id=call.id)
                for call in message.tool_calls or ()
            )
            return Message("assistant", content, calls, reasoning=message.reasoning_content or "", name=name)
        case ToolMessage():
            return Message("tool", content, tool_call_id=message.tool_call_id, name=name)
        case _:
            return Message("user", content, name=name)


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
