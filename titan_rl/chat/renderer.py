"""Messages to tokens and back: what every renderer does, and the renderer for tokenizers without a chat template.

- A renderer never renders again what a policy sampled: `extend` returns only the tokens that follow it.
- `parse` drops only the stop token. The finish reason says whether the policy ended its turn.
- A tool call that cannot be read is a `ToolCall` with a `problem`, never text.
- Nothing here imports torch or transformers.
"""

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import import_package
from titan_rl.types import FinishReason, Message, ToolCall, ToolSpec

CALL, CALL_END, RESULT, RESULT_END = "<tool>", "</tool>", "<result>", "</result>"
"""Symbols for tool calls and their answers."""
END, MOST_MESSAGES = 0, 1 << 31
"""The stop token of messages that are tokens; how many of them there may be."""
UNKNOWN = "<unknown>"
"""Symbol that stands for a reply that the tokenizer cannot write."""
TURN = "<turn>"
"""Symbol after which a turn of the policy begins."""

Tokens = Sequence[int]
Messages = Sequence[Message]
Tools = Sequence[ToolSpec]

SHOWN = 40
"""Characters that an error shows on either side of an unknown symbol."""

_CALL = re.compile("<tool>((?:(?!</?tool>).)*)</tool>", re.DOTALL)


class AnswerForm(NamedTuple):
    """What a turn of the policy must be, after what it thinks: content of a schema, calls, or either."""

    schema: dict[str, Any] | None
    """JSON Schema of the content; None: any text."""
    tools: Tools
    """Those that may be called."""
    parallel: bool
    """Whether there may be several calls."""
    must_call: bool
    """There is no content."""


class Renderer(Protocol):
    """Converts messages to tokens and back, for one tokenizer."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """Tokens by which the policy ends its turn."""
    longest_token: int
    """Characters of the longest token."""

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """The tokens of a first prompt, up to where the policy's turn begins. `tools`: tools that the policy may call.
        Raises TaskError: the messages or tools cannot be written in this tokenizer."""

    def extend(self, prompt: Tokens, completion: Tokens, messages: Messages, tools: Tools = ()) -> list[int]:
        """The tokens that `messages` add to `prompt + completion`, up to where the policy's next turn begins. Raises
        TaskError: this chat format would change earlier tokens."""

    def parse(
        self, completion: Tokens, finish_reason: FinishReason, prompt: Iterable[int] = (), tools: Tools = ()
    ) -> Message:
        """The policy's turn as a message of role "assistant". Tool calls become `tool_calls`; one that cannot be read
        has a `problem`. Without `tools`, calls stay text."""

    def say(self, message: Message) -> list[int]:
        """The tokens with which the policy would say this message, with the stop token that ends the turn. Raises
        TaskError: the message cannot be written in this tokenizer."""

    def constraint(self, form: AnswerForm) -> str:
        """As `SamplingParams.constraint` has it. Raises TaskError: this format, as most, cannot be constrained so."""
        if form.must_call or form.schema is not None:
            raise TaskError(f"the answers of a {type(self).__name__} cannot be constrained")
        return ""

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text. Raises TaskError if the tokenizer cannot write it."""

    def decode(self, token_ids: Tokens) -> str:
        """The text of tokens, special ones included."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, also where that is a part of a character."""
        return self.decode([token_id]).encode()


class SymbolRenderer(Renderer):
    """For tokenizers with one token per symbol and no chat template. Messages are concatenated; a turn of the policy
    ends with the stop token.

    - A special token such as `<tool>` is one symbol: the longest match wins.
    - If the tokenizer has `<tool>` and `</tool>`, the policy may call one tool with one argument, written between them.
      `</tool>` is a stop token, so a call ends the turn.
    - If it has `<result>` and `</result>`, a tool's answer is written between them.
    - If it has `<unknown>`, that is what the policy reads where a reply to it (of a tool, a task or a program) has
      characters without a symbol: a reply that nobody foresaw costs its reward, and not the rollout. What it is asked
      first must be written in full.
    - If it has `<turn>`, that comes before each turn of the policy. Without it nothing but the prompts themselves
      says where they end: "reverse ab" may be asked "reverse ab", or "reverse a" of whose answer "b" was said.
    """

    def __init__(self, model_path: str | Path):
        tokenizer = load_tokenizer(model_path)
        self._ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self.vocab_size = max(self._tokens) + 1
        self.stop_token_ids = read_stop_token_ids(Path(model_path), self._ids)
        self._call_end: int | None = None
        if {CALL, CALL_END} <= self._ids.keys():
            self._call_end = self._ids[CALL_END]
            self.stop_token_ids = (*self.stop_token_ids, self._call_end)
        self._marks_results = {RESULT, RESULT_END} <= self._ids.keys()
        self._mark = [self._ids[TURN]] if TURN in self._ids else []
        longest_first = sorted(self._ids, key=len, reverse=True)
        self.longest_token = len(longest_first[0])
        self._symbol = re.compile("|".join(map(re.escape, longest_first)) + "|(.)", re.DOTALL)

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        if tools:
            self._only_argument(tools)  # only checked: symbols cannot describe a tool to the policy
        answered = itertools.accumulate((message.role == "assistant" for message in messages), operator.or_)
        return self._joined(map(self._tokens_of, messages, answered))

    def extend(self, prompt: Tokens, completion: Tokens, messages: Messages, tools: Tools = ()) -> list[int]:
        if tools:
            self._only_argument(tools)
        return self._joined(self._tokens_of(message, reply=True) for message in messages)

    def parse(
        self, completion: Tokens, finish_reason: FinishReason, prompt: Iterable[int] = (), tools: Tools = ()
    ) -> Message:
        ended_by_call = finish_reason is FinishReason.STOP and completion[-1] == self._call_end
        kept = ended_by_call or finish_reason is not FinishReason.STOP
        text = self.decode(completion if kept else completion[:-1])
        if not tools:
            return Message("assistant", text)
        name, argument = self._only_argument(tools)
        calls = [ToolCall(name, {argument: value}) for value in _CALL.findall(text)]
        content = _CALL.sub("", text)
        if content.endswith(CALL_END):
            calls.append(ToolCall(name, {}, f"there is no {CALL} before {CALL_END}"))
        return Message("assistant", content, tuple(calls))

    def say(self, message: Message) -> list[int]:
        token_ids = self.encode(self._text_of(message))
        return token_ids if message.tool_calls else [*token_ids, self.stop_token_ids[0]]

    def _only_argument(self, tools: Tools) -> tuple[str, str]:
        if self._call_end is None:
            raise TaskError(f"this tokenizer has no symbols {CALL} and {CALL_END} to call tools with")
        arguments = tools[0].parameters.get("properties", {})
        if len(tools) != 1 or not isinstance(arguments, Mapping) or len(arguments) != 1:
            call, names = f"{CALL}argument{CALL_END}", ", ".join(tool.name for tool in tools)
            raise TaskError(f"a tokenizer of symbols can call one tool with one argument, as {call}, not {names}")
        return tools[0].name, next(iter(arguments))

    def _joined(self, parts: Iterable[list[int]]) -> list[int]:
        return [*itertools.chain.from_iterable(parts), *self._mark]

    def _tokens_of(self, message: Message, reply: bool) -> list[int]:
        """Turns of the policy end as it ends them, so that a conversation sent whole has its very tokens."""
        if message.role == "assistant":
            return [*self._mark, *self.say(message)]
        text = self._text_of(message)
        if reply and UNKNOWN in self._ids and any(match[1] is not None for match in self._symbol.finditer(text)):
            text = self._text_of(message._replace(content=UNKNOWN))
        return self.encode(text)

    def _text_of(self, message: Message) -> str:
        if message.role == "tool" and self._marks_results:
            return f"{RESULT}{message.content}{RESULT_END}"
        return message.content + "".join(map(_written, message.tool_calls))

    def decode(self, token_ids: Tokens) -> str:
        # padded embeddings have ids outside the vocabulary
        return "".join([self._tokens.get(token_id, UNKNOWN) for token_id in token_ids])

    def encode(self, text: str) -> list[int]:
        ids = []
        for match in self._symbol.finditer(text):
            if match[1] is not None:
                near = text[max(0, match.start() - SHOWN) : match.start() + SHOWN]
                raise TaskError(f"the tokenizer has no symbol {match[1]!r}, in {near!r}")
            ids.append(self._ids[match[0]])
        return ids


def _written(call: ToolCall) -> str:
    if call.problem:
        return call.raw
    if len(call.arguments) != 1:
        raise TaskError(f"a tokenizer of symbols writes a call with one argument, not {call.name}({call.arguments})")
    return f"{CALL}{next(iter(call.arguments.values()))}{CALL_END}"


def load_tokenizer(model_path: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a Hugging Face directory. Raises ConfigError if there is none, or a broken one."""
    tokenizers = import_package("tokenizers", for_what="rendering", install="tokenizers")
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{model_path}: there is no tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{file}: not a file of the library `tokenizers` ({error})") from error


def read_stop_token_ids(directory: Path, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token. If it names none, those of the model's configs."""
    eos = read_json(directory / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(text, str) and text in vocabulary:
        return (vocabulary[text],)
    for file in ("generation_config.json", "config.json"):
        ids = read_json(directory / file).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    raise ConfigError(f"{directory}: neither the tokenizer nor the model config says what the end-of-sequence token is")


def read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is no file."""
    return json.loads(file.read_text()) if file.is_file() else {}


class MessageRenderer(Renderer):
    """For policies that are asked in messages: a person at a terminal, or a demonstration. A token stands for a whole
    message, so that whatever plays rollouts of tokens plays these too, with any task, whatever a model's tokenizer
    could write:

        prompt  [tools, user "2*3=", …]    said  [assistant "6", END]

    The first token of a prompt stands for the tools. Ids mean nothing outside of the renderer. Equal messages have
    equal ones, so that a prompt has the same tokens, and its requests the same seeds, whenever it is asked."""

    vocab_size = MOST_MESSAGES
    stop_token_ids: tuple[int, ...] = (END,)
    longest_token = MOST_MESSAGES

    def __init__(self) -> None:
        self._said: dict[int, Message | tuple[ToolSpec, ...]] = {END: ()}

    def render(self, messages: Messages, tools: Tools = ()) -> list[int]:
        return [self._id(tuple(tools)), *map(self._id, messages)]

    def extend(self, prompt: Tokens, completion: Tokens, messages: Messages, tools: Tools = ()) -> list[int]:
        return [self._id(message) for message in messages]

    def parse(
        self, completion: Tokens, finish_reason: FinishReason, prompt: Iterable[int] = (), tools: Tools = ()
    ) -> Message:
        return next(iter(self.messages(completion)), Message("assistant", ""))._replace(role="assistant")

    def say(self, message: Message) -> list[int]:
        return [self._id(message), END]

    def encode(self, text: str) -> list[int]:
        return [self._id(Message("user", text))]

    def decode(self, token_ids: Tokens) -> str:
        return "".join(message.content for message in self.messages(token_ids))

    def messages(self, token_ids: Iterable[int]) -> list[Message]:
        return [said for token_id in token_ids if isinstance(said := self._said[token_id], Message)]

    def tools(self, prompt: Sequence[int]) -> tuple[ToolSpec, ...]:
        first = self._said[prompt[0]]
        return () if isinstance(first, Message) else first

    def _id(self, said: Message | tuple[ToolSpec, ...]) -> int:
        digest = hashlib.blake2b(repr(said).encode(errors="replace"), digest_size=4).digest()
        number = int.from_bytes(digest) % MOST_MESSAGES
        # `setdefault`, because a gateway renders in a thread of its own; an id that is taken has to give way
        while number == END or self._said.setdefault(number, said) != said:
            number = (number + 1) % MOST_MESSAGES
        return number
