"""Prints what a benchmark found: a table to read, then, as the last line, one JSON object to compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Cell = str | float | int


def print_report(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], figures: Mapping[str, Cell | Sequence[Cell]]
) -> None:
    """Print the title, a table, and `figures` as JSON.

    Args:
        header: one word per column.
        rows: cells; floats are shown with three significant digits.
        figures: plain numbers, strings or lists of them; the JSON keeps their full precision.
    """
    print_table(title, header, rows)
    print(json.dumps(dict(figures)), flush=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print the title, the table, and an empty line."""
    texts = [[_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    lines = [
        "  ".join(_aligned(text, width, column) for column, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in texts
    ]
    print(title)
    print(lines[0])
    print("  ".join("-" * width for width in widths))
    print("\n".join(lines[1:]))
    print(flush=True)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def _aligned(text: str, width: int, column: int) -> str:
    """The first column names things and is set left; numbers are set right."""
    return text.ljust(width) if column == 0 else text.rjust(width)
