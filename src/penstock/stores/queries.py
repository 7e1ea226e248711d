"""SQL and Lua as files: one name per query, loaded once."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from penstock.core.require import require

DEFAULT_SCHEMA = "events"
_SCHEMA_PREFIX = re.compile(r"\bevents(?=\.|;)")
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_QUERY_HEADING = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def with_schema(sql: str, schema: str) -> str:
    """The statement in the configured schema; the files are written for `events`."""
    require(
        _SCHEMA_NAME.fullmatch(schema) is not None,
        f"schema={schema!r} must be a plain lower-case PostgreSQL name",
    )
    return sql if schema == DEFAULT_SCHEMA else _SCHEMA_PREFIX.sub(schema, sql)


class Queries:
    """The queries of one `.sql` file, in one schema."""

    def __init__(self, file_name: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._file_name = file_name
        self._queries = _load(file_name, schema)

    def __getitem__(self, name: str) -> str:
        return self._queries[name]


@cache
def _load(file_name: str, schema: str) -> dict[str, str]:
    text = files(__package__).joinpath("sql", file_name).read_text(encoding="utf-8")
    _, *parts = _QUERY_HEADING.split(with_schema(text, schema))
    return dict(zip(parts[0::2], (part.strip() for part in parts[1::2]), strict=True))


@cache
def lua(name: str) -> str:
    """The text of a Lua script."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
