"""Send: an event exists if and only if the transaction that it was sent in commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from penstock.core.contracts import Promise
from penstock.core.events import Event, RawEvent
from penstock.core.outgoing import UNSET, Key, Limits, OutgoingEvent, Unset, encode_event
from penstock.core.trace_context import TRACEPARENT, TRACESTATE
from penstock.errors import InvalidEvent, UnsafeTransaction, UsageError
from penstock.pipeline import session_buffer
from penstock.pipeline.handling import current_handling
from penstock.pipeline.transaction_buffer import buffer_of, by_schema, open_buffer, pending_for
from penstock.stores.identity import new_event_uuid
from penstock.stores.outbox_writer import insert, insert_async
from penstock.telemetry import tracing

Admit: TypeAlias = Callable[[str, Event | RawEvent], None]
Plain: TypeAlias = Session | Connection | psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
"""What the targets of a send come down to."""


def _admit_all(_stream: str, _event: Event | RawEvent) -> None:
    """Every event is welcome on every stream."""


class Sender:
    """Encodes events and ties them to the transaction of whatever they are sent through.

    A SQLAlchemy session or connection remembers them and inserts them when it commits; on a
    psycopg connection they are inserted at once, so send last there.
    """

    def __init__(
        self,
        *,
        schema: str,
        payload_bytes_max: int,
        metadata_bytes_max: int,
        admit: Admit = _admit_all,
        producer: str | None = None,
    ) -> None:
        self._schema = schema
        self._limits = Limits(payload_bytes_max, metadata_bytes_max)
        self._admit = admit
        self._producer = producer
        self._promises: dict[tuple[str, type], Promise | None] = {}

    def send(
        self,
        target: Any,
        stream: str,
        event: Event | RawEvent,
        *,
        key: Key | Unset = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuid: UUID | None = None,
    ) -> UUID:
        """Send an event in the target's transaction; the same event_uuid again changes nothing."""
        uuids = None if event_uuid is None else [event_uuid]
        return self.send_many(
            target, stream, [event], key=key, metadata=metadata, event_uuids=uuids
        )[0]

    def send_many(
        self,
        target: Any,
        stream: str,
        events: Iterable[Event | RawEvent],
        *,
        key: Key | Unset = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuids: Sequence[UUID] | None = None,
    ) -> list[UUID]:
        """Send events in order, in one round trip. A `key` holds for all of them."""
        plain = _plain(target)
        if isinstance(plain, psycopg.AsyncConnection):
            raise UsageError(
                "Sending through a psycopg AsyncConnection is I/O. Nothing was sent; "
                "write `await send_async(...)`."
            )
        events = list(events)
        with _span(stream, len(events)):
            outgoing = self.encode(stream, events, key, metadata, event_uuids)
            self._deliver(plain, outgoing)
        return [each.event_uuid for each in outgoing]

    async def send_async(
        self,
        target: Any,
        stream: str,
        event: Event | RawEvent,
        *,
        key: Key | Unset = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuid: UUID | None = None,
    ) -> UUID:
        """The same for every target, a psycopg AsyncConnection included."""
        uuids = None if event_uuid is None else [event_uuid]
        sent = await self.send_many_async(
            target, stream, [event], key=key, metadata=metadata, event_uuids=uuids
        )
        return sent[0]

    async def send_many_async(
        self,
        target: Any,
        stream: str,
        events: Iterable[Event | RawEvent],
        *,
        key: Key | Unset = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuids: Sequence[UUID] | None = None,
    ) -> list[UUID]:
        """The same for several events, in one round trip."""
        plain = _plain(target)
        events = list(events)
        with _span(stream, len(events)):
            outgoing = self.encode(stream, events, key, metadata, event_uuids)
            if not isinstance(plain, psycopg.AsyncConnection):
                self._deliver(plain, outgoing)
            elif outgoing:
                _require_safe(plain)
                await insert_async(plain, self._schema, outgoing)
        return [each.event_uuid for each in outgoing]

    @property
    def schema(self) -> str:
        """The schema of the outbox that it sends to."""
        return self._schema

    def encode(
        self,
        stream: str,
        events: Iterable[Event | RawEvent],
        key: Key | Unset,
        metadata: Mapping[str, Any] | None,
        event_uuids: Sequence[UUID] | None,
    ) -> list[OutgoingEvent]:
        """The events as the outbox takes them, with what the event in hand passes on to them."""
        events = list(events)
        if event_uuids is None:
            event_uuids = [new_event_uuid() for _ in events]
        if len(event_uuids) != len(events):
            raise InvalidEvent(
                f"There are {len(events)} events and {len(event_uuids)} event_uuids. "
                "Nothing was sent; pass one for each event, or none at all."
            )
        metadata = _with_inheritance(metadata)
        for event in events:
            self._admit(stream, event)
        return [
            encode_event(
                stream,
                event,
                event_uuid=uuid,
                limits=self._limits,
                key=key,
                metadata=metadata,
                promise=self._promise_of(stream, event),
                producer=self._producer,
            )
            for event, uuid in zip(events, event_uuids, strict=True)
        ]

    def _promise_of(self, stream: str, event: Event | RawEvent) -> Promise | None:
        identity = (stream, type(event))
        if identity not in self._promises:
            self._promises[identity] = promise_of(stream, type(event), self._producer)
        return self._promises[identity]

    def _deliver(
        self,
        plain: Session | Connection | psycopg.Connection[Any],
        outgoing: Sequence[OutgoingEvent],
    ) -> None:
        if not outgoing:
            return
        if isinstance(plain, psycopg.Connection):
            _require_safe(plain)
            insert(plain, self._schema, outgoing)
            return
        pending = pending_for(self._schema, outgoing)
        if isinstance(plain, Session):
            session_buffer.remember(plain, pending)
        else:
            open_buffer(plain).add(plain, pending)


def promise_of(stream: str, event_class: type, producer: str | None) -> Promise | None:
    """What a producer says about its events; None where it has nothing to say."""
    if producer is None or not issubclass(event_class, Event):
        return None
    # Event itself has no version, and no type either.
    if getattr(event_class, "__event_version__", None) is None:
        return None
    return Promise(stream, event_class, producer)


def take_pending(target: Any) -> dict[str, list[OutgoingEvent]]:
    """Remove what the transaction of a session or connection was going to insert, by schema."""
    plain = _plain(target)
    if isinstance(plain, Session):
        return by_schema(session_buffer.take(plain))
    buffer = buffer_of(plain) if isinstance(plain, Connection) else None
    return {} if buffer is None else by_schema(buffer.take())


def peek_pending(target: Any) -> list[OutgoingEvent]:
    """What the transaction of a session or connection is going to insert when it commits."""
    plain = _plain(target)
    if isinstance(plain, Session):
        return [each.event for each in session_buffer.waiting(plain)]
    buffer = buffer_of(plain) if isinstance(plain, Connection) else None
    return [] if buffer is None else [each.event for each in buffer.waiting()]


def _with_inheritance(metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    handling, carried = current_handling.get(), tracing.carried_metadata()
    if (handling is None and not carried) or not isinstance(metadata, Mapping | None):
        return metadata
    given = metadata or {}
    inherited = {} if handling is None else handling.inherited_metadata()
    if carried or TRACEPARENT in given:
        # The two belong together: no state of another trace.
        for name in (TRACEPARENT, TRACESTATE):
            inherited.pop(name, None)
    return {**inherited, **({} if TRACEPARENT in given else carried), **given}


def _span(stream: str, count: int) -> AbstractContextManager[Any]:
    tracer = tracing.active() if count and isinstance(stream, str) else None
    return tracing.NOTHING if tracer is None else tracer.sending(stream, count)


def _plain(target: Any) -> Plain:
    """The session or connection behind a target, without asking it for anything."""
    if isinstance(target, scoped_session | async_scoped_session):
        target = target()
    if isinstance(target, AsyncSession):
        return target.sync_session
    if isinstance(target, AsyncConnection):
        if target.sync_connection is None:
            raise UsageError(
                "This AsyncConnection is not open. Nothing was sent; enter it with `async with`."
            )
        return target.sync_connection
    if isinstance(target, Session | Connection | psycopg.Connection | psycopg.AsyncConnection):
        return target
    raise UsageError(
        f"Cannot send through a {type(target).__name__}: an event belongs to a transaction. "
        "Nothing was sent; pass the SQLAlchemy Session or Connection, or the psycopg connection, "
        "that writes your data."
    )


def _require_safe(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    # psycopg has no public name for it, nor for the number of open blocks below.
    if getattr(connection, "_tpc", None) is not None:
        raise UnsafeTransaction(
            "Sending in a two-phase transaction is not supported: its outcome is decided "
            "elsewhere. Nothing was sent; use a transaction on one database."
        )
    status = connection.info.transaction_status
    # While a pipeline is under way, the status does not tell whether a transaction has begun.
    is_unknown = status == TransactionStatus.ACTIVE and not getattr(
        connection, "_num_transactions", 0
    )
    if connection.autocommit and (status == TransactionStatus.IDLE or is_unknown):
        raise UnsafeTransaction(
            "This psycopg connection is in autocommit mode, so the event could not be atomic with "
            "your data. Nothing was sent; send inside `with connection.transaction():`."
        )
