"""SQL and Lua as files: one name per query, loaded once."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from penstock.core.require import require

DEFAULT_SCHEMA = "events"
_SCHEMA_PREFIX = re.compile(r"\bevents(?=\.|;)")
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
# What stands unquoted in the files cannot be one of these: the reserved words of pg_get_keywords().
_RESERVED_WORDS = """
    all analyse analyze and any array as asc asymmetric authorization binary both case cast
    check collate collation column concurrently constraint create cross current_catalog
    current_date current_role current_schema current_time current_timestamp current_user
    default deferrable desc distinct do else end except false fetch for foreign freeze from
    full grant group having ilike in initially inner intersect into is isnull join lateral
    leading left like limit localtime localtimestamp natural not notnull null offset on only
    or order outer overlaps placing primary references returning right select session_user
    similar some symmetric system_user table tablesample then to trailing true union unique
    user using variadic verbose when where window with
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())
_QUERY_HEADING = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def with_schema(sql: str, schema: str) -> str:
    """The statement in the configured schema; the files are written for `events`."""
    require(
        _SCHEMA_NAME.fullmatch(schema) is not None,
        f"schema={schema!r} must be a plain lower-case PostgreSQL name",
    )
    require(
        schema not in _RESERVED and not schema.startswith("pg_"),
        f"schema={schema!r} is a name that PostgreSQL keeps for itself. Choose another one.",
    )
    return sql if schema == DEFAULT_SCHEMA else _SCHEMA_PREFIX.sub(schema, sql)


@cache
class Queries(dict[str, str]):
    """The queries of one `.sql` file by their names, in one schema: loaded once, for everybody."""

    def __init__(self, file_name: str, schema: str = DEFAULT_SCHEMA) -> None:
        text = files(__package__).joinpath("sql", file_name).read_text(encoding="utf-8")
        _, *parts = _QUERY_HEADING.split(with_schema(text, schema))
        super().__init__(zip(parts[0::2], (part.strip() for part in parts[1::2]), strict=True))


@cache
def lua(name: str) -> str:
    """The text of a Lua script."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
