"""The tokenizers of tiny policies.

- Every tokenizer has its padding at id 0 and the token that ends an answer at id 1.
- What a tokenizer decodes shows its special tokens: environments parse the text.
- "chat" writes any text, one token per byte, and has the special tokens that Qwen3's chat format is made of; the
  `renderers` library writes that format for it as it does for a real Qwen3 checkpoint.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from titan_rl.policy.config import TinyPolicyConfig

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
    return [*_CHAT_ENDS, *_bytes(), _CHAT_START, *_CHAT_MARKS, *config.special_tokens]


def make_tokenizer(config: TinyPolicyConfig) -> Tokenizer:
    """The tokenizer that `config` describes."""
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


def _bytes() -> list[str]:
    """The printable stand-ins that byte-level tokenizers write for the 256 bytes, in an order of their own."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())
