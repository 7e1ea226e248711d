"""A publisher sleeps while nobody sends, and no committed event ever waits for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from penstock.core.settings import Settings
from penstock.pipeline import publisher as publisher_module
from penstock.stores.wakeup import Wakeup
from penstock.telemetry import bus, signals
from tests.publishing import Worker, ask, insert, running, send, told, worker
from tests.waiting import SOON_SECONDS, wait_until

# Far longer than any wait here, so that nothing was found by the slow poll.
POLL_SECONDS = 2 * SOON_SECONDS


@pytest.fixture
def settings(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    # So that nothing but the wake-up itself explains a prompt publication.
    monkeypatch.setattr(publisher_module, "SWEEP_SECONDS", 600.0)
    send(database_url, "orders")
    return Settings(database_url=database_url, redis_url=redis_url, poll_seconds=POLL_SECONDS)


@contextmanager
def asleep(publisher: Worker) -> Iterator[tuple[threading.Thread, threading.Event]]:
    """The publisher in its sleep, in a thread of its own."""
    stop = threading.Event()
    slept = threading.Event()

    def notice(_signal: signals.PublisherSlept) -> None:
        slept.set()

    bus.subscribe(signals.PublisherSlept, notice)
    sleeper = threading.Thread(target=publisher.publisher.wait, args=(stop,))
    sleeper.start()
    try:
        assert slept.wait(SOON_SECONDS), "the publisher does not fall asleep"
        yield sleeper, stop
    finally:
        stop.set()
        sleeper.join(SOON_SECONDS)
        bus.unsubscribe(notice)


@contextmanager
def listener(settings: Settings) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute("LISTEN events_outbox_insert")
        connection.execute("LISTEN end_of_the_count")
        yield connection


def notifications(connection: psycopg.Connection[Any]) -> int:
    """How many came until now: notifications arrive in the order of their commits."""
    connection.execute("NOTIFY end_of_the_count")
    heard: list[str] = []
    for notification in connection.notifies(timeout=SOON_SECONDS):
        if notification.channel == "end_of_the_count":
            break
        heard.append(notification.payload)
    assert set(heard) <= {""}, "a payload can be read by every role"
    return len(heard)


def test_no_event_waits_for_the_slow_poll(settings: Settings) -> None:
    """Senders hold their transactions open for a while, as long as it takes to lose a race."""
    chance = random.Random(3)  # noqa: S311
    hold = threading.Event()
    committed_at: dict[str, float] = {}
    appended_at: list[tuple[int, float]] = []

    def notice(signal: signals.BatchAppended) -> None:
        appended_at.append((signal.last, time.monotonic()))

    bus.subscribe(signals.BatchAppended, notice)
    try:
        with (
            told(signals.PublisherSlept) as slept,
            running(settings),
            psycopg.connect(settings.database_url) as connection,
        ):
            wait_until(lambda: bool(slept), what="the publisher sleeps")
            # Without many falls asleep this would show nothing; a slow machine needs more rounds.
            while len(committed_at) < 200 or len(slept) < 20:
                (uuid,) = insert(connection, "orders")
                hold.wait(chance.random() * 0.004)
                connection.commit()
                committed_at[uuid] = time.monotonic()
                hold.wait(chance.random() * 0.02)
            wait_until(
                lambda: appended_at[-1][0] == 1 + len(committed_at),
                what="all are published",
            )
    finally:
        bus.unsubscribe(notice)
    rows = ask(
        settings.database_url,
        "SELECT event_uuid::text, position FROM events.outbox_event WHERE position > 1",
    )
    delays = [
        next(moment for last, moment in appended_at if last >= position) - committed_at[uuid]
        for uuid, position in rows
        if uuid in committed_at
    ]
    assert len(delays) == len(committed_at)
    assert max(delays) < SOON_SECONDS


def test_a_sleeping_publisher_is_notified_and_an_awake_one_is_not(settings: Settings) -> None:
    with worker(settings) as publisher, listener(settings) as heard:
        publisher.publish_all()
        with asleep(publisher) as (sleeper, _):
            notifications(heard)
            send(settings.database_url, "orders", 2)
            sleeper.join(SOON_SECONDS)
            assert not sleeper.is_alive()
            assert notifications(heard) == 1
        # It publishes what woke it first; a line with more than one event is busy, and lets go.
        assert publisher.step() == 2
        for _ in range(20):
            send(settings.database_url, "orders")
        assert notifications(heard) == 0
        publisher.publish_all()


def test_a_sleeper_holds_locks_but_no_transaction(settings: Settings) -> None:
    with worker(settings) as publisher:
        publisher.publish_all()
        with asleep(publisher):
            # A renewal may be under way for a moment; a transaction would stay.
            wait_until(
                lambda: ask(settings.database_url, STATES) == [("idle", True)],
                what="all its connections are idle",
            )
            assert ask(settings.database_url, HELD_LOCKS) == [(1,)]
        assert ask(settings.database_url, HELD_LOCKS) == [(0,)]


STATES = (
    "SELECT DISTINCT state, xact_start IS NULL FROM pg_stat_activity "
    "WHERE application_name LIKE 'penstock %%' AND datname = current_database()"
)
HELD_LOCKS = (
    "SELECT count(*)::int FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def test_a_publisher_does_not_fall_asleep_over_an_undecided_sender(settings: Settings) -> None:
    with (
        worker(settings) as publisher,
        psycopg.connect(settings.database_url) as undecided,
        told(signals.PublisherSlept) as slept,
    ):
        publisher.publish_all()
        insert(undecided, "orders")
        for _ in range(10):
            publisher.publisher.wait(threading.Event())
            assert publisher.step() == 0
        assert slept == []
        undecided.commit()
        publisher.publisher.wait(threading.Event())
        assert publisher.step() == 1
        assert slept == []


def test_stop_ends_a_sleep_at_once(settings: Settings) -> None:
    with worker(settings) as publisher:
        publisher.publish_all()
        with asleep(publisher) as (sleeper, stop):
            stop.set()
            sleeper.join(SOON_SECONDS)
            assert not sleeper.is_alive()


def test_a_publisher_that_hears_nothing_says_so_once_and_polls(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wakeup, "hears", lambda *_: False)
    with told(signals.WakeupSilent, signals.PublisherSlept) as told_of, running(settings):
        for count in range(2, 6):
            send(settings.database_url, "orders")
            wait_until(
                lambda count=count: published(settings) == count,  # type: ignore[misc]
                what="the poll finds the event",
            )
    assert told_of == [signals.WakeupSilent(publisher_module.POLL_MODE_SECONDS)]


def test_polling_by_choice_needs_no_listening_connection(settings: Settings) -> None:
    with (
        told(signals.PublisherSlept, signals.WakeupSilent) as told_of,
        running(replace(settings, wakeup="poll")),
    ):
        send(settings.database_url, "orders")
        wait_until(lambda: published(settings) == 2, what="the event is found")
        assert ask(settings.database_url, LISTENERS) == [(0,)]
    assert told_of == []


LISTENERS = (
    "SELECT count(*)::int FROM pg_stat_activity "
    "WHERE application_name = 'penstock wake-up' AND datname = current_database()"
)


def published(settings: Settings) -> int:
    rows = ask(settings.database_url, "SELECT published FROM events.stream")
    return int(rows[0][0]) if rows else 0


def test_a_quiet_line_keeps_its_locks_and_hears_of_every_event(settings: Settings) -> None:
    with worker(settings) as publisher, listener(settings) as heard:
        publisher.publish_all()
        with asleep(publisher) as (sleeper, _):
            notifications(heard)
            send(settings.database_url, "orders")
            sleeper.join(SOON_SECONDS)
        assert publisher.step() == 1
        assert publisher.step() == 0, "nobody has notified, so there is nothing to look for"
        send(settings.database_url, "orders")
        assert notifications(heard) == 2
        wait_until(lambda: publisher.step() == 1, what="it is published")


def test_a_batch_cut_short_is_finished_without_another_notification(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither a sweep nor the slow poll may come to the rescue.
    monkeypatch.setattr(publisher_module, "SWEEP_SECONDS", 600.0)
    small = replace(settings, publish_batch_size=1, poll_seconds=600.0)

    def is_all_published() -> bool:
        ((count,),) = ask(settings.database_url, "SELECT count(*) FROM events.outbox_event")
        return published(settings) == int(count)

    with running(small):
        for count in (1, 5):
            send(settings.database_url, "orders", count)
            wait_until(is_all_published, what="all is published")
