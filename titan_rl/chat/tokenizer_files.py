"""Tokenizers as their files are: loaded by the `tokenizers` library, or by transformers for chat templates.

Neither torch nor transformers is imported, but by `transformers_tokenizer`. What is missing is a `ConfigError` that
names the file or the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError


class PlainTokenizer:
    """What the `renderers` library asks of a tokenizer, over the `tokenizers` library alone."""

    unk_token_id = None

    def __init__(self, model_path: str | Path):
        self._tokenizer = load_tokenizer(model_path)
        self.name_or_path = str(model_path)
        self.eos_token_id = next(iter(read_stop_token_ids(Path(model_path), self.get_vocab())), None)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def load_tokenizer(model_path: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a Hugging Face directory. Raises ConfigError where none can be read."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"rendering needs the package `tokenizers` ({error})") from error
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{model_path}: there is no tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{file}: not a file of the library `tokenizers` ({error})") from error


def transformers_tokenizer(model_path: str | Path) -> Any:
    """The same with its chat template. Raises ConfigError where transformers is not installed."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"the chat template of {model_path} needs the package `transformers` ({error})") from error
    return AutoTokenizer.from_pretrained(str(model_path))


def read_stop_token_ids(directory: Path, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence token; where it names none, what the model's configs say."""
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
    """What a file holds; nothing where there is no file."""
    return json.loads(file.read_text()) if file.is_file() else {}
