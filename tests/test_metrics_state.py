"""What metrics say of a real pipeline: its state, what its consumers did, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from penstock.core.retry import Retry
from penstock.core.settings import Settings
from penstock.errors import FatalError
from penstock.ops import metrics_state
from penstock.ops.metrics_state import MetricsState
from penstock.telemetry import metrics, signals
from penstock.telemetry.meters import Meters
from penstock.telemetry.metrics import Distribution, Instrument
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.test_consumer import heard

CONSUMER = ("test.consumer", "orders")


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    yield bench
    bench.close()


@pytest.fixture
def meters() -> Iterator[Meters]:
    meters = Meters()
    meters.start()
    yield meters
    meters.stop()


def state(settings: Settings) -> dict[Instrument, dict[tuple[str, ...], Any]]:
    with closing(MetricsState(settings)) as reader:
        return by_instrument(reader.read())


def by_instrument(readings: Any) -> dict[Instrument, dict[tuple[str, ...], Any]]:
    found: dict[Instrument, dict[tuple[str, ...], Any]] = {}
    for reading in readings:
        found.setdefault(reading.instrument, {})[reading.labels] = reading.value
    return found


def handle(event: Placed) -> None:
    if event.n == 3:
        raise FatalError("no")
    if event.n == 5:
        raise ValueError("not yet")


def ignore(event: Placed) -> None:
    """Nothing to do."""


def test_state_follows_events_on_their_way(bench: Workbench) -> None:
    bench.send(7)
    bench.connection.execute("UPDATE events.outbox_event SET created_at = now() - '90 s'::interval")
    before = state(bench.settings)
    assert before[metrics.OUTBOX_BACKLOG] == {("orders",): 7}
    assert 90_000 <= before[metrics.OUTBOX_AGE]["orders",] < 180_000
    bench.publish()
    consumer = bench.consumer(handle, retry=Retry(attempts_max=5))
    waiting = state(bench.settings)
    assert waiting[metrics.OUTBOX_BACKLOG] == {("orders",): 0}
    assert waiting[metrics.OUTBOX_AGE] == {("orders",): 0}
    assert waiting[metrics.LAG_EVENTS] == {CONSUMER: 7}
    assert 90_000 <= waiting[metrics.LAG_MS][CONSUMER] < 180_000
    assert waiting[metrics.HOT_LOG_LENGTH] == {("orders",): 7}
    assert waiting[metrics.HOT_LOG_BYTES]["orders",] > 500
    run_until_idle(consumer)
    after = state(bench.settings)
    assert after[metrics.LAG_EVENTS] == after[metrics.LAG_MS] == {CONSUMER: 0}
    assert after[metrics.DEAD_LETTERS] == {CONSUMER: 1}
    assert after[metrics.PARKED_KEYS] == {CONSUMER: 1}
    assert after[metrics.STREAM_HEAD] == after[metrics.STREAM_PUBLISHED] == {("orders",): 7}
    assert metrics.ARCHIVE_LAG_MS not in after
    assert set(after) <= set(metrics.STATE)


def test_what_was_numbered_and_is_not_in_the_hot_log_is_still_in_the_outbox(
    bench: Workbench,
) -> None:
    bench.send(3)
    bench.publish()
    bench.connection.execute("UPDATE events.stream SET published = 1")
    bench.connection.execute("UPDATE events.outbox_event SET created_at = now() - '90 s'::interval")
    found = state(bench.settings)
    assert found[metrics.OUTBOX_BACKLOG] == {("orders",): 2}
    assert found[metrics.OUTBOX_AGE]["orders",] >= 90_000


def test_an_archive_that_is_behind_is_told_of(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    bench.connection.execute("SELECT events.ensure_archiver('orders')")
    bench.connection.execute("UPDATE events.outbox_event SET created_at = now() - '90 s'::interval")
    found = state(bench.settings)
    assert found[metrics.ARCHIVE_LAG_EVENTS] == {("orders",): 3}
    assert found[metrics.ARCHIVE_LAG_MS]["orders",] >= 90_000


def test_of_a_server_that_is_away_nothing_is_told(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    away = Settings(database_url="postgresql://nobody@127.0.0.1:1/none")
    assert state(away) == {}
    without_redis = Settings(
        database_url=bench.settings.database_url, redis_url="redis://127.0.0.1:1/0"
    )
    found = state(without_redis)
    assert metrics.HOT_LOG_LENGTH not in found
    assert found[metrics.STREAM_HEAD] == {("orders",): 1}


def test_state_is_told_though_the_connection_broke_meanwhile(bench: Workbench) -> None:
    with closing(MetricsState(bench.settings)) as reader:
        assert reader.read()
        bench.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'penstock metrics' AND datname = current_database()"
        )
        assert reader.read()


def test_a_consumer_that_is_far_behind_is_told_of_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_state, "FAR_BEHIND_EVENTS", 10)
    bench.send(10)
    bench.publish()
    consumer = bench.consumer(ignore, batch_size=1)
    with heard(signals.ConsumerFarBehind) as told, closing(MetricsState(bench.settings)) as reader:
        reader.read()
        reader.read()
        consumer.step()
        consumer.step()
        reader.read()
        bench.send(5)
        bench.publish()
        reader.read()
        assert [(each.consumer, each.lag_events) for each in told] == [("test.consumer", 10)]
        run_until_idle(consumer)
        reader.read()
        bench.send(12)
        bench.publish()
        reader.read()
    assert len(told) == 2


def test_consumers_count_what_is_committed_and_time_every_call(
    bench: Workbench, meters: Meters
) -> None:
    bench.send(7)
    bench.send(2, event_type="cancelled")
    bench.send(4, event_type="unheard-of")
    bench.publish()
    run_until_idle(bench.consumer(handle, retry=Retry(attempts_max=5)))
    found = by_instrument(meters.sums.readings())
    counted = {
        instrument.name.rpartition(".")[2]: found[instrument][CONSUMER]
        for instrument in (
            *(metrics.HANDLED, metrics.SKIPPED, metrics.FAILED, metrics.PARKED, metrics.BURIED),
            metrics.UNKNOWN_EVENT_TYPE,
        )
    }
    # A batch that was rolled back has handled nothing, and its events are skipped once.
    assert counted.pop("unknown_event_type") >= 4
    assert counted == {"handled": 5, "skipped": 6, "failed": 2, "parked": 1, "buried": 1}
    assert found[metrics.TIER_READS] == {("test.consumer", "hot"): 13}
    assert found[metrics.PUBLISHED] == {("orders",): 13}
    assert found[metrics.HOT_LOG_REFILLED] == {("orders",): 0}
    published = found[metrics.PUBLISH_SECONDS]["orders",]
    calls, batches = found[metrics.HANDLER_SECONDS][CONSUMER], found[metrics.BATCH_EVENTS][CONSUMER]
    assert isinstance(calls, Distribution)
    assert isinstance(batches, Distribution)
    # Seven calls and those that were made again: a failed batch is taken apart.
    assert sum(calls.counts) > 7
    assert batches.total == 11, "those that failed were settled by no attempt"
    assert 0 < published.total < 60


def test_a_hot_log_that_is_filled_again_counts_as_that(bench: Workbench, meters: Meters) -> None:
    # The log is filled again for those who have not read it.
    bench.consumer(ignore)
    bench.send(5)
    bench.publish()
    assert bench.settings.redis_url is not None
    with closing(redis.Redis.from_url(bench.settings.redis_url)) as client:
        client.flushdb()
    bench.send(1)
    bench.publish()
    found = by_instrument(meters.sums.readings())
    assert found[metrics.PUBLISHED] == {("orders",): 6}
    assert found[metrics.HOT_LOG_REFILLED] == {("orders",): 5}
