"""How commands speak: tables for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.errors import OperationRefused, UsageError

# Into a file or a pipe nothing is cut off at an imagined right edge.
PIPE_WIDTH = 240
# More than anybody reads, and little enough to hold in memory.
LIST_LIMIT_MAX = 100_000
# What an event or an error says must not steer the terminal that shows it.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

console = Console(highlight=False, markup=False, soft_wrap=True)
error_console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
if not console.is_terminal:
    console.width = PIPE_WIDTH


def print_error(message: str) -> None:
    """Say on stderr what went wrong."""
    with suppress(OSError):
        error_console.print(Text.assemble(("Error: ", "bold red"), message))


def print_note(message: str) -> None:
    """Say on stderr what is going on, so that stdout stays the answer."""
    # A full disk under the log is no reason to end, or not to begin.
    with suppress(OSError):
        error_console.print(message)


def confirm(what: str, *, yes: bool) -> None:
    """Ask on a terminal whether that is meant. Raises OperationRefused for a no."""
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{what} Nothing was changed yet; if you mean it, add --yes.")
    print_note(what)
    if not typer.confirm("Go on?", err=True):
        raise OperationRefused("Nothing was changed.")


def print_json(value: Any) -> None:
    """The answer for programs: one JSON document."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def duration(milliseconds: int | None) -> str | None:
    """A time span for people."""
    if milliseconds is None:
        return None
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    return f"{milliseconds / 1000:,.1f} s"


def span(milliseconds: int) -> str:
    """A time span for people that may be long: in the two largest units of it."""
    minutes, hours, days = (milliseconds // unit for unit in (60_000, 3_600_000, 86_400_000))
    if days:
        return f"{days:,} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return duration(milliseconds) or "" if minutes < 2 else f"{minutes} min"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose numbers stand at the right; a leading > in a heading asks for that."""
    made = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for column in columns:
        justify: Any = "right" if column.startswith(">") else "left"
        made.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*(Text(_shown(cell)) for cell in row))
    return made


def lines(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Text:
    """The same as plain lines, one for each row, however wide: for tables of many rows."""
    names = [column.removeprefix(">") for column in columns]
    cells = [names, *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    signs = [">" if column.startswith(">") else "<" for column in columns]
    written = [
        "   ".join(f"{cell:{sign}{width}}" for cell, sign, width in layout)
        for layout in (zip(row, signs, widths, strict=True) for row in cells)
    ]
    return Text("\n ".join([title, "", *written, ""]), no_wrap=True, overflow="ignore")


def _shown(cell: object) -> str:
    return "-" if cell is None else str(cell)


def plain(text: str) -> str:
    """Text that somebody else wrote, without anything that a terminal obeys."""
    return text.translate(_CONTROLS)
