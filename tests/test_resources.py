"""What handlers share: made once in a worker, waited for, and closed when the worker ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from penstock import Context, Guarantee, Pipeline, TimerMessage
from penstock.errors import RegistrationError
from penstock.telemetry import signals
from penstock.testing import deliver
from tests.events import Cancelled, Placed
from tests.test_consumer import heard
from tests.test_seams import working
from tests.waiting import SOON_SECONDS, wait_until


class Client:
    """A connection to somewhere else."""


class AsyncClient:
    """The same for asyncio."""

    loop: asyncio.AbstractEventLoop
    is_over: asyncio.Event


@contextmanager
def pipeline_for(database_url: str, redis_url: str | None) -> Iterator[Pipeline]:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)
    yield pipeline
    pipeline.engine.dispose()


def test_all_handlers_of_a_worker_share_one_and_it_is_closed_at_the_end(
    database_url: str, redis_url: str
) -> None:
    happened: list[str] = []
    seen: list[tuple[int, Client]] = []
    with pipeline_for(database_url, redis_url) as pipeline:

        @pipeline.resource
        def client() -> Iterator[Client]:
            happened.append("opened")
            yield Client()
            happened.append("closed")

        @pipeline.consumer("orders", name="bill", lanes=2)
        def bill(client: Client, event: Placed, session: Session) -> None:
            assert session.is_active
            seen.append((event.n, client))

        @pipeline.consumer(
            "orders", name="tell", guarantee=Guarantee.AT_LEAST_ONCE, start="earliest"
        )
        async def tell(event: Placed, context: Context, there: Client) -> None:
            seen.append((10 + event.n, there))

        @pipeline.timer("reminders")
        def remind(body: dict[str, Any], there: Client) -> None:
            seen.append((body["n"], there))

        pipeline.send_now("orders", Placed(n=1))
        pipeline.send_now("orders", Placed(n=2))
        pipeline.timers.publish({"n": 20}, "reminders", activate_in=timedelta())
        assert happened == []
        roles = ("publisher", "consumer:bill", "consumer:tell", "timer:reminders")
        with working(pipeline, *roles):
            wait_until(lambda: len(seen) == 5, what="all handlers have been called")
            assert happened == ["opened"]
        assert happened == ["opened", "closed"]
        assert sorted(n for n, _ in seen) == [1, 2, 11, 12, 20]
        assert len({id(client) for _, client in seen}) == 1
        # The next worker has its own; one without handlers that ask for it has none.
        with working(pipeline, "publisher"):
            pass
        assert happened == ["opened", "closed"]


def test_one_that_lives_on_the_event_loop_is_opened_used_and_closed_in_it(
    database_url: str,
) -> None:
    happened: list[str] = []
    with pipeline_for(database_url, None) as pipeline:

        @pipeline.resource
        async def client() -> AsyncIterator[AsyncClient]:
            async with asyncio.timeout(SOON_SECONDS):  # which wants one task
                made = AsyncClient()
                made.loop = asyncio.get_running_loop()
                yield made
                assert asyncio.get_running_loop() is made.loop
                happened.append("closed")

        @pipeline.consumer("orders", name="tell")
        async def tell(event: Placed, client: AsyncClient) -> None:
            assert asyncio.get_running_loop() is client.loop
            happened.append("handled")

        pipeline.send_now("orders", Placed(n=1))
        with working(pipeline, "publisher", "consumer:tell"):
            wait_until(lambda: bool(happened), what="the event is handled")
        assert happened == ["handled", "closed"]


def test_its_handlers_wait_for_one_that_cannot_be_opened_and_others_go_on(
    database_url: str,
) -> None:
    tries: list[int] = []
    seen: list[str] = []
    with pipeline_for(database_url, None) as pipeline:

        @pipeline.resource
        def client() -> Iterator[Client]:
            tries.append(1)
            if len(tries) < 3:
                raise ConnectionRefusedError("nobody is there")
            yield Client()

        @pipeline.consumer("orders", name="tell")
        def tell(event: Placed, client: Client, context: Context) -> None:
            seen.append(f"told at attempt {context.attempt}")

        @pipeline.consumer("orders", name="bill")
        def bill(event: Placed) -> None:
            seen.append("billed")

        pipeline.send_now("orders", Placed(n=1))
        with (
            heard(signals.ServerLost) as lost,
            heard(signals.ServerFound) as found,
            working(pipeline, "publisher", "consumer:bill", "consumer:tell"),
        ):
            wait_until(lambda: len(seen) == 2, what="both have handled it")
    assert sorted(seen) == ["billed", "told at attempt 1"]
    assert len(tries) == 3
    (away,) = lost
    assert away.server == "the resource client"
    assert "nobody is there" in away.error
    assert [back.server for back in found] == ["the resource client"]


def test_one_that_ends_by_itself_is_opened_anew_and_no_event_pays_for_it(
    database_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[AsyncClient] = []
    tries: list[int] = []
    seen: list[str] = []
    has_ended = threading.Event()
    with pipeline_for(database_url, redis_url) as pipeline:

        @pipeline.resource
        async def client() -> AsyncIterator[AsyncClient]:
            tries.append(1)
            if len(tries) in (2, *range(4, 9)):
                raise ConnectionRefusedError("not back yet")
            try:
                async with asyncio.TaskGroup() as beside:
                    made = AsyncClient()
                    made.loop, made.is_over = asyncio.get_running_loop(), asyncio.Event()
                    task = beside.create_task(lose(made.is_over))
                    opened.append(made)
                    yield made
                    task.cancel()
            finally:
                has_ended.set()

        async def lose(is_over: asyncio.Event) -> None:
            await is_over.wait()
            raise ConnectionResetError("the other side is gone")

        def end(client: AsyncClient) -> None:
            has_ended.clear()
            client.loop.call_soon_threadsafe(client.is_over.set)
            assert has_ended.wait(SOON_SECONDS)
            # Its task is over by the time that the loop has come to another one.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), client.loop).result(SOON_SECONDS)

        @pipeline.consumer(
            "orders", name="tell", guarantee=Guarantee.AT_MOST_ONCE, start="earliest"
        )
        async def tell(event: Placed, client: AsyncClient) -> None:
            seen.append(f"told {event.n} by {opened.index(client)}")

        @pipeline.timer("reminders")
        async def remind(body: int, client: AsyncClient, message: TimerMessage) -> None:
            seen.append(f"reminded {body} by {opened.index(client)} at attempt {message.attempt}")

        pipeline.send_now("orders", Placed(n=1))
        with working(pipeline, "publisher", "consumer:tell", "timer:reminders"):
            wait_until(lambda: len(seen) == 1, what="the first is handled")
            end(opened[0])
            pipeline.timers.publish(3, "reminders", activate_in=timedelta())
            wait_until(lambda: len(seen) == 2, what="the timer is handled")
            end(opened[1])
            pipeline.send_now("orders", Placed(n=2))
            wait_until(lambda: len(seen) == 3, what="the second is handled")
    assert seen == ["told 1 by 0", "reminded 3 by 1 at attempt 1", "told 2 by 2"]
    assert "the resource client ended by itself" in caplog.text
    assert "the other side is gone" in caplog.text


def test_an_error_at_the_end_is_logged_and_ends_nobody(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    with pipeline_for(database_url, None) as pipeline:

        @pipeline.resource
        def client() -> Iterator[Client]:
            yield Client()
            raise LookupError("the other side has hung up")

        @pipeline.consumer("orders", name="tell")
        def tell(event: Placed, client: Client) -> None:
            seen.append(event.n)

        pipeline.send_now("orders", Placed(n=1))
        with (
            caplog.at_level(logging.ERROR, "penstock"),
            working(pipeline, "publisher", "consumer:tell"),
        ):
            wait_until(lambda: bool(seen), what="the event is handled")
    assert "resource client failed while it was closed" in caplog.text


def test_two_workers_in_one_process_close_it_when_both_have_ended(database_url: str) -> None:
    happened: list[str] = []
    seen: list[str] = []
    with pipeline_for(database_url, None) as pipeline:

        @pipeline.resource
        def client() -> Iterator[Client]:
            happened.append("opened")
            yield Client()
            happened.append("closed")

        @pipeline.consumer("orders", name="bill")
        def bill(event: Placed, client: Client) -> None:
            seen.append("billed")

        @pipeline.consumer("orders", name="tell")
        def tell(event: Placed, client: Client) -> None:
            seen.append("told")

        pipeline.send_now("orders", Placed(n=1))
        with working(pipeline, "publisher", "consumer:bill"):
            with working(pipeline, "consumer:tell"):
                wait_until(lambda: len(seen) == 2, what="both have handled it")
            assert happened == ["opened"]
        assert happened == ["opened", "closed"]


def test_a_test_gives_its_own() -> None:
    def handler(event: Placed, client: Client) -> Client:
        return client

    async def asynchronous(client: AsyncClient, event: Placed) -> AsyncClient:
        return client

    mine, other = Client(), AsyncClient()
    assert deliver(handler, Placed(n=1), resources={Client: mine}) is mine
    awaited = deliver(asynchronous, Placed(n=1), resources={AsyncClient: other, Client: mine})
    assert asyncio.run(awaited) is other
    with pytest.raises(RegistrationError, match="'client' is neither an event nor something known"):
        deliver(handler, Placed(n=1))
    with pytest.raises(RegistrationError, match=r"'client' is neither.*by its resources="):
        deliver(asynchronous, Placed(n=1))


# ── registering ────────────────────────────────────────────────────────────────────────────────


def no_yield() -> Client:
    return Client()


def of_something(size: int) -> Iterator[Client]:
    yield Client()


def untold():  # type: ignore[no-untyped-def]  # what is tested
    yield Client()


def no_iterator() -> Client:  # type: ignore[misc]
    yield Client()


def a_session() -> Iterator[Session]:
    yield Session()


def an_event() -> Generator[Placed, None, None]:
    yield Placed(n=1)


def a_list() -> Iterator[list[Client]]:
    yield []


def some_events() -> Iterator[Placed | Cancelled]:
    yield Placed(n=1)


def a_body() -> Iterator[dict[str, Any]]:
    yield {}


def text() -> Iterator[str]:
    yield ""


def anything() -> Iterator[Any]:
    yield None


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_yield, "with a yield"),
        (Client(), "with a yield"),
        (of_something, "takes parameters"),
        (untold, "does not tell what it yields"),
        (no_iterator, "does not tell what it yields"),
        (a_session, "annotation Session means something else"),
        (an_event, "annotation Placed means something else"),
        (a_list, "means something else"),
        (some_events, "means something else"),
        (a_body, "means something else"),
        (text, "annotation str means something else"),
        (anything, "means something else"),
    ],
)
def test_what_cannot_be_a_resource_is_refused_with_a_sentence(function: Any, why: str) -> None:
    with pytest.raises(RegistrationError, match=why) as refused:
        Pipeline("shop").resource(function)
    assert "Write def http() -> Iterator[httpx.Client]" in str(refused.value)


def test_two_of_a_kind_and_those_that_do_not_fit_a_handler_are_refused() -> None:
    pipeline = Pipeline("shop")

    @pipeline.resource
    def first() -> Iterator[Client]:
        yield Client()

    with pytest.raises(RegistrationError, match="'first' makes the same"):

        @pipeline.resource
        def second() -> Iterator[Client]:
            yield Client()

    @pipeline.resource
    async def asynchronous() -> AsyncIterator[AsyncClient]:
        yield AsyncClient()

    with pytest.raises(RegistrationError, match=r"async generator 'asynchronous'.*async def"):

        @pipeline.consumer("orders", name="bill")
        def bill(event: Placed, client: AsyncClient) -> None: ...

    with pytest.raises(RegistrationError, match=r"async generator 'asynchronous'.*async def"):

        @pipeline.timer("reminders")
        def remind(body: str, client: AsyncClient) -> None: ...

    with pytest.raises(RegistrationError, match="it takes no event"):

        @pipeline.consumer("orders", name="tell")
        def tell(client: Client) -> None: ...
