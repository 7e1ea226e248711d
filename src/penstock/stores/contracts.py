"""What is sent under which type and version: recorded with the first events, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import orjson
import psycopg

from penstock.core.contract_schema import contract_of
from penstock.core.contracts import Promise
from penstock.core.events import Event
from penstock.core.outgoing import OutgoingEvent
from penstock.core.schema import Rule, check, schema_hash
from penstock.core.schema.catalogue import Contract, comparable
from penstock.core.schema.documents import contract_in, document_of
from penstock.errors import ContractError
from penstock.stores.queries import Queries
from penstock.stores.questions import Questions, Statement, ask, place_of

BREAKS_SHOWN = 10
SEEN_MAX = 10_000


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
    ask(connection, keeping(place_of(connection), schema, promises))


def keeping(place: object, schema: str, promises: Iterable[Promise]) -> Questions[None]:
    """The questions that record what is going to be sent; `place` tells databases apart.

    Raises ContractError where it breaks what was sent.
    """
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
            if len(_seen) >= SEEN_MAX:
                _seen.clear()
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
        breaks = check(*comparable(recorded, described.contract), Rule.FULL)
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
