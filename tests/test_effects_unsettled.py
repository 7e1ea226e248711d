"""PostgreSQL goes away around a call, or its time is up: what the process knows is not lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from penstock.errors import EffectUnknown, HandlerTimeout, ServerUnavailable
from penstock.pipeline.effects import UNSETTLED_MAX
from penstock.runtime.time_limit import TimeLimit
from penstock.stores.servers import Servers
from tests.databases import new_database
from tests.effects_at_work import EffectBench, Outside, heard
from tests.waiting import wait_until

WAITING = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """One for all tests of this file: each has an event of its own."""
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def bench(database_url: str) -> Iterator[EffectBench]:
    made = EffectBench(database_url)
    yield made
    made.close()


@contextmanager
def locked_out(database_url: str) -> Iterator[None]:
    """Nobody can touch the table for as long as this lasts."""
    with psycopg.connect(database_url) as blocker:
        blocker.execute("LOCK TABLE events.effect")
        yield


# ── the server goes away ───────────────────────────────────────────────────────────────────────


def test_a_result_that_could_not_be_recorded_is_recorded_by_the_next_attempt(
    bench: EffectBench,
) -> None:
    process = bench.process()
    outside = Outside("sent", "sent twice")

    def send() -> Any:
        bench.is_server_away = True
        return outside()

    with pytest.raises(ServerUnavailable):
        process.once(bench.event, "receipt", send, interrupted="bury")
    bench.is_server_away = False
    assert bench.rows() == [("receipt", False, 1)]
    with heard() as signals:
        assert process.once(bench.event, "receipt", send, interrupted="bury") == "sent"
    assert signals == ["Recorded"]
    assert outside.calls == 1
    assert bench.process().once(bench.event, "receipt", send) == "sent"


def test_what_a_rival_recorded_meanwhile_wins_over_a_kept_result(bench: EffectBench) -> None:
    process = bench.process()

    def send() -> str:
        bench.is_server_away = True
        return "kept here"

    with pytest.raises(ServerUnavailable):
        process.once(bench.event, "receipt", send)
    bench.is_server_away = False
    assert bench.process().once(bench.event, "receipt", Outside("rival's")) == "rival's"
    assert process.once(bench.event, "receipt", send) == "rival's"


def test_a_failed_call_that_could_not_be_taken_back_is_known_to_have_failed(
    bench: EffectBench,
) -> None:
    process = bench.process()

    def send() -> None:
        bench.is_server_away = True
        raise ConnectionRefusedError("closed")

    with pytest.raises(ConnectionRefusedError) as failure:
        process.once(bench.event, "receipt", send, interrupted="bury")
    assert "PostgreSQL is away" in failure.value.__notes__[0]
    bench.is_server_away = False
    assert bench.rows() == [("receipt", False, 1)]
    # Another process cannot know; this one does.
    with pytest.raises(EffectUnknown):
        bench.process().once(bench.event, "receipt", Outside("no"), interrupted="bury")
    with heard() as signals:
        assert process.once(bench.event, "receipt", Outside("sent"), interrupted="bury") == "sent"
    assert "Interrupted" not in signals


def test_a_call_that_never_began_is_known_not_to_have_happened(
    bench: EffectBench, database_url: str
) -> None:
    process = bench.process()

    async def scenario() -> None:
        async def send() -> str:
            return "sent"

        once = process.once_async(bench.event, "receipt", send, interrupted="bury")
        task = asyncio.create_task(once)
        with locked_out(database_url):
            await asyncio.to_thread(
                wait_until, lambda: bench.ask(WAITING) == [(1,)], what="the statement waits"
            )
            # The statement goes on in its thread, and is committed; nobody is called.
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    wait_until(lambda: bench.rows() == [("receipt", False, 1)], what="it is on record")
    assert process.once(bench.event, "receipt", Outside("sent"), interrupted="bury") == "sent"


def test_a_lost_connection_is_replaced_in_mid_call(bench: EffectBench) -> None:
    def send() -> str:
        bench.ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'test effects' AND datname = current_database()"
        )
        return "sent"

    assert bench.process().once(bench.event, "receipt", send) == "sent"
    assert bench.rows() == [("receipt", True, 1)]


def test_a_server_that_does_not_answer_is_unavailable(
    bench: EffectBench, database_url: str
) -> None:
    outside = Outside("sent")
    process = bench.process()
    with locked_out(database_url), pytest.raises(ServerUnavailable, match="did not answer"):
        process.once(bench.event, "receipt", outside)
    assert outside.calls == 0
    assert process.once(bench.event, "receipt", outside) == "sent"


def test_a_server_that_ends_what_takes_long_is_unavailable_too(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        if connection.info.server_version < 170000:
            pytest.skip("PostgreSQL 17 is the first to have transaction_timeout")
    limited = f"{database_url}?options=-c%20transaction_timeout%3D50ms"
    outside = Outside("sent")
    with closing(EffectBench(limited)) as bench:
        process = bench.process()
        with locked_out(database_url), pytest.raises(ServerUnavailable, match="did not answer"):
            process.once(bench.event, "receipt", outside)
        assert outside.calls == 0
        assert process.once(bench.event, "receipt", outside) == "sent"


def test_what_is_kept_has_a_limit(bench: EffectBench) -> None:
    process = bench.process()
    bench.is_server_away = True
    for number in range(UNSETTLED_MAX + 20):
        with pytest.raises(ServerUnavailable):
            process.once(bench.event, f"effect {number}", Outside(1))
    assert len(process._unsettled) == UNSETTLED_MAX
    bench.is_server_away = False
    assert process.once(bench.event, f"effect {UNSETTLED_MAX + 19}", Outside(1)) == 1
    assert len(process._unsettled) == UNSETTLED_MAX - 1


# ── the time is up ─────────────────────────────────────────────────────────────────────────────


def test_a_call_whose_time_is_up_is_unknown(bench: EffectBench) -> None:
    limit = TimeLimit(0.2, consumer="shop.mail")
    process = bench.process()

    def endless() -> None:
        while True:
            threading.Event().wait(0.01)

    with pytest.raises(HandlerTimeout):
        limit.call(process.once, bench.event, "receipt", endless)
    assert bench.rows() == [("receipt", False, 1)]
    with pytest.raises(EffectUnknown):
        process.once(bench.event, "receipt", Outside("no"), interrupted="bury")


def test_a_handler_whose_time_is_up_leaves_the_shared_connection_alone(
    bench: EffectBench, database_url: str
) -> None:
    process = bench.process()
    outside = Outside("sent")
    limit = TimeLimit(0.2, consumer="shop.mail")
    with locked_out(database_url), pytest.raises(HandlerTimeout):
        limit.call(process.once, bench.event, "receipt", outside)
    # Whoever comes next finds it in order; and nobody had been called.
    assert outside.calls == 0
    assert process.once(bench.event, "receipt", outside, interrupted="bury") == "sent"
