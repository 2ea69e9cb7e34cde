"""Prints what a benchmark found: a table to read, then, as the last line, one JSON object to compare."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Cell = str | float | int
LOAD_BEFORE = round(os.getloadavg()[0], 2)


def print_report(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], figures: Mapping[str, Cell | Sequence[Cell]]
) -> None:
    """Print the title, a table, and `figures` as JSON, with the cores and what they did before the program started.

    Args:
        header: one word per column.
        rows: cells; floats are shown with three significant digits.
        figures: plain numbers, strings or lists of them; the JSON keeps their full precision.
    """
    print_table(title, header, rows)
    about = {"cpus": len(os.sched_getaffinity(0)), "load_average_before": LOAD_BEFORE}
    print(json.dumps({**about, **figures}), flush=True)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, file: TextIO | None = None
) -> None:
    """Print the title, the table, and an empty line. The first column names things; the others are numbers."""
    print(title, file=file)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, name in enumerate(header):
        table.add_column(escape(name), justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_text, row))
    Console(width=200, file=file).print(table)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return escape(str(cell))
