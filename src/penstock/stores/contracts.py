"""What is sent under which type and version: recorded with the first events, and compared.

An application sends through connections of many kinds, so what is asked and answered is written
once, as a generator, and each kind of connection only carries it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import orjson
import psycopg
import sqlalchemy
from psycopg.rows import tuple_row

from penstock.core.contract_schema import contract_of
from penstock.core.contracts import Promise
from penstock.core.events import Event
from penstock.core.outgoing import OutgoingEvent
from penstock.core.schema import Rule, check, schema_hash
from penstock.core.schema.catalogue import Contract
from penstock.core.schema.documents import contract_in, document_of
from penstock.errors import ContractError
from penstock.stores.queries import Queries

BREAKS_SHOWN = 10
_PARAMETER = re.compile(r"%\((\w+)\)s")


class Statement(NamedTuple):
    """One question to the database."""

    query: str
    parameters: dict[str, Any]


Questions = Generator[Statement, Sequence[Any], None]


@dataclass(frozen=True, slots=True)
class Described:
    """An event class, described for everybody else."""

    contract: Contract
    schema_hash: str

    @classmethod
    @cache
    def of(cls, event_class: type[Event]) -> Described:
        """Its contract and hash; made once, since a class does not change."""
        contract = contract_of(event_class)
        return cls(contract, schema_hash(contract.json_schema))


class Variant(NamedTuple):
    """A schema that was in use under a type and version."""

    schema_hash: str
    json_schema: str
    registered_by: str
    first_seen_at: datetime
    is_producer_known: bool


_seen: set[tuple[object, str, Promise]] = set()
"""Recorded already, by the database, its schema and what was promised there."""


def promises_of(events: Iterable[OutgoingEvent]) -> list[Promise]:
    """What these events promise, each once."""
    return list(dict.fromkeys(event.promise for event in events if event.promise is not None))


def require_kept(
    connection: psycopg.Connection[Any], schema: str, promises: Iterable[Promise]
) -> None:
    """Record what is going to be sent. Raises ContractError where it breaks what was sent."""
    place = (connection.info.host, connection.info.port, connection.info.dbname)
    questions = _questions(place, schema, promises)
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        answer: Sequence[Any] | None = None
        while (statement := _next(questions, answer)) is not None:
            answer = cursor.execute(statement.query, statement.parameters).fetchall()


async def require_kept_async(
    connection: psycopg.AsyncConnection[Any], schema: str, promises: Iterable[Promise]
) -> None:
    """The same on an asynchronous connection."""
    place = (connection.info.host, connection.info.port, connection.info.dbname)
    questions = _questions(place, schema, promises)
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        answer: Sequence[Any] | None = None
        while (statement := _next(questions, answer)) is not None:
            await cursor.execute(statement.query, statement.parameters)
            answer = await cursor.fetchall()


def require_kept_through_sqlalchemy(
    connection: sqlalchemy.Connection, schema: str, promises: Iterable[Promise]
) -> None:
    """The same with any driver."""
    questions = _questions(connection.engine.url, schema, promises)
    answer: Sequence[Any] | None = None
    while (statement := _next(questions, answer)) is not None:
        query = sqlalchemy.text(_PARAMETER.sub(r":\1", statement.query))
        answer = connection.execute(query, statement.parameters).fetchall()


def _next(questions: Questions, answer: Sequence[Any] | None) -> Statement | None:
    try:
        return next(questions) if answer is None else questions.send(answer)
    except StopIteration:
        return None


def _questions(place: object, schema: str, promises: Iterable[Promise]) -> Questions:
    sql = Queries("contract.sql", schema)
    for promise in promises:
        if (place, schema, promise) in _seen:
            continue
        event_class = promise.event_class
        described = Described.of(event_class)
        parameters = {
            "stream_name": promise.stream_name,
            "event_type": event_class.__event_type__,
            "version": event_class.__event_version__,
            "producer": promise.producer,
        }
        variants = [Variant(*row) for row in (yield Statement(sql["variants"], parameters))]
        same = [one for one in variants if one.schema_hash == described.schema_hash]
        if any(one.is_producer_known for one in same):
            # Not before it was found: a transaction that recorded it may have been rolled back.
            _seen.add((place, schema, promise))
            continue
        if not same:
            _require_compatible(promise, described, variants)
        yield Statement(
            sql["record"],
            {
                **parameters,
                "schema_hash": described.schema_hash,
                "json_schema": orjson.dumps(document_of(described.contract)).decode(),
                # As JSON, because not every driver knows lists.
                "compared": orjson.dumps([one.schema_hash for one in variants]).decode(),
            },
        )


def _require_compatible(
    promise: Promise, described: Described, variants: Sequence[Variant]
) -> None:
    """Whoever reads this version reads all of its variants, and they are written side by side."""
    for variant in variants:
        recorded = contract_in(orjson.loads(variant.json_schema))
        breaks = check(recorded.json_schema, described.contract.json_schema, Rule.FULL)
        if not breaks:
            continue
        event_class = promise.event_class
        shown = "".join(f"\n  {each.place}: {each.reason}" for each in breaks[:BREAKS_SHOWN])
        more = len(breaks) - BREAKS_SHOWN
        raise ContractError(
            f"{event_class.__name__} is not what {variant.registered_by} has recorded as version "
            f"{event_class.__event_version__} of {event_class.__event_type__!r} on "
            f"{variant.first_seen_at:%Y-%m-%d}, so nothing was sent:{shown}"
            f"{f'{chr(10)}  and {more} more' if more > 0 else ''}\n"
            f"Write version={(event_class.__event_version__ or 0) + 1} and an upcaster from "
            f"version {event_class.__event_version__}, or make it the same again. "
            "`penstock schema check` finds this before a deployment."
        )
