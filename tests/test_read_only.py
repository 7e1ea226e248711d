"""A server that takes no writes for a while is waited for; a handler that takes none has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Context, Guarantee, Pipeline, Retry
from penstock.cli import supervision
from penstock.core.settings import Settings
from penstock.stores.postgres import connect
from penstock.telemetry.signals import (
    ConsumerRegistered,
    EventFailed,
    FiringFailed,
    PruningFailed,
    ServerLost,
    TimerDeferred,
    TimerFailed,
)
from tests.databases import name_of
from tests.events import Placed
from tests.failing import heard
from tests.publishing import at
from tests.test_cli import SHOP, Penstock
from tests.test_seams import working
from tests.waiting import SOON_SECONDS, wait_until

EVENTS = 4
ALL = list(range(1, EVENTS + 1))
INSERT = "INSERT INTO effect (n) VALUES (%s)"
ROLES = ("publisher", "janitor", "timers", "archiver", "consumer:bill")
ONCE = Retry.fixed(seconds=0.02, attempts_max=1)


def by_session(event: Placed, session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


def by_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(INSERT, (event.n,))


async def by_async_session(event: Placed, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


def by_completing(event: Placed, context: Context) -> None:
    with context.complete() as session:
        by_session(event, session)


@pytest.fixture
def observer(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (n bigint)")
        yield connection


@pytest.fixture
def penstock(
    tmp_path: Path, database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> Penstock:
    """The command line, in a folder with an application that declares what it sends."""
    (tmp_path / "shop.py").write_text(SHOP + "pipeline.stream('orders', OrderPlaced)\n")
    variables = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": redis_url}
    return Penstock(tmp_path, variables, capsys)


def effects(observer: psycopg.Connection[Any]) -> list[int]:
    return [n for (n,) in observer.execute("SELECT n FROM effect ORDER BY n")]


def published(observer: psycopg.Connection[Any]) -> int:
    return sum(n for (n,) in observer.execute("SELECT published FROM events.stream"))


def send(pipeline: Pipeline, observer: psycopg.Connection[Any], numbers: list[int]) -> None:
    with observer.transaction():
        for n in numbers:
            pipeline.send(observer, "orders", Placed(n=n))


def let_write(
    observer: psycopg.Connection[Any], database_url: str, *, is_allowed: bool, who: str = "%"
) -> None:
    """From now on, or no more, as behind an address that leads to a standby for a while."""
    change = "RESET default_transaction_read_only"
    if not is_allowed:
        change = "SET default_transaction_read_only TO on"
    database = sql.Identifier(name_of(database_url))
    observer.execute(sql.SQL("ALTER DATABASE {} " + change).format(database))
    observer.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND datname = current_database() AND application_name LIKE %s",
        (f"penstock {who}",),
    )


def test_every_role_waits_for_a_server_that_takes_no_writes(
    database_url: str, tmp_path: Path, observer: psycopg.Connection[Any]
) -> None:
    pipeline = Pipeline(
        "shop", database_url=database_url, redis_url=None, archive_url=str(tmp_path)
    )
    pipeline.consumer("orders", name="bill", start="earliest")(by_session)
    send(pipeline, observer, ALL)
    with working(pipeline, "publisher"):
        wait_until(lambda: published(observer) == EVENTS, what="there is something to archive")
    let_write(observer, database_url, is_allowed=False)
    with heard(ServerLost, FiringFailed, PruningFailed) as told, working(pipeline, *ROLES):
        wait_until(lambda: len(told) >= len(ROLES), what="everybody waits")
        let_write(observer, database_url, is_allowed=True)
        wait_until(lambda: effects(observer) == ALL, what="all are handled")
    assert {signal.worker for signal in told} == set(ROLES), "each says so once"
    assert all("read-only" in lost.error for lost in told)


KINDS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (by_session, {}),
    (by_session, {"batch_size": 1}),
    (by_cursor, {}),
    (by_async_session, {}),
    (by_completing, {"guarantee": Guarantee.AT_LEAST_ONCE}),
]


@pytest.mark.parametrize(("handler", "options"), KINDS)
def test_no_event_has_failed_while_the_server_takes_no_writes(
    database_url: str,
    observer: psycopg.Connection[Any],
    handler: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    pipeline.consumer("orders", name="bill", start="earliest", retry=ONCE, **options)(handler)
    send(pipeline, observer, ALL)

    def forbid() -> None:
        """Those who ask and keep leases are connected already, and notice nothing."""
        let_write(observer, database_url, is_allowed=False, who="nobody")

    with (
        heard(ServerLost, EventFailed) as told,
        at(ConsumerRegistered, forbid),
        working(pipeline, "publisher", "consumer:bill"),
    ):
        wait_until(lambda: len(told) > 0, what="it is noticed")
        let_write(observer, database_url, is_allowed=True, who="shop.bill")
        wait_until(lambda: effects(observer) == ALL, what="all are handled")
    assert [signal for signal in told if isinstance(signal, EventFailed)] == []


def test_an_event_whose_handler_makes_its_transaction_read_only_has_failed(
    database_url: str, observer: psycopg.Connection[Any]
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)

    @pipeline.consumer("orders", name="bill", start="earliest", retry=ONCE)
    def bill(event: Placed, session: Session) -> None:
        if event.n == ALL[1]:
            session.execute(text("SET TRANSACTION READ ONLY"))
        by_session(event, session)

    send(pipeline, observer, ALL)
    with heard(ServerLost, EventFailed) as told, working(pipeline, "publisher", "consumer:bill"):
        wait_until(lambda: len(effects(observer)) == EVENTS - 1, what="the others are handled")
    assert [(type(signal), signal.position) for signal in told] == [(EventFailed, ALL[1])]


def test_no_timer_has_failed_while_the_server_takes_no_writes(
    database_url: str, redis_url: str, observer: psycopg.Connection[Any]
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)
    pipeline.timer("reminders", retry=ONCE)(by_session)
    let_write(observer, database_url, is_allowed=False)
    with heard(TimerFailed, TimerDeferred) as told, working(pipeline, "timer:reminders"):
        pipeline.timers.publish({"n": 1}, "reminders", timer_id="1", activate_in=timedelta(0))
        wait_until(lambda: len(told) > 0, what="it is put off")
        let_write(observer, database_url, is_allowed=True)
        wait_until(lambda: effects(observer) == [1], what="it is handled")
    assert [signal for signal in told if isinstance(signal, TimerFailed)] == []


def test_a_command_says_that_the_server_takes_no_writes(
    penstock: Penstock, database_url: str, observer: psycopg.Connection[Any]
) -> None:
    let_write(observer, database_url, is_allowed=False)
    said = penstock("quarantine", "release", "--all", code=1).stderr
    assert "cannot execute DELETE in a read-only transaction. What was committed" in said


def test_run_begins_though_its_connection_is_cut_while_it_asks_for_the_time(
    monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    def cut(connection: psycopg.Connection[Any], _schema: str) -> Any:
        return connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(supervision, "read_database_clock", cut)
    invocation: Any = SimpleNamespace(
        connect=lambda _command: connect(database_url, "penstock run"),
        settings=Settings(database_url=database_url),
    )
    assert datetime.fromisoformat(supervision._deployed_at(invocation)) <= datetime.now(UTC)


def test_run_begins_while_the_server_takes_no_writes(
    penstock: Penstock, database_url: str, observer: psycopg.Connection[Any]
) -> None:
    let_write(observer, database_url, is_allowed=False)
    process = penstock.start("--app", "shop:pipeline", "run", "--publisher", "--no-spare")
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "read-only" in line)
        assert "The workers wait for it." in said
        let_write(observer, database_url, is_allowed=True)
        assert any("LeaseAcquired" in line for line in process.stderr)
        process.terminate()
        process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0
