"""What an application may take for a handler, and what such a one does to its worker."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Event, Pipeline, Retry
from penstock.errors import RegistrationError, UsageError
from penstock.testing import deliver
from tests.events import Placed
from tests.settling import settle

INSERT = text("INSERT INTO effect (n) VALUES (:n)")
OUTCOMES = "SELECT position, outcome FROM events.processed_event ORDER BY position"
TROUBLED, EVENTS = 2, 3
SETTLED = [(1, "handled"), (TROUBLED, "dead"), (3, "handled")]


def a_generator(event: Placed, session: Session) -> Iterator[None]:
    session.execute(INSERT, {"n": event.n})
    yield


async def an_async_generator(event: Placed, session: AsyncSession) -> AsyncIterator[None]:
    await session.execute(INSERT, {"n": event.n})
    yield


class AnObject:
    def __call__(self, event: Placed) -> None: ...


def with_more(event: Placed, more: int) -> None: ...


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (a_generator, "has a yield"),
        (an_async_generator, "has a yield"),
        (AnObject(), "is not a function"),
        (functools.partial(with_more, more=1), "is not a function"),
        (None, "is not a function"),
    ],
)
def test_what_nobody_could_call_is_refused_where_it_is_written(
    handler: Callable[..., Any], why: str
) -> None:
    pipeline = Pipeline("shop", database_url="postgresql://nowhere", redis_url=None)
    with pytest.raises(RegistrationError, match=why):
        pipeline.consumer("orders", name="bill")(handler)
    with pytest.raises(RegistrationError, match=why):
        pipeline.timer("reminders")(handler)


def test_a_handler_may_use_what_is_defined_further_down() -> None:
    pipeline = Pipeline("shop", database_url="postgresql://nowhere", redis_url=None)

    class Sent(Event, type="handler_kinds.sent", version=1): ...

    @pipeline.consumer("orders", name="bill")
    def bill(event: Sent) -> None:
        further_down(Sent())

    def further_down(_event: Sent) -> None: ...

    assert "bill" in pipeline.consumers


def outcomes(database_url: str, handler: Callable[..., Any]) -> list[Any]:
    """What became of the events, once all are settled."""
    settle(database_url, handler, EVENTS, retry=Retry.none())
    with psycopg.connect(database_url) as connection:
        return connection.execute(OUTCOMES).fetchall()


async def later(event: Placed, session: Session) -> None:
    raise AssertionError


def a_plain_wrapper(event: Placed, session: Session) -> Coroutine[Any, Any, None] | None:
    """Around something that wants to be awaited."""
    return later(event, session) if event.n == TROUBLED else None


def a_hidden_generator(event: Placed, session: Session) -> Iterator[None] | None:
    return a_generator(event, session) if event.n == TROUBLED else None


async def an_async_wrapper(
    event: Placed, session: AsyncSession
) -> Coroutine[Any, Any, None] | AsyncIterator[None] | None:
    return an_async_generator(event, session) if event.n == TROUBLED else None


@pytest.mark.parametrize("handler", [a_plain_wrapper, a_hidden_generator, an_async_wrapper])
def test_what_a_handler_leaves_for_somebody_else_to_do_has_not_been_handled(
    database_url: str, handler: Callable[..., Any]
) -> None:
    assert outcomes(database_url, handler) == SETTLED
    with psycopg.connect(database_url) as connection:
        ((message,),) = connection.execute(
            "SELECT error_message FROM events.dead_letter"
        ).fetchall()
    assert "which nobody runs" in message


def test_deliver_does_not_take_it_for_handled_either() -> None:
    def handle(event: Placed) -> Iterator[None]:
        return iter_of(event)

    def iter_of(event: Placed) -> Iterator[None]:
        yield

    with pytest.raises(UsageError, match="which nobody runs"):
        deliver(handle, Placed(n=1))


# ── async handlers that would end their worker ─────────────────────────────────────────────────


async def leaves() -> None:
    sys.exit(4)


async def is_interrupted() -> None:
    raise KeyboardInterrupt


async def exits_in_a_task() -> None:
    await asyncio.gather(leaves())


async def is_interrupted_in_a_task() -> None:
    await asyncio.create_task(is_interrupted())


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise LookupError


async def cancels_itself_at_last() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize(
    "trouble",
    [exits_in_a_task, is_interrupted_in_a_task, stops_the_loop, cancels_itself_at_last],
)
def test_an_async_handler_ends_neither_its_loop_nor_its_worker(
    database_url: str, trouble: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    async def handle(event: Placed, session: AsyncSession) -> None:
        await session.execute(INSERT, {"n": event.n})
        if event.n == TROUBLED:
            await trouble()

    assert outcomes(database_url, handle) == SETTLED


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit


def test_an_error_whose_text_would_end_the_worker(database_url: str) -> None:
    def handle(event: Placed) -> None:
        if event.n == TROUBLED:
            raise Unspeakable

    assert outcomes(database_url, handle) == SETTLED
