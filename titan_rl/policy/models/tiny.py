"""Makes a tiny policy with random weights and its tokenizer, in Hugging Face format.

The directory is named after everything that decides its content, appears by one rename, and is never changed
afterwards: any number of processes may ask for the same policy at once and all read the same bytes.

- Every tokenizer has its padding at id 0 and the token that ends an answer at id 1.
- Decoded text shows special tokens, because environments parse the text.
- "chat" writes any text, one token per byte, and has the special tokens of Qwen3's chat format; the `renderers` library
  writes that format for it as it does for a real Qwen3 checkpoint.

Needs numpy, safetensors and tokenizers, not torch: the controller process calls it.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from titan_rl.config import RunConfig
from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.architecture import ARCHITECTURES, Architecture

_FORMAT = 1
"""Part of the directory's name; raise it when the files written for one config change."""


def tiny_policy(config: RunConfig) -> TinyPolicyConfig | None:
    """The tiny policy of the config, if it is one, with its seed."""
    tiny = config.policy.tiny
    return tiny if tiny is None or tiny.seed is not None else dataclasses.replace(tiny, seed=config.seed)


def model_directory(config: RunConfig) -> Path:
    """The checkpoint that trainer and generators load. A tiny policy is made if it does not exist yet."""
    tiny = tiny_policy(config)
    return Path(config.policy.path) if tiny is None else make_tiny_policy(tiny)


def make_tiny_policy(config: TinyPolicyConfig, cache: Path | None = None) -> Path:
    """The checkpoint directory of `config` (a seed of None counts as 0), made now if it is not in `cache` yet.

    Args:
        cache: defaults to `$XDG_CACHE_HOME/titan_rl` or `~/.cache/titan_rl`.

    Raises:
        ConfigError: as `tiny_shape`, or `cache` cannot be written.
    """
    shape = tiny_shape(config)
    config = dataclasses.replace(config, seed=config.seed or 0)
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_rl"
    settings = dataclasses.asdict(config)
    if config.architecture == "qwen3":
        del settings["architecture"]  # the names that such policies had when there was no other
    content = json.dumps([_FORMAT, settings], sort_keys=True)
    target = cache / f"tiny-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    except OSError as error:
        raise ConfigError(
            f"policy.tiny: the policy is kept in {cache} ($XDG_CACHE_HOME), which cannot be written: {error.strerror}"
        ) from error
    try:
        _write(draft, config, shape)
        draft.chmod(0o755)
        draft.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first, with the same bytes
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def tiny_shape(config: TinyPolicyConfig) -> Architecture:
    """Sizes of the policy that `config` describes; raises ConfigError where they contradict each other."""
    tokens = token_names(config)
    if len(set(tokens)) != len(tokens):
        twice = sorted({token for token in tokens if tokens.count(token) > 1})
        raise ConfigError(f"policy.tiny: symbols and special_tokens name these tokens twice: {' '.join(twice)}")
    if config.tokenizer == "symbols" and not config.symbols:
        raise ConfigError("policy.tiny.symbols is empty")
    if config.heads % config.kv_heads:
        raise ConfigError(f"policy.tiny.kv_heads ({config.kv_heads}) must divide policy.tiny.heads ({config.heads})")
    if config.head_dim % 2:
        raise ConfigError(f"policy.tiny.head_dim must be even (rotary embedding), got {config.head_dim}")
    sizes = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_length")
    family = import_name(config.architecture, ARCHITECTURES, Architecture)
    return family(
        vocab=len(tokens), **{name: getattr(config, name) for name in sizes}, tied=config.tied_embeddings, **family.tiny
    )


def _write(directory: Path, config: TinyPolicyConfig, shape: Architecture) -> None:
    random = np.random.default_rng(config.seed)
    weights = {
        name: np.ones(size, np.float32)
        if len(size) == 1
        else (shape.tiny_std * random.standard_normal(size)).astype(np.float32)
        for name, size in shape.tensor_shapes().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _model_config(shape))
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": True, "temperature": 1.0},
    )
    make_tokenizer(config).save(str(directory / "tokenizer.json"))
    names = token_names(config)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names[EOS_ID],
        "pad_token": names[PAD_ID],
        "model_max_length": shape.max_length,
        "clean_up_tokenization_spaces": False,
    }
    if config.tokenizer == "chat":
        settings["chat_template"] = CHAT_TEMPLATE
    _write_json(directory / "tokenizer_config.json", settings)


def _model_config(shape: Architecture) -> dict[str, Any]:
    settings = msgspec.to_builtins(shape)  # transformers 4 reads its rope_theta, transformers 5 the rope_parameters
    rope = settings.get("rope_parameters") or {"rope_type": "default"}
    return {
        **settings,
        "rope_parameters": {**rope, "rope_theta": shape.rope_theta},
        "architectures": [shape.transformers_class],
        "model_type": shape.model_type,
        **{name: values[0] for name, values in shape.computed.items() if name != "rope_type"},
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "dtype": "float32",
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


PAD_ID, EOS_ID = 0, 1

_SYMBOLS_ENDS = ("<pad>", "<eos>")
_CHAT_ENDS = ("<|endoftext|>", "<|im_end|>")
_CHAT_START = "<|im_start|>"
_CHAT_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CHAT_TEMPLATE = (
    "{%- if tools %}{{ raise_exception('this template shows no tools') }}{% endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}"
    "{%- endif -%}"
)
"""For programs that know nothing but templates: Qwen3's format, without tools and without earlier thinking."""


def token_names(config: TinyPolicyConfig) -> list[str]:
    """Every token in the order of its id: padding, end of answer, symbols or bytes, further ones in order."""
    if config.tokenizer == "symbols":
        return [*_SYMBOLS_ENDS, *config.symbols, *config.special_tokens]
    # the printable stand-ins that byte-level tokenizers write for the 256 bytes, in an order of their own
    stand_ins = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*_CHAT_ENDS, *stand_ins, _CHAT_START, *_CHAT_MARKS, *config.special_tokens]


def make_tokenizer(config: TinyPolicyConfig) -> Tokenizer:
    ids = {token: index for index, token in enumerate(token_names(config))}
    if config.tokenizer == "symbols":
        # No unknown token: a text with a foreign character is an error, not a prompt with a hole.
        tokenizer = Tokenizer(models.WordLevel(ids))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(list(_SYMBOLS_ENDS))
        further = config.special_tokens
    else:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*_CHAT_ENDS, _CHAT_START)])
        further = (*_CHAT_MARKS, *config.special_tokens)
    # Not "special" in the library's sense: decoding must show them, environments parse the text.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in further])
    return tokenizer
