"""Who is told of dead letters: a function after the commit, a stream within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock import Event, FatalError, Pipeline, Retry, StreamEvent
from penstock.core.wire import Entry, decode_body
from penstock.pipeline.context import Context
from penstock.telemetry import bus
from penstock.telemetry.signals import EventBuried, KeyBacklogged, KeyHeld
from tests.test_seams import working
from tests.waiting import wait_until

ALERTS = "alerts"
ROLES = ("publisher", "consumer:count", "consumer:watch")


class Placed(Event, type="hooks.placed", version=1, key="key"):
    key: str
    n: int


@pytest.fixture
def pipeline(database_url: str, redis_url: str) -> Iterator[Pipeline]:
    before = {kind: list(found) for kind, found in bus._by_type.items()}
    pipeline = Pipeline(
        "shop",
        database_url=database_url,
        redis_url=redis_url,
        dead_letter_stream=ALERTS,
        parked_per_key_max=2,
    )
    yield pipeline
    pipeline.engine.dispose()
    bus._by_type.clear()
    bus._by_type.update(before)


@pytest.mark.parametrize(
    ("options", "kinds", "signal_types"),
    [
        ({}, ["buried"], [EventBuried]),
        ({"on_exhausted": "hold"}, ["held", "backlogged"], [KeyHeld, KeyBacklogged]),
    ],
)
def test_trouble_is_told_to_a_function_and_sent_as_an_event(
    pipeline: Pipeline, options: dict[str, Any], kinds: list[str], signal_types: list[type]
) -> None:
    told: list[Any] = []
    alerts: list[dict[str, Any]] = []

    @pipeline.consumer("orders", name="count", **options)
    def count(event: Placed) -> None:
        if event.n == 1:
            raise FatalError("no use")

    @pipeline.consumer(ALERTS, name="watch")
    def watch(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        alerts.append(event.payload)

    pipeline.on_dead_letter(told.append)
    for n in range(1, 4):
        pipeline.send_now("orders", Placed(key="a", n=n))
    with working(pipeline, *ROLES):
        wait_until(lambda: len(alerts) == len(kinds), what=lambda: str(alerts))
    assert [alert["kind"] for alert in alerts] == kinds
    assert [type(signal) for signal in told] == signal_types
    assert alerts[0]["consumer"] == "shop.count"
    assert alerts[0]["position"] == 1
    assert alerts[0]["reason"] == "fatal"
    assert "payload" not in alerts[0]


def test_a_failing_watcher_does_not_alarm_itself(pipeline: Pipeline) -> None:
    @pipeline.consumer("orders", name="count", retry=Retry.none())
    def count(event: Placed) -> None:
        raise ValueError

    @pipeline.consumer(ALERTS, name="watch", retry=Retry.none())
    def watch(event: StreamEvent[Any]) -> None:
        raise ValueError

    buried: list[str] = []
    pipeline.on_dead_letter(lambda signal: buried.append(signal.consumer))
    pipeline.send_now("orders", Placed(key="a", n=1))
    with working(pipeline, *ROLES):
        wait_until(lambda: len(buried) == 2, what=lambda: str(buried))
    assert sorted(buried) == ["shop.count", "shop.watch"]
    with psycopg.connect(pipeline.settings.database_url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM events.outbox_event WHERE stream_name = %s", (ALERTS,)
        ).fetchone()
    assert found == (1,)


def test_another_pipelines_trouble_is_not_told(pipeline: Pipeline) -> None:
    told: list[Any] = []
    pipeline.on_dead_letter(told.append)
    bus.emit(EventBuried("other.count", 1, "", ""))
    assert told == []


# ── rehearsals ─────────────────────────────────────────────────────────────────────────────────


def entry_of(pipeline: Pipeline, n: int) -> Entry:
    uuid = pipeline.send_now("orders", Placed(key="a", n=n))
    with psycopg.connect(pipeline.settings.database_url) as connection:
        row = connection.execute(
            "UPDATE events.outbox_event o SET position = 1, term = 1 WHERE event_uuid = %s"
            " RETURNING events.entry(o, gen_random_uuid())",
            (uuid,),
        ).fetchone()
        connection.rollback()
    assert row is not None
    return decode_body("orders", 1, row[0].encode())


@pytest.mark.parametrize(
    ("n", "outcome", "detail"),
    [
        (1, "would succeed", ""),
        (2, "would fail", "ValueError: not today"),
        (3, "would call", "'charge'"),
        (4, "would fail", "CommitInTransactionError"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_rehearsal_runs_the_handler_and_leaves_nothing(
    pipeline: Pipeline, n: int, outcome: str, detail: str, is_async: bool
) -> None:
    calls: list[str] = []

    def count(event: Placed, cursor: psycopg.Cursor[Any], context: Context) -> None:
        assert context.is_dry_run
        cursor.execute("INSERT INTO stray VALUES (%s)", (event.n,))
        if event.n == 2:
            raise ValueError("not today")
        if event.n == 3:
            context.once("charge", calls.append, "charged")
        if event.n == 4:
            cursor.connection.commit()

    async def count_async(
        event: Placed, cursor: psycopg.AsyncCursor[Any], context: Context
    ) -> None:
        await cursor.execute("INSERT INTO stray VALUES (%s)", (event.n,))
        if event.n == 2:
            raise ValueError("not today")
        if event.n == 3:
            context.once("charge", calls.append, "charged")
        if event.n == 4:
            await cursor.connection.commit()

    with psycopg.connect(pipeline.settings.database_url) as connection:
        connection.execute("CREATE TABLE stray (n int)")
    pipeline.consumer("orders", name="count")(count_async if is_async else count)
    rehearsal = pipeline.rehearse("shop.count", entry_of(pipeline, n))
    assert rehearsal.outcome == outcome
    assert detail in rehearsal.detail
    assert calls == []
    with psycopg.connect(pipeline.settings.database_url) as connection:
        left = connection.execute(
            "SELECT (SELECT count(*) FROM stray), (SELECT count(*) FROM events.effect),"
            " (SELECT count(*) FROM events.processed_event), (SELECT count(*) FROM events.seal)"
        ).fetchone()
    assert left == (0, 0, 0, 0)
