"""The application of `penstock demo`: orders are sent, and two consumers have effects for each.

It is written as any application would be; the demo's worker processes load it with
`--app penstock.cli.demo_app:pipeline`.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import BigInteger, DateTime, Identity, func
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Event, Pipeline, StreamEvent
from penstock.telemetry.signals import WorkerStarted

STREAM = "orders"
PIDS_FOLDER = "DEMO_PIDS_FOLDER"
"""The environment names the folder in which workers leave their process ids."""


class Base(DeclarativeBase):
    """The tables of the demo."""


class Customer(Base):
    """Counts the orders of each customer; its row lock puts them into an order of commits."""

    __tablename__ = "customer"
    name: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]


class Order(Base):
    """The business row, written in the transaction that sends the event."""

    __tablename__ = "placed_order"
    event_uuid: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    number: Mapped[int]
    cents: Mapped[int]


class _Effect:
    """What a handler writes; `serial` tells the order in which effects were made."""

    serial: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    event_uuid: Mapped[UUID]
    customer: Mapped[str]
    number: Mapped[int]
    written_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.clock_timestamp()
    )


class Invoice(_Effect, Base):
    """The effect of billing."""

    __tablename__ = "invoice"


class Shipment(_Effect, Base):
    """The effect of shipping."""

    __tablename__ = "shipment"


EFFECTS: dict[str, type[Invoice] | type[Shipment]] = {"billing": Invoice, "shipping": Shipment}


class OrderPlaced(Event, type="orders.placed", version=1, key="customer"):
    """A customer has placed an order, the nth of this customer."""

    customer: str
    number: int
    cents: int


Placed = StreamEvent[OrderPlaced]


def build_pipeline(**addresses: Any) -> Pipeline:
    """The pipeline. Its settings are written out, so that nobody's environment changes the demo."""
    pipeline = Pipeline(
        "demo",
        schema="events",
        redis_prefix="penstock",
        wakeup="notify",
        lease_seconds=5.0,
        lease_renew_seconds=1.5,
        publish_batch_size=500,
        **addresses,
    )
    pipeline.stream(STREAM, OrderPlaced)

    @pipeline.consumer(STREAM, name="billing")
    def bill(event: Placed, session: Session) -> None:
        order = event.payload
        session.add(
            Invoice(event_uuid=event.event_uuid, customer=order.customer, number=order.number)
        )

    @pipeline.consumer(STREAM, name="shipping")
    def ship(event: Placed, cursor: psycopg.Cursor) -> None:
        order = event.payload
        cursor.execute(
            "INSERT INTO shipment (event_uuid, customer, number) VALUES (%s, %s, %s)",
            (event.event_uuid, order.customer, order.number),
        )

    return pipeline


pipeline = build_pipeline()


@pipeline.on(WorkerStarted)
def leave_pid(signal: WorkerStarted) -> None:
    """Tell the demo which process to kill."""
    if folder := os.environ.get(PIDS_FOLDER):
        path = Path(folder, signal.worker)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(str(signal.pid), encoding="utf-8")
        unfinished.replace(path)
