"""Each layer of defence asked by itself, on the servers of a run, after everything has ended.

A layer that is missing is often hidden by the next one: a stale publisher's batch, say, is refused
by its term, and would do no harm without that either. So each is shown what it must refuse.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import redis

from penstock.core.isolation import Batch
from penstock.core.leases import Lease, consumer_role
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.core.wire import Entry, decode_body, decode_entry, encode_entry
from penstock.errors import LeaseLost, MalformedEntry
from penstock.pipeline.publisher import Publisher
from penstock.runtime.leases import LeaseKeeper
from penstock.stores.hot_log import Fence
from penstock.stores.inbox import Inbox
from penstock.stores.leases import LeaseTable
from penstock.stores.outbox import Outbox
from penstock.stores.redis_log import RedisLog
from penstock.stores.streams import Streams
from penstock.stores.suspects import Suspects
from penstock.stores.worker_connection import SyncWorkerConnection
from tests.waiting import SOON_SECONDS, wait_until

STREAM = "probe"
CONSUMER = "probe.consumer"
PATIENCE_SECONDS = 10.0
ORIGIN, DATABASE = "probe", "1/1/00000001"
KEYS = MacKeys.parse("probe:" + "00" * 32)

Connection = psycopg.Connection[Any]


class Probes:
    """Asks every layer; the answers are faults, and there should be none."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self._database_url = database_url
        self._redis_url = redis_url
        self._leases = LeaseTable()

    def run(self) -> Iterator[str]:
        """What a layer let through."""
        for probe in (
            self._log_refuses_former_terms,
            self._log_skips_what_it_has,
            self._idle_log_is_refilled,
            self._numbering_is_one_at_a_time,
            self._fence_refuses,
            self._seal_refuses,
            self._takeover_ends_the_predecessor,
            self._keys_are_locked,
            self._starts_are_counted,
            self._signatures_are_checked,
        ):
            try:
                fault = probe()
            except Exception as error:  # noqa: BLE001 - a layer that breaks is a fault, too
                fault = f"{type(error).__name__}: {error}"
            if fault is not None:
                yield f"probe {probe.__name__.strip('_')}: {fault}"

    # ── the hot log ───────────────────────────────────────────────────────────────────────────

    def _log_refuses_former_terms(self) -> str | None:
        with self._log() as append:
            append(5, 1, 3)
            return self._is_refused(lambda: append(4, 4, 6), "a former term appends")

    def _log_skips_what_it_has(self) -> str | None:
        with self._log() as append:
            append(5, 1, 3)
            if (last := append(5, 2, 4)) != 4:
                return f"a batch that overlaps leads to {last} instead of 4"
            return None

    def _idle_log_is_refilled(self) -> str | None:
        """What is lost while nobody sends anything, so that no append can come upon it."""
        settings = Settings(
            database_url=self._database_url, redis_url=self._redis_url, redis_prefix="probe-idle"
        )
        with self._connect() as connection:
            # Only what somebody has still to read is filled in again.
            self._leases.ensure(connection, STREAM, consumer_role(CONSUMER), checkpoint=0)
            _send(connection, 3)
        keeper = LeaseKeeper(settings)
        publisher = Publisher(
            settings, keeper, RedisLog(self._redis_url, prefix=settings.redis_prefix)
        )

        def holds_all() -> bool:
            if publisher.step().is_idle:
                publisher.wait(threading.Event())
            return bool(server.xlen(f"{settings.redis_prefix}:{{{STREAM}}}:log"))

        with redis.Redis.from_url(self._redis_url) as server, closing(publisher):
            wait_until(holds_all, what="the log is filled")
            server.delete(*server.keys(f"{settings.redis_prefix}:*"))
            try:
                wait_until(holds_all, what="the log is filled again", seconds=PATIENCE_SECONDS)
            except AssertionError:
                return "what the hot log lost while nobody sent anything is not filled in again"
            finally:
                keeper.close()
        return None

    @contextmanager
    def _log(self) -> Iterator[Callable[[int, int, int], int]]:
        log = RedisLog(self._redis_url, prefix="probe")

        def append(term: int, first: int, last: int) -> int:
            entries = [b"x"] * (last - first + 1)
            return log.append(STREAM, _fence(term), first=first, entries=entries)

        with closing(log):
            log.open(STREAM, _fence(5), base=0)
            log.restart(STREAM, _fence(5), base=0)
            yield append

    # ── positions and order ───────────────────────────────────────────────────────────────────

    def _numbering_is_one_at_a_time(self) -> str | None:
        """Two with the same lease, as when a connection was lost and its backend goes on."""
        with self._connect() as connection, self._connect() as rival:
            lease = self._lease(connection, "publisher")
            _send(connection, 20)
            connection.autocommit = False
            first = Outbox().number(connection, lease, 5)
            second: list[tuple[int, str]] = []
            thread = threading.Thread(
                target=lambda: second.extend(Outbox().number(rival, lease, 5))
            )
            thread.start()
            self._wait_until_blocked(rival)
            connection.commit()
            thread.join(SOON_SECONDS)
            positions = [position for position, _ in [*first, *second]]
        start = first[0][0]
        return None if positions == list(range(start, start + 10)) else f"positions {positions}"

    def _keys_are_locked(self) -> str | None:
        """Whoever sends a key's event second draws its id after the first has committed."""
        with self._connect() as first, self._connect() as second:
            first.autocommit = False
            _send(first, 1, key="same")
            second.execute("SET lock_timeout = 200")
            try:
                _send(second, 1, key="same")
            except psycopg.errors.LockNotAvailable:
                return None
            return "two senders of one key did not wait for each other"

    # ── the consumer's transaction ────────────────────────────────────────────────────────────

    def _fence_refuses(self) -> str | None:
        with self._connect() as connection, closing(self._worker()) as worker:
            lease = self._lease(connection, consumer_role(CONSUMER))
            entry = _entry(lease.checkpoint + 1)
            wrong: dict[str, Lease] = {
                "another owner": replace(lease, owner_id="nobody"),
                "a former term": replace(lease, term=lease.term - 1),
                "another checkpoint": lease.at(lease.checkpoint - 1),
            }
            for what, held in wrong.items():
                fault = self._is_refused(
                    lambda held=held: _settle(worker, held, entry),  # type: ignore[misc]
                    f"{what} commits",
                )
                worker.rollback()
                if fault is not None:
                    return fault
            connection.execute(
                "UPDATE events.stream_lease SET lease_until = '-infinity' WHERE role = %s",
                (lease.role,),
            )
            return self._is_refused(
                lambda: _settle(worker, lease, entry), "a lease that is over commits"
            )

    def _seal_refuses(self) -> str | None:
        with self._connect() as connection, closing(self._worker()) as worker:
            lease = self._lease(connection, consumer_role(CONSUMER))
            _claim(worker, lease, _entry(lease.checkpoint + 1))
            try:
                worker.execute("COMMIT", {})
            except psycopg.Error:
                return None
            return "a handler's COMMIT went through"

    def _takeover_ends_the_predecessor(self) -> str | None:
        with self._connect() as connection, closing(self._worker()) as worker:
            lease = self._lease(connection, consumer_role(CONSUMER))
            _claim(worker, lease, _entry(lease.checkpoint + 1))
            self._leases.end_predecessor(connection, lease)
            try:
                worker.fetch("SELECT 1", {})
            except psycopg.OperationalError:
                return None
            return "a predecessor's transaction is still open"

    def _starts_are_counted(self) -> str | None:
        with self._connect() as connection:
            connection.execute("DELETE FROM events.suspect WHERE consumer = %s", (CONSUMER,))
            suspects, entry = Suspects(), _entry(1)
            starts = [len(suspects.start(connection, CONSUMER, entry, "w")) for _ in range(3)]
            suspects.finish(connection, CONSUMER, entry.position)
        return None if starts == [0, 1, 2] else f"three starts were counted as {starts}"

    def _signatures_are_checked(self) -> str | None:
        raw = encode_entry(STREAM, 7, _BODY, KEYS)
        for position, data in ((8, raw), (7, raw + b" ")):
            try:
                decode_entry(STREAM, position, data, KEYS)
            except MalformedEntry:
                continue
            return "an entry that was moved or altered is believed"
        return None

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> Connection:
        return psycopg.connect(self._database_url, autocommit=True)

    def _worker(self) -> SyncWorkerConnection:
        return SyncWorkerConnection(self._database_url, "penstock probe")

    def _lease(self, connection: Connection, role: str) -> Lease:
        Streams().register(connection, STREAM)
        self._leases.ensure(connection, STREAM, role, checkpoint=10)
        connection.execute(
            "UPDATE events.stream_lease SET lease_until = '-infinity', term = term + 2"
            " WHERE stream_name = %s AND role = %s",
            (STREAM, role),
        )
        lease = self._leases.acquire(
            connection, STREAM, role, owner_id="probe", worker_id="probe", lease_seconds=60
        )
        assert lease is not None
        return lease

    def _is_refused(self, act: Callable[[], Any], what: str) -> str | None:
        try:
            act()
        except LeaseLost:
            return None
        return what

    def _wait_until_blocked(self, connection: Connection) -> None:
        pid = connection.info.backend_pid
        with self._connect() as other:
            query = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
            wait_until(
                lambda: other.execute(query, (pid,)).fetchone() == (True,),
                what="the rival waits",
            )


_BODY = """event
0cad6cb1-3b3e-4026-9267-af9b06ad2fb8
3
41
01a1de94-ace6-77df-9c92-ee6cc16573e2
probed
1

1794735647975097
null
{}
{}"""


def _entry(position: int) -> Entry:
    return decode_body(STREAM, position, _BODY.encode())


def _claim(worker: SyncWorkerConnection, lease: Lease, entry: Entry) -> Any:
    batch = Batch((entry,), entry.position)
    return Inbox().claim(worker, CONSUMER, lease, batch, ["handled"])


def _settle(worker: SyncWorkerConnection, lease: Lease, entry: Entry) -> None:
    claim = _claim(worker, lease, entry)
    Inbox().commit(worker, claim, lease, entry.position)


def _fence(term: int) -> Fence:
    return Fence(ORIGIN, DATABASE, term)


def _send(connection: Connection, count: int, key: str | None = None) -> None:
    connection.execute(
        "SELECT events.send(%s, 'probed', '{}', key => %s) FROM generate_series(1, %s)",
        (STREAM, key, count),
    )
