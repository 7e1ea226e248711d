"""The event of all measurements, its handlers and the effect that they leave, on both sides.

Nothing here imports Penstock: it listens to every SQLAlchemy session of a process, and the other
side of a comparison must not pay for that.
"""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import psycopg
from pydantic import BaseModel, ConfigDict
from sqlalchemy import BigInteger
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

STREAM = "users"
EVENT_TYPE = "users.created"
METADATA = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tenant": "north",
}

INSERT_ROW = "INSERT INTO bench.ledger (user_id, email, amount_cents) VALUES (%s, %s, %s)"


class User(BaseModel):
    """About 400 bytes of JSON, with a nested object and a list to validate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    user_id: int
    email: str
    name: str
    address: dict[str, str]
    plan: str
    amount_cents: int
    currency: str
    tags: list[str]
    active: bool
    note: str


def user_fields(number: int) -> dict[str, Any]:
    """The fields of the event with this number: always the same."""
    return {
        "user_id": number,
        "email": f"user{number}@example.org",
        "name": f"Ada Lovelace the {number}th",
        "address": {"street": "12 St James's Square", "city": "London", "postcode": "SW1Y 4JH"},
        "plan": "enterprise",
        "amount_cents": 990 + number % 1000,
        "currency": "EUR",
        "tags": ["new", "invited", "newsletter"],
        "active": number % 2 == 0,
        "note": "The engine weaves algebraical patterns just as the loom weaves flowers and leaves;"
        " it might act upon other things besides number.",
    }


# ── handlers ───────────────────────────────────────────────────────────────────────────────────


class Tables(DeclarativeBase):
    """The mapped side of bench.sql."""


class Ledger(Tables):
    """One row per event."""

    __tablename__ = "ledger"
    __table_args__ = {"schema": "bench"}  # noqa: RUF012 - SQLAlchemy's spelling

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    user_id: Mapped[int]
    email: Mapped[str]
    amount_cents: Mapped[int]


def add_row(event: User, session: Session) -> None:
    """One row through the ORM."""
    session.add(Ledger(user_id=event.user_id, email=event.email, amount_cents=event.amount_cents))


def insert_row(event: User, cursor: psycopg.Cursor[Any]) -> None:
    """One row through psycopg."""
    cursor.execute(INSERT_ROW, (event.user_id, event.email, event.amount_cents))


# ── effects ────────────────────────────────────────────────────────────────────────────────────


def ledger_digest(connection: psycopg.Connection[Any], through: int) -> str:
    """A digest of the effects of the first events: equal where both sides did the same."""
    rows = connection.execute(
        "SELECT user_id, email, amount_cents FROM bench.ledger"
        " WHERE user_id <= %s ORDER BY user_id, id",
        (through,),
    ).fetchall()
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def tame_garbage_collection() -> None:
    """What Penstock's worker sets, for the other side too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
