"""Messages to tokens and back. `make_renderer` picks the renderer of a tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.chat.renderer import Renderer, SymbolRenderer, read_json
from titan_rl.errors import ConfigError


def make_renderer(name: str, model_path: str | Path, settings: Mapping[str, Any] | None = None) -> Renderer:
    """What `rollout.renderer` names, for the tokenizer in `model_path`. Raises ConfigError: one of them is missing."""
    if name == "auto":
        directory = Path(model_path)
        template = read_json(directory / "tokenizer_config.json").get("chat_template")
        name = "chat" if template or (directory / "chat_template.jinja").is_file() else "symbols"
    if name == "symbols":
        if settings:
            raise ConfigError(f"rollout.renderer_kwargs {dict(settings)} are for chat renderers; this one is 'symbols'")
        return SymbolRenderer(model_path)
    return ChatRenderer(model_path, name, settings)
