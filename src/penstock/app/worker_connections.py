"""Opens the connections whose transactions workers share with handlers."""

from __future__ import annotations

from typing import Any, TypeAlias

from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from penstock.stores.async_worker_connection import AsyncWorkerConnection
from penstock.stores.worker_connection import SyncWorkerConnection, WorkerConnection

SessionFactory: TypeAlias = sessionmaker[Any] | async_sessionmaker[Any] | None
"""What makes the application's sessions; one of the other kind than the handler is left alone."""


def open_worker_connection(
    database_url: str, name: str, *, is_async: bool, factory: SessionFactory
) -> WorkerConnection:
    """A connection for the handler of this name. Raises ServerUnavailable."""
    application = f"penstock {name}"
    if is_async:
        return AsyncWorkerConnection(
            database_url, application, factory if isinstance(factory, async_sessionmaker) else None
        )
    return SyncWorkerConnection(
        database_url, application, factory if isinstance(factory, sessionmaker) else None
    )
