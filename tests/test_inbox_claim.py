"""An event of another bus is handled once: claims under rivals, rollbacks and crashes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import penstock
from penstock.core.claims import lock_number
from penstock.core.events import StreamEvent
from penstock.errors import PenstockError, SchemaMismatch, UnsafeTransaction, UsageError
from penstock.inbox import AlreadyHandled, Claim, ClaimRefused, LockContention, claim, claim_async
from penstock.stores.migrations import migrate
from penstock.stores.postgres import sqlalchemy_url
from penstock.stores.servers import Servers
from tests.bench_of_one import Workbench, run_until_idle
from tests.claiming import ASYNC, CONSUMER, KINDS, SYNC, Caller, caller
from tests.databases import new_database
from tests.waiting import SOON_SECONDS, wait_until

ROOT = Path(__file__).parent.parent
BROKEN = "SELECT 1/0"
SNAPSHOT = "SELECT count(*) FROM events.inbox_event"
LOCK_OF_A_CLAIM = (
    "SELECT classid::bigint, objid::bigint, objsubid FROM pg_locks"
    " WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
)

NUMBER_OF_BILLING_EVT_1 = -5_525_296_476_290_669_717

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE effect (event_id text)")
        yield url


@pytest.fixture
def url(database_url: str) -> str:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("TRUNCATE events.inbox_event, effect")
    return database_url


def claimed(url: str, schema: str = "events") -> list[tuple[str, str]]:
    """What is done, as another session sees it."""
    query = sql.SQL("SELECT consumer, event_id FROM {}.inbox_event ORDER BY 1, 2")
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query.format(sql.Identifier(schema))).fetchall()


@asynccontextmanager
async def two(kind: str, url: str, **options: Any) -> AsyncIterator[tuple[Caller, Caller]]:
    """Two callers, each with a connection of its own."""
    async with caller(kind, url, **options) as first, caller("psycopg.Connection", url) as second:
        yield first, second


# ── one transaction ────────────────────────────────────────────────────────────────────────────


@every_kind
def test_a_claim_is_done_when_its_transaction_commits(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with two(kind, url) as (first, second):
            assert await first.claim("e1") == Claim(CONSUMER, "e1")
            with pytest.raises(LockContention, match="not done yet"):
                await second.claim("e1")
            await second.rollback()
            await first.commit()
            with pytest.raises(AlreadyHandled, match="has handled event 'e1' already"):
                await second.claim("e1")
            await second.rollback()
            with pytest.raises(AlreadyHandled):
                await first.claim("e1")

    asyncio.run(scenario())
    assert claimed(url) == [(CONSUMER, "e1")]


@every_kind
def test_a_claim_that_is_rolled_back_never_was(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with two(kind, url) as (first, second):
            await first.claim("e1")
            await first.rollback()
            assert claimed(url) == []
            await second.claim("e1")
            await second.commit()

    asyncio.run(scenario())
    assert claimed(url) == [(CONSUMER, "e1")]


@every_kind
def test_a_claim_in_a_savepoint_goes_with_it(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with two(kind, url) as (first, second):
            await first.claim("before")
            await first.claim_and_undo("e1")
            await second.claim("e1")
            await second.rollback()
            await first.claim("e1")
            await first.commit()

    asyncio.run(scenario())
    assert claimed(url) == [(CONSUMER, "before"), (CONSUMER, "e1")]


@every_kind
def test_claimed_twice_in_one_transaction_it_is_handled_by_that_one(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with caller(kind, url) as first:
            await first.claim("e1")
            with pytest.raises(AlreadyHandled, match="this very transaction has claimed it"):
                await first.claim("e1")
            # Nothing failed on the server: the transaction goes on.
            await first.claim("e2")
            await first.commit()

    asyncio.run(scenario())
    assert claimed(url) == [(CONSUMER, "e1"), (CONSUMER, "e2")]


@every_kind
def test_the_data_and_the_claim_are_one(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with caller(kind, url) as first:
            await first.execute("INSERT INTO effect VALUES ('lost')")
            await first.claim("e1")
            await first.rollback()
            await first.execute("INSERT INTO effect VALUES ('kept')")
            await first.claim("e1")
            await first.commit()

    asyncio.run(scenario())
    assert effects(url) == ["kept"]


def effects(url: str) -> list[str]:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute("SELECT event_id FROM effect ORDER BY 1").fetchall()
    return [event_id for (event_id,) in rows]


def test_every_consumer_has_its_own_events(url: str) -> None:
    with psycopg.connect(url) as first, psycopg.connect(url) as second:
        for connection, consumer, event_id in (
            (first, "a", "bc"),
            (second, "ab", "c"),
            (second, "a", "b"),
            (first, "b", "bc"),
        ):
            claim(connection, consumer, event_id)
    assert len(claimed(url)) == 4


def test_a_uuid_is_its_text(url: str) -> None:
    event_id = UUID("0190a0e1-7f6a-7000-8000-000000000001")
    with psycopg.connect(url) as connection:
        assert claim(connection, CONSUMER, event_id) == Claim(CONSUMER, str(event_id))
        with pytest.raises(AlreadyHandled):
            claim(connection, CONSUMER, str(event_id))


def test_a_claim_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Claim("a", "b").consumer = "c"  # type: ignore[misc]


# ── rivals ─────────────────────────────────────────────────────────────────────────────────────


def attempt(connection: psycopg.Connection[Any] | Session, event_id: str) -> str:
    """Claim, write, commit; what came of it."""
    try:
        claim(connection, CONSUMER, event_id)
    except ClaimRefused as refusal:
        connection.rollback()
        return type(refusal).__name__
    if isinstance(connection, Session):
        connection.execute(text("INSERT INTO effect VALUES (:id)"), {"id": event_id})
    else:
        connection.execute("INSERT INTO effect VALUES (%s)", [event_id])
    connection.commit()
    return "handled"


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("kind", ["Session", "psycopg.Connection"])
def test_of_rivals_at_the_same_moment_one_handles(url: str, kind: str, isolation: str) -> None:
    events = [f"e{n}" for n in range(60)]
    rivals = 4
    outcomes: Counter[tuple[str, str]] = Counter()
    barrier = threading.Barrier(rivals, timeout=SOON_SECONDS)
    engine = create_engine(sqlalchemy_url(url), isolation_level=isolation)

    def race() -> None:
        options = "-c default_transaction_isolation=" + isolation.replace(" ", r"\ ")
        connection: Any = (
            Session(engine) if kind == "Session" else psycopg.connect(url, options=options)
        )
        with connection:
            for event_id in events:
                barrier.wait()
                outcomes[event_id, attempt(connection, event_id)] += 1

    threads = [threading.Thread(target=race) for _ in range(rivals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_SECONDS)
    engine.dispose()
    assert sum(outcomes.values()) == rivals * len(events), "a rival ended early"
    assert [outcomes[event_id, "handled"] for event_id in events] == [1] * len(events)
    assert sorted(effects(url)) == sorted(events)
    assert {outcome for _, outcome in outcomes} <= {"handled", "LockContention", "AlreadyHandled"}


def test_of_asynchronous_rivals_one_handles(url: str) -> None:
    events = [f"e{n}" for n in range(30)]
    outcomes: Counter[tuple[str, str]] = Counter()

    async def race(kind: str, barrier: asyncio.Barrier) -> None:
        async with caller(kind, url) as rival:
            for event_id in events:
                await barrier.wait()
                try:
                    await rival.claim(event_id)
                    outcome = "handled"
                    await rival.write(event_id)
                except ClaimRefused as refusal:
                    outcome = type(refusal).__name__
                await rival.commit()
                outcomes[event_id, outcome] += 1

    async def scenario() -> None:
        barrier = asyncio.Barrier(len(ASYNC))
        await asyncio.wait_for(asyncio.gather(*(race(kind, barrier) for kind in ASYNC)), 60)

    asyncio.run(scenario())
    assert [outcomes[event_id, "handled"] for event_id in events] == [1] * len(events)
    assert sorted(effects(url)) == sorted(events)


def test_whoever_is_told_not_yet_may_be_the_one_in_the_end(url: str) -> None:
    """Had the rival been told that it is done, the event would be lost now."""
    is_claimed, is_refused = threading.Event(), threading.Event()

    def fail() -> None:
        with psycopg.connect(url) as connection:
            claim(connection, CONSUMER, "e1")
            is_claimed.set()
            is_refused.wait(SOON_SECONDS)
            connection.rollback()

    failing = threading.Thread(target=fail)
    failing.start()
    assert is_claimed.wait(SOON_SECONDS)
    with psycopg.connect(url) as connection:
        assert attempt(connection, "e1") == "LockContention"
        is_refused.set()
        failing.join(SOON_SECONDS)
        assert attempt(connection, "e1") == "handled"
    assert effects(url) == ["e1"]


@pytest.mark.parametrize("kind", ["Session", "psycopg.Connection", "psycopg.AsyncConnection"])
def test_a_process_that_is_killed_lets_go(url: str, kind: str) -> None:
    command = [sys.executable, "-m", "tests.claiming", kind, url, "e1"]
    with (
        psycopg.connect(url) as connection,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "claimed\n"
            assert attempt(connection, "e1") == "LockContention"
        finally:
            holder.send_signal(signal.SIGKILL)
        assert holder.wait(SOON_SECONDS) == -signal.SIGKILL
        wait_until(lambda: attempt(connection, "e1") == "handled", what="the claim is free")
    assert effects(url) == ["e1"]


# ── snapshots ──────────────────────────────────────────────────────────────────────────────────


@every_kind
def test_the_inbox_is_looked_at_after_the_lock(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with two(kind, url) as (late, rival):
            await late.execute(SNAPSHOT)
            await rival.claim("e1")
            await rival.commit()
            with pytest.raises(AlreadyHandled):
                await late.claim("e1")

    asyncio.run(scenario())


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@every_kind
def test_under_a_snapshot_that_is_too_old_it_is_not_yet(
    url: str, kind: str, isolation: str
) -> None:
    async def scenario() -> None:
        async with two(kind, url) as (old, rival):
            await old.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
            await old.execute(SNAPSHOT)
            await rival.claim("e1")
            await rival.commit()
            with pytest.raises(LockContention, match="since this one began"):
                await old.claim("e1")
            await old.rollback()
            with pytest.raises(AlreadyHandled):
                await old.claim("e1")

    asyncio.run(scenario())
    assert claimed(url) == [(CONSUMER, "e1")]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_under_a_snapshot_that_holds_it_it_is_done(url: str, isolation: str) -> None:
    with psycopg.connect(url) as connection:
        attempt(connection, "e1")
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
        with pytest.raises(AlreadyHandled):
            claim(connection, CONSUMER, "e1")


# ── transactions that cannot hold a claim ──────────────────────────────────────────────────────


@every_kind
def test_autocommit_is_refused(url: str, kind: str) -> None:
    is_psycopg = kind.startswith("psycopg")
    options = {"autocommit": True} if is_psycopg else {"isolation_level": "AUTOCOMMIT"}

    async def scenario() -> None:
        async with caller(kind, url, **options) as careless:
            with pytest.raises(UnsafeTransaction, match="autocommit"):
                await careless.claim("e1")

    asyncio.run(scenario())
    assert claimed(url) == []


def test_autocommit_is_refused_while_a_pipeline_hides_the_transaction(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        with pytest.raises(UnsafeTransaction, match="outside of a pipeline"):
            claim(connection, CONSUMER, "e1")
    assert claimed(url) == []


def test_a_transaction_block_on_an_autocommit_connection_will_do(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        with connection.transaction():
            claim(connection, CONSUMER, "e1")
            assert claimed(url) == []
        assert claimed(url) == [(CONSUMER, "e1")]


def test_a_pipeline_within_a_transaction_will_do(url: str) -> None:
    with psycopg.connect(url) as connection, connection.pipeline():
        claim(connection, CONSUMER, "e1")
        with pytest.raises(AlreadyHandled):
            claim(connection, CONSUMER, "e1")
    assert claimed(url) == [(CONSUMER, "e1")]


@every_kind
def test_a_transaction_that_has_failed_is_refused(url: str, kind: str) -> None:
    async def scenario() -> None:
        async with caller(kind, url) as failed:
            with pytest.raises((psycopg.Error, Exception), match="division by zero"):
                await failed.execute(BROKEN)
            with pytest.raises(UnsafeTransaction, match="roll back and begin again"):
                await failed.claim("e1")
            await failed.rollback()
            await failed.claim("e1")

    asyncio.run(scenario())


def test_a_session_without_a_transaction_is_refused(url: str) -> None:
    engine = create_engine(sqlalchemy_url(url))
    with Session(engine, autobegin=False) as session:
        with pytest.raises(UnsafeTransaction, match="was not begun"):
            claim(session, CONSUMER, "e1")
        with session.begin():
            claim(session, CONSUMER, "e1")
    with engine.connect() as connection, connection.begin() as transaction:
        transaction.rollback()
        with pytest.raises(UnsafeTransaction, match="has ended"):
            claim(connection, CONSUMER, "e1")
    engine.dispose()


def test_a_session_on_nothing_or_on_another_database_is_refused() -> None:
    with pytest.raises(UsageError, match="no default database"):
        claim(Session(), CONSUMER, "e1")
    with (
        create_engine("sqlite://").connect() as connection,
        pytest.raises(UsageError, match="sqlite"),
    ):
        claim(connection, CONSUMER, "e1")


def test_what_is_no_transaction_is_refused(url: str) -> None:
    async def scenario() -> None:
        for kind in ASYNC:
            async with caller(kind, url) as other:
                with pytest.raises(UsageError, match="await claim_async"):
                    claim(other.session, CONSUMER, "e1")
        for kind in SYNC:
            async with caller(kind, url) as other:
                with pytest.raises(UsageError, match=r"write `claim\("):
                    await claim_async(other.session, CONSUMER, "e1")
        with pytest.raises(UsageError, match="SQLAlchemy or psycopg"):
            await claim_async(url, CONSUMER, "e1")  # type: ignore[arg-type]
        engine = create_async_engine(sqlalchemy_url(url))
        with pytest.raises(UsageError, match="async with"):
            await claim_async(engine.connect(), CONSUMER, "e1")

    asyncio.run(scenario())
    with pytest.raises(UsageError, match="builtins str"):
        claim(url, CONSUMER, "e1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option", [{"row_factory": dict_row}, {"cursor_factory": psycopg.RawCursor}]
)
def test_the_options_of_a_psycopg_connection_do_not_matter(
    url: str, option: dict[str, Any]
) -> None:
    with psycopg.connect(url, **option) as connection:
        claim(connection, CONSUMER, "e1")
    assert claimed(url) == [(CONSUMER, "e1")]


def test_the_options_of_a_sqlalchemy_connection_do_not_matter(url: str) -> None:
    engine = create_engine(sqlalchemy_url(url))
    with engine.connect().execution_options(stream_results=True) as connection:
        claim(connection, CONSUMER, "e1")
        connection.commit()
    engine.dispose()
    assert claimed(url) == [(CONSUMER, "e1")]


def test_other_errors_stay_what_they_are(url: str) -> None:
    engine = create_engine(sqlalchemy_url(url))
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL ROLE pg_monitor"))
        with pytest.raises(ProgrammingError, match="permission denied"):
            claim(connection, CONSUMER, "e1")
    engine.dispose()


# ── names ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", ["", "a\0b", "\ud800", None, 7, b"e1", UUID])
def test_a_name_that_the_inbox_cannot_hold_is_refused(bad: Any) -> None:
    for arguments in ((bad, "e1"), (CONSUMER, bad)):
        with pytest.raises(UsageError, match="Nothing was claimed"):
            claim(Session(), *arguments)


@pytest.mark.parametrize(("consumer", "event_id"), [("c" * 201, "e"), ("c", "e" * 501)])
def test_a_name_that_is_too_long_is_refused(consumer: str, event_id: str) -> None:
    with pytest.raises(UsageError, match="characters"):
        claim(Session(), consumer, event_id)


def test_the_longest_names_fit(url: str) -> None:
    # Four bytes for most characters, and none like another: nothing to compress.
    event_id = "".join(chr(0x10000 + 7919 * n % 0x20000) for n in range(500))
    with pytest.raises(UsageError, match="2600 bytes"), psycopg.connect(url) as connection:
        claim(connection, "\U00020000" * 200, event_id)
    for consumer, longest in (("c" * 200, "e" * 500), ("\U00020000" * 150, event_id)):
        with psycopg.connect(url) as connection:
            claim(connection, consumer, longest)
            connection.commit()
            with pytest.raises(AlreadyHandled):
                claim(connection, consumer, longest)


def test_the_number_of_a_lock_is_the_same_for_ever() -> None:
    assert lock_number(Claim("billing", "evt_1")) == NUMBER_OF_BILLING_EVT_1


def test_the_lock_is_one_number_in_a_space_of_its_own(url: str) -> None:
    with psycopg.connect(url) as connection:
        claim(connection, "billing", "evt_1")
        [(high, low, space)] = connection.execute(LOCK_OF_A_CLAIM).fetchall()
    assert (high << 32 | low) == NUMBER_OF_BILLING_EVT_1 % 2**64
    assert space == 1, "2 would be the space of two numbers, where all other locks are"


def test_a_schema_of_another_name_has_an_inbox_of_its_own(servers: Servers) -> None:
    async def scenario(url: str) -> None:
        for kind in KINDS:
            async with caller(kind, url) as here:
                await here.claim(kind, schema="bus")
                with pytest.raises(SchemaMismatch, match=r"penstock migrate.*'events'"):
                    await here.claim(kind)

    async def committed(url: str) -> None:
        async with caller("Session", url) as here:
            await here.claim("e1", schema="bus")
            await here.commit()

    with new_database(servers.database_url) as url:
        migrate(url, "bus")
        asyncio.run(scenario(url))
        assert claimed(url, "bus") == []
        asyncio.run(committed(url))
        assert claimed(url, "bus") == [(CONSUMER, "e1")]


def test_the_errors_are_public_and_of_one_tree() -> None:
    assert (penstock.AlreadyHandled, penstock.LockContention) == (AlreadyHandled, LockContention)
    for error in (AlreadyHandled, LockContention):
        assert issubclass(error, ClaimRefused)
        assert issubclass(error, PenstockError)
    assert not issubclass(LockContention, AlreadyHandled)


# ── in handlers ────────────────────────────────────────────────────────────────────────────────


def in_session(event: StreamEvent[Any], session: Session) -> None:
    claim(session, CONSUMER, f"e{event.position % 2}")


def in_connection(event: StreamEvent[Any], connection: psycopg.Connection[Any]) -> None:
    claim(connection, CONSUMER, f"e{event.position % 2}")


async def in_async_connection(
    event: StreamEvent[Any], connection: psycopg.AsyncConnection[Any]
) -> None:
    await claim_async(connection, CONSUMER, f"e{event.position % 2}")


@pytest.mark.parametrize("handler", [in_session, in_connection, in_async_connection])
def test_a_handler_claims_in_the_transaction_that_it_is_lent(url: str, handler: Any) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "TRUNCATE events.outbox_event, events.stream, events.consumer, events.stream_lease,"
            " events.processed_event"
        )
    bench = Workbench(url, None)
    try:
        bench.send(2)
        bench.publish()
        run_until_idle(bench.consumer(handler))
    finally:
        bench.close()
    assert claimed(url) == [(CONSUMER, "e0"), (CONSUMER, "e1")]
