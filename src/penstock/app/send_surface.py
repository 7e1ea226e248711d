"""The ways to send, as a pipeline offers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from penstock.core.events import Event, RawEvent
from penstock.core.outgoing import UNSET
from penstock.pipeline.sending import Sender


class SendSurface:
    """What `Pipeline` has for sending; everything else of it is elsewhere."""

    @property
    def engine(self) -> Engine:
        """A SQLAlchemy engine on the pipeline's database."""
        raise NotImplementedError

    @property
    def async_engine(self) -> AsyncEngine:
        """The same for asyncio."""
        raise NotImplementedError

    @property
    def _sender(self) -> Sender:
        raise NotImplementedError

    def send(
        self,
        session: Any,
        stream: str,
        event: Event | RawEvent,
        *,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuid: UUID | None = None,
    ) -> UUID:
        """Send an event in the session's transaction; it exists if and only if that commits."""
        return self._sender.send(
            session, stream, event, key=key, metadata=metadata, event_uuid=event_uuid
        )

    def send_many(
        self,
        session: Any,
        stream: str,
        events: Iterable[Event | RawEvent],
        *,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuids: Sequence[UUID] | None = None,
    ) -> list[UUID]:
        """Send events in order, in one round trip."""
        return self._sender.send_many(
            session, stream, events, key=key, metadata=metadata, event_uuids=event_uuids
        )

    async def send_async(
        self,
        session: Any,
        stream: str,
        event: Event | RawEvent,
        *,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuid: UUID | None = None,
    ) -> UUID:
        """The same for a psycopg AsyncConnection, where sending is I/O."""
        return await self._sender.send_async(
            session, stream, event, key=key, metadata=metadata, event_uuid=event_uuid
        )

    async def send_many_async(
        self,
        session: Any,
        stream: str,
        events: Iterable[Event | RawEvent],
        *,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuids: Sequence[UUID] | None = None,
    ) -> list[UUID]:
        """The same for several events."""
        return await self._sender.send_many_async(
            session, stream, events, key=key, metadata=metadata, event_uuids=event_uuids
        )

    def send_now(
        self,
        stream: str,
        event: Event | RawEvent,
        *,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuid: UUID | None = None,
    ) -> UUID:
        """Send an event in a transaction of its own."""
        with Session(self.engine) as session, session.begin():
            return self.send(
                session, stream, event, key=key, metadata=metadata, event_uuid=event_uuid
            )

    async def send_now_async(
        self,
        stream: str,
        event: Event | RawEvent,
        *,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        event_uuid: UUID | None = None,
    ) -> UUID:
        """The same for asyncio."""
        async with AsyncSession(self.async_engine) as session, session.begin():
            return self.send(
                session, stream, event, key=key, metadata=metadata, event_uuid=event_uuid
            )
