"""Anybody's text as Markdown that shows it, and does nothing else."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Final

# Character references, because they end no table cell and begin no tag wherever they stand.
_REFERENCES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "\\": "&#92;"}
_SPECIAL: Final = re.compile(
    r"[&<>|\\]"
    r"|[`*\[\]~$#]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # inside of a word it is only an underscore
    r"|:(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):|@",  # these would become links
    re.IGNORECASE,
)
_LINE_START: Final = re.compile(r"^(?:(?=[+=:-])|(?P<number>\d+)(?=[.)]))")
_PLAIN_CODE: Final = re.compile(r"[^`|\s](?:[^`|]*[^`|\s])?")
_DIRECTIONS: Final = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def text(words: str) -> str:
    """One line of plain text."""
    return _SPECIAL.sub(_escaped, " ".join(_visible(words).split()))


def paragraphs(words: str) -> list[str]:
    """Text of several paragraphs, each on one line, none of them anything but a paragraph."""
    blocks = (text(block) for block in re.split(r"\n\s*\n", words.replace("\r\n", "\n")))
    return [_LINE_START.sub(r"\g<number>\\", block) for block in blocks if block]


def code(name: str) -> str:
    """A name, as code where code can hold it."""
    shown = _visible(name)
    return f"`{shown}`" if _PLAIN_CODE.fullmatch(shown) else text(shown)


def value(anything: Any) -> str:
    """A JSON value, as code where code can hold it."""
    return code(json.dumps(anything, ensure_ascii=False))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, made of cells that are Markdown already."""
    return [_row(header), "|" + "---|" * len(header), *map(_row, rows)]


def json_block(anything: Any) -> list[str]:
    """The lines of a block that shows a JSON value."""
    # No line of JSON can begin with the fence that ends the block.
    shown = json.dumps(anything, ensure_ascii=False, indent=2)
    return ["```json", *"".join(map(_json_visible, shown)).split("\n"), "```"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell or "-" for cell in cells) + " |"


def _escaped(match: re.Match[str]) -> str:
    sign = match[0]
    return _REFERENCES.get(sign, "&#64;" if sign == "@" else f"\\{sign}")


def _visible(words: str) -> str:
    return "".join(
        " " if sign in "\n\r\t" else "\ufffd" if _is_unseen(sign) else sign for sign in words
    )


def _is_unseen(sign: str) -> bool:
    return sign in _DIRECTIONS or unicodedata.category(sign) in {"Cc", "Cs", "Zl", "Zp"}


def _json_visible(sign: str) -> str:
    return f"\\u{ord(sign):04x}" if sign != "\n" and _is_unseen(sign) else sign
