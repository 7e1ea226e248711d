"""What the publisher's tests are told in: sending, looking at both sides, crashing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import redis

from penstock.core.settings import Settings
from penstock.pipeline.publisher import Publisher
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop
from penstock.stores.announcements import Announcements
from penstock.stores.hot_log import NoHotLog
from penstock.stores.identity import new_event_uuid
from penstock.stores.redis_log import RedisLog
from penstock.telemetry import bus
from penstock.telemetry.signals import Signal
from tests.waiting import SOON_SECONDS, wait_until


class Crash(BaseException):
    """Ends a publisher as a kill would: nothing catches it."""


def insert(
    connection: psycopg.Connection[Any], stream_name: str, count: int = 1, **fields: Any
) -> list[str]:
    """Send events in the connection's transaction. Returns their uuids in order."""
    uuids = [str(new_event_uuid()) for _ in range(count)]
    batch = [
        {"event_uuid": uuid, "stream_name": stream_name, "event_type": "T", "payload": n, **fields}
        for n, uuid in enumerate(uuids)
    ]
    connection.execute("SELECT events.send_many(%s::jsonb)", [json.dumps(batch)])
    return uuids


def send(database_url: str, stream_name: str, count: int = 1, **fields: Any) -> list[str]:
    """Send events in a transaction of their own."""
    with psycopg.connect(database_url) as connection:
        return insert(connection, stream_name, count, **fields)


def ask(database_url: str, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        cursor = connection.execute(query, parameters)
        return cursor.fetchall() if cursor.description else []


def numbered(database_url: str, stream_name: str) -> list[tuple[int, str]]:
    """Positions and bodies as PostgreSQL has them."""
    return ask(
        database_url,
        "SELECT o.position, events.entry(o, s.origin) FROM events.outbox_event o "
        "JOIN events.stream s ON s.name = o.stream_name "
        "WHERE o.stream_name = %s AND o.position IS NOT NULL ORDER BY o.position",
        stream_name,
    )


def log_key(stream_name: str) -> str:
    """The key of a stream's hot log."""
    return f"penstock:{{{stream_name}}}:log"


def hot_entries(redis_url: str, stream_name: str) -> list[tuple[str, dict[bytes, bytes]]]:
    """Ids and fields as Redis has them."""
    with closing(redis.Redis.from_url(redis_url, protocol=2)) as client:
        found: Any = client.xrange(log_key(stream_name))
        return [(entry_id.decode(), fields) for entry_id, fields in found]


def hot_ids(redis_url: str, stream_name: str) -> list[str]:
    """The ids of a stream's hot log."""
    return [entry_id for entry_id, _ in hot_entries(redis_url, stream_name)]


def ids(first: int, last: int) -> list[str]:
    """The ids of an unbroken log."""
    return [f"{position}-0" for position in range(first, last + 1)]


class Worker:
    """A publisher with its leases, as one process would have them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keeper = LeaseKeeper(settings)
        self.publisher = Publisher(settings, self.keeper, hot_log_of(settings))

    def step(self) -> int:
        """One step; returns what moved."""
        return self.publisher.step().moved

    def publish_all(self) -> None:
        """Step until everything that was sent is numbered and in the hot log."""
        wait_until(
            lambda: self.step() == 0 and not self._is_behind(),
            what="the publisher has caught up",
        )

    def die(self) -> None:
        """End without giving anything back, as far as PostgreSQL can see."""
        self.keeper.close()
        self.publisher._connection.close()
        self.publisher._hot_log.close()
        ask(
            self.settings.database_url,
            "UPDATE events.stream_lease SET lease_until = '-infinity' WHERE worker_id = %s",
            self.keeper.worker_id,
        )

    def close(self) -> None:
        """Stop cleanly."""
        self.publisher.close()
        self.keeper.close()

    def _is_behind(self) -> bool:
        return any(p.is_behind and p.refusal is None for p in self.publisher._publications.values())


def hot_log_of(settings: Settings) -> RedisLog | NoHotLog:
    """The hot log that the settings ask for."""
    if settings.redis_url is None:
        return NoHotLog(Announcements(settings.database_url))
    return RedisLog(settings.redis_url, length_max=settings.hot_log_length_max)


@contextmanager
def worker(settings: Settings) -> Iterator[Worker]:
    """A publisher that is stepped by the test."""
    running = Worker(settings)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def running(settings: Settings, name: str = "publisher") -> Iterator[threading.Event]:
    """A publisher that runs in a thread until the block ends, or its event is set."""
    keeper = LeaseKeeper(settings)
    stop = threading.Event()
    loop = Loop(name, lambda: Publisher(settings, keeper, hot_log_of(settings)), stop)
    thread = threading.Thread(target=loop.run, name=name)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(SOON_SECONDS)
        keeper.close()
        assert not thread.is_alive(), f"{name} does not stop"


@contextmanager
def told(*signal_types: type[Signal]) -> Iterator[list[Any]]:
    """The signals of these types, as they come."""
    heard: list[Any] = []
    for signal_type in signal_types:
        bus.subscribe(signal_type, heard.append)
    try:
        yield heard
    finally:
        for _ in signal_types:
            bus.unsubscribe(heard.append)


@contextmanager
def at(signal_type: type[Signal], action: Callable[[], None]) -> Iterator[None]:
    """Do something at the first signal of a type, in the thread that emits it."""
    pending = [action]

    def act(_signal: Signal) -> None:
        if pending:
            pending.pop()()

    bus.subscribe(signal_type, act)
    try:
        yield
    finally:
        bus.unsubscribe(act)
        assert not pending, f"{signal_type.__name__} never came"


def crash() -> None:
    """Be killed here."""
    raise Crash


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    """Do all of it at once; the first failure comes out."""
    failures: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - handed to the test below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
