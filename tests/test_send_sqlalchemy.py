"""An event sent through SQLAlchemy exists if and only if its transaction commits, somehow."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from traceback import format_exception
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, MetaData, create_engine, event, text
from sqlalchemy.event.attr import _ListenerCollection
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InvalidRequestError,
    OperationalError,
    SAWarning,
)
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from penstock.core.events import RawEvent
from penstock.core.wire import Entry
from penstock.errors import (
    EventIdentityConflict,
    InvalidEvent,
    OutcomeUnknown,
    SchemaMismatch,
    UnsafeTransaction,
    UsageError,
)
from penstock.pipeline import session_buffer, transaction_buffer
from penstock.pipeline.handling import Handling, current_handling
from penstock.pipeline.sending import Sender, peek_pending, take_pending
from penstock.stores.migrations import migrate
from penstock.stores.postgres import sqlalchemy_url
from penstock.stores.servers import Servers
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.signals import EventsInserted
from tests.databases import new_database
from tests.proxy import Proxy
from tests.sending import Outbox, make_sender
from tests.waiting import SOON_SECONDS

# Long enough for the other thread, if nothing keeps it from going on.
WITHOUT_A_LOCK_SECONDS = 0.5
MODES = ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


class Base(DeclarativeBase):
    metadata = MetaData()


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


sender = make_sender()


def send(target: Any, name: str, **options: Any) -> Any:
    return sender.send(target, "orders", RawEvent(name, {}), **options)


class Undo(Exception):
    """Raised in tests to leave a block by rolling it back."""


class ShopOutbox(Outbox):
    """The outbox, and the data beside it."""

    @property
    def orders(self) -> list[int]:
        return [row[0] for row in self.connection.execute("SELECT id FROM orders ORDER BY id")]


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url), pool_size=1, max_overflow=2)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(database_url: str) -> Iterator[ShopOutbox]:
    outbox = ShopOutbox(database_url)
    outbox.clear()
    yield outbox
    outbox.close()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


# ── whoever commits ────────────────────────────────────────────────────────────────────────────


def test_nothing_is_inserted_before_the_commit(session: Session, outbox: ShopOutbox) -> None:
    send(session, "A")
    session.add(Order(id=1, cents=1))
    session.flush()
    assert session.scalar(text("SELECT count(*) FROM events.outbox_event")) == 0
    session.commit()
    assert (outbox.sent, outbox.orders) == (["A"], [1])


def test_a_send_alone_is_reason_enough_to_commit(session: Session, outbox: ShopOutbox) -> None:
    send(session, "A")
    session.commit()
    send(session, "B")
    session.commit()
    session.commit()
    assert outbox.sent == ["A", "B"]


def test_a_begin_block_commits_its_events(engine: Engine, outbox: ShopOutbox) -> None:
    with Session(engine) as session, session.begin():
        send(session, "A")
    with sessionmaker(engine).begin() as session:
        send(session, "B")
    assert outbox.sent == ["A", "B"]


def test_the_session_transaction_commits_its_events(session: Session, outbox: ShopOutbox) -> None:
    transaction = session.begin()
    send(session, "A")
    transaction.commit()
    assert outbox.sent == ["A"]


def test_the_sessions_connection_commits_its_events(session: Session, outbox: ShopOutbox) -> None:
    send(session, "A")
    session.add(Order(id=1, cents=1))
    session.flush()
    send(session, "B")
    session.connection().commit()
    assert (outbox.sent, outbox.orders) == (["A", "B"], [1])
    send(session, "C")
    session.connection().commit()
    assert outbox.sent == ["A", "B", "C"]


def test_a_connection_commits_its_events(engine: Engine, outbox: ShopOutbox) -> None:
    with engine.begin() as connection:
        send(connection, "A")
    with engine.connect() as connection:
        send(connection, "B")
        connection.commit()
        send(connection, "lost")
        connection.rollback()
        with connection.begin():
            send(connection, "C")
        send(connection, "lost, because the connection is closed")
    assert outbox.sent == ["A", "B", "C"]


@pytest.mark.parametrize("mode", MODES)
def test_a_joined_session_leaves_its_events_to_the_outer_commit(
    engine: Engine, outbox: ShopOutbox, mode: Any
) -> None:
    with engine.connect() as connection, connection.begin():
        with Session(connection, join_transaction_mode=mode) as session:
            send(session, "A")
            session.add(Order(id=1, cents=1))
            session.commit()
        if mode != "control_fully":
            assert outbox.sent == []
            send(connection, "B")
    assert outbox.orders == [1]
    assert outbox.sent == (["A"] if mode == "control_fully" else ["A", "B"])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "control_fully"])
def test_a_joined_session_shares_the_outer_rollback(
    engine: Engine, outbox: ShopOutbox, mode: Any
) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode=mode) as session:
            send(session, "A")
            session.commit()
            send(session, "B")
            session.add(Order(id=1, cents=1))
            session.commit()
        outer.rollback()
    assert (outbox.sent, outbox.orders) == ([], [])


def test_a_joined_savepoint_that_is_rolled_back_takes_only_its_own_events(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.begin() as connection:
        send(connection, "A")
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            send(session, "B")
            session.add(Order(id=1, cents=1))
            session.flush()
            session.rollback()
            send(session, "C")
            session.commit()
            send(session, "D")
            session.execute(text("SELECT 1"))
        send(connection, "E")
    assert (outbox.sent, outbox.orders) == (["A", "C", "E"], [])


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only"])
def test_events_stay_with_data_that_a_closed_session_left_to_the_outer_transaction(
    engine: Engine, outbox: ShopOutbox, mode: Any
) -> None:
    with engine.begin() as connection:
        session = Session(connection, join_transaction_mode=mode)
        session.add(Order(id=1, cents=1))
        session.flush()
        send(session, "A")
        session.close()
    assert (outbox.sent, outbox.orders) == (["A"], [1])


def test_an_idle_joined_session_is_not_forgotten(engine: Engine, outbox: ShopOutbox) -> None:
    with engine.begin() as connection:
        session = Session(connection)
        send(session, "A")
    assert outbox.sent == ["A"]
    session.close()


def test_an_idle_savepoint_is_not_forgotten_by_an_outer_commit(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection:
        connection.begin()
        session = Session(connection)
        session.execute(text("SELECT 1"))
        session.begin_nested()
        send(session, "A")
        connection.commit()
        assert outbox.sent == ["A"]
        session.close()


def test_a_joined_session_inside_a_rolled_back_savepoint_loses_its_events(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.begin() as connection:
        send(connection, "A")
        savepoint = connection.begin_nested()
        session = Session(connection, join_transaction_mode="rollback_only")
        send(session, "lost")
        savepoint.rollback()
    assert outbox.sent == ["A"]
    session.close()


def test_an_idle_joined_session_loses_what_it_sent_since_a_savepoint_and_nothing_else(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection, Session(connection) as session:
        connection.begin()
        send(session, "A")
        savepoint = connection.begin_nested()
        send(session, "lost")
        send(connection, "lost too")
        savepoint.rollback()
        send(session, "B")
        connection.begin_nested().commit()
        savepoint = connection.begin_nested()
        send(session, "lost as well")
        savepoint.rollback()
        connection.commit()
    assert outbox.sent == ["A", "B"]


def test_an_idle_joined_session_goes_on_after_a_savepoint_that_it_came_in(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection, Session(connection) as session:
        connection.begin()
        savepoint = connection.begin_nested()
        send(session, "lost")
        savepoint.rollback()
        send(session, "A")
        connection.commit()
    assert outbox.sent == ["A"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("joins", [False, True])
def test_a_joined_session_and_its_connection_keep_the_order_of_their_sends(
    engine: Engine, outbox: ShopOutbox, mode: Any, joins: bool
) -> None:
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            send(session, "A", key="k")
            send(connection, "B", key="k")
            send(session, "C", key="k")
            if joins:
                session.execute(text("SELECT 1"))
            send(connection, "D", key="k")
            send(session, "E", key="k")
            assert names(peek_pending(session)) == ["A", "B", "C", "D", "E"]
            if joins:
                session.commit()
            connection.commit()
    assert outbox.sent == ["A", "B", "C", "D", "E"]


def test_an_idle_joined_session_is_part_of_every_transaction_of_its_connection(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection, Session(connection) as session:
        for name, ends in (
            ("A", connection.commit),
            ("lost", connection.rollback),
            ("B", connection.commit),
        ):
            connection.begin()
            send(session, name)
            ends()
    assert outbox.sent == ["A", "B"]


def test_an_idle_joined_session_that_sends_while_its_connection_commits_is_heard(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection, Session(connection) as session:
        connection.begin()
        send(connection, "A")
        event.listen(engine, "commit", lambda _connection: send(session, "B"), once=True)
        connection.commit()
    assert outbox.sent == ["A", "B"]


def test_engines_with_execution_options_tell_everything_once(
    engine: Engine, outbox: ShopOutbox
) -> None:
    optioned = engine.execution_options(compiled_cache=None)
    for each in (optioned, engine, optioned.execution_options(no_parameters=False), optioned):
        with each.begin() as connection:
            send(connection, "A")
            with suppress(Undo), connection.begin_nested():
                send(connection, "lost")
                raise Undo
            with connection.begin_nested():
                send(connection, "B")
    assert outbox.sent == ["A", "B"] * 4


def test_a_connection_with_server_side_cursors_inserts_too(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect().execution_options(stream_results=True) as connection:
        send(connection, "A")
        connection.commit()
    assert outbox.sent == ["A"]


def test_scoped_sessions_are_sessions(engine: Engine, outbox: ShopOutbox) -> None:
    scoped = scoped_session(sessionmaker(engine))
    send(scoped, "A")
    scoped.commit()
    scoped.remove()
    assert outbox.sent == ["A"]


# ── savepoints ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("uses_database", [True, False])
def test_a_rolled_back_savepoint_takes_its_events_along(
    session: Session, outbox: ShopOutbox, uses_database: bool
) -> None:
    def work() -> None:
        if uses_database:
            session.execute(text("SELECT 1"))

    with session.begin():
        send(session, "A")
        work()
        with suppress(Undo), session.begin_nested():
            send(session, "B")
            work()
            send(session, "C")
            raise Undo
        with session.begin_nested():
            send(session, "D")
            work()
        send(session, "E")
    assert outbox.sent == ["A", "D", "E"]


@pytest.mark.parametrize("uses_database", [True, False])
def test_a_released_savepoint_shares_the_fate_of_the_one_around_it(
    session: Session, outbox: ShopOutbox, uses_database: bool
) -> None:
    with session.begin():
        with suppress(Undo), session.begin_nested():
            send(session, "A")
            with session.begin_nested():
                send(session, "B")
                if uses_database:
                    session.execute(text("SELECT 1"))
            send(session, "C")
            raise Undo
        send(session, "D")
        with session.begin_nested():
            send(session, "E")
            with suppress(Undo), session.begin_nested():
                send(session, "F")
                if uses_database:
                    session.execute(text("SELECT 1"))
                raise Undo
            send(session, "G")
    assert outbox.sent == ["D", "E", "G"]


def test_savepoints_of_a_connection_count_as_well(engine: Engine, outbox: ShopOutbox) -> None:
    with engine.begin() as connection:
        older = connection.begin_nested()
        send(connection, "A")
        with connection.begin_nested():
            send(connection, "B")
        older.rollback()
        send(connection, "C")
        with connection.begin_nested():
            send(connection, "D")
            with suppress(Undo), connection.begin_nested():
                send(connection, "E")
                raise Undo
            send(connection, "F")
        with suppress(Undo), connection.begin_nested():
            send(connection, "G")
            with connection.begin_nested():
                send(connection, "H")
            raise Undo
        send(connection, "I")
    assert outbox.sent == ["C", "D", "F", "I"]


def test_an_outer_savepoint_rolled_back_before_its_inner_one_takes_both(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection:
        send(connection, "A")
        outer = connection.begin_nested()
        send(connection, "B")
        connection.begin_nested()
        send(connection, "C")
        with pytest.warns(SAWarning, match="already deassociated"):
            outer.rollback()
        send(connection, "D")
        connection.commit()
    assert outbox.sent == ["A", "D"]


def test_savepoints_that_are_older_than_the_first_send_count_as_well(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.begin() as connection:
        outer = connection.begin_nested()
        middle = connection.begin_nested()
        send(connection, "lost")
        connection.begin_nested().commit()
        middle.commit()
        outer.rollback()
        send(connection, "A")
    assert outbox.sent == ["A"]


def test_a_savepoint_left_open_commits_with_the_transaction(
    session: Session, engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.connect() as connection:
        connection.begin()
        connection.begin_nested()
        send(connection, "A")
        connection.commit()
    transaction = session.begin()
    session.begin_nested()
    send(session, "B")
    transaction.commit()
    assert outbox.sent == ["A", "B"]


# ── late senders ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("with_event", [True, False])
def test_listeners_that_send_while_the_session_commits_are_heard(
    session: Session, outbox: ShopOutbox, with_data: bool, with_event: bool
) -> None:
    event.listen(session, "before_commit", lambda session: send(session, "before commit"))
    event.listen(session, "after_flush", lambda session, _: send(session, "after flush"))
    if with_data:
        session.add(Order(id=1, cents=1))
    if with_event:
        send(session, "A")
    session.commit()
    expected = ["A"] * with_event + ["before commit"] + ["after flush"] * with_data
    assert outbox.sent == expected


def test_a_listener_that_opens_a_savepoint_while_the_session_commits_is_heard(
    session: Session, outbox: ShopOutbox
) -> None:
    def late(session: Session) -> None:
        if not session.in_nested_transaction():
            with session.begin_nested():
                send(session, "B")
            with suppress(Undo), session.begin_nested():
                send(session, "lost")
                raise Undo

    event.listen(session, "before_commit", late)
    session.commit()
    assert outbox.sent == ["B"]


def test_a_commit_listener_of_the_engine_that_sends_is_heard(
    engine: Engine, outbox: ShopOutbox
) -> None:
    transaction_buffer.watch(engine)
    event.listen(engine, "commit", lambda connection: send(connection, "late"))
    with engine.begin() as connection:
        send(connection, "A")
    assert outbox.sent == ["A", "late"]


def test_sending_after_the_commit_is_refused(session: Session, outbox: ShopOutbox) -> None:
    event.listen(session, "after_commit", lambda session: send(session, "too late"))
    send(session, "A")
    with pytest.raises(UnsafeTransaction, match="send before the commit"):
        session.commit()
    assert outbox.sent == ["A"]


def test_a_listener_that_sends_while_the_session_begins_is_told_how(
    session: Session, outbox: ShopOutbox
) -> None:
    def begun(session: Session, _transaction: Any, connection: Connection) -> None:
        with pytest.raises(UnsafeTransaction, match="send through the connection that it is given"):
            send(session, "lost")
        send(connection, "A")

    event.listen(session, "after_begin", begun)
    session.execute(text("SELECT 1"))
    session.commit()
    assert outbox.sent == ["A"]


# ── nothing survives ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("uses_database", [True, False])
@pytest.mark.parametrize("end", [Session.rollback, Session.close, Session.invalidate])
def test_what_was_not_committed_is_gone(
    session: Session, outbox: ShopOutbox, end: Callable[[Session], None], uses_database: bool
) -> None:
    send(session, "A")
    transaction = session.get_transaction()
    if uses_database:
        session.execute(text("SELECT 1"))
    end(session)
    send(session, "B")
    session.commit()
    assert outbox.sent == ["B"]
    assert transaction is not None


def test_a_closed_session_takes_nothing_into_an_outer_transaction(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with engine.begin() as connection:
        session = Session(connection)
        send(session, "A")
        transaction = session.get_transaction()
        session.close()
        assert peek_pending(connection) == []
    assert outbox.sent == []
    assert transaction is not None


def test_a_failing_flush_takes_the_events_along(session: Session, outbox: ShopOutbox) -> None:
    session.add(Order(id=1, cents=1))
    session.commit()
    session.expunge_all()
    send(session, "A")
    session.add(Order(id=1, cents=2))
    with pytest.raises(IntegrityError):
        session.commit()
    with pytest.raises(UnsafeTransaction, match="already failed"):
        send(session, "B")
    session.rollback()
    send(session, "C")
    session.commit()
    assert outbox.sent == ["C"]


@pytest.mark.parametrize("tidy", [True, False])
def test_a_failing_insert_takes_the_data_along(
    engine: Engine, outbox: ShopOutbox, tidy: bool
) -> None:
    taken = uuid4()
    with Session(engine) as session, session.begin():
        send(session, "A", event_uuid=taken)
    with Session(engine) as session:
        session.add(Order(id=1, cents=1))
        send(session, "B", event_uuid=taken)
        with pytest.raises(EventIdentityConflict, match="other content") as conflict:
            session.commit()
        assert "parameters" not in str(conflict.value.__cause__)
        if tidy:
            session.rollback()
    with Session(engine) as session, session.begin():
        assert session.scalar(text("SELECT count(*) FROM orders")) == 0
        send(session, "C")
    with engine.connect() as connection:
        send(connection, "D", event_uuid=taken)
        connection.execute(text("INSERT INTO orders VALUES (2, 2)"))
        with pytest.raises(EventIdentityConflict):
            connection.commit()
        connection.rollback()
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar() == 0
    assert (outbox.sent, outbox.orders) == (["A", "C"], [])


def test_an_error_of_the_insert_quotes_no_event(session: Session, outbox: ShopOutbox) -> None:
    outbox.connection.execute("BEGIN")
    outbox.connection.execute("LOCK TABLE events.outbox_event")
    session.execute(text("SET LOCAL lock_timeout = '10ms'"))
    sender.send(session, "orders", RawEvent("A", {"note": "s3cret"}))
    with pytest.raises(OperationalError, match="lock timeout") as raised:
        session.commit()
    outbox.connection.execute("ROLLBACK")
    assert "s3cret" not in "".join(format_exception(raised.value))
    assert outbox.sent == []


def test_a_commit_that_fails_before_the_server_hears_of_it_leaves_no_open_transaction(
    engine: Engine, outbox: ShopOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise InvalidEvent("not today")

    connection = engine.connect()
    connection.execute(text("INSERT INTO orders VALUES (1, 1)"))
    send(connection, "A")
    with monkeypatch.context() as patch:
        patch.setattr(transaction_buffer, "insert_through_sqlalchemy", fail)
        with pytest.raises(InvalidEvent):
            connection.commit()
    connection.close()
    with engine.begin() as connection:  # the pool's only connection, once more
        connection.execute(text("SELECT 1"))
    assert (outbox.sent, outbox.orders) == ([], [])


def test_nothing_keeps_sessions_connections_or_events_alive(engine: Engine) -> None:
    def use() -> list[weakref.ref[Any]]:
        session = Session(engine)
        send(session, "A")
        with session.begin_nested():
            send(session, "B")
        session.commit()
        send(session, "C")
        connection = engine.connect()
        send(connection, "D")
        references: list[weakref.ref[Any]] = [weakref.ref(session), weakref.ref(connection)]
        connection.close()
        return references

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert len(session_buffer._early) == 0
    assert len(transaction_buffer._buffers) == 0


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


def test_autocommit_is_refused_wherever_it_is_set(engine: Engine, database_url: str) -> None:
    url = sqlalchemy_url(database_url)
    auto = create_engine(url, isolation_level="AUTOCOMMIT")
    optioned = engine.execution_options(isolation_level="AUTOCOMMIT")
    for each in (auto, optioned):
        with Session(each) as session, pytest.raises(UnsafeTransaction, match="autocommit"):
            send(session, "A")
        with each.connect() as connection, pytest.raises(UnsafeTransaction, match="autocommit"):
            send(connection, "A")
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(UnsafeTransaction, match="autocommit"):
            send(connection, "A")
        with Session(connection) as session, pytest.raises(UnsafeTransaction, match="autocommit"):
            send(session, "A")
    session = Session(engine, execution_options={"isolation_level": "AUTOCOMMIT"})
    with session, pytest.raises(UnsafeTransaction, match="autocommit"):
        send(session, "A")
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(UnsafeTransaction, match="autocommit"):
            send(session, "A")
    auto.dispose()


def test_autocommit_chosen_after_the_send_is_refused_before_any_write(
    session: Session, outbox: ShopOutbox
) -> None:
    send(session, "A")
    with pytest.raises(UnsafeTransaction, match="autocommit"):
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    with pytest.raises(UnsafeTransaction, match="autocommit"):
        session.commit()
    assert outbox.sent == []


def test_two_phase_transactions_are_refused(engine: Engine) -> None:
    refused = pytest.raises(UnsafeTransaction, match="two-phase")
    with Session(engine, twophase=True) as session, refused:
        send(session, "A")
    with engine.connect() as connection, connection.begin_twophase(), refused:
        send(connection, "A")


def test_a_session_that_never_begins_by_itself_has_to_begin(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(UnsafeTransaction, match=r"call session\.begin\(\)"):
            send(session, "A")
        with session.begin():
            send(session, "B")
    assert outbox.sent == ["B"]


def test_a_session_without_a_default_database_is_refused(
    engine: Engine, outbox: ShopOutbox
) -> None:
    with Session(binds={Order: engine}) as session:
        with pytest.raises(UsageError, match=r"pass session\.connection"):
            send(session, "A")
        send(session.connection(bind_arguments={"mapper": Order}), "B")
        session.commit()
    assert outbox.sent == ["B"]


def test_with_two_databases_the_default_one_gets_the_events(
    engine: Engine, database_url: str, outbox: ShopOutbox
) -> None:
    other = create_engine(sqlalchemy_url(database_url))
    with Session(engine, binds={Order: other}) as session:
        send(session, "A")
        session.add(Order(id=1, cents=1))
        session.flush()
        with session.begin_nested():
            send(session, "B")
        session.commit()
    other.dispose()
    assert (outbox.sent, outbox.orders) == (["A", "B"], [1])


@pytest.mark.parametrize("make", [lambda e: e, sessionmaker, lambda e: e.raw_connection(), str])
def test_what_has_no_transaction_is_refused(engine: Engine, make: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match=r"Cannot send through a .*pass the SQLAlchemy Session"):
        send(make(engine), "A")


def test_a_missing_schema_says_what_to_run(session: Session) -> None:
    make_sender("nowhere").send(session, "orders", RawEvent("A", {}))
    with pytest.raises(SchemaMismatch, match=r"penstock migrate.*nowhere"):
        session.commit()


def test_another_database_can_remember_but_not_store() -> None:
    engine = create_engine("sqlite://")
    with Session(engine) as session:
        send(session, "A")
        session.execute(text("SELECT 1"))
        send(session, "B")
        assert names(peek_pending(session)) == ["A", "B"]
        with pytest.raises(UsageError, match="cannot be stored in sqlite"):
            session.commit()
    engine.dispose()


def test_a_bad_event_leaves_the_transaction_usable(session: Session, outbox: ShopOutbox) -> None:
    with pytest.raises(InvalidEvent):
        sender.send(session, "orders", RawEvent("A", {"x": float("nan")}))
    with pytest.raises(InvalidEvent):
        sender.send_many(session, "orders", [RawEvent("A", {}), RawEvent("B", object())])
    send(session, "C")
    session.commit()
    assert outbox.sent == ["C"]


# ── the connection breaks ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def proxied(engine: Engine, database_url: str) -> Iterator[tuple[Proxy, str]]:
    assert engine is not None
    with Proxy.to(database_url) as proxy:
        yield proxy, proxy.url(database_url)


def test_a_connection_lost_at_commit_leaves_the_outcome_unknown_and_a_second_try_safe(
    proxied: tuple[Proxy, str], outbox: ShopOutbox
) -> None:
    proxy, url = proxied
    engine = create_engine(sqlalchemy_url(url))
    uuid = uuid4()
    with Session(engine) as session:
        session.add(Order(id=1, cents=1))
        send(session, "A", event_uuid=uuid)
        session.flush()
        proxy.cut_reply_to(b"COMMIT")
        with pytest.raises(OutcomeUnknown, match="same event_uuid") as unknown:
            session.commit()
    assert isinstance(unknown.value.__cause__, psycopg.OperationalError)
    assert proxy.cuts == 1
    with Session(engine) as session, session.begin():
        session.merge(Order(id=1, cents=1))
        send(session, "A", event_uuid=uuid)
    assert (outbox.sent, outbox.orders) == (["A"], [1])
    engine.dispose()


def test_a_connection_lost_before_commit_is_an_ordinary_error(
    proxied: tuple[Proxy, str], outbox: ShopOutbox
) -> None:
    proxy, url = proxied
    engine = create_engine(sqlalchemy_url(url))
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        send(session, "A")
        proxy.cut_reply_to(b"send_many")
        with pytest.raises(OperationalError):
            session.commit()
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        proxy.cut_reply_to(b"COMMIT")
        with pytest.raises(OperationalError):  # nothing was sent, so it is not Penstock's matter
            session.commit()
    assert outbox.sent == []
    engine.dispose()


def test_a_connection_lost_by_a_late_insert_is_an_ordinary_error(
    proxied: tuple[Proxy, str], outbox: ShopOutbox
) -> None:
    proxy, url = proxied
    engine = create_engine(sqlalchemy_url(url))
    transaction_buffer.watch(engine)
    event.listen(engine, "commit", lambda connection: send(connection, "late"))
    with engine.connect() as connection:
        send(connection, "A")
        proxy.cut_reply_to(b"send_many", nth=2)
        with pytest.raises(OperationalError):
            connection.commit()
    assert (outbox.sent, proxy.cuts) == ([], 1)
    engine.dispose()


def test_a_connection_lost_at_a_commit_without_events_is_an_ordinary_error(
    proxied: tuple[Proxy, str],
) -> None:
    proxy, url = proxied
    engine = create_engine(sqlalchemy_url(url))
    with engine.connect() as connection:
        savepoint = connection.begin_nested()
        send(connection, "A")
        savepoint.rollback()
        proxy.cut_reply_to(b"COMMIT")
        with pytest.raises(OperationalError):
            connection.commit()
    engine.dispose()


def test_a_commit_that_the_server_refuses_is_no_mystery(engine: Engine, outbox: ShopOutbox) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("ALTER TABLE orders ADD UNIQUE (cents) DEFERRABLE INITIALLY DEFERRED")
        )
    with Session(engine) as session:
        session.add_all([Order(id=1, cents=1), Order(id=2, cents=1)])
        send(session, "A")
        with pytest.raises(DBAPIError, match="duplicate key"):
            session.commit()
    assert outbox.sent == []


def test_an_asynchronous_commit_leaves_the_outcome_unknown_too(
    proxied: tuple[Proxy, str], outbox: ShopOutbox
) -> None:
    proxy, url = proxied

    async def work() -> None:
        async with async_engine(url) as engine, AsyncSession(engine) as session:
            session.add(Order(id=1, cents=1))
            send(session, "A")
            await session.flush()
            proxy.cut_reply_to(b"COMMIT")
            with pytest.raises(OutcomeUnknown):
                await session.commit()

    asyncio.run(work())
    assert outbox.orders in ([], [1])


# ── asyncio ────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def async_engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(sqlalchemy_url(url))
    try:
        yield engine
    finally:
        await engine.dispose()


async def through_sessions(engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        send(session, "A")
        session.add(Order(id=1, cents=1))
        with suppress(Undo):
            async with session.begin_nested():
                send(session, "lost")
                raise Undo
        async with session.begin_nested():
            send(session, "B")
        await session.commit()
        send(session, "lost")
        await session.rollback()
        send(session, "lost")
        await session.close()
        await sender.send_async(session, "orders", RawEvent("C", {}))
        await session.commit()
    async with AsyncSession(engine) as session, session.begin():
        send(session, "D")
    async with AsyncSession(engine) as session:
        send(session, "lost")


async def through_connections(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        send(connection, "A")
        with suppress(Undo):
            async with connection.begin_nested():
                send(connection, "lost")
                raise Undo
    async with engine.connect() as connection:
        send(connection, "B")
        await connection.commit()
        send(connection, "lost")
        await connection.rollback()
        await sender.send_many_async(connection, "orders", [RawEvent("C", {}), RawEvent("D", {})])
        await connection.commit()
        with pytest.raises(UsageError, match="not open"):
            send(engine.connect(), "E")


async def through_late_listeners(engine: AsyncEngine) -> None:
    for name in ("A", "B"):
        async with AsyncSession(engine) as session:
            sync = session.sync_session
            event.listen(sync, "before_commit", lambda s, name=name: send(s, name))
            await session.commit()
    async with engine.connect() as connection, AsyncSession(connection) as session:
        send(session, "C")
        await session.commit()
        await connection.commit()
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    send(scoped, "D")
    await scoped.commit()
    await scoped.remove()


@pytest.mark.parametrize("work", [through_sessions, through_connections, through_late_listeners])
def test_asynchronous_sessions_and_connections_need_no_await_to_send(
    engine: Engine, outbox: ShopOutbox, work: Callable[[AsyncEngine], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        async with async_engine(engine.url.render_as_string(hide_password=False)) as asynchronous:
            await work(asynchronous)

    asyncio.run(run())
    assert outbox.sent == ["A", "B", "C", "D"]


# ── what is pending ────────────────────────────────────────────────────────────────────────────


def names(events: list[Any]) -> list[str]:
    return [each.event_type for each in events]


def test_pending_events_can_be_looked_at_and_taken(engine: Engine, outbox: ShopOutbox) -> None:
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="rollback_only") as session:
            assert peek_pending(session) == []
            send(session, "A")
            assert names(peek_pending(session)) == ["A"]
            assert names(peek_pending(connection)) == ["A"]
            session.execute(text("SELECT 1"))
            send(connection, "B")
            with session.begin_nested():
                send(session, "C")
                assert names(peek_pending(session)) == ["A", "B", "C"]
            assert names(take_pending(session)["events"]) == ["A", "B", "C"]
            assert peek_pending(session) == peek_pending(connection) == []
            send(session, "D")
            session.commit()
            assert names(peek_pending(session)) == names(peek_pending(connection)) == ["D"]
            assert names(take_pending(connection)["events"]) == ["D"]
        connection.commit()
    assert outbox.sent == []


def test_a_plain_session_shows_and_gives_what_it_remembers(
    session: Session, outbox: ShopOutbox
) -> None:
    send(session, "A")
    session.begin_nested()
    send(session, "B")
    assert names(peek_pending(session)) == ["A", "B"]
    assert names(take_pending(session)["events"]) == ["A", "B"]
    assert take_pending(session) == {}
    session.commit()
    assert outbox.sent == []


def test_events_of_two_outboxes_are_taken_by_schema(session: Session) -> None:
    send(session, "A")
    make_sender("elsewhere").send(session, "orders", RawEvent("B", {}))
    send(session, "C")
    taken = take_pending(session)
    assert {schema: names(events) for schema, events in taken.items()} == {
        "events": ["A", "C"],
        "elsewhere": ["B"],
    }


def test_each_schema_gets_its_own_events(
    session: Session, outbox: ShopOutbox, database_url: str
) -> None:
    migrate(database_url, "elsewhere")
    send(session, "A")
    make_sender("elsewhere").send(session, "orders", RawEvent("B", {}))
    session.commit()
    rows = outbox.connection.execute("SELECT event_type FROM elsewhere.outbox_event").fetchall()
    assert (outbox.sent, rows) == (["A"], [("B",)])


def test_the_first_sends_of_an_engine_may_come_from_several_threads(
    engine: Engine, outbox: ShopOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy lets one thread's new list of listeners take the place of another's."""
    names = ("begun", "sent", "replaced", "committed")
    begun, sent, replaced, committed = moments = [threading.Event() for _ in names]
    make, append = _ListenerCollection.__init__, _ListenerCollection.append

    def is_slow() -> bool:
        return threading.current_thread() is slow

    def make_slowly(self: Any, *arguments: Any) -> None:
        if is_slow():
            begun.set()
            sent.wait(WITHOUT_A_LOCK_SECONDS)
        make(self, *arguments)

    def append_slowly(self: Any, *arguments: Any) -> None:
        if is_slow():
            replaced.set()
            committed.wait(WITHOUT_A_LOCK_SECONDS)
        append(self, *arguments)

    def work(number: int, before: threading.Event | None = None) -> None:
        with Session(engine) as session:
            session.add(Order(id=number, cents=1))
            session.flush()
            send(session, f"order {number}")
            if before is not None:
                sent.set()
                before.wait(WITHOUT_A_LOCK_SECONDS)
            session.commit()
        if before is not None:
            committed.set()

    monkeypatch.setattr(_ListenerCollection, "__init__", make_slowly)
    monkeypatch.setattr(_ListenerCollection, "append", append_slowly)
    slow = threading.Thread(target=work, args=(1,))
    quick = threading.Thread(target=work, args=(2, replaced))
    slow.start()
    assert begun.wait(SOON_SECONDS)
    quick.start()
    for thread in (slow, quick):
        thread.join(SOON_SECONDS)
    assert all(moment.is_set() for moment in moments)
    assert outbox.orders == [1, 2]
    assert sorted(outbox.sent) == ["order 1", "order 2"]


# ── metadata, admission, signals ───────────────────────────────────────────────────────────────


def handled_entry(metadata: bytes) -> Entry:
    fields = (b"1", b"1", b"", b"0", b"null", metadata)
    return Entry("s", 1, "origin", "00000000-0000-0000-0000-00000000000a", "t", 1, fields, b"{}")


def test_events_sent_by_a_handler_carry_on_what_caused_them(session: Session) -> None:
    entry = handled_entry(b'{"traceparent": "t", "correlation_id": "c", "tenant": 5}')
    send(session, "outside")
    token = current_handling.set(Handling(entry))
    try:
        send(session, "plain")
        send(session, "own", metadata={"correlation_id": "mine", "x": 1})
        with pytest.raises(InvalidEvent, match="Pass a dict"):
            send(session, "bad", metadata=[1])
    finally:
        current_handling.reset(token)
    outside, plain, own = take_pending(session)["events"]
    assert outside.metadata == "{}"
    assert plain.metadata == (
        f'{{"traceparent":"t","correlation_id":"c","causation_id":"{entry.event_uuid}"}}'
    )
    assert '"correlation_id":"mine"' in own.metadata
    assert '"x":1' in own.metadata
    assert entry.event_uuid in own.metadata


def test_the_pipeline_decides_first_what_may_be_sent(session: Session) -> None:
    def admit(stream: str, event: Any) -> None:
        raise UsageError(f"not {event.event_type} on {stream}")

    strict = Sender(schema="events", payload_bytes_max=9, metadata_bytes_max=9, admit=admit)
    with pytest.raises(UsageError, match="not A on orders"):
        strict.send(session, "orders", RawEvent("A", object()))
    assert peek_pending(session) == []


def test_an_insert_is_signalled_with_its_count(session: Session) -> None:
    signals: list[EventsInserted] = []
    subscribe(EventsInserted, signals.append)
    try:
        sender.send_many(session, "orders", [RawEvent("A", {}), RawEvent("B", {})])
        send(session, "C")
        assert signals == []
        session.commit()
    finally:
        unsubscribe(signals.append)
    assert signals == [EventsInserted(3)]


def test_a_thousand_events_are_one_statement(session: Session, outbox: ShopOutbox) -> None:
    statements: list[str] = []

    def count(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(session.get_bind(), "before_cursor_execute", count)
    uuids = sender.send_many(
        session, "orders", [RawEvent(f"t{n:04}", {"n": n}, key=str(n % 7)) for n in range(1000)]
    )
    session.commit()
    assert len(statements) == 1
    assert outbox.sent == [f"t{n:04}" for n in range(1000)]
    assert len(set(uuids)) == 1000


def test_an_invalid_use_of_a_session_stays_sqlalchemys_error(session: Session) -> None:
    send(session, "A")
    with pytest.raises(InvalidRequestError, match="already begun"):
        session.begin()
