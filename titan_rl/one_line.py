"""Text of policies and users, made fit for one line of a terminal."""

from __future__ import annotations


def one_line(text: str, longest: int) -> str:
    """`text` with control characters as escapes, and cut in the middle where it is longer than `longest` characters.

    >>> one_line("12\\n34", 100), one_line("0123456789", 4)
    ('12\\\\n34', '01…89')
    """
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}…{text[-half:]}"
    return printable(text)


def printable(text: str) -> str:
    """`text` with control characters, and all else that is not to be seen, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
