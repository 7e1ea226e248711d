"""Crashes that are no kill: pauses, lost servers, cut connections, rivals. Then the books."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from penstock.stores.migrations import migrate
from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey, Servers
from tests.databases import new_database
from tests.line import (
    CONSUMERS,
    PUBLISHER,
    Line,
    Worker,
    create_tables,
    lease_role,
    running_line,
    workload_template,
)
from tests.proxy import Proxy
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
AUDITS = 150
ALL_ROLES = (PUBLISHER, *CONSUMERS)


@pytest.fixture(scope="module")
def workload_database(servers: Servers) -> Iterator[str]:
    with workload_template(servers.database_url) as name:
        yield name


@pytest.fixture
def database(servers: Servers, workload_database: str) -> Iterator[str]:
    with new_database(servers.database_url, workload_database) as url:
        yield url


@pytest.fixture
def line(database: str, redis_url: str, tmp_path: Path) -> Iterator[Line]:
    with running_line(database, redis_url, tmp_path) as made:
        yield made


def soon(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, what=what)


def open_batches(line: Line, role: str) -> list[int]:
    """The backends that have a batch of this role in hand."""
    return [
        pid
        for (pid,) in line.ask(
            "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2"
            "   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            "   AND classid = (hashtext('penstock lane')::bigint & 4294967295)::oid"
            "   AND objid = (hashtext('ledger ' || %s)::bigint & 4294967295)::oid",
            lease_role(role),
        )
    ]


def stopped_worker(line: Line, role: str, at: str, **options: object) -> Worker:
    """A worker that stands still at a signal of its second batch."""
    worker = line.start(role, failpoint=f"{at}:stop:2", **options)  # type: ignore[arg-type]
    worker.wait_until_stopped()
    return worker


# ── pauses ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", CONSUMERS)
@pytest.mark.parametrize("at", ["BatchClaimed", "EventHandled", "BatchSealed"])
def test_a_consumer_that_wakes_up_late_commits_nothing_and_nobody_waited_for_it(
    line: Line, role: str, at: str
) -> None:
    line.send(30)
    with line.working(PUBLISHER):
        paused = stopped_worker(line, role, at)
        (backend,) = open_batches(line, role)
        before = line.effects(role)
        with line.working(role):
            line.close_books([role])
            assert paused.is_stopped, "the successor did not wait for its predecessor"
            assert line.effects(role) > before
            assert backend not in open_batches(line, role)
            after = line.effects(role)
            paused.send(signal.SIGCONT)
            soon(
                lambda: paused.has_said("LeaseLost", "ServerLost"),
                "the late worker notices",
            )
            line.send(5)
            line.close_books([role])
            assert line.effects(role) > after


@pytest.mark.parametrize("role", CONSUMERS)
def test_a_worker_whose_lease_was_taken_commits_nothing_even_before_anybody_else_worked(
    line: Line, role: str
) -> None:
    line.send(30)
    with line.working(PUBLISHER):
        worker = stopped_worker(line, role, "BatchSealed")
        before = line.effects(role)
        # The checkpoint has not moved: owner and term alone tell the old holder from the new.
        line.ask(
            "UPDATE events.stream_lease SET owner_id = 'somebody else', term = term + 1,"
            " lease_until = clock_timestamp() + interval '1 minute' WHERE role = %s",
            lease_role(role),
        )
        worker.send(signal.SIGCONT)
        soon(lambda: worker.has_said("LeaseLost"), "the worker notices")
        assert line.effects(role) == before
        assert line.books([role]).balance
        line.ask(
            "UPDATE events.stream_lease SET lease_until = '-infinity' WHERE role = %s",
            lease_role(role),
        )
        line.close_books([role])


@pytest.mark.long
def test_the_books_balance_at_every_moment(line: Line) -> None:
    with line.working(*ALL_ROLES), line.feeding():
        soon(lambda: line.effects("coroutine") > 0, "events flow")
        for _ in range(AUDITS):
            books = line.books()
            assert books.balance, str(books)
    with line.working(*ALL_ROLES):
        line.close_books()


def test_a_publisher_that_wakes_up_late_can_do_no_harm(line: Line) -> None:
    line.send(30)
    paused = line.start(PUBLISHER, failpoint="BatchNumbered:stop:2")
    paused.wait_until_stopped()
    with line.working(PUBLISHER, "session"):
        line.send(20)
        line.close_books(["session"])
        paused.send(signal.SIGCONT)
        soon(lambda: paused.has_said("LeaseLost"), "the late publisher notices")
        line.send(10)
        line.close_books(["session"])
        line.wait_until_hot_log_follows()


@pytest.mark.long
def test_two_publishers_take_turns_on_one_stream(line: Line) -> None:
    rivals = [line.start(PUBLISHER), line.start(PUBLISHER)]
    with line.working("session"), line.feeding():
        for rival in rivals:
            soon(lambda: line.is_held(PUBLISHER), "one of them publishes")
            holder = line.owner(PUBLISHER)[0]
            soon(lambda: line.effects("session") > 10, "events flow")
            victim = next((r for r in rivals if f"-{r.process.pid}-" in str(holder)), rival)
            victim.end()
            rivals[rivals.index(victim)] = line.start(PUBLISHER)
            soon(lambda held=holder: line.owner(PUBLISHER)[0] != held, "the other one publishes")  # type: ignore[misc]
    with line.working("session", PUBLISHER):
        line.close_books(["session"])
        line.wait_until_hot_log_follows()


# ── servers ────────────────────────────────────────────────────────────────────────────────────


def test_redis_may_come_back_empty_at_any_time(database: str, tmp_path: Path) -> None:
    with (
        EmbeddedValkey(tmp_path / "valkey", persistence="none") as valkey,
        running_line(database, valkey.url, tmp_path) as line,
        line.working(*ALL_ROLES),
    ):
        for round_number in range(1, 3):
            with line.feeding():
                target = round_number * 20
                soon(
                    lambda least=target: line.effects("session") > least,  # type: ignore[misc]
                    "events flow",
                )
                valkey.crash()
                valkey.start()
            line.close_books()
            line.wait_until_hot_log_follows()


@pytest.mark.long
def test_postgresql_may_crash_in_the_middle_of_everything(tmp_path: Path) -> None:
    with (
        EmbeddedPostgres(tmp_path / "postgres", durable=True) as postgres,
        EmbeddedValkey(tmp_path / "valkey", persistence="none") as valkey,
    ):
        migrate(postgres.url)
        create_tables(postgres.url)
        with running_line(postgres.url, valkey.url, tmp_path) as line:
            line.start(PUBLISHER, "session")
            line.start("cursor", "coroutine")
            for round_number in range(1, 3):
                with line.feeding():
                    target = round_number * 20
                    soon(
                        lambda least=target: line.effects("coroutine") > least,  # type: ignore[misc]
                        "events flow",
                    )
                    postgres.crash()
                    postgres.start()
                line.close_books()
            line.wait_until_hot_log_follows()


def test_consumers_go_on_from_the_outbox_while_redis_is_down(
    database: str, redis_url: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy.to(redis_url))
        stack.enter_context(proxy.refusing())
        line = stack.enter_context(running_line(database, proxy.url(redis_url), tmp_path))
        stack.enter_context(line.working(*ALL_ROLES))
        line.send(40)
        line.close_books()
        line.send(20)
        line.close_books()


def test_the_line_works_without_redis(database: str, tmp_path: Path) -> None:
    with running_line(database, None, tmp_path) as line:
        victim = line.start("session", failpoint="BatchSealed:kill:2")
        with line.working(PUBLISHER, "cursor", "coroutine"), line.feeding():
            victim.wait_until_dead()
        with line.working(*ALL_ROLES):
            line.close_books()


# ── connections ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", CONSUMERS)
def test_a_backend_that_is_ended_in_mid_batch_costs_nothing(line: Line, role: str) -> None:
    line.send(30)
    with line.working(PUBLISHER):
        worker = stopped_worker(line, role, "BatchClaimed")
        (backend,) = open_batches(line, role)
        line.ask("SELECT pg_terminate_backend(%s)", backend)
        worker.send(signal.SIGCONT)
        line.close_books([role])
        assert worker.is_alive


@pytest.mark.long
def test_backends_may_be_ended_at_random(line: Line) -> None:
    with line.working(PUBLISHER, "session"), line.feeding():
        line.start("cursor", "coroutine")
        for _ in range(20):
            soon(lambda: bool(open_batches(line, "session")), "a batch is in hand")
            line.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'penstock %%'"
                " ORDER BY random() LIMIT 2"
            )
    with line.working(*ALL_ROLES):
        line.close_books()
        line.wait_until_hot_log_follows()


@pytest.mark.parametrize("role", CONSUMERS)
def test_a_reply_to_commit_that_is_lost_repeats_nothing(line: Line, role: str) -> None:
    line.send(30)
    with Proxy.to(line.database_url) as proxy, line.working(PUBLISHER):
        proxy.cut_reply_to(b"COMMIT", nth=2)
        through = {"PENSTOCK_DATABASE_URL": proxy.url(line.database_url)}
        worker = line.start(role, environment=through)
        soon(lambda: proxy.cuts > 0, "the reply is lost")
        line.close_books([role])
        assert worker.is_alive


@pytest.mark.parametrize("role", CONSUMERS)
def test_a_commit_that_never_arrives_loses_nothing(line: Line, role: str) -> None:
    line.send(30)
    with Proxy.to(line.database_url) as proxy, line.working(PUBLISHER):
        through = {"PENSTOCK_DATABASE_URL": proxy.url(line.database_url)}
        worker = stopped_worker(line, role, "BatchSealed", environment=through)
        before = line.effects(role)
        proxy.cut()
        soon(lambda: not open_batches(line, role), "the server gives the batch up")
        assert line.effects(role) == before
        worker.send(signal.SIGCONT)
        line.close_books([role])
        assert worker.is_alive


# ── senders ────────────────────────────────────────────────────────────────────────────────────


def test_late_commits_are_neither_lost_nor_overtaken_within_their_key(line: Line) -> None:
    with line.working(PUBLISHER, "session"), ExitStack() as late:
        for number in range(5):
            line.send(4)
            late.enter_context(line.held_transaction(f"late-{number}"))
        line.send(20)
        soon(
            lambda: bool(line.value("SELECT coalesce(max(head), 0) > 30 FROM events.stream")),
            "later commits are numbered first",
        )
        late.close()
        line.close_books(["session"])
        line.wait_until_hot_log_follows()


def test_concurrent_senders_keep_every_key_in_order(line: Line) -> None:
    senders = [line.start_sender(60, seed=seed) for seed in range(3)]
    with line.working(*ALL_ROLES):
        for sender in senders:
            sender.wait_until_dead()
            assert sender.process.returncode == 0, sender.tail()
        books = line.close_books()
        assert books.sent > 200
        line.wait_until_hot_log_follows()


def test_a_sender_whose_connection_breaks_at_commit_knows_that_it_does_not_know(
    line: Line, tmp_path: Path
) -> None:
    with Proxy.to(line.database_url) as proxy:
        folder = tmp_path / "through"
        folder.mkdir()
        with running_line(proxy.url(line.database_url), line.redis_url, folder) as through:
            proxy.cut_reply_to(b"COMMIT", nth=3)
            through.send(20)
            assert proxy.cuts == 1
            assert len(through.history([]).unknown) > 0
            with line.working(PUBLISHER, "session"):
                through.close_books(["session"])


def test_the_sealed_transaction_of_a_dead_worker_is_gone(line: Line) -> None:
    line.send(20)
    with line.working(PUBLISHER):
        worker = stopped_worker(line, "session", "BatchSealed")
        effects = line.effects("session")
        worker.end()
        soon(lambda: not open_batches(line, "session"), "the server gives the batch up")
        assert line.effects("session") == effects
        with psycopg.connect(line.database_url) as connection:
            seals = connection.execute("SELECT count(*) FROM events.seal").fetchone()
        assert seals == (0,)
        with line.working("session"):
            line.close_books(["session"])
