"""A fleet: several supervisors on one database, each standing for a host that may be lost."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

from penstock.core.audit import audit
from penstock.core.books import Books
from penstock.core.history import ConsumerHistory, History, SentRow
from penstock.stores.configuration import PREFIX
from penstock.stores.identity import new_event_uuid
from penstock.stores.migrations import migrate
from tests.fleet_app import CONSUMER, LANES, STREAM, TABLES, Moved, build_pipeline
from tests.histories import read_consumer
from tests.line import Worker
from tests.waiting import SOON_SECONDS, wait_until

FULL_NAME = f"fleet.{CONSUMER}"
EVENTS_PER_TRANSACTION = 10
SETTINGS: Mapping[str, Any] = {
    "lease_seconds": 4.0,
    "lease_renew_seconds": 1.0,
    "poll_seconds": 1.0,
    "shutdown_seconds": 10.0,
}
HELD = """
SELECT w.pid, count(*)
  FROM events.consumer c
  JOIN events.stream_lease l ON l.stream_name = c.stream_name AND l.epoch = c.epoch
  JOIN events.worker w ON w.consumer = c.name AND w.worker_id = l.worker_id
 WHERE c.name = %s AND l.lease_until > clock_timestamp()
 GROUP BY w.pid
"""
LONGEST_WAIT = """
SELECT coalesce(extract(epoch FROM max(e.handled_at - o.created_at)), 0)::float
  FROM effect e JOIN events.outbox_event o USING (event_uuid)
 WHERE o.created_at > %s
"""
PENDING = """
SELECT (SELECT count(*) FROM events.outbox_event) - (SELECT count(*) FROM effect)
"""


class Host(Worker):
    """A supervisor and its workers."""

    def workers(self) -> list[int]:
        """The processes that it has started and that still exist."""
        pid = self.process.pid
        try:
            listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(child) for child in listed.split()]

    def die(self) -> None:
        """Be gone at once with everything on it, as after a power cut."""
        # It must not see its workers die, nor may they see it: both would clean up. One list for
        # both: of a supervisor that somebody else kills in between, nobody knows the workers.
        family = self._family()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in family:
                send(pid, number)
        self.process.wait()

    def freeze(self) -> None:
        """Stand still, as a virtual machine does while it is moved."""
        self._send_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on as if nothing had happened."""
        self._send_all(signal.SIGCONT)

    def leave(self) -> None:
        """Stop in order. Returns when everything has ended."""
        self.process.terminate()
        self.wait_until_dead()
        assert self.process.returncode == 0, self.tail()

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        if self.is_alive:
            self.die()

    def _send_all(self, number: signal.Signals) -> None:
        for pid in self._family():
            send(pid, number)

    def _family(self) -> list[int]:
        return [self.process.pid, *self.workers()]


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended by itself."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def prepare(database_url: str) -> None:
    """Make an empty database ready for the fleet."""
    migrate(database_url)
    with psycopg.connect(database_url) as connection:
        connection.execute(TABLES)


class Fleet:
    """Hosts, what is sent to them, and the books at the end."""

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        folder: Path,
        *,
        keys: int = 200,
        with_spares: bool = False,
        **settings: Any,
    ) -> None:
        self._folder = folder
        self._with_spares = with_spares
        self._settings = {
            **SETTINGS,
            "database_url": database_url,
            "redis_url": redis_url,
            **settings,
        }
        self.lease_seconds: float = self._settings["lease_seconds"]
        self._pipeline = build_pipeline(**self._settings)
        self._connection = psycopg.connect(database_url, autocommit=True)
        self._asking = threading.Lock()
        self._accounts = [f"account-{number}" for number in range(keys)]
        self._counts: Counter[str] = Counter()
        self._sent: set[str] = set()
        self._chance = random.Random(11)  # noqa: S311 - a reproducible workload
        self.hosts: list[Host] = []
        self._started = 0

    def close(self) -> None:
        for host in self.hosts:
            host.end()
        self._connection.close()

    # ── hosts ─────────────────────────────────────────────────────────────────────────────────

    def add_host(self, *roles: str) -> Host:
        """Start one more; with the options of `penstock run`, by default everything."""
        argv = [sys.executable, "-m", "penstock", "--app", "tests.fleet_app:pipeline", "run"]
        argv += [] if self._with_spares else ["--no-spare"]
        world = {f"{PREFIX}{name.upper()}": str(value) for name, value in self._settings.items()}
        self._started += 1
        host = Host([*argv, *roles], world, self._folder / f"host-{self._started}.log")
        self.hosts.append(host)
        return host

    def remove(self, host: Host) -> None:
        """Forget a host that has died or left."""
        self.hosts.remove(host)

    def replace(self, host: Host, *roles: str) -> Host:
        """Stop a host in order and start a new one in its place, as a deploy does."""
        host.leave()
        self.remove(host)
        new = self.add_host(*roles)
        self.wait_until_working(new)
        return new

    def held(self) -> dict[Host, int]:
        """How many lanes each host holds; those of unknown workers count for nobody."""
        by_pid = {pid: host for host in self.hosts for pid in host.workers()}
        lanes = dict.fromkeys(self.hosts, 0)
        for pid, count in self.ask(HELD, FULL_NAME):
            if pid in by_pid:
                lanes[by_pid[pid]] += count
        return lanes

    def worker_of(self, host: Host) -> int:
        """The process that handles events on a host."""
        (pid,) = {row[0] for row in self.ask(HELD, FULL_NAME)} & set(host.workers())
        return int(pid)

    def wait_until_working(self, host: Host) -> None:
        """The host has joined and holds lanes."""
        wait_until(
            lambda: self.held()[host] > 0,
            what=lambda: f"the new host holds lanes: {list(self.held().values())}\n{host.tail()}",
        )

    @property
    def is_fair(self) -> bool:
        """Whether all lanes are held, by each host the same number but for one."""
        lanes = self.held().values()
        return sum(lanes) == LANES and max(lanes) - min(lanes) <= 1

    def wait_until_fair(self, seconds: float = SOON_SECONDS) -> None:
        wait_until(
            lambda: self.is_fair,
            seconds=seconds,
            what=lambda: f"lanes are shared fairly: {list(self.held().values())}\n{self.tails()}",
        )

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """A publisher in this process that outlives all hosts."""
        stop = threading.Event()
        thread = threading.Thread(target=self._pipeline.run_worker, args=(["publisher"], stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SOON_SECONDS)
            assert not thread.is_alive(), "the publisher does not stop"

    # ── sending ───────────────────────────────────────────────────────────────────────────────

    @property
    def sent(self) -> int:
        """How many events have been committed."""
        return len(self._sent)

    def send(self, transactions: int = 1) -> None:
        """Commit a few events of random keys."""
        with psycopg.connect(self._settings["database_url"]) as connection:
            for _ in range(transactions):
                self._send(connection)

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        accounts = self._chance.choices(self._accounts, k=EVENTS_PER_TRANSACTION)
        self._counts.update(accounts)
        events = []
        later: Counter[str] = Counter(accounts)
        for account in accounts:
            later[account] -= 1
            events.append(Moved(account=account, number=self._counts[account] - later[account]))
        uuids = [new_event_uuid() for _ in events]
        self._pipeline.send_many(connection, STREAM, events, event_uuids=uuids)
        connection.commit()
        self._sent.update(map(str, uuids))

    @contextmanager
    def feeding(self, pause_seconds: float = 0.04) -> Iterator[None]:
        """Somebody goes on sending meanwhile."""
        stop = threading.Event()
        failures: list[BaseException] = []

        def feed() -> None:
            try:
                with psycopg.connect(self._settings["database_url"]) as connection:
                    while not stop.wait(pause_seconds):
                        self._send(connection)
            except BaseException as error:  # noqa: BLE001 - handed to the test below
                failures.append(error)

        thread = threading.Thread(target=feed, name="feeding")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self._asking:
            return self._connection.execute(query.encode(), parameters).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        ((value,),) = self.ask(query, *parameters)
        return value

    def now(self) -> datetime:
        """The database's clock, which all moments are compared on."""
        moment: datetime = self.value("SELECT clock_timestamp()")
        return moment

    def handled(self) -> int:
        return int(self.value("SELECT count(*) FROM effect"))

    def wait_until_handled_more(self, events: int = 100) -> None:
        """Events flow: so many more than now have had their effects."""
        target = self.handled() + events
        wait_until(lambda: self.handled() >= target, what=lambda: f"events flow:\n{self.tails()}")

    def longest_wait_seconds(self, since: datetime) -> float:
        """The longest time from an event's INSERT to its effect, of those sent since then."""
        return float(self.value(LONGEST_WAIT, since))

    def tails(self) -> str:
        """The last words of every host."""
        return "\n".join(f"{host.log.name}:\n{host.tail()}" for host in self.hosts)

    # ── the books ─────────────────────────────────────────────────────────────────────────────

    def close_books(self, seconds: float = SOON_SECONDS) -> Books:
        """Wait until all is handled, then demand that the books balance with nothing pending."""
        wait_until(
            lambda: self.value(PENDING) <= 0 and self.books().pending == 0,
            seconds=seconds,
            what=lambda: f"everything is handled:\n{self.books()}\n{self.tails()}",
        )
        books = self.books()
        assert books.balance, str(books)
        assert books.sent == len(self._sent) > 0
        return books

    def books(self) -> Books:
        """What everybody wrote down, in one snapshot."""
        known = frozenset(self._sent)
        with psycopg.connect(self._settings["database_url"]) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            outbox = connection.execute(
                "SELECT event_uuid::text, key, (payload ->> 'number')::bigint, position"
                "  FROM events.outbox_event"
            ).fetchall()
            head = connection.execute("SELECT max(head) FROM events.stream").fetchone()
            consumer = _consumer_history(connection)
        return audit(
            History(
                acknowledged=known,
                unknown=frozenset(self._sent - known),
                outbox=tuple(SentRow(*row) for row in outbox),
                head=(head and head[0]) or 0,
                consumers=(consumer,),
            )
        )


def _consumer_history(connection: psycopg.Connection[Any]) -> ConsumerHistory:
    effects = connection.execute(
        "SELECT event_uuid::text, account, of_account FROM effect ORDER BY number"
    ).fetchall()
    return read_consumer(connection, FULL_NAME, STREAM, effects)
