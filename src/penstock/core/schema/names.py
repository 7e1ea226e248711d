"""Names that go anywhere: keys of a document and names of files, none of them given twice."""

from __future__ import annotations

import re
from hashlib import sha256

_SEPARATOR = "--"
_FILE_NAME_LENGTH_MAX = 200

# An underscore before an x would read as the beginning of an escape. Dots and hyphens stay where
# they stand alone between others, so that no part holds the separator, nor a path `..`.
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]|_(?=x)|(?:^|(?<=[.-]))[.-]|[.-](?=[.-]|$)")
_CAPITAL = re.compile(r"[A-Z]")


def component_key(*parts: str) -> str:
    """A key of ASCII letters, digits, dots, hyphens and underscores; other parts, another key."""
    return _SEPARATOR.join(_UNSAFE.sub(_escape, part) for part in parts)


def page_name(stream_name: str) -> str:
    """The file that a stream's page is written to.

    Different streams have different files, also where the file system ignores case.
    """
    # The prefix keeps clear of the index, of hidden files and of names that Windows reserves.
    safe = _CAPITAL.sub(_escape, component_key(stream_name))
    if len(safe) > _FILE_NAME_LENGTH_MAX:
        digest = sha256(stream_name.encode()).hexdigest()
        safe = f"{safe[: _FILE_NAME_LENGTH_MAX - 70]}{_SEPARATOR}{digest}"
    return f"stream-{safe}.md"


def _escape(match: re.Match[str]) -> str:
    return f"_x{ord(match[0]):x}_"
