"""The ways to have an event sent later, as a pipeline offers them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any
from uuid import UUID

from penstock.app.send_surface import SendSurface
from penstock.core.events import Event, RawEvent
from penstock.core.outgoing import UNSET
from penstock.core.recurrence import CatchUp
from penstock.core.timers import OnConflict, PendingTimer
from penstock.pipeline.scheduling import Scheduler

PENDING_LIMIT = 1000


class TimerSurface(SendSurface):
    """What `Pipeline` has for timers. Unlike a send, everything here is I/O, at once."""

    @cached_property
    def scheduler(self) -> Scheduler:
        """What checks, stores and finds timers for this pipeline."""
        return Scheduler(self._sender)

    def schedule(
        self,
        session: Any,
        stream: str,
        event: Event | RawEvent,
        *,
        at: datetime | None = None,
        delay: timedelta | None = None,
        every: timedelta | None = None,
        cron: str | None = None,
        zone: str | None = None,
        catch_up: CatchUp = "one",
        timer_id: str | UUID | None = None,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        on_conflict: OnConflict = "replace",
    ) -> str:
        """Have an event sent at a time, after a delay, or again and again; returns the timer's id.

        The timer belongs to the session's transaction. An id that is taken is replaced, kept, or
        raises TimerExists. Raises InvalidTimer for a time that leaves doubt.
        """
        timer = self.scheduler.new_timer(
            stream,
            event,
            at=at,
            delay=delay,
            every=every,
            cron=cron,
            zone=zone,
            catch_up=catch_up,
            timer_id=timer_id,
            key=key,
            metadata=metadata,
            on_conflict=on_conflict,
        )
        return self.scheduler.schedule(session, timer)

    async def schedule_async(
        self,
        session: Any,
        stream: str,
        event: Event | RawEvent,
        *,
        at: datetime | None = None,
        delay: timedelta | None = None,
        every: timedelta | None = None,
        cron: str | None = None,
        zone: str | None = None,
        catch_up: CatchUp = "one",
        timer_id: str | UUID | None = None,
        key: Any = UNSET,
        metadata: Mapping[str, Any] | None = None,
        on_conflict: OnConflict = "replace",
    ) -> str:
        """The same for asynchronous sessions and connections."""
        timer = self.scheduler.new_timer(
            stream,
            event,
            at=at,
            delay=delay,
            every=every,
            cron=cron,
            zone=zone,
            catch_up=catch_up,
            timer_id=timer_id,
            key=key,
            metadata=metadata,
            on_conflict=on_conflict,
        )
        return await self.scheduler.schedule_async(session, timer)

    def cancel(self, session: Any, timer_id: str | UUID) -> bool:
        """Take a timer back, if the session's transaction commits.

        False: there is none of that id, or its event was sent already. Waits for whoever is firing
        it just now, so that the answer is final.
        """
        return self.scheduler.cancel(session, timer_id)

    async def cancel_async(self, session: Any, timer_id: str | UUID) -> bool:
        """The same for asynchronous sessions and connections."""
        return await self.scheduler.cancel_async(session, timer_id)

    def reschedule(
        self,
        session: Any,
        timer_id: str | UUID,
        *,
        at: datetime | None = None,
        delay: timedelta | None = None,
    ) -> bool:
        """Move a timer's next firing; one that was held is let go.

        False: there is none of that id, or its event was sent already. A recurring timer goes on
        from there.
        """
        return self.scheduler.reschedule(session, timer_id, at, delay)

    async def reschedule_async(
        self,
        session: Any,
        timer_id: str | UUID,
        *,
        at: datetime | None = None,
        delay: timedelta | None = None,
    ) -> bool:
        """The same for asynchronous sessions and connections."""
        return await self.scheduler.reschedule_async(session, timer_id, at, delay)

    def pending(
        self,
        session: Any = None,
        *,
        before: datetime | None = None,
        stream: str | None = None,
        limit: int = PENDING_LIMIT,
    ) -> list[PendingTimer]:
        """The timers that wait, the next one first; without a session, on a connection of its own.

        Only those due before a moment, or of one stream, if asked; held ones too.
        """
        if session is not None:
            return self.scheduler.pending(session, before, stream, limit)
        with self.engine.connect() as connection:
            return self.scheduler.pending(connection, before, stream, limit)

    async def pending_async(
        self,
        session: Any = None,
        *,
        before: datetime | None = None,
        stream: str | None = None,
        limit: int = PENDING_LIMIT,
    ) -> list[PendingTimer]:
        """The same for asynchronous sessions and connections."""
        if session is not None:
            return await self.scheduler.pending_async(session, before, stream, limit)
        async with self.async_engine.connect() as connection:
            return await self.scheduler.pending_async(connection, before, stream, limit)
