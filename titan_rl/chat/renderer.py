"""Text to tokens and back: token ids in, token ids out.

- What a policy sampled is never rendered again: `extend` gives only the tokens that follow it.
- `parse` drops the stop token and nothing else: whether a turn was ended is the finish reason's business.
- A tool call that cannot be read is a `ToolCall` with a `problem`, never text that is passed over.
- Neither torch nor transformers is imported, but by the renderer for models that the `renderers` library does not
  know, which has to run their chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.chat.symbol_renderer import SymbolRenderer
from titan_rl.chat.tokenizer_files import read_json
from titan_rl.errors import ConfigError
from titan_rl.types import FinishReason, Message, ToolSpec


class Renderer(Protocol):
    """Owns the conversion between messages and tokens for one tokenizer."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """Tokens by which the policy ends its turn."""
    longest_token: int
    """Characters of the longest one: no longer text per token can be written."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The first prompt, up to where the policy's turn begins.

        Args:
            tools: what the policy may call.

        Raises:
            TaskError: the messages or tools cannot be written in this tokenizer.
        """

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """The tokens that come after `prompt + completion` when `messages` follow, up to the policy's next turn.

        Raises:
            TaskError: no such tokens exist: this chat format would change what went before.
        """

    def parse(
        self,
        completion: Sequence[int],
        finish_reason: FinishReason,
        prompt: Iterable[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Message:
        """What the policy said, as a message of role "assistant". Its tool calls stand apart, those that cannot be read
        with their `problem`; without `tools` there is nothing to call, and they are text."""

    def say(self, message: Message) -> list[int]:
        """The tokens of a turn in which the policy says this and ends it: its completion, stop token included.

        Raises:
            TaskError: the message cannot be written in this tokenizer.
        """

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text. Raises TaskError where the tokenizer cannot write it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""


def make_renderer(name: str, model_path: str | Path, settings: Mapping[str, Any] | None = None) -> Renderer:
    """The renderer that `rollout.renderer` names, for the tokenizer in `model_path`.

    Raises:
        ConfigError: there is no tokenizer, or no such renderer.
    """
    if name == "auto":
        name = "chat" if _has_chat_template(Path(model_path)) else "symbols"
    if name == "symbols":
        if settings:
            raise ConfigError(f"rollout.renderer_kwargs {dict(settings)} are for chat renderers; this one is 'symbols'")
        return SymbolRenderer(model_path)
    return ChatRenderer(model_path, name, settings)


def _has_chat_template(directory: Path) -> bool:
    return (directory / "chat_template.jinja").is_file() or bool(
        read_json(directory / "tokenizer_config.json").get("chat_template")
    )
