"""Finds SQL that would end or restart a transaction, so that handlers cannot send it."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache


class Control(Enum):
    """What a statement would do to the transaction that it runs in."""

    COMMIT = "commit"
    ROLLBACK = "roll back"


# Most statements contain none of these words, and one search is all they cost.
_SUSPICIOUS = re.compile(
    r"\b(commit|end|rollback|abort|begin|start|prepare|constraints)\b", re.IGNORECASE
)
_QUOTED = re.compile(
    r"""
      '(?:[^']|'')*'                              # a string
    | "(?:[^"]|"")*"                              # an identifier
    | (?P<tag>\$(?:[A-Za-z_]\w*)?\$).*?(?P=tag)   # a dollar-quoted string
    | --[^\n]*                                    # a comment
    | /\*.*?\*/                                   # a comment
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMITS = re.compile(
    r"(commit|end|begin|start\s+transaction|prepare\s+transaction)\b"
    r"|set\s+constraints\b.*\bimmediate\b",
    re.IGNORECASE | re.DOTALL,
)
_ROLLS_BACK = re.compile(r"(rollback|abort)\b(?!(\s+(work|transaction))?\s+to\b)", re.IGNORECASE)


@lru_cache(maxsize=4096)
def find_control(sql: str) -> Control | None:
    """What the text would do to the transaction; savepoints are nobody's concern."""
    if _SUSPICIOUS.search(sql) is None:
        return None
    for statement in _QUOTED.sub(" ", sql).split(";"):
        text = statement.strip()
        if _COMMITS.match(text):
            return Control.COMMIT
        if _ROLLS_BACK.match(text):
            return Control.ROLLBACK
    return None
