"""What the tests of the inbox share: every kind of session and connection, asked alike."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from penstock.inbox import Claim, claim, claim_async
from penstock.stores.postgres import sqlalchemy_url

SYNC = ("Session", "scoped_session", "Connection", "psycopg.Connection")
ASYNC = ("AsyncSession", "async_scoped_session", "AsyncConnection", "psycopg.AsyncConnection")
KINDS = (*SYNC, *ASYNC)
CONSUMER = "shop.webhook"


class Undo(Exception):
    """Raised in tests to leave a block by rolling it back."""


@dataclass(frozen=True)
class Caller:
    """Somebody who claims, through a session or connection of one kind."""

    kind: str
    session: Any

    async def claim(self, event_id: str | UUID, consumer: str = CONSUMER, **options: Any) -> Claim:
        if self.kind in ASYNC:
            return await claim_async(self.session, consumer, event_id, **options)
        return claim(self.session, consumer, event_id, **options)

    async def execute(self, statement: str) -> None:
        is_psycopg = self.kind.startswith("psycopg")
        await _awaited(self.session.execute(statement if is_psycopg else text(statement)))

    async def write(self, event_id: str) -> None:
        """What handling the event comes to."""
        if self.kind.startswith("psycopg"):
            query = "INSERT INTO effect VALUES (%s)"
            await _awaited(self.session.execute(query, [event_id]))
        else:
            statement = text("INSERT INTO effect VALUES (:id)")
            await _awaited(self.session.execute(statement, {"id": event_id}))

    async def commit(self) -> None:
        await _awaited(self.session.commit())

    async def rollback(self) -> None:
        await _awaited(self.session.rollback())

    async def claim_and_undo(self, event_id: str) -> None:
        """Claim inside a savepoint, and roll that back."""
        begin = "transaction" if self.kind.startswith("psycopg") else "begin_nested"
        savepoint = getattr(self.session, begin)()
        with suppress(Undo):
            if self.kind in ASYNC:
                async with savepoint:
                    await self.claim(event_id)
                    raise Undo
            else:
                with savepoint:
                    await self.claim(event_id)
                    raise Undo


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


@asynccontextmanager
async def caller(kind: str, url: str, **options: Any) -> AsyncIterator[Caller]:
    """A caller with a connection of its own; `options` are those of the engine or connection."""
    session: Any
    if kind == "psycopg.Connection":
        with psycopg.connect(url, **options) as session:
            yield Caller(kind, session)
            session.rollback()
    elif kind == "psycopg.AsyncConnection":
        async with await psycopg.AsyncConnection.connect(url, **options) as session:
            yield Caller(kind, session)
            await session.rollback()
    elif kind in SYNC:
        with _sync(kind, url, options) as session:
            yield Caller(kind, session)
    else:
        async with _async(kind, url, options) as session:
            yield Caller(kind, session)


def _sync(kind: str, url: str, options: dict[str, Any]) -> Any:
    engine = create_engine(sqlalchemy_url(url), poolclass=NullPool, **options)
    if kind == "Connection":
        return engine.connect()
    return Session(engine) if kind == "Session" else _Scoped(sessionmaker(engine))


def _async(kind: str, url: str, options: dict[str, Any]) -> Any:
    engine = create_async_engine(sqlalchemy_url(url), poolclass=NullPool, **options)
    if kind == "AsyncConnection":
        return engine.connect()
    return AsyncSession(engine) if kind == "AsyncSession" else _AsyncScoped(engine)


class _Scoped:
    """A scoped_session as a context."""

    def __init__(self, factory: sessionmaker[Session]) -> None:
        self._session = scoped_session(factory)

    def __enter__(self) -> scoped_session[Session]:
        return self._session

    def __exit__(self, *_error: object) -> None:
        self._session.remove()


class _AsyncScoped:
    """An async_scoped_session as a context."""

    def __init__(self, engine: Any) -> None:
        self._session = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

    async def __aenter__(self) -> async_scoped_session[AsyncSession]:
        return self._session

    async def __aexit__(self, *_error: object) -> None:
        await self._session.remove()


async def hold(kind: str, url: str, event_id: str) -> None:
    """A process of its own: claim, say so, and keep the transaction open until the end."""
    async with caller(kind, url) as holder:
        await holder.claim(event_id)
        sys.stdout.write("claimed\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    asyncio.run(hold(*sys.argv[1:]))
