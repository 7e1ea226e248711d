"""What `penstock bench` does: a line of its own at work, in a database that nobody else uses."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import redis
from psycopg import sql

from penstock import Event, Pipeline
from penstock.cli.developing import offering_your_own
from penstock.cli.invocation import Invocation
from penstock.cli.output import print_note
from penstock.cli.passing import leaving_on_signals, running_servers
from penstock.core.leases import PUBLISHER, consumer_role
from penstock.core.masking import masked_url
from penstock.errors import PenstockError, ServerUnavailable
from penstock.stores.configuration import gather
from penstock.stores.hot_log_keys import data_keys_key, log_key, record_key
from penstock.stores.identity import new_token
from penstock.stores.migrations import migrate
from penstock.stores.postgres import connect, sqlalchemy_url
from penstock.stores.redis_link import new_client
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.signals import BatchCommitted, BatchConfirmed

NAME = STREAM = "bench"
SENT_AT_ONCE = 100
KEYS = 1000
WARM_UP = 20
PATIENCE_SECONDS = 30.0
REDIS_SECONDS = 5.0


class Measured(Event, type="bench.measured", version=1, key="account"):
    """An event of about 400 bytes."""

    account: int
    cents: int
    note: str


def ignore(event: Measured) -> None:
    """Nothing but the line itself."""


def insert_row(event: Measured, cursor: psycopg.Cursor[Any]) -> None:
    """One row, as most handlers write at least."""
    values = (event.account, event.cents)
    cursor.execute("INSERT INTO measured (account, cents) VALUES (%s, %s)", values)


HANDLERS: Mapping[str, Callable[..., None]] = {"nothing": ignore, "row": insert_row}
ROLES = {PUBLISHER: PUBLISHER, **{name: consumer_role(name) for name in HANDLERS}}


class Journal:
    """When each part of the line was how far, as its signals tell."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._has_worker = False

    def on_worker(self, *, is_there: bool) -> None:
        """Whether anybody is at work; without, nobody need be waited for."""
        with self._changed:
            self._has_worker = is_there
            self._changed.notify_all()

    def on_confirmed(self, signal: BatchConfirmed) -> None:
        """The publisher moved on."""
        self._note(PUBLISHER, signal.last)

    def on_committed(self, signal: BatchCommitted) -> None:
        """A consumer moved on."""
        self._note(signal.consumer.removeprefix(f"{NAME}."), signal.last)

    def _note(self, part: str, position: int) -> None:
        with self._changed:
            self._steps[part].append((time.perf_counter(), position))
            self._changed.notify_all()

    def wait_for(self, part: str, position: int) -> float:
        """Wait until a part is there; returns since when. Raises PenstockError if it stands."""
        with self._changed:
            while not self._steps[part] or self._steps[part][-1][1] < position:
                if not self._has_worker or not self._changed.wait(PATIENCE_SECONDS):
                    raise PenstockError(
                        f"{part} has not moved for {PATIENCE_SECONDS:g} s. Nothing is left behind; "
                        "look at the load of the servers, and measure again."
                    )
            return self._steps[part][-1][0]

    def rate(self, part: str) -> float:
        """Events per second between the first and the last batch, so that starting is no part."""
        (began_at, first), (ended_at, last) = self._steps[part][0], self._steps[part][-1]
        if first == last:
            raise PenstockError(
                f"{part} moved everything at once, which tells no rate. Nothing is left behind; "
                "raise --events."
            )
        return (last - first) / (ended_at - began_at)


def run_bench(invocation: Invocation, events: int, seconds: float) -> dict[str, Any]:
    """Measure on the servers of the settings, or on embedded ones where no setting names any."""
    with leaving_on_signals(), _line(invocation) as pipeline, _journal() as journal:
        url = pipeline.settings.database_url
        with connect(url, "penstock bench", autocommit=False) as connection:
            print_note(f"Moving {events:,} events, stage by stage …")
            sent_per_second = _send(pipeline, connection, events)
            for part, role in ROLES.items():
                with working(pipeline, [role], journal):
                    journal.wait_for(part, events)
            rates = {part: journal.rate(part) for part in ROLES}
            print_note(f"Sending one at a time for {seconds:g} s …")
            latencies = _latencies(pipeline, connection, journal, events, seconds)
    return {
        "events": events,
        "sent_per_second": sent_per_second,
        "published_per_second": rates.pop(PUBLISHER),
        "handled_per_second": rates,
        "commit_to_commit_ms": latencies,
    }


def _send(pipeline: Pipeline, connection: psycopg.Connection[Any], events: int) -> float:
    began_at = time.perf_counter()
    for first in range(0, events, SENT_AT_ONCE):
        numbers = range(first, min(first + SENT_AT_ONCE, events))
        pipeline.send_many(connection, STREAM, map(_event, numbers))
        connection.commit()
    return events / (time.perf_counter() - began_at)


def _latencies(
    pipeline: Pipeline,
    connection: psycopg.Connection[Any],
    journal: Journal,
    position: int,
    seconds: float,
) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in HANDLERS}
    ends_at = time.perf_counter() + seconds
    with working(pipeline, list(ROLES.values()), journal):
        while time.perf_counter() < ends_at or len(times["row"]) < 2 * WARM_UP:
            pipeline.send(connection, STREAM, _event(position))
            connection.commit()
            sent_at, position = time.perf_counter(), position + 1
            for name, collected in times.items():
                collected.append((journal.wait_for(name, position) - sent_at) * 1000)
    return {name: _percentiles(collected[WARM_UP:]) for name, collected in times.items()}


def _percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    hundredths = statistics.quantiles(milliseconds, n=100, method="inclusive")
    return {"p50": hundredths[49], "p99": hundredths[98], "events": len(milliseconds)}


def _event(number: int) -> Measured:
    return Measured(account=number % KEYS, cents=number, note="n" * 330)


# ── surroundings ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def _line(invocation: Invocation) -> Iterator[Pipeline]:
    """A pipeline in a database and below a prefix of its own, both of which go in the end."""
    name = f"penstock_bench_{new_token()}"
    with _servers(invocation) as (server_url, redis_url), ExitStack() as stack:
        print_note(
            f"Measuring PostgreSQL {masked_url(server_url)} and Redis "
            f"{masked_url(redis_url or 'none')}, in the database {name}, which is dropped again."
        )
        url = stack.enter_context(_database(server_url, name))
        migrate(url)
        with connect(url, "penstock bench") as connection:
            connection.execute("CREATE TABLE measured (account bigint, cents bigint)")
        pipeline = Pipeline(
            NAME, database_url=url, redis_url=redis_url, schema="events", redis_prefix=name
        )
        pipeline.check_hot_log()
        if redis_url is not None:
            stack.callback(_forget, redis_url, name)
        pipeline.stream(STREAM, Measured)
        for consumer, handler in HANDLERS.items():
            pipeline.consumer(STREAM, name=consumer, start="earliest")(handler)
        yield pipeline


@contextmanager
def _servers(invocation: Invocation) -> Iterator[tuple[str, str | None]]:
    if invocation.app is not None or "database_url" in gather({}):
        yield invocation.settings.database_url, invocation.settings.redis_url
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, ExitStack() as stack:
        with offering_your_own():
            servers = stack.enter_context(running_servers(Path(folder)))
        yield servers.database_url, servers.redis_url


@contextmanager
def _database(server_url: str, name: str) -> Iterator[str]:
    """The URL of a new database. Its advisory locks are its own, too: nobody else notices."""
    identifier = sql.Identifier(name)
    with connect(server_url, "penstock bench") as administration:
        administration.execute(sql.SQL("CREATE DATABASE {}").format(identifier))
    try:
        yield sqlalchemy_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with connect(server_url, "penstock bench") as administration:
            administration.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


def _forget(redis_url: str, prefix: str) -> None:
    try:
        with new_client(redis_url, REDIS_SECONDS) as client:
            client.delete(*(name(prefix, STREAM) for name in (log_key, record_key, data_keys_key)))
    except redis.RedisError as error:
        raise ServerUnavailable(
            f"Redis does not answer: {error}. Its keys {prefix}:* may still be there; remove them."
        ) from error


@contextmanager
def working(pipeline: Pipeline, roles: Sequence[str], journal: Journal) -> Iterator[None]:
    """A worker in this process; what ends it comes out here."""
    stop = threading.Event()
    with ThreadPoolExecutor(1, "penstock-bench") as threads:
        journal.on_worker(is_there=True)
        worker = threads.submit(pipeline.run_worker, roles, stop)
        worker.add_done_callback(lambda _: journal.on_worker(is_there=False))
        try:
            yield
        finally:
            stop.set()
            worker.result()


@contextmanager
def _journal() -> Iterator[Journal]:
    journal = Journal()
    subscribe(BatchConfirmed, journal.on_confirmed)
    subscribe(BatchCommitted, journal.on_committed)
    try:
        yield journal
    finally:
        unsubscribe(journal.on_confirmed)
        unsubscribe(journal.on_committed)
