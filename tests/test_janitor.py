"""The janitor: old rows that nobody needs go, in small batches; everything else stays."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from penstock.core.events import StreamEvent
from penstock.core.options import ConsumerOptions
from penstock.core.settings import Settings
from penstock.errors import SettingsError
from penstock.pipeline.janitor import Janitor
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop
from penstock.stores import cleanup
from penstock.stores.cleanup import Cleanup
from penstock.stores.queries import Queries
from penstock.stores.starts import Starts
from penstock.stores.streams import Streams
from penstock.telemetry import signals
from tests.bench_of_one import Workbench, run_until_idle
from tests.publishing import hot_ids, ids, send, told, worker
from tests.waiting import wait_until

WAITING = "SELECT 1 FROM pg_locks WHERE NOT granted"
OLD_DAYS = 7.01
YOUNG_DAYS = 6.99
SOON_SECONDS = 45.0
LOCKS = {
    "processed_event": b"SELECT 1 FROM events.processed_event WHERE position = 5 FOR UPDATE",
    "outbox_event": b"SELECT 1 FROM events.outbox_event WHERE position = 5 FOR UPDATE",
}
LOCK_INBOX = "SELECT 1 FROM events.inbox_event WHERE event_id = '5' FOR UPDATE"
LOCK_EFFECTS = "SELECT 1 FROM events.effect FOR UPDATE"


class Books:
    """Rows as the line would leave them, of any age."""

    def __init__(self, database_url: str) -> None:
        self.connection = psycopg.connect(database_url, autocommit=True)

    def stream(self, name: str = "orders", *, head: int = 10, published: int | None = None) -> None:
        self.connection.execute(
            "INSERT INTO events.stream (name, origin, head, published)"
            " SELECT %s, id, %s, %s FROM events.origin",
            (name, head, head if published is None else published),
        )

    def consumer(
        self,
        name: str = "shop.bill",
        *checkpoints: int,
        stream: str = "orders",
        lanes: int = 0,
        epoch: int = 1,
        start: int = 1,
    ) -> None:
        """A consumer, and a lease row for every checkpoint given."""
        self.connection.execute(
            "INSERT INTO events.consumer (name, stream_name, start_position, lanes, epoch)"
            " VALUES (%s, %s, %s, %s, %s)",
            (name, stream, start, lanes or max(1, len(checkpoints)), epoch),
        )
        for lane, checkpoint in enumerate(checkpoints):
            role = f"consumer:{name}/{epoch}/{lane}" if lanes or epoch > 1 else f"consumer:{name}"
            self.lease(role, checkpoint, stream=stream, epoch=epoch, lane=lane)

    def lease(
        self, role: str, checkpoint: int, *, stream: str = "orders", epoch: int = 1, lane: int = 0
    ) -> None:
        self.connection.execute(
            "INSERT INTO events.stream_lease (stream_name, role, checkpoint, epoch, lane)"
            " VALUES (%s, %s, %s, %s, %s)",
            (stream, role, checkpoint, epoch, lane),
        )

    def settled(
        self,
        count: int = 10,
        *,
        consumer: str = "shop.bill",
        days: float = OLD_DAYS,
        outcome: str = "handled",
    ) -> None:
        self.connection.execute(
            "INSERT INTO events.processed_event"
            " (consumer, event_uuid, position, outcome, processed_at)"
            " SELECT %s, events.uuid7(), n, %s,"
            "        now() - make_interval(secs => %s) + n * interval '1 microsecond'"
            "   FROM generate_series(1, %s) AS n",
            (consumer, outcome, days * 86_400, count),
        )

    def outbox(
        self,
        count: int = 10,
        *,
        first: int = 1,
        stream: str = "orders",
        days: float = OLD_DAYS,
    ) -> None:
        self.connection.execute(
            "INSERT INTO events.outbox_event"
            " (event_uuid, stream_name, event_type, payload, position, term, published_at)"
            " SELECT events.uuid7(), %s, 'placed', '{}', n, 1, now() - make_interval(secs => %s)"
            "   FROM generate_series(%s::bigint, %s) AS n",
            (stream, days * 86_400, first, first + count - 1),
        )

    def effects_of_settled(self, effect: str = "mail", *, is_done: bool = True) -> None:
        """What context.once has recorded for every event that is settled, just before that."""
        self.connection.execute(
            "INSERT INTO events.effect (consumer, event_uuid, effect, is_done, host, started_at)"
            " SELECT consumer, event_uuid, %s, %s, 'here', processed_at - interval '1 second'"
            "   FROM events.processed_event",
            (effect, is_done),
        )

    def effects(
        self, count: int = 10, *, consumer: str = "shop.bill", days: float = OLD_DAYS
    ) -> None:
        """The same for events that are not settled."""
        self.connection.execute(
            "INSERT INTO events.effect (consumer, event_uuid, effect, host, started_at)"
            " SELECT %s, events.uuid7(), 'mail', 'here',"
            "        now() - make_interval(secs => %s) + n * interval '1 microsecond'"
            "   FROM generate_series(1, %s) AS n",
            (consumer, days * 86_400, count),
        )

    def claims(self, count: int = 10, *, days: float) -> None:
        self.connection.execute(
            "INSERT INTO events.inbox_event (consumer, event_id, handled_at)"
            " SELECT 'shop.hook', n, now() - make_interval(secs => %s)"
            "   FROM generate_series(1, %s) AS n",
            (days * 86_400, count),
        )

    def operation(
        self, events: int = 10, *, ended_days_ago: float | None, started_days_ago: float = 2000
    ) -> int:
        """A redrive of so many events; None: it is not over."""
        row = self.connection.execute(
            "INSERT INTO events.operation (kind, requested_by, started_at, ended_at)"
            " VALUES ('redrive', 'somebody', now() - make_interval(secs => %s),"
            "         now() - make_interval(secs => %s))"
            " RETURNING id",
            (
                started_days_ago * 86_400,
                None if ended_days_ago is None else ended_days_ago * 86_400,
            ),
        ).fetchone()
        assert row is not None
        self.connection.execute(
            "INSERT INTO events.operation_event (operation_id, consumer, event_uuid, position)"
            " SELECT %s, 'shop.bill', events.uuid7(), n FROM generate_series(1, %s) AS n",
            (row[0], events),
        )
        return int(row[0])

    def effects_left(self, consumer: str = "shop.bill") -> int:
        query = "SELECT count(*) FROM events.effect WHERE consumer = %s"
        return self._numbers(query, consumer)[0]

    def claims_left(self) -> int:
        return self._numbers("SELECT count(*) FROM events.inbox_event")[0]

    def operations_left(self) -> list[int]:
        return self._numbers("SELECT id FROM events.operation ORDER BY id")

    def operation_events_left(self) -> int:
        return self._numbers("SELECT count(*) FROM events.operation_event")[0]

    def settled_left(self, consumer: str = "shop.bill") -> list[int]:
        return self._numbers(
            "SELECT position FROM events.processed_event WHERE consumer = %s ORDER BY position",
            consumer,
        )

    def outbox_left(self, stream: str = "orders") -> list[int]:
        return self._numbers(
            "SELECT position FROM events.outbox_event"
            " WHERE stream_name = %s AND position IS NOT NULL ORDER BY position",
            stream,
        )

    def _numbers(self, query: str, *parameters: Any) -> list[int]:
        rows = self.connection.execute(query.encode(), parameters).fetchall()
        return [number for (number,) in rows]


@pytest.fixture
def books(database_url: str) -> Iterator[Books]:
    books = Books(database_url)
    yield books
    books.connection.close()


@pytest.fixture
def settings(database_url: str) -> Settings:
    return Settings(database_url=database_url)


@contextmanager
def janitor(
    settings: Settings, stop_requested: Callable[[], bool] = lambda: False
) -> Iterator[Janitor]:
    """A janitor that is stepped by the test, as one process would have it."""
    keeper = LeaseKeeper(settings)
    stage = Janitor(settings, keeper, stop_requested=stop_requested)
    try:
        yield stage
    finally:
        stage.close()
        keeper.close()


def tidy(settings: Settings) -> int:
    """One whole round; returns how many rows went."""
    with janitor(settings) as stage:
        return finish_round(stage)


def finish_round(stage: Janitor) -> int:
    pruned = 0
    while not (progress := stage.step()).is_idle:
        pruned += progress.moved
    return pruned


# ── settled rows ───────────────────────────────────────────────────────────────────────────────


def test_settled_rows_go_when_they_are_old_and_below_the_floor(
    books: Books, settings: Settings
) -> None:
    books.consumer("shop.bill", 7)
    books.settled(10)
    assert tidy(settings) == 7
    assert books.settled_left() == [8, 9, 10]


def test_settled_rows_stay_for_their_retention(books: Books, settings: Settings) -> None:
    books.consumer("shop.bill", 10)
    books.settled(10, days=YOUNG_DAYS)
    assert tidy(settings) == 0
    assert tidy(replace(settings, settled_retention_days=6.98)) == 10


@pytest.mark.parametrize("outcome", ["parked", "dead"])
def test_what_is_parked_or_dead_stays_settled(
    books: Books, settings: Settings, outcome: str
) -> None:
    books.consumer("shop.bill", 10)
    books.settled(10, outcome=outcome)
    assert tidy(settings) == 0


@pytest.mark.parametrize("outcome", ["skipped", "discarded"])
def test_every_other_outcome_goes(books: Books, settings: Settings, outcome: str) -> None:
    books.consumer("shop.bill", 10)
    books.settled(10, outcome=outcome)
    assert tidy(settings) == 10


def test_the_slowest_lane_is_the_floor(books: Books, settings: Settings) -> None:
    books.consumer("shop.bill", 9, 4, 6, lanes=3)
    books.settled(10)
    tidy(settings)
    assert books.settled_left() == [5, 6, 7, 8, 9, 10]


def test_only_lanes_of_the_current_epoch_count(books: Books, settings: Settings) -> None:
    books.consumer("shop.bill", 6, 8, lanes=2, epoch=3)
    books.lease("consumer:shop.bill/2/0", 1, epoch=2)
    books.settled(10)
    tidy(settings)
    assert books.settled_left() == [7, 8, 9, 10]


def test_a_lane_without_a_row_has_settled_nothing(books: Books, settings: Settings) -> None:
    books.consumer("shop.bill", 9, 9, lanes=3, start=4)
    books.settled(10)
    tidy(settings)
    assert books.settled_left() == [4, 5, 6, 7, 8, 9, 10]


def test_a_consumer_whose_name_begins_like_anothers_is_another(
    books: Books, settings: Settings
) -> None:
    books.consumer("shop.bill", 9)
    books.consumer("shop.bill_order", 2)
    books.settled(10)
    books.settled(10, consumer="shop.bill_order")
    tidy(settings)
    assert books.settled_left() == [10]
    assert books.settled_left("shop.bill_order") == [3, 4, 5, 6, 7, 8, 9, 10]


def test_rows_of_a_consumer_that_is_gone_go_after_the_retention(
    books: Books, settings: Settings
) -> None:
    books.settled(3, consumer="shop.gone")
    books.settled(2, consumer="shop.gone", days=YOUNG_DAYS)
    assert tidy(settings) == 3
    assert books.settled_left("shop.gone") == [1, 2]


def test_rows_that_must_stay_do_not_hide_those_behind_them(
    books: Books, settings: Settings
) -> None:
    books.consumer("shop.stuck", 0)
    books.consumer("shop.bill", 10)
    books.settled(25, consumer="shop.stuck", days=9)
    books.settled(10, days=8)
    assert tidy(replace(settings, cleanup_batch_size=10)) == 10
    assert len(books.settled_left("shop.stuck")) == 25


# ── the outbox ─────────────────────────────────────────────────────────────────────────────────


def test_published_events_go_when_they_are_old_and_everybody_has_them(
    books: Books, settings: Settings
) -> None:
    books.stream()
    books.consumer("shop.bill", 10)
    books.outbox(10)
    assert tidy(settings) == 10


def test_published_events_stay_for_their_retention(books: Books, settings: Settings) -> None:
    books.stream()
    books.outbox(10, days=YOUNG_DAYS)
    assert tidy(settings) == 0
    assert tidy(replace(settings, outbox_retention_days=6.98)) == 10


def test_what_the_hot_log_has_not_confirmed_stays(books: Books, settings: Settings) -> None:
    books.stream(published=6)
    books.outbox(10)
    tidy(settings)
    assert books.outbox_left() == [7, 8, 9, 10]


def test_the_slowest_consumer_holds_the_outbox(books: Books, settings: Settings) -> None:
    books.stream()
    books.consumer("shop.bill", 10)
    books.consumer("shop.slow", 9, 3, lanes=2)
    books.outbox(10)
    tidy(settings)
    assert books.outbox_left() == [4, 5, 6, 7, 8, 9, 10]


def test_a_consumer_that_never_ran_holds_the_outbox_from_its_start(
    books: Books, settings: Settings
) -> None:
    books.stream()
    books.consumer("shop.new", start=5)
    books.outbox(10)
    tidy(settings)
    assert books.outbox_left() == [5, 6, 7, 8, 9, 10]


def test_a_consumer_of_another_database_holds_the_outbox(books: Books, settings: Settings) -> None:
    books.stream()
    books.connection.execute("INSERT INTO events.remote_consumer VALUES ('far.away', 'orders', 2)")
    books.outbox(10)
    tidy(settings)
    assert books.outbox_left()[0] == 3


def test_the_archiver_holds_the_outbox_where_there_is_one(books: Books, settings: Settings) -> None:
    books.stream()
    books.lease("archiver", 4)
    books.outbox(10)
    tidy(settings)
    assert books.outbox_left()[0] == 5


def test_readers_of_one_stream_do_not_hold_another(books: Books, settings: Settings) -> None:
    books.stream("orders")
    books.stream("invoices")
    books.consumer("shop.bill", 2, stream="invoices")
    books.outbox(10)
    books.outbox(10, stream="invoices")
    tidy(settings)
    assert books.outbox_left() == []
    assert books.outbox_left("invoices")[0] == 3


def test_unnumbered_events_are_never_pruned(books: Books, settings: Settings) -> None:
    books.stream(head=3)
    books.outbox(3)
    books.connection.execute(
        "INSERT INTO events.outbox_event"
        " (event_uuid, stream_name, event_type, payload, created_at, published_at)"
        " VALUES (events.uuid7(), 'orders', 'T', '{}', '2020-01-01Z', '2020-01-01Z')"
    )
    assert tidy(settings) == 3
    left = books.connection.execute("SELECT count(*) FROM events.outbox_event").fetchone()
    assert left == (1,)


def test_what_is_kept_has_no_gap(books: Books, settings: Settings) -> None:
    """A clock that was set back makes later events look older."""
    books.stream()
    books.outbox(3)
    books.outbox(1, first=4, days=YOUNG_DAYS)
    books.outbox(6, first=5)
    tidy(settings)
    assert books.outbox_left() == [4, 5, 6, 7, 8, 9, 10]


# ── effects ────────────────────────────────────────────────────────────────────────────────────


def test_what_once_recorded_goes_with_the_settled_row(books: Books, settings: Settings) -> None:
    books.consumer("shop.bill", 7)
    books.settled(10)
    books.effects_of_settled("mail")
    books.effects_of_settled("invoice", is_done=False)
    with told(signals.RowsPruned) as rounds:
        assert tidy(settings) == 7
    assert signals.RowsPruned("effect", 14) in rounds
    assert books.effects_left() == 6


def test_what_once_recorded_stays_as_long_as_the_settled_row(
    books: Books, settings: Settings
) -> None:
    """The call was begun before the retention, the event settled within it."""
    books.consumer("shop.bill", 10)
    books.settled(10, days=YOUNG_DAYS)
    books.effects_of_settled()
    books.connection.execute("UPDATE events.effect SET started_at = '2020-01-01Z'")
    tidy(settings)
    assert books.effects_left() == 10


@pytest.mark.parametrize("outcome", ["parked", "dead"])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_once_recorded_stays_while_its_event_is_parked_or_dead(
    books: Books, settings: Settings, outcome: str, is_known: bool
) -> None:
    if is_known:
        books.consumer("shop.bill", 10)
    books.settled(10, outcome=outcome)
    books.effects_of_settled()
    tidy(settings)
    assert books.effects_left() == 10


def test_what_once_recorded_for_an_event_that_is_not_settled_stays_however_old(
    books: Books, settings: Settings
) -> None:
    """The consumer was stopped in the middle; when it comes back it must not call again."""
    books.consumer("shop.bill", 3)
    books.effects(10, days=1000)
    tidy(settings)
    assert books.effects_left() == 10


def test_what_once_recorded_for_a_consumer_that_is_gone_goes_after_the_retention(
    books: Books, settings: Settings
) -> None:
    books.effects(10, consumer="shop.gone")
    books.effects(5, consumer="shop.gone", days=YOUNG_DAYS)
    assert tidy(settings) == 10
    assert books.effects_left("shop.gone") == 5


@pytest.mark.parametrize("table", ["parked_event", "dead_letter"])
def test_nothing_goes_that_belongs_to_a_parked_event_or_a_dead_letter(
    books: Books, settings: Settings, table: str
) -> None:
    books.effects(1, consumer="shop.gone")
    more = ", event_type, version, reason" if table == "dead_letter" else ""
    values = ", 'placed', 1, 'fatal'" if table == "dead_letter" else ""
    books.connection.execute(
        f"INSERT INTO events.{table}"  # noqa: S608 - names of this file
        f" (consumer, stream_name, position, event_uuid, key_hash, entry{more})"
        f" SELECT consumer, 'orders', 1, event_uuid, 1, ''{values} FROM events.effect".encode()
    )
    tidy(settings)
    assert books.effects_left("shop.gone") == 1


def test_records_that_must_stay_do_not_hide_those_behind_them(
    books: Books, settings: Settings
) -> None:
    books.consumer("shop.stopped", 0)
    books.effects(25, consumer="shop.stopped", days=9)
    books.effects(10, consumer="shop.gone", days=8)
    assert tidy(replace(settings, cleanup_batch_size=10)) == 10
    assert books.effects_left("shop.stopped") == 25


def test_settled_rows_and_what_once_recorded_go_together_or_not_at_all(
    books: Books, settings: Settings
) -> None:
    books.settled(10)
    books.effects_of_settled()
    with psycopg.connect(settings.database_url) as other:
        other.execute(LOCK_EFFECTS)
        with told(signals.PruningFailed) as failures:
            assert tidy(settings) == 0
    assert [failure.table for failure in failures] == ["processed_event"]
    assert (len(books.settled_left()), books.effects_left()) == (10, 10)


# ── the inbox ──────────────────────────────────────────────────────────────────────────────────


def test_claims_go_after_their_retention_in_batches(books: Books, settings: Settings) -> None:
    books.claims(25, days=30.01)
    books.connection.execute("UPDATE events.inbox_event SET consumer = 'shop.other'")
    books.claims(5, days=29.99)
    with (
        janitor(replace(settings, cleanup_batch_size=10)) as stage,
        told(signals.RowsPruned) as rounds,
    ):
        steps = [stage.step().moved for _ in range(8)]
        assert steps == [0, 0, 10, 10, 5, 0, 0, 0]
    assert rounds == [signals.RowsPruned("inbox_event", 25)]
    assert books.claims_left() == 5
    assert tidy(replace(settings, inbox_retention_days=29.98)) == 5


def test_trails_go_after_the_retention_in_batches(books: Books, settings: Settings) -> None:
    books.connection.execute(
        "INSERT INTO events.trail (event_uuid, consumer, stream_name, position, step, noted_at)"
        " SELECT gen_random_uuid(), 'shop.bill', 'orders', n, 'waited',"
        "        clock_timestamp() - CASE WHEN n > 20 THEN interval '6.9 days' ELSE '7.1 days' END"
        "   FROM generate_series(1, 25) AS n"
    )
    with told(signals.RowsPruned) as rounds:
        assert tidy(replace(settings, cleanup_batch_size=10)) == 20
    assert rounds == [signals.RowsPruned("trail", 20)]


def test_a_locked_claim_ends_the_batch_and_nothing_else(books: Books, settings: Settings) -> None:
    books.claims(10, days=31)
    books.operation(3, ended_days_ago=30)
    with psycopg.connect(settings.database_url) as other, told(signals.PruningFailed) as failures:
        other.execute(LOCK_INBOX)
        assert tidy(settings) == 4
    assert [failure.table for failure in failures] == ["inbox_event"]
    assert tidy(settings) == 10


# ── operations ─────────────────────────────────────────────────────────────────────────────────


def test_operations_go_four_retentions_after_their_end(books: Books, settings: Settings) -> None:
    books.operation(10, ended_days_ago=28.01)
    kept = [
        books.operation(2, ended_days_ago=27.99),
        books.operation(2, ended_days_ago=None, started_days_ago=27.99),
    ]
    with told(signals.RowsPruned) as rounds:
        assert tidy(settings) == 11
    assert rounds == [signals.RowsPruned("operation", 11)]
    assert books.operations_left() == kept
    assert books.operation_events_left() == 4


def test_an_operation_that_was_killed_goes_four_retentions_after_its_start(
    books: Books, settings: Settings
) -> None:
    books.operation(10, ended_days_ago=None, started_days_ago=28.01)
    assert tidy(settings) == 11
    assert (books.operations_left(), books.operation_events_left()) == ([], 0)


@pytest.mark.parametrize("ended_days_ago", [None, 1000])
def test_the_record_of_a_replay_stays_as_long_as_the_replay(
    books: Books, settings: Settings, ended_days_ago: float | None
) -> None:
    operation = books.operation(0, ended_days_ago=ended_days_ago)
    books.connection.execute(
        "INSERT INTO events.consumer"
        " (name, stream_name, start_position, replay_of, end_position, operation_id)"
        " VALUES ('shop.bill@again', 'orders', 1, 'shop.bill', 9, %s)",
        (operation,),
    )
    assert tidy(settings) == 0
    books.connection.execute("DELETE FROM events.consumer WHERE name LIKE '%@%'")
    assert tidy(settings) == 1


def test_an_operation_with_many_events_goes_in_batches(books: Books, settings: Settings) -> None:
    books.operation(25, ended_days_ago=29)
    books.operation(0, ended_days_ago=29)
    with janitor(replace(settings, cleanup_batch_size=10)) as stage:
        # Settled, effects and the inbox come first. The one without events need not wait.
        assert [stage.step().moved for _ in range(7)] == [0, 0, 0, 0, 11, 10, 6]
    assert (books.operations_left(), books.operation_events_left()) == ([], 0)


def test_an_operation_stays_while_its_events_are_on_their_way(
    books: Books, settings: Settings
) -> None:
    operation = books.operation(3, ended_days_ago=1000)
    books.connection.execute(
        "INSERT INTO events.parked_event"
        " (consumer, stream_name, position, event_uuid, key_hash, entry, operation_id)"
        " VALUES ('shop.bill', 'orders', 1, events.uuid7(), 1, '', %s)",
        (operation,),
    )
    assert tidy(settings) == 0
    books.connection.execute("DELETE FROM events.parked_event")
    assert tidy(settings) == 4


# ── rounds ─────────────────────────────────────────────────────────────────────────────────────


def test_a_step_is_one_batch_and_a_rest(books: Books, settings: Settings) -> None:
    books.stream(head=25)
    books.consumer("shop.bill", 25)
    books.settled(25)
    books.outbox(25)
    with janitor(replace(settings, cleanup_batch_size=10)) as stage:
        # Of effects, claims, trails and operations there are none; last comes who holds what.
        steps = [stage.step() for _ in range(11)]
        assert [step.moved for step in steps] == [10, 10, 5, 10, 10, 5, 0, 0, 0, 0, 0]
        assert all(step.pause_seconds > 0 for step in steps)
        assert stage.step().is_idle


def test_a_round_tells_what_it_pruned_and_the_next_one_waits(
    books: Books, settings: Settings
) -> None:
    books.stream()
    books.consumer("shop.bill", 10)
    books.settled(10)
    with janitor(settings) as stage, told(signals.RowsPruned) as rounds:
        finish_round(stage)
        assert rounds == [signals.RowsPruned("processed_event", 10)]
        books.settled(5)
        assert stage.step().is_idle
    assert books.settled_left() == [1, 2, 3, 4, 5]


def test_rounds_follow_each_other_by_themselves(books: Books, settings: Settings) -> None:
    often = replace(settings, cleanup_every_seconds=0.05)
    keeper = LeaseKeeper(often)
    stop = threading.Event()
    loop = Loop("janitor", lambda: Janitor(often, keeper, stop_requested=stop.is_set), stop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        for _ in range(2):
            books.settled(5)
            wait_until(lambda: not books.settled_left(), seconds=SOON_SECONDS, what="rows go")
    finally:
        stop.set()
        thread.join(SOON_SECONDS)
        keeper.close()
    assert not thread.is_alive()


def test_a_stop_ends_the_round_between_two_batches(books: Books, settings: Settings) -> None:
    books.settled(25)
    stop = threading.Event()
    with janitor(replace(settings, cleanup_batch_size=10), stop.is_set) as stage:
        assert stage.step().moved == 10
        stop.set()
        assert stage.step().is_idle
    assert len(books.settled_left()) == 15


def test_one_janitor_works_at_a_time_and_the_next_one_takes_over(
    books: Books, settings: Settings
) -> None:
    books.settled(25)
    small = replace(settings, cleanup_batch_size=10)
    with janitor(small) as second:
        with janitor(small) as first:
            assert first.step().moved == 10
            assert second.step().is_idle
        assert second.step().moved == 10


def test_a_janitor_that_lost_its_lease_stops(books: Books, settings: Settings) -> None:
    books.settled(25)
    with janitor(replace(settings, cleanup_batch_size=10)) as stage:
        stage.step()
        books.connection.execute("UPDATE events.stream_lease SET owner_id = 'rival'")
        assert stage._lease is not None
        stage._leases.forget(stage._lease, "the server was away")
        assert stage.step().is_idle
    assert len(books.settled_left()) == 15


def test_a_hung_janitor_is_found_by_its_successor(settings: Settings) -> None:
    hung = psycopg.connect(settings.database_url)
    hung.execute(Queries("cleanup.sql")["prepare"].encode(), {"lock_timeout": "1s"})
    with janitor(settings) as successor, told(signals.PredecessorEnded) as ended:
        successor.step()
    assert [signal.role for signal in ended] == ["janitor"]
    hung.close()


@pytest.mark.parametrize("table", LOCKS)
def test_a_locked_row_ends_the_batch_and_holds_up_nobody(
    books: Books, settings: Settings, table: str
) -> None:
    books.stream()
    books.settled(10)
    books.outbox(10)
    with psycopg.connect(settings.database_url) as other, janitor(settings) as stage:
        other.execute(LOCKS[table])
        with told(signals.PruningFailed) as failures:
            assert finish_round(stage) == 10
    assert [failure.table for failure in failures] == [table]
    assert len(books.settled_left() + books.outbox_left()) == 10
    assert tidy(settings) == 10


def test_a_row_that_is_parked_meanwhile_stays(
    books: Books, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has looked at the row, and waits for whoever is changing it."""
    monkeypatch.setattr(cleanup, "LOCK_TIMEOUT", f"{SOON_SECONDS:g}s")
    books.settled(10)
    books.effects_of_settled()
    with psycopg.connect(settings.database_url) as other:
        other.execute("UPDATE events.processed_event SET outcome = 'parked' WHERE position = 5")
        thread = threading.Thread(target=tidy, args=(settings,))
        thread.start()
        wait_until(
            lambda: bool(books.connection.execute(WAITING).fetchone()),
            seconds=SOON_SECONDS,
            what="the batch waits for the row",
        )
    thread.join(SOON_SECONDS)
    assert books.settled_left() == [5]
    assert books.effects_left() == 1


def test_trouble_with_cleanup_never_stops_the_process(books: Books, settings: Settings) -> None:
    books.stream()
    books.settled(10)
    books.outbox(10)
    with janitor(settings) as stage, told(signals.PruningFailed) as failures:
        books.connection.execute("ALTER TABLE events.processed_event RENAME outcome TO verdict")
        assert finish_round(stage) == 10
    assert [failure.table for failure in failures] == ["processed_event"]
    assert books.outbox_left() == []


def test_trouble_at_the_beginning_of_a_round_waits_for_the_next(
    books: Books, settings: Settings
) -> None:
    books.settled(10)
    with janitor(settings) as stage, told(signals.PruningFailed) as failures:
        books.connection.execute("ALTER TABLE events.stream RENAME published TO confirmed")
        assert finish_round(stage) == 0
    assert [failure.table for failure in failures] == ["stream"]


# ── a reader that holds the outbox ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("days", "count"), [(13.9, 0), (14.1, 1)])
def test_a_reader_that_holds_the_outbox_for_a_second_retention_is_named_once_a_round(
    books: Books, settings: Settings, days: float, count: int
) -> None:
    books.stream()
    books.consumer("shop.bill", 10)
    books.consumer("shop.stopped", 2)
    books.outbox(10, days=days)
    with told(signals.PruningHeld) as held:
        assert tidy(settings) == 2
    expected = signals.PruningHeld("orders", "consumer shop.stopped", 2, round(days * 86_400))
    assert [replace(hold, oldest_seconds=expected.oldest_seconds) for hold in held] == (
        [expected] * count
    )


def test_nobody_is_blamed_for_an_outbox_that_is_only_young(
    books: Books, settings: Settings
) -> None:
    books.stream()
    books.consumer("shop.stopped", 0)
    books.outbox(10, days=YOUNG_DAYS)
    with told(signals.PruningHeld) as held:
        tidy(settings)
    assert held == []


def test_no_reader_is_blamed_for_a_batch_that_failed(books: Books, settings: Settings) -> None:
    books.stream()
    books.consumer("shop.bill", 10)
    books.outbox(10, days=15)
    with psycopg.connect(settings.database_url) as other, told(signals.PruningHeld) as held:
        other.execute(LOCKS["outbox_event"])
        assert tidy(settings) == 0
    assert held == []


# ── what comes after pruning ───────────────────────────────────────────────────────────────────


def chosen_start(books: Books, start: Any) -> int:
    options = ConsumerOptions(stream_name="orders", name="new", start=start)
    with books.connection.transaction():
        return Starts().choose(books.connection, "shop.new", options)


@pytest.mark.parametrize(
    ("start", "position", "is_late"),
    [
        ("earliest", 5, True),
        (3, 5, True),
        (5, 5, False),
        (7, 7, False),
        (12, 12, False),
        ("latest", 11, False),
        (datetime(2020, 1, 1, tzinfo=UTC), 5, True),
        (datetime.now(UTC) + timedelta(days=1), 11, False),
    ],
)
def test_a_new_consumer_starts_at_the_first_event_that_is_left_and_says_so(
    books: Books, start: Any, position: int, is_late: bool
) -> None:
    books.stream()
    books.outbox(6, first=5)
    with told(signals.ConsumerStartedLate) as late:
        assert chosen_start(books, start) == position
    said = signals.ConsumerStartedLate("shop.new", "orders", str(start), position)
    assert late == ([said] if is_late else [])


def test_on_a_stream_that_is_pruned_empty_a_new_consumer_waits_for_the_next_event(
    books: Books,
) -> None:
    books.stream(head=10)
    with told(signals.ConsumerStartedLate) as late:
        assert chosen_start(books, "earliest") == 11
    assert len(late) == 1


def test_on_a_new_stream_a_consumer_starts_at_its_beginning(books: Books) -> None:
    with told(signals.ConsumerStartedLate) as late:
        assert chosen_start(books, "earliest") == 1
        books.stream(head=0)
        assert chosen_start(books, "earliest") == 1
    assert late == []


def test_nothing_is_pruned_between_the_choice_of_a_start_and_its_entry(
    books: Books, settings: Settings
) -> None:
    books.stream()
    books.outbox(10)
    options = ConsumerOptions(stream_name="orders", name="new")
    with psycopg.connect(settings.database_url) as registering:
        assert Starts().choose(registering, "shop.new", options) == 1
        assert tidy(settings) == 0
        registering.execute(
            "INSERT INTO events.consumer (name, stream_name, start_position)"
            " VALUES ('shop.new', 'orders', 1)"
        )
    assert tidy(settings) == 0
    assert len(books.outbox_left()) == 10


def write_effect(event: StreamEvent[Any], session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.position})


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (serial bigserial, n bigint)")
    yield bench
    bench.close()


def effects(bench: Workbench) -> list[Any]:
    return bench.rows("SELECT n FROM effect ORDER BY serial")


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_line_whose_outbox_was_pruned_empty_goes_on(
    bench: Workbench, redis_url: str, is_flushed: bool
) -> None:
    bench.send(10)
    bench.publish()
    old = bench.consumer(write_effect)
    run_until_idle(old)
    bench.connection.execute("UPDATE events.outbox_event SET published_at = '2020-01-01Z'")
    assert tidy(bench.settings) == 10
    if is_flushed:
        with redis.Redis.from_url(redis_url) as client:
            client.flushdb()
    assert Streams().refill_base(bench.connection, "orders", 1000) == 10
    new = bench.consumer(write_effect, name="new")
    bench.send(2)
    bench.publish()
    run_until_idle(old)
    run_until_idle(new)
    assert effects(bench) == [*range(1, 11), 11, 12, 11, 12]


@pytest.mark.slow
def test_a_consumer_behind_the_trimmed_hot_log_misses_nothing(
    bench: Workbench, redis_url: str
) -> None:
    count = 1500
    run_until_idle(bench.consumer(write_effect, batch_size=500))
    send(bench.settings.database_url, "orders", count)
    short = replace(bench.settings, publish_batch_size=100, hot_log_length_max=100)
    with worker(short) as publisher:
        publisher.publish_all()
    hot = hot_ids(redis_url, "orders")
    assert hot == ids(count - len(hot) + 1, count)
    assert len(hot) < count / 2, "nothing was trimmed"
    assert tidy(bench.settings) == 0
    behind = bench._stages[0]
    run_until_idle(behind)  # type: ignore[arg-type]
    assert effects(bench) == list(range(1, count + 1))


# ── plans and settings ─────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("analysed_when", ["empty", "never"])
def test_stale_statistics_do_not_lead_the_planner_astray(
    books: Books, settings: Settings, analysed_when: str
) -> None:
    connection = books.connection
    for table in ("processed_event", "outbox_event", "effect", "inbox_event"):
        connection.execute(f"ALTER TABLE events.{table} SET (autovacuum_enabled = off)".encode())
        if analysed_when == "empty":
            connection.execute(f"ANALYZE events.{table}".encode())
    books.stream(head=100_000)
    books.consumer("shop.bill", 100_000)
    books.settled(1_000, days=8)
    books.settled(100_000, days=1)
    books.effects_of_settled()
    books.claims(1_000, days=31)
    connection.execute("UPDATE events.inbox_event SET consumer = 'shop.other'")
    books.claims(100_000, days=1)
    books.outbox(1_000, days=8)
    books.outbox(99_000, first=1_001, days=1)
    plans = plans_of(connection)
    for table, index in (
        ("processed_event", "processed_event_expiry"),
        ("outbox_event", "outbox_event_position"),
    ):
        plan = next(plan for plan in plans if f"Delete on {table}" in plan)
        assert f"Seq Scan on {table}" not in plan, plan
        assert f"Index Scan using {index}" in plan, plan
        assert "Tid Scan" in plan, plan
        assert "Sort Key: p.processed_at" not in plan, plan
    [settled] = [plan for plan in plans if "Delete on processed_event" in plan]
    assert "Index Scan using effect_pkey" in settled, settled
    [inbox] = [plan for plan in plans if "Delete on inbox_event" in plan]
    assert "using inbox_event_age" in inbox, inbox
    [leftover] = [plan for plan in plans if "effect_age" in plan]
    for plan in (settled, inbox, leftover):
        assert "Seq Scan on effect" not in plan, plan
        assert "Seq Scan on inbox_event" not in plan, plan
        assert "Seq Scan on processed_event" not in plan, plan


@pytest.mark.long
@pytest.mark.timeout(180)
def test_rows_that_lie_in_no_order_are_found_by_the_index_too(books: Books) -> None:
    """The statistics are right, and say that reading the whole table costs less."""
    books.stream(head=100_000)
    books.connection.execute(
        "INSERT INTO events.processed_event"
        " (consumer, event_uuid, position, outcome, processed_at)"
        " SELECT 'shop.gone', gen_random_uuid(), n, 'handled',"
        "        now() - (random() + CASE WHEN n % 10 = 0 THEN 8 ELSE 1 END) * interval '1 day'"
        "   FROM generate_series(1, 100000) AS n"
    )
    books.outbox(10_000)
    books.connection.execute("ANALYZE events.processed_event")
    plans = plans_of(books.connection, batch_size=10_000)
    plan = next(plan for plan in plans if "Delete on processed_event" in plan)
    assert "Seq Scan on processed_event" not in plan, plan


def plans_of(connection: psycopg.Connection[Any], batch_size: int = 500) -> list[str]:
    """The plans that the server really used."""
    heard: list[str] = []
    connection.add_notice_handler(lambda notice: heard.append(notice.message_primary or ""))
    connection.execute("LOAD 'auto_explain'")
    for name, value in (("auto_explain.log_min_duration", "0"), ("client_min_messages", "log")):
        connection.execute("SELECT set_config(%s, %s, false)", [name, value])
    limits: dict[str, Any] = {"retention_days": 7, "batch_size": batch_size}
    settled = Cleanup().prune_settled(connection, since=None, **limits)
    Cleanup().prune_effects(connection, since=None, **limits)
    Cleanup().prune_aged(connection, "inbox_event", **limits)
    outbox = Cleanup().prune_outbox(connection, "orders", after=0, **limits)
    assert (settled.deleted, outbox.deleted) == (batch_size, batch_size)
    return heard


@pytest.mark.parametrize(
    "wrong",
    [
        {"cleanup_every_seconds": 0},
        {"cleanup_batch_size": 0},
        {"cleanup_batch_size": 10_001},
        {"settled_retention_days": 0.001},
        {"outbox_retention_days": 0.001},
        {"inbox_retention_days": 0.001},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Settings(database_url="postgresql://h/d", **wrong)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_benchmark_of_cleanup_runs() -> None:
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.cleanup",
            "--only",
            "line",
            "--rows",
            "6000",
            "--rounds",
            "1",
        ],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        timeout=150,
        check=True,
    )
    for what in ("line p50", "line p99", "rows pruned"):
        assert what in finished.stdout
