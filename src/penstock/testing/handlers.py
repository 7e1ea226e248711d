"""Runs one handler on one event with all the rules of a worker, and no servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
import psycopg
import pydantic_core
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.core.events import Event, RawEvent
from penstock.core.failures import as_contract_error
from penstock.core.handlers import require_done
from penstock.core.outgoing import UNSET, Limits, OutgoingEvent, encode_event
from penstock.core.settings import MEBIBYTE
from penstock.core.wire import Entry
from penstock.errors import UsageError
from penstock.pipeline.context import Context
from penstock.pipeline.handling import Handling, current_handling
from penstock.pipeline.resources import given
from penstock.pipeline.sending import peek_pending
from penstock.pipeline.signature import HandlerPlan, View, read_signature
from penstock.stores.guard import Guard, guard_session, unguard_session
from penstock.stores.identity import new_event_uuid
from penstock.testing.effects import RememberedEffects

STREAM = "test"
ORIGIN = "00000000-0000-7000-8000-000000000000"
_PLAIN = (Session, psycopg.Connection)
_ASYNC = (AsyncSession, psycopg.AsyncConnection)


@dataclass(frozen=True, slots=True)
class SentEvent:
    """One event that was sent and waits for its transaction's commit."""

    stream_name: str
    event_type: str
    version: int
    key: str | None
    payload: Any
    metadata: dict[str, Any]
    event_uuid: UUID


def sent(session: Any) -> list[SentEvent]:
    """What was sent through a session or connection and is not committed yet, in order."""
    return [_as_sent(event) for event in peek_pending(session)]


def deliver(
    handler: Callable[..., Any],
    event: Event | RawEvent,
    *,
    session: Any = None,
    connection: Any = None,
    stream: str = STREAM,
    position: int = 1,
    key: str | None = None,
    metadata: dict[str, Any] | None = None,
    attempt: int = 1,
    resources: Mapping[Any, Any] | None = None,
) -> Any:
    """Call a handler as a worker would: decoded event, guarded transaction, context.

    `context.once` calls, and remembers until this delivery ends. `resources` are what the handler
    gets in the place of those of `@pipeline.resource`, by annotation: {httpx.Client: client}.

    Raises what the handler raises; a commit or rollback of its session raises as in production,
    also where the handler swallows the refusal. What it does through the driver, or as SQL text, is
    looked at by workers only. An `async def` handler gives an awaitable.
    """
    name = getattr(handler, "__name__", "handler")
    plan = read_signature(handler, name, given(resources or {}))
    entry = _entry(event, stream, position, key, metadata)
    lent = {
        View.SESSION: session,
        View.CONNECTION: connection,
        View.CURSOR: connection.cursor() if connection is not None else None,
        View.CONTEXT: Context(
            f"test.{plan.function.__name__}", entry, attempt, effects=RememberedEffects()
        ),
    }
    argument = _decoded(plan, entry)
    _require_lent(plan, lent)
    arguments = [
        ([argument] if plan.is_batch else argument) if view is None else lent[view]
        for view in plan.parameters
    ]
    if plan.is_async:
        return _call_async(plan.function, arguments, session, entry)
    with _as_worker(session, entry) as guard:
        result = plan.function(*arguments)
        require_done(result)
        if session is not None:
            session.flush()
    guard.require_kept()
    return result


async def _call_async(
    handler: Callable[..., Any], arguments: list[Any], session: Any, entry: Entry
) -> Any:
    with _as_worker(session, entry) as guard:
        result = await handler(*arguments)
        require_done(result)
        if session is not None:
            await session.flush()
    guard.require_kept()
    return result


@contextmanager
def _as_worker(session: Any, entry: Entry) -> Iterator[Guard]:
    """The surroundings of a handler: a guarded session and the event that causes what it sends."""
    guard = Guard()
    guarded = session.sync_session if isinstance(session, AsyncSession) else session
    token = current_handling.set(Handling(entry))
    if guarded is not None:
        guard_session(guarded, guard)
    try:
        with guard.lent():
            yield guard
    finally:
        if guarded is not None:
            unguard_session(guarded)
        current_handling.reset(token)


def _decoded(plan: HandlerPlan, entry: Entry) -> Any:
    if not plan.names(entry):
        raise UsageError(
            f"{plan.function.__name__} does not name {entry.event_type!r}: a worker would "
            "count the event as skipped. Deliver an event that it handles."
        )
    try:
        return plan.decode(entry)
    except ValidationError as error:
        raise as_contract_error(error, entry.event_type) from None


def _require_lent(plan: HandlerPlan, lent: dict[View, Any]) -> None:
    for view in plan.parameters:
        if view is not None and lent[view] is None:
            argument = "session" if view is View.SESSION else "connection"
            raise UsageError(f"The handler wants a {argument}: deliver(…, {argument}=…).")
    unfit = _PLAIN if plan.is_async else _ASYNC
    for each in lent.values():
        if isinstance(each, unfit):
            kind = "an async def" if plan.is_async else "a plain"
            raise UsageError(
                f"A {type(each).__name__} does not fit {kind} handler, and no worker would lend "
                "it. Deliver with the other kind."
            )


def _entry(
    event: Event | RawEvent,
    stream: str,
    position: int,
    key: str | None,
    metadata: dict[str, Any] | None,
) -> Entry:
    """The event as a worker would read it: encoded and decoded again."""
    outgoing = encode_event(
        stream,
        event,
        event_uuid=new_event_uuid(),
        limits=Limits(MEBIBYTE, MEBIBYTE),
        key=UNSET if key is None else key,
        metadata=metadata,
    )
    return Entry(
        stream_name=stream,
        position=position,
        origin=ORIGIN,
        event_uuid=str(outgoing.event_uuid),
        event_type=outgoing.event_type,
        version=outgoing.version,
        fields=(
            b"1",
            str(position).encode(),
            b"",
            b"0",
            orjson.dumps(outgoing.key),
            outgoing.metadata.encode(),
        ),
        payload=outgoing.payload.encode(),
    )


def _as_sent(event: OutgoingEvent) -> SentEvent:
    return SentEvent(
        event.stream_name,
        event.event_type,
        event.version,
        event.key,
        pydantic_core.from_json(event.payload),
        orjson.loads(event.metadata),
        event.event_uuid,
    )
