"""Applications test their handlers with the rules of production and without servers."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError
from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import CommitInTransactionError, Context, Event, Pipeline, RawEvent, StreamEvent
from penstock.errors import ContractError, UsageError
from penstock.testing import deliver, sent


class Base(DeclarativeBase): ...


class Invoice(Base):
    __tablename__ = "invoice"
    order_id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Placed(Event, type="testing.placed", version=1, key="order_id"):
    order_id: int
    cents: int


class Billed(Event, type="orders.billed", version=1):
    order_id: int


class Other(Event, type="orders.other", version=1): ...


pipeline = Pipeline("shop", database_url="postgresql://nowhere/none")


def bill(event: Placed, session: Session, context: Context) -> str:
    session.add(Invoice(order_id=event.order_id, cents=event.cents))
    pipeline.send(session, "invoices", Billed(order_id=event.order_id), key=f"o{event.order_id}")
    return context.idempotency_key("mail")


def sqlite_session() -> Session:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    return Session(engine)


def test_a_handler_runs_on_the_session_of_the_test() -> None:
    with sqlite_session() as session:
        key = deliver(bill, Placed(order_id=1, cents=990), session=session)
        assert session.scalars(select(Invoice.cents)).all() == [990]
        assert len(key) == 64
        (event,) = sent(session)
        assert (event.stream_name, event.event_type) == ("invoices", "orders.billed")
        assert event.key == "o1"
        assert event.payload == {"order_id": 1}
        assert "causation_id" in event.metadata
        session.rollback()
        assert sent(session) == []


def test_a_commit_is_refused_as_in_production() -> None:
    def committing(event: Placed, session: Session) -> None:
        session.commit()

    def swallowing(event: Placed, session: Session) -> None:
        try:
            session.commit()
        except CommitInTransactionError:
            return

    with sqlite_session() as session:
        for handler in (committing, swallowing):
            with pytest.raises(CommitInTransactionError):
                deliver(handler, Placed(order_id=1, cents=1), session=session)
        session.commit()


def test_what_a_handler_raises_comes_out() -> None:
    def failing(event: StreamEvent[Placed]) -> None:
        raise LookupError(event.payload.order_id)

    with pytest.raises(LookupError):
        deliver(failing, Placed(order_id=1, cents=1))


def test_a_payload_that_does_not_fit_is_refused_as_in_production() -> None:
    def handle(event: Placed) -> None: ...

    with pytest.raises(ContractError, match="cents"):
        deliver(handle, RawEvent("testing.placed", {"order_id": 1, "cents": "many"}))


def test_an_async_handler_is_awaited() -> None:
    seen: list[Placed] = []

    async def handler(events: list[Placed]) -> None:
        seen.extend(events)

    asyncio.run(deliver(handler, Placed(order_id=1, cents=1)))
    assert seen == [Placed(order_id=1, cents=1)]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UsageError, match=r"does not name 'orders\.other'"):
        deliver(bill, Other(), session=Session())
    with pytest.raises(UsageError, match=r"deliver\(…, session=…\)"):
        deliver(bill, Placed(order_id=1, cents=1))
    with pytest.raises(ValidationError):
        Placed.model_validate({"order_id": 1, "cents": 1, "extra": 1})


def test_an_async_session_is_guarded_too() -> None:
    async def handler(event: Placed, session: AsyncSession) -> None:
        await session.commit()

    async def scenario() -> None:
        with pytest.raises(CommitInTransactionError):
            await deliver(handler, Placed(order_id=1, cents=1), session=AsyncSession())

    asyncio.run(scenario())


def test_a_session_of_the_other_kind_is_refused() -> None:
    async def bill_async(event: Placed, session: AsyncSession) -> None: ...

    def passes_by(event: Placed) -> None: ...

    for handler in (bill, passes_by):
        with pytest.raises(UsageError, match="AsyncSession does not fit a plain handler"):
            deliver(handler, Placed(order_id=1, cents=990), session=AsyncSession())
    with pytest.raises(UsageError, match="Session does not fit an async def handler"):
        deliver(bill_async, Placed(order_id=1, cents=990), session=Session())
