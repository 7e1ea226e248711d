"""A whole line for crash tests: real worker processes on real servers, and the books at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import redis

from penstock.core.audit import audit
from penstock.core.books import Books
from penstock.core.history import ConsumerHistory, History, SentRow
from penstock.core.leases import consumer_role
from penstock.core.wire import encode_entry
from penstock.stores.configuration import PREFIX
from penstock.stores.identity import new_event_uuid
from penstock.stores.migrations import migrate
from penstock.telemetry.failpoints import ENVIRONMENT_NAME
from tests.databases import name_of, new_database
from tests.histories import read_consumer, read_holes
from tests.signing import keys_of
from tests.waiting import SOON_SECONDS, wait_until
from tests.workload import (
    STREAM,
    TABLES,
    Journal,
    Posted,
    Sender,
    build_pipeline,
    read_beliefs,
)

ROOT = Path(__file__).parent.parent
CONSUMERS = ("session", "cursor", "coroutine")
PUBLISHER = "publisher"
LOG_TAIL_BYTES = 3000

SETTINGS: Mapping[str, Any] = {
    "lease_seconds": 1.0,
    "lease_renew_seconds": 0.3,
    "publish_batch_size": 20,
    "poll_seconds": 1.0,
    "shutdown_seconds": 5.0,
}

PROGRESS = """
SELECT (SELECT count(*) FROM events.outbox_event WHERE position IS NULL),
       (SELECT count(*) FROM events.stream_lease WHERE role = ANY(%s) AND checkpoint >=
               (SELECT coalesce(max(head), 0) FROM events.stream)),
       (SELECT count(*) FROM events.parked_event WHERE consumer = ANY(%s))
"""


class Worker:
    """A real worker process, which may be killed, stopped and continued."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        return self.process.poll() == -signal.SIGKILL

    @property
    def is_stopped(self) -> bool:
        """Whether the process stands still, by the kernel's account."""
        state = Path(f"/proc/{self.process.pid}/stat").read_text()
        return state.rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_until_dead(self, seconds: float = SOON_SECONDS) -> None:
        wait_until(
            lambda: not self.is_alive,
            seconds=seconds,
            what=lambda: f"the worker ends:\n{self.tail()}",
        )

    def wait_until_stopped(self, seconds: float = SOON_SECONDS) -> None:
        wait_until(
            lambda: self.is_stopped or not self.is_alive,
            seconds=seconds,
            what=lambda: f"the worker stops:\n{self.tail()}",
        )
        assert self.is_alive, f"the worker ended instead of stopping:\n{self.tail()}"

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        if self.is_alive:
            self.process.kill()
        self.process.wait()

    def has_said(self, *words: str) -> bool:
        """Whether one of the words is anywhere in its log."""
        log = self.log.read_text(errors="replace")
        return any(word in log for word in words)

    def tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


class Line:
    """One database and one hot log with senders, workers and books."""

    def __init__(
        self, database_url: str, redis_url: str | None, folder: Path, **settings: Any
    ) -> None:
        self.database_url = database_url
        self.redis_url = redis_url
        self.folder = folder
        self.settings = {**SETTINGS, **settings}
        self.workers: list[Worker] = []
        self._journal_path = folder / "journal"
        self._journal = Journal(self._journal_path)
        self._pipeline = build_pipeline(
            database_url=database_url, redis_url=redis_url, **self.settings
        )
        self._senders: list[Sender] = []
        self._sender = self.sender(seed=1)
        self._connection: psycopg.Connection[Any] | None = None
        self._asking = threading.Lock()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        for sender in self._senders:
            sender.close()
        if self._connection is not None:
            self._connection.close()
        self._journal.close()

    # ── sending ───────────────────────────────────────────────────────────────────────────────

    def send(self, transactions: int = 1) -> None:
        """Send from this process."""
        for _ in range(transactions):
            self._sender.send()

    def sender(self, seed: int) -> Sender:
        """One more sender in this process, for a thread of its own."""
        sender = Sender(self._pipeline, self._journal, seed)
        self._senders.append(sender)
        return sender

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Somebody goes on sending meanwhile, whatever happens to the servers."""
        stop = threading.Event()
        sender = self.sender(seed=3)

        def feed() -> None:
            while not stop.wait(0.02):
                sender.send()

        thread = threading.Thread(target=feed, name="feeding")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextmanager
    def held_transaction(self, account: str) -> Iterator[None]:
        """An event whose row is drawn now and whose commit comes when the block ends."""
        uuid = new_event_uuid()
        self._journal.write("T", [uuid])
        with psycopg.connect(self.database_url) as connection:
            event = Posted(account=account, number=1)
            self._pipeline.send(connection, STREAM, event, event_uuid=uuid)
            yield
        self._journal.write("K", [uuid])

    def start_sender(
        self, transactions: int, *, seed: int = 7, failpoint: str | None = None
    ) -> Worker:
        """A sender that is a process."""
        argv = ["-m", "tests.workload", str(self._journal_path), str(seed), str(transactions)]
        return self._start([sys.executable, *argv], failpoint, {})

    # ── working ───────────────────────────────────────────────────────────────────────────────

    def start(
        self,
        *roles: str,
        failpoint: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        """A worker process with these roles, which dies or stops at its failpoint."""
        argv = [sys.executable, "-m", "penstock", "--app", "tests.workload:pipeline", "work"]
        argv += ["--parent", str(os.getpid())]
        for role in roles:
            argv += ["--role", full_role(role)]
        return self._start(argv, failpoint, environment or {})

    def _start(
        self, argv: Sequence[str], failpoint: str | None, environment: Mapping[str, str]
    ) -> Worker:
        settings = {
            "database_url": self.database_url,
            "redis_url": self.redis_url or "none",
            **self.settings,
        }
        world = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
        world[ENVIRONMENT_NAME] = failpoint or ""
        log = self.folder / f"worker-{len(self.workers)}.log"
        worker = Worker(argv, {**world, **environment}, log)
        self.workers.append(worker)
        return worker

    @contextmanager
    def working(self, *roles: str) -> Iterator[None]:
        """Workers in a thread of this process while the block lasts: cheap bystanders."""
        stop = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                pipeline = build_pipeline(
                    database_url=self.database_url, redis_url=self.redis_url, **self.settings
                )
                pipeline.run_worker(list(map(full_role, roles)), stop)
            except BaseException as error:  # noqa: BLE001 - handed to the test below
                failures.append(error)

        thread = threading.Thread(target=work, name=f"working {roles}")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SOON_SECONDS)
            assert not thread.is_alive(), f"{roles} do not stop"
        if failures:
            raise failures[0]

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of a query, on a connection that is kept: waiting asks very often."""
        with self._asking:
            if self._connection is None or self._connection.closed:
                self._connection = psycopg.connect(self.database_url, autocommit=True)
            cursor = self._connection.execute(query.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def value(self, query: str, *parameters: Any) -> Any:
        (row,) = self.ask(query, *parameters)
        return row[0]

    def effects(self, consumer: str) -> int:
        return int(
            self.value("SELECT count(*) FROM effect WHERE consumer = %s", f"line.{consumer}")
        )

    def owner(self, role: str) -> tuple[str | None, int]:
        """Who holds a role now, and in which term."""
        rows = self.ask(
            "SELECT CASE WHEN lease_until > clock_timestamp() THEN owner_id END, term"
            "  FROM events.stream_lease WHERE stream_name = %s AND role = %s",
            STREAM,
            lease_role(role),
        )
        return (rows[0][0], int(rows[0][1])) if rows else (None, 0)

    def is_held(self, role: str) -> bool:
        return self.owner(role)[0] is not None

    def client(self) -> redis.Redis:
        assert self.redis_url is not None
        return redis.Redis.from_url(self.redis_url, protocol=2)

    # ── the books ─────────────────────────────────────────────────────────────────────────────

    def history(self, consumers: Sequence[str] = CONSUMERS) -> History:
        """What everybody wrote down, in one snapshot."""
        # Senders may be at it. What they knew before the snapshot must be in it; what they had
        # tried by its end may be.
        _, known, refused = self._beliefs()
        with psycopg.connect(self.database_url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            rows = connection.execute(
                "SELECT event_uuid::text, key, (payload ->> 'number')::bigint, position"
                "  FROM events.outbox_event WHERE stream_name = %s",
                (STREAM,),
            ).fetchall()
            head = connection.execute(
                "SELECT coalesce(max(head), 0) FROM events.stream WHERE name = %s", (STREAM,)
            ).fetchone()
            assert head is not None
            holes = read_holes(connection, STREAM)
            histories = tuple(_consumer_history(connection, name) for name in consumers)
        tried, _, _ = self._beliefs()
        return History(
            acknowledged=frozenset(known),
            refused=frozenset(refused),
            unknown=frozenset(tried - known - refused),
            outbox=tuple(SentRow(*row) for row in rows),
            head=head[0],
            holes=holes,
            consumers=histories,
        )

    def books(self, consumers: Sequence[str] = CONSUMERS) -> Books:
        return audit(self.history(consumers))

    def _beliefs(self) -> tuple[set[str], set[str], set[str]]:
        return read_beliefs([self._journal_path])

    def wait_until_handled(
        self, consumers: Sequence[str] = CONSUMERS, seconds: float = SOON_SECONDS
    ) -> None:
        """Everything that is in the outbox is numbered and settled, and nothing is parked."""

        roles = [lease_role(name) for name in consumers]
        full_names = [f"line.{name}" for name in consumers]

        def is_done() -> bool:
            try:
                ((unnumbered, done, parked),) = self.ask(PROGRESS, roles, full_names)
            except psycopg.OperationalError:
                return False
            return bool(unnumbered == parked == 0 and done == len(consumers))

        wait_until(
            is_done,
            seconds=seconds,
            what=lambda: f"everything is handled:\n{self.books(consumers)}\n{self.tails()}",
        )

    def tails(self) -> str:
        """The last words of every worker process."""
        return "\n".join(f"{worker.log.name}:\n{worker.tail()}" for worker in self.workers)

    def close_books(
        self, consumers: Sequence[str] = CONSUMERS, seconds: float = SOON_SECONDS
    ) -> Books:
        """Wait until all is handled, then demand that the books balance with nothing pending."""
        self.wait_until_handled(consumers, seconds)
        books = self.books(consumers)
        assert books.balance, str(books)
        assert books.pending == books.parked == books.dead == 0, str(books)
        assert books.sent > 0, "nothing was sent: the test shows nothing"
        return books

    def hot_log_faults(self) -> list[str]:
        """How the hot log differs from the outbox, entry by entry; empty: not at all."""
        keys = keys_of(self.database_url)
        expected = {
            f"{position}-0": encode_entry(STREAM, position, body, keys)
            for position, body in self.ask(
                "SELECT o.position, events.entry(o, s.origin) FROM events.outbox_event o"
                "  JOIN events.stream s ON s.name = o.stream_name WHERE o.position IS NOT NULL"
                " UNION ALL SELECT h.last, events.hole_entry(h, s.origin) FROM events.hole h"
                "  JOIN events.stream s ON s.name = h.stream_name"
            )
        }
        with closing(self.client()) as client:
            found: Any = client.xrange(f"penstock:{{{STREAM}}}:log")
        entries = {entry_id.decode(): fields.get(b"e") for entry_id, fields in found}
        first = min((int(entry_id.split("-")[0]) for entry_id in entries), default=0)
        faults = [
            f"{entry_id} is missing"
            for entry_id in expected
            if entry_id not in entries and int(entry_id.split("-")[0]) >= first
        ]
        faults += [
            f"{entry_id} differs from the outbox"
            for entry_id, entry in entries.items()
            if expected.get(entry_id) != entry
        ]
        return faults if entries else ["the hot log is empty"]

    def wait_until_hot_log_follows(self) -> None:
        """The hot log holds, byte by byte, what the outbox holds."""
        wait_until(
            lambda: not self.hot_log_faults(),
            what="the hot log equals the outbox",
        )


def _consumer_history(connection: psycopg.Connection[Any], name: str) -> ConsumerHistory:
    full_name = f"line.{name}"
    effects = connection.execute(
        "SELECT event_uuid::text, account, of_account FROM effect"
        " WHERE consumer = %s ORDER BY number",
        (full_name,),
    ).fetchall()
    return read_consumer(connection, full_name, STREAM, effects)


def full_role(role: str) -> str:
    """The role as a worker's command line wants it."""
    return f"consumer:{role}" if role in CONSUMERS else role


def lease_role(role: str) -> str:
    """The role as the lease table has it."""
    return consumer_role(f"line.{role}") if role in CONSUMERS else role


# ── databases ──────────────────────────────────────────────────────────────────────────────────


@contextmanager
def workload_template(server_url: str) -> Iterator[str]:
    """The name of a migrated database with the workload's tables, to be copied."""
    with new_database(server_url) as url:
        migrate(url)
        create_tables(url)
        yield name_of(url)


def create_tables(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(TABLES.encode())


@contextmanager
def running_line(
    database_url: str, redis_url: str | None, folder: Path, **settings: Any
) -> Iterator[Line]:
    line = Line(database_url, redis_url, folder, **settings)
    try:
        yield line
    finally:
        line.close()
