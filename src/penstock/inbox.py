"""Handle once what comes from elsewhere: webhooks, messages of other buses, imported files.

    try:
        inbox.claim(session, "billing", delivery_id)
    except AlreadyHandled:
        ...  # done before: say so (200)
    except LockContention:
        ...  # somebody is at it: have it delivered again (503)

The claim belongs to the caller's transaction and is done when that commits, together with what
else it wrote. Rolled back, be it to a savepoint or by a crash, it never was. How long the inbox
remembers is the setting `inbox_retention_days`: longer than the other side tries again.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from penstock.core.claims import Claim, parse_claim
from penstock.errors import AlreadyHandled, ClaimRefused, LockContention, UsageError
from penstock.stores import inbox_claims
from penstock.stores.queries import DEFAULT_SCHEMA

__all__ = ["AlreadyHandled", "Claim", "ClaimRefused", "LockContention", "claim", "claim_async"]

Transactional: TypeAlias = Session | scoped_session[Any] | Connection | psycopg.Connection[Any]
"""What `claim` takes."""
AsyncTransactional: TypeAlias = (
    AsyncSession | async_scoped_session[Any] | AsyncConnection | psycopg.AsyncConnection[Any]
)
"""What `claim_async` takes."""


def claim(
    session: Transactional, consumer: str, event_id: str | UUID, *, schema: str = DEFAULT_SCHEMA
) -> Claim:
    """Make an event this transaction's to handle, once for every consumer.

    Raises AlreadyHandled if it is done, or was claimed in this very transaction before: then it is
    done if this transaction commits. Raises LockContention while another transaction has it; that
    one may still roll back, so it means not yet, never done. Waits for nobody.
    """
    parsed = parse_claim(consumer, event_id)
    target: Any = session() if isinstance(session, scoped_session) else session
    match target:
        case Session():
            inbox_claims.claim_in_session(target, schema, parsed)
        case Connection():
            inbox_claims.claim_through_sqlalchemy(target, schema, parsed)
        case psycopg.Connection():
            inbox_claims.claim_through_psycopg(target, schema, parsed)
        case AsyncSession() | AsyncConnection() | psycopg.AsyncConnection():
            raise _refused(target, "write `await claim_async(...)`")
        case async_scoped_session():
            raise _refused(target, "write `await claim_async(...)`")
        case _:
            raise _refused(target, "pass the SQLAlchemy or psycopg one that writes your data")
    return parsed


async def claim_async(
    session: AsyncTransactional,
    consumer: str,
    event_id: str | UUID,
    *,
    schema: str = DEFAULT_SCHEMA,
) -> Claim:
    """The same for asynchronous sessions and connections."""
    parsed = parse_claim(consumer, event_id)
    target: Any = session() if isinstance(session, async_scoped_session) else session
    match target:
        case AsyncSession():
            await target.run_sync(inbox_claims.claim_in_session, schema, parsed)
        case AsyncConnection() if target.sync_connection is None:
            raise _refused(target, "enter it first, with `async with`")
        case AsyncConnection():
            await target.run_sync(inbox_claims.claim_through_sqlalchemy, schema, parsed)
        case psycopg.AsyncConnection():
            await inbox_claims.claim_through_psycopg_async(target, schema, parsed)
        case Session() | Connection() | psycopg.Connection() | scoped_session():
            raise _refused(target, "write `claim(...)`, in a thread of its own")
        case _:
            raise _refused(target, "pass the SQLAlchemy or psycopg one that writes your data")
    return parsed


def _refused(target: object, advice: str) -> UsageError:
    kind = f"{type(target).__module__.partition('.')[0]} {type(target).__name__}"
    return UsageError(f"Cannot claim like this through a {kind}. Nothing was claimed; {advice}.")
