"""Text for one line of a terminal."""


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "rollout"), counted(1200, "rollout")
    ('1 rollout', '1,200 rollouts')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def one_line(text: str, longest: int) -> str:
    """`text` of a policy or a user, with control characters as escapes, and cut in the middle if it is longer than
    `longest` characters.

    >>> one_line("12\\n34", 100), one_line("0123456789", 4)
    ('12\\\\n34', '01…89')
    """
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]}…{text[-half:]}"
    return escaped(text)


def escaped(text: str, keep: str = "") -> str:
    """`text` with control characters as escapes, but those in `keep`: raw ones would steer the reader's terminal."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def sendable(text: str) -> str:
    """The text without what UTF-8 cannot write, such as half of a surrogate pair."""
    return text.encode(errors="replace").decode()
