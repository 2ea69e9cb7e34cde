"""Chat formats, by the library `renderers`. `renderer` says what holds for every renderer.

Only `transformers_tokenizer` imports transformers, to run the chat template of models that the library does not know.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_rl.chat.renderer import AnswerForm, Messages, Tokens, Tools, load_tokenizer, read_json, read_stop_token_ids
from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import import_package
from titan_rl.types import FinishReason, Message, ToolCall, ToolSpec

CHAT_RENDERERS = {"qwen3": "qwen3"}
"""`model_type` of a checkpoint → renderer of the library. Other models run the tokenizer's chat template."""
CALL_TOKENS = {"qwen3": ("<tool_call>", "</tool_call>")}
"""Renderer → the tokens around a call of its format, which is that of Qwen3."""
THINK_TOKENS = ("<think>", "</think>")
MOST_SPACES = 2
"""In a row in constrained JSON: a policy that has not learned otherwise would write nothing else."""
_OWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in _OWN}
"""Which byte a character stands for in the vocabularies of byte-level tokenizers."""
BYTE_OF |= {chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _OWN)}


class ChatRenderer:
    """A chat format of the library `renderers`: its renderer of that `name`, for "chat" the one of the checkpoint's
    model type. `settings`: the renderer's own, such as `enable_thinking`. Raises ConfigError: the library is not
    installed, or does not know the name or a setting."""

    def __init__(self, model_path: str | Path, name: str = "chat", settings: Mapping[str, Any] | None = None):
        renderers = import_package("renderers", for_what=f"rollout.renderer {name!r}", install="renderers")
        if name == "chat":
            name = CHAT_RENDERERS.get(read_json(Path(model_path) / "config.json").get("model_type", ""), "default")
        values = dict(settings or {})
        try:
            default = renderers.config_from_name(name)
            if hasattr(default, "thinking_retention") and name != "default":
                # keep earlier thinking in the prompt: dropping it would change tokens that the policy sampled
                values.setdefault("thinking_retention", "all")
            config = type(default)(**{**values, "name": name})
        except (ValueError, KeyError) as error:
            raise ConfigError(f"rollout.renderer {name!r} with rollout.renderer_kwargs {values}: {error}") from error
        tokenizer = transformers_tokenizer(model_path) if name == "default" else PlainTokenizer(model_path)
        self._tokenizer, self._name = tokenizer, name
        self._may_think = bool(getattr(config, "enable_thinking", False))
        self._renderer = renderers.create_renderer(tokenizer, config)
        self.vocab_size = len(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # of byte-level ones in bytes, never less
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Messages, tools: Tools = (), *, add_generation_prompt: bool = True) -> list[int]:
        with _writing():
            dicts, declared = as_dicts(messages), _declared(tools)
            return list(self._renderer.render_ids(dicts, tools=declared, add_generation_prompt=add_generation_prompt))

    def extend(self, prompt: Tokens, completion: Tokens, messages: Messages, tools: Tools = ()) -> list[int]:
        stopped = bool(completion) and completion[-1] in self.stop_token_ids
        # one that stopped where the format knows no next turn, as within a thought, is closed as if it had been cut
        for sampled in (completion, completion[:-1]) if stopped else (completion,):
            before = [*prompt, *sampled]
            with _writing():
                dicts, declared = as_dicts(messages), _declared(tools)
                rendered = self._renderer.bridge_to_next_turn(list(prompt), list(sampled), dicts, tools=declared)
            if rendered is not None and rendered.token_ids[: len(before)] == before:
                return list(rendered.token_ids[len(before) :])
        roles, again = ", ".join(message.role for message in messages), "rendering again what the policy sampled"
        raise TaskError(f"this chat format cannot be extended by messages of {roles} without {again}")

    def parse(
        self, completion: Tokens, finish_reason: FinishReason, prompt: Iterable[int] = (), tools: Tools = ()
    ) -> Message:
        asked = [int(token_id) for token_id in prompt]
        parsed = self._renderer.parse_response(list(completion), tools=_declared(tools), prompt_ids=asked)
        calls = tuple(map(_tool_call, parsed.tool_calls))
        content = parsed.content if tools else parsed.content + "".join(call.raw for call in parsed.tool_calls)
        return Message("assistant", content, calls if tools else (), reasoning=parsed.reasoning_content or "")

    def say(self, message: Message) -> list[int]:
        if not (message.tool_calls or message.reasoning):
            return [*self.encode(message.content), self.stop_token_ids[0]]
        asked = Message("user", "")  # any question: the turn is what follows its tokens
        before = self.render([asked])
        after = self.render([asked, message], add_generation_prompt=False)
        said = after[len(before) :]
        end = next((place for place, token_id in enumerate(said) if token_id in self.stop_token_ids), -1)
        said = said[: end + 1]
        tools = [ToolSpec(call.name, "", {}) for call in message.tool_calls]
        if after[: len(before)] != before or self.parse(said, FinishReason.STOP, before, tools) != message:
            problem = "does not write a finished turn with tool calls or reasoning as the policy would say it"
            raise TaskError(f"this chat format {problem}: it cannot be demonstrated")
        return said

    def constraint(self, form: AnswerForm) -> str:
        if self._name not in CALL_TOKENS and not form.must_call and form.schema is None:
            return ""  # `strict` and `parallel_tool_calls` are hints then
        if self._name not in CALL_TOKENS and (form.tools or self._may_think):
            raise TaskError(f"answers cannot be constrained in the chat format {self._name!r}")
        formats: list[Any] = []
        if form.schema is not None and not form.must_call:
            formats.append(_json(form.schema))
        if form.tools:
            formats.append(self._calls(form, text=not (formats or form.must_call)))
        answer = {"type": "or", "elements": formats} if len(formats) > 1 else formats[0]
        if self._may_think:
            marks = self._ids(THINK_TOKENS)
            thought = {"type": "any_tokens", "exclude_tokens": [*marks, *self.stop_token_ids]}
            thinking = _sequence(_between(marks, thought), _text("\n\n"))
            answer = _sequence({"type": "optional", "content": thinking}, answer)
        return json.dumps({"type": "structural_tag", "format": answer})

    def _ids(self, tokens: Sequence[str]) -> list[int]:
        return list(self._tokenizer.convert_tokens_to_ids(tokens))

    def _calls(self, form: AnswerForm, *, text: bool) -> dict[str, Any]:
        """At least one call, or with `text` any text and calls. Marks are single tokens: others would spell text."""
        marks = self._ids(CALL_TOKENS[self._name])
        tags = []
        for tool in form.tools:
            name, arguments = json.dumps(tool.name), _json({"type": "object"} | tool.parameters)
            call = _sequence(_text(f'\n{{"name": {name}, "arguments": '), arguments, _text("}\n"))
            tags.append(_between(marks, call))
        calls = {"tags": tags, "at_least_one": not text, "stop_after_first": not form.parallel}
        if not text:
            return {"type": "tags_with_separator", "separator": "\n", **calls}
        excluded = [*self._ids(THINK_TOKENS), *self.stop_token_ids]
        return {"type": "token_triggered_tags", "trigger_tokens": marks[:1], "exclude_tokens": excluded, **calls}

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TaskError(f"the text is not valid Unicode ({error.reason}) at {error.start}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Tokens) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        alone = self.decode([token_id])
        if "\ufffd" not in alone:  # behind itself it is not at a text's beginning, where some tokenizers drop a space
            return self.decode([token_id, token_id]).removeprefix(alone).encode()
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if found := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(found[1])
        return bytes(map(BYTE_OF.__getitem__, name)) if set(name) <= BYTE_OF.keys() else alone.encode()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # chat templates raise exceptions of any kind
        raise TaskError(f"this chat format cannot write the messages: {type(error).__name__}: {error}") from error


def as_dicts(messages: Messages) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: arguments of calls as objects, empty fields left out."""
    return [
        _present(
            role=message.role,
            name=message.name,
            tool_call_id=message.tool_call_id,
            reasoning_content=message.reasoning,
            tool_calls=[
                _present(id=call.id, type="function", function={"name": call.name, "arguments": dict(call.arguments)})
                for call in message.tool_calls
                if not call.problem
            ],
        )
        # a call that could not be read is written back as the policy wrote it
        | {"content": message.content + "".join(call.raw for call in message.tool_calls)}
        for message in messages
    ]


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACES}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _between(marks: Sequence[int], content: dict[str, Any]) -> dict[str, Any]:
    begin, end = ({"type": "token", "token": mark} for mark in marks)
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _declared(tools: Tools) -> list[dict[str, Any]] | None:
    return [tool._asdict() for tool in tools] or None


def _tool_call(parsed: Any) -> ToolCall:
    name, arguments, problem = parsed.name or "", parsed.arguments, ""
    if parsed.status != "ok":
        problem = f"the tool call could not be read ({parsed.status.replace('_', ' ')}): {parsed.raw}"
    elif not isinstance(arguments, dict):
        problem = f"the arguments of {name} must be a JSON object: {parsed.raw}"
    if problem:
        return ToolCall(name, {}, problem, parsed.raw)
    return ToolCall(name, arguments, id=parsed.id or "")


class PlainTokenizer:
    """The tokenizer interface that the library `renderers` needs, without transformers."""

    unk_token_id = None

    def __init__(self, model_path: str | Path):
        self._tokenizer = load_tokenizer(model_path)
        self.get_vocab, self.convert_ids_to_tokens = self._tokenizer.get_vocab, self._tokenizer.id_to_token
        self.name_or_path = str(model_path)
        self.eos_token_id = next(iter(read_stop_token_ids(Path(model_path), self.get_vocab())), None)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def transformers_tokenizer(model_path: str | Path) -> Any:
    """The tokenizer with its chat template. Raises ConfigError if transformers is not installed."""
    transformers = import_package("transformers", for_what=f"the chat template of {model_path}", install="transformers")
    return transformers.AutoTokenizer.from_pretrained(str(model_path))
