"""Which prompts are held out: decided by the prompt's own text, so no list has to be kept and no seed can leak one
into training."""

import random
from itertools import product

HELD_OUT_SHARE = 10
"""One prompt in so many is held out."""

_ENUMERABLE = 10_000
"""If a task has at most this many texts, all are enumerated; if it has more, some are drawn."""


def fold(text: str) -> int:
    """A hash that is the same in every process and easy to compute elsewhere: h = (h * 131 + ord(c)) mod 1000003."""
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) % 1_000_003
    return value


def is_held_out(text: str) -> bool:
    return fold(text) % HELD_OUT_SHARE == 0


def training_text(stream: random.Random, symbols: str, length: int) -> str:
    """The stream's next text of `length` symbols that is not held out."""
    while True:
        text = "".join(stream.choices(symbols, k=length))
        if not is_held_out(text):
            return text


def held_out_texts(stream: random.Random, symbols: str, length: int, count: int) -> list[str]:
    """`count` different held-out texts of `length` symbols; fewer where there are fewer, or would be hard to find."""
    possible = len(symbols) ** length
    if possible <= _ENUMERABLE:
        texts = [text for text in map("".join, product(symbols, repeat=length)) if is_held_out(text)]
        return stream.sample(texts, count) if len(texts) > count else texts
    drawn: dict[str, None] = {}  # a dict keeps the order of drawing
    # at most a tenth of the held-out texts, so that duplicates stay rare and the loop ends
    while len(drawn) < min(count, possible // HELD_OUT_SHARE**2):
        text = "".join(stream.choices(symbols, k=length))
        if is_held_out(text):
            drawn[text] = None
    return list(drawn)
