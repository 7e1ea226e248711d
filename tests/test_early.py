"""Early events: an idle consumer begins with what was sent before it has its position."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.core.options import Guarantee
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.context import Context
from penstock.pipeline.lane import Lane
from penstock.stores import eager_ear, redis_link
from penstock.stores.eager_ear import EagerEar
from penstock.stores.hot_log import Fence
from penstock.stores.redis_log import RedisLog
from penstock.stores.wakeup import Wakeup
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.failing import LATER
from tests.roles import new_roles
from tests.waiting import SOON_SECONDS, wait_until

INSERT = text("INSERT INTO effect (n) VALUES (:n)")
EFFECTS = "SELECT n FROM effect ORDER BY n"
EARS = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'penstock early'"
)
STOP = threading.Event()
Do = Callable[[], object]


class Quiet:
    """A consumer that has nothing to do, of a stream whose publisher sleeps."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.calls: list[tuple[int, int, int]] = []
        """Of each call: the event, its attempt, and how far the stream was numbered."""
        self.meanwhile: list[Do] = []
        """What happens during the next calls."""
        self.sent = 0

    def handle(self, event: Placed, session: Session, context: Context) -> None:
        self.calls.append((event.n, context.attempt, self.bench.head()))
        session.execute(INSERT, {"n": event.n})
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def send(self, connection: psycopg.Connection[Any] | None = None) -> None:
        """Send the next event, of a key of its own."""
        self.sent += 1
        (connection or self.bench.connection).execute(
            "SELECT events.send('orders', 'placed', jsonb_build_object('n', %s::integer),"
            " key => %s)",
            (self.sent, f"k{self.sent}"),
        )

    def consumer(self, **options: Any) -> Lane:
        """Its lane, which has handled the first event and rests."""
        self.send()
        self.bench.publish()
        lane = self.bench.consumer(self.handle, **options)
        run_until_idle(lane)
        self.tend()
        lane.wait(STOP)
        return lane

    def tend(self) -> None:
        """As every consumer does twice a second."""
        tend(self.bench)


def tend(bench: Workbench) -> None:
    (consumer,) = [stage for stage in bench._stages if isinstance(stage, Consumer)]
    consumer.step()


@pytest.fixture
def quiet(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quiet]:
    monkeypatch.setattr("penstock.pipeline.lane.WAIT_SECONDS", 0.05)
    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (n bigint)")
    with sleeping_publisher(database_url):
        yield Quiet(bench)
    bench.close()


@contextmanager
def sleeping_publisher(database_url: str) -> Iterator[None]:
    """Every sender notifies."""
    with closing(Wakeup(database_url)) as wakeup:
        assert wakeup.try_hold(["orders"])
        yield


@pytest.fixture
def heard() -> Iterator[list[signals.Signal]]:
    found: list[signals.Signal] = []
    subscribe_to_all(found.append)
    yield found
    unsubscribe(found.append)


def of_kind(heard: list[signals.Signal], *kinds: type[signals.Signal]) -> list[signals.Signal]:
    return [signal for signal in heard if isinstance(signal, kinds)]


def turn(lane: Lane) -> None:
    """As the loop does: wait, then step until there is nothing to do."""
    lane.wait(STOP)
    run_until_idle(lane)


def test_the_handler_is_called_before_the_event_is_numbered(
    quiet: Quiet, heard: list[signals.Signal]
) -> None:
    lane = quiet.consumer()
    quiet.meanwhile = [quiet.bench.publish]
    quiet.send()
    turn(lane)
    assert quiet.calls == [(1, 1, 1), (2, 1, 1)]
    assert quiet.bench.rows(EFFECTS) == [1, 2]
    assert quiet.bench.settled() == [(1, "handled"), (2, "handled")]
    assert quiet.bench.checkpoint() == 2
    assert of_kind(heard, signals.EarlyEventRead) == [signals.EarlyEventRead("test.consumer", 2)]
    assert of_kind(heard, signals.EarlyEventGivenUp, signals.GapFound) == []


def test_the_stream_goes_on_behind_an_early_event(quiet: Quiet) -> None:
    lane = quiet.consumer()
    for _ in range(3):
        quiet.meanwhile = [quiet.bench.publish]
        quiet.send()
        turn(lane)
        quiet.send()
        quiet.bench.publish()
        turn(lane)
    run_until_idle(lane)
    numbers = [1, 2, 3, 4, 5, 6, 7]
    assert [n for n, *_ in quiet.calls] == numbers
    assert quiet.bench.rows(EFFECTS) == numbers
    assert quiet.bench.checkpoint() == 7


def test_what_was_published_with_it_is_handled_behind_it(quiet: Quiet) -> None:
    lane = quiet.consumer()

    def two_more() -> None:
        quiet.send()
        quiet.send()
        quiet.bench.publish()

    quiet.meanwhile = [two_more]
    quiet.send()
    turn(lane)
    assert [n for n, *_ in quiet.calls] == [1, 2, 3, 4]
    assert quiet.bench.rows(EFFECTS) == [1, 2, 3, 4]


def test_nothing_is_committed_that_is_not_published(
    quiet: Quiet, heard: list[signals.Signal]
) -> None:
    lane = quiet.consumer()
    quiet.send()
    turn(lane)
    assert quiet.bench.rows(EFFECTS) == [1]
    assert quiet.bench.settled() == [(1, "handled")]
    assert [type(signal) for signal in of_kind(heard, signals.EarlyEventGivenUp)] == [
        signals.EarlyEventGivenUp
    ]
    quiet.bench.publish()
    turn(lane)
    assert [(n, attempt) for n, attempt, _ in quiet.calls] == [(1, 1), (2, 1), (2, 1)]
    assert quiet.bench.rows(EFFECTS) == [1, 2]
    assert of_kind(heard, signals.EventFailed, signals.BatchRolledBack) == []


def test_an_event_whose_place_another_one_takes_is_handled_behind_that(
    quiet: Quiet, database_url: str
) -> None:
    lane = quiet.consumer()
    with psycopg.connect(database_url) as slow_sender:
        quiet.send(slow_sender)

        def overtake() -> None:
            slow_sender.commit()
            quiet.bench.publish()

        quiet.meanwhile = [overtake]
        quiet.send()
        turn(lane)
    assert [n for n, *_ in quiet.calls] == [1, 3, 2, 3]
    assert quiet.bench.rows("SELECT n FROM effect") == [1, 2, 3]
    assert quiet.bench.settled() == [(1, "handled"), (2, "handled"), (3, "handled")]


def test_a_failure_on_an_early_event_does_not_count(
    quiet: Quiet, heard: list[signals.Signal]
) -> None:
    lane = quiet.consumer()

    def fail() -> None:
        quiet.bench.publish()
        raise ValueError

    quiet.meanwhile = [fail, fail]
    quiet.send()
    lane.wait(STOP)
    lane.step()
    assert of_kind(heard, signals.EventFailed) == []
    lane.step()
    assert [(n, attempt) for n, attempt, _ in quiet.calls] == [(1, 1), (2, 1), (2, 1)]
    assert of_kind(heard, signals.EventFailed)
    assert quiet.bench.rows("SELECT attempts FROM events.parked_event") == [1]


@pytest.fixture
def numbering(quiet: Quiet, database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A publisher's transaction that has the stream's row, and has not committed yet."""
    quiet.send()
    quiet.bench.publish()
    with psycopg.connect(database_url) as numbering:
        numbering.execute("SELECT FROM events.stream WHERE name = 'orders' FOR UPDATE")
        yield numbering


def test_a_numbering_under_way_is_waited_for(
    quiet: Quiet, numbering: psycopg.Connection[Any]
) -> None:
    quiet.bench.connection.execute("ALTER FUNCTION events.await_numbering SET lock_timeout = '30s'")
    lane = quiet.bench.consumer(quiet.handle)
    run_until_idle(lane)
    quiet.tend()
    lane.wait(STOP)
    quiet.send()

    def commit_once_awaited() -> None:
        wait_until(
            lambda: (
                quiet.bench.rows(
                    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    " AND datname = current_database()"
                )
                == [1]
            ),
            what="the consumer waits",
        )
        numbering.execute(
            "UPDATE events.outbox_event SET position = 2, term = 1 WHERE position IS NULL"
        )
        numbering.execute("UPDATE events.stream SET head = 2 WHERE name = 'orders'")
        numbering.commit()

    publisher = threading.Thread(target=commit_once_awaited)
    quiet.meanwhile = [publisher.start]
    lane.wait(STOP)
    lane.step()
    publisher.join()
    assert quiet.calls == [(1, 1, 1), (2, 1, 1)]
    assert quiet.bench.settled() == [(1, "handled"), (2, "handled")]


def test_a_numbering_that_hangs_is_not_waited_for(
    quiet: Quiet, numbering: psycopg.Connection[Any], heard: list[signals.Signal]
) -> None:
    lane = quiet.bench.consumer(quiet.handle)
    run_until_idle(lane)
    quiet.tend()
    lane.wait(STOP)
    quiet.send()
    lane.wait(STOP)
    lane.step()
    assert len(of_kind(heard, signals.EarlyEventGivenUp)) == 1
    assert quiet.bench.settled() == [(1, "handled")]
    numbering.rollback()
    quiet.bench.publish()
    turn(lane)
    assert quiet.bench.rows(EFFECTS) == [1, 2]


def test_a_role_that_may_not_lock_the_stream_never_listens(quiet: Quiet, database_url: str) -> None:
    with new_roles(database_url, "reader") as roles:
        quiet.bench.connection.execute(f"GRANT USAGE ON SCHEMA events TO {roles.name('reader')}")
        with closing(EagerEar(roles.url("reader"), "orders")) as early:
            early.tend()
            assert early.descriptor() is None
            assert not early.is_heard()
        with closing(EagerEar(database_url, "orders")) as early:
            early.tend()
            assert early.descriptor() is not None


def test_only_what_goes_well_is_followed_by_a_head_start(
    quiet: Quiet, heard: list[signals.Signal]
) -> None:
    quiet.send()
    quiet.bench.publish()
    lane = quiet.bench.consumer(quiet.handle, start="latest")
    run_until_idle(lane)
    quiet.tend()
    lane.wait(STOP)
    quiet.send()
    turn(lane)
    assert of_kind(heard, signals.EarlyEventRead) == []
    quiet.bench.publish()
    turn(lane)
    quiet.send()
    turn(lane)
    quiet.send()
    turn(lane)
    given_up = [signals.EarlyEventRead("test.consumer", 3)]
    assert of_kind(heard, signals.EarlyEventRead) == given_up


def test_an_event_of_a_parked_key_waits(quiet: Quiet, heard: list[signals.Signal]) -> None:
    lane = quiet.consumer(retry=LATER)
    quiet.bench.connection.execute(
        "SELECT events.send('orders', 'placed', '{\"n\": 2}', key => 'k3')"
    )
    quiet.sent = 2
    quiet.bench.publish()

    def fail() -> None:
        raise ValueError

    quiet.meanwhile = [fail, fail]
    while not of_kind(heard, signals.EventParked):
        lane.step()
    quiet.send()
    turn(lane)
    assert 3 not in [n for n, *_ in quiet.calls]
    quiet.bench.publish()
    turn(lane)
    assert quiet.bench.settled() == [(1, "handled"), (2, "parked"), (3, "parked")]


async def awaiting(event: Placed, session: AsyncSession) -> None:
    await session.execute(INSERT, {"n": event.n})


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {"lanes": 2}),
        ({}, {"batch_size": 1}),
        ({}, {"timeout_seconds": 5.0}),
        ({"wakeup": "poll"}, {}),
        ({"early_events": False}, {}),
        ({"redis_url": None}, {}),
    ],
    ids=str,
)
def test_some_consumers_never_listen(
    database_url: str, redis_url: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    bench = Workbench(database_url, **{"redis_url": redis_url, **settings})
    bench.connection.execute("CREATE TABLE effect (n bigint)")
    never_listens(bench, Quiet(bench).handle, **options)


def test_handlers_that_await_and_looser_guarantees_never_listen(
    database_url: str, redis_url: str
) -> None:
    def outside(event: Placed) -> None: ...

    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (n bigint)")
    never_listens(bench, awaiting)
    bench = Workbench(database_url, redis_url)
    never_listens(bench, outside, name="looser", guarantee=Guarantee.AT_LEAST_ONCE)


def never_listens(bench: Workbench, handler: Callable[..., Any], **options: Any) -> None:
    try:
        bench.send(3)
        bench.publish()
        lane = bench.consumer(handler, **options)
        run_until_idle(lane)
        tend(bench)
        lane.wait(STOP)
        assert bench.rows(EARS) == []
    finally:
        bench.close()


def test_a_lane_whose_ear_is_cut_off_goes_on_and_listens_again(
    quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_ear, "RETRY_SECONDS", 0.0)
    lane = quiet.consumer()
    (pid,) = quiet.bench.rows(EARS)
    assert quiet.bench.rows(f"SELECT pg_terminate_backend({pid})") == [True]
    wait_until(lambda: quiet.bench.rows(EARS) == [], what="the ear is gone")
    quiet.send()
    quiet.bench.publish()
    turn(lane)
    assert quiet.bench.rows(EFFECTS) == [1, 2]

    def listens_again() -> bool:
        quiet.tend()
        lane.wait(STOP)
        return len(quiet.bench.rows(EARS)) == 1

    wait_until(listens_again, what="it listens again")
    quiet.meanwhile = [quiet.bench.publish]
    quiet.send()
    turn(lane)
    assert quiet.calls[-1] == (3, 1, 2)


def test_what_nobody_waits_for_is_taken_in(quiet: Quiet) -> None:
    lane = quiet.consumer()
    (consumer,) = [stage for stage in quiet.bench._stages if isinstance(stage, Consumer)]
    quiet.send()
    early = consumer._ear
    assert early is not None
    descriptor = early.descriptor()
    assert descriptor is not None
    wait_until(lambda: is_readable(descriptor), what="the sender's word arrives")
    consumer.step()
    assert not is_readable(descriptor)
    assert not early.is_heard()
    quiet.bench.publish()
    turn(lane)
    assert quiet.bench.rows(EFFECTS) == [1, 2]


def is_readable(descriptor: int) -> bool:
    with socket.socket(fileno=socket.dup(descriptor)) as copy:
        copy.setblocking(False)
        try:
            return bool(copy.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False


def claimed_early(quiet: Quiet, after: int) -> str | None:
    """The body of what would be begun with, in a transaction that does not last."""
    place = "'test.consumer', 'orders', 'consumer:test.consumer', 'consumer:test.consumer/1'"
    with quiet.bench.connection.transaction(force_rollback=True):
        row = quiet.bench.connection.execute(
            f"SELECT events.claim_early(1, {place}, %s)", (after,)
        ).fetchone()
    assert row is not None
    body: str | None = row[0]
    return body


def test_an_early_event_is_the_published_one_but_for_its_term(quiet: Quiet) -> None:
    quiet.send()
    quiet.bench.publish()
    quiet.send()
    early = claimed_early(quiet, 1)
    assert early is not None
    quiet.bench.publish()
    (published,) = quiet.bench.rows("SELECT body FROM events.read_entries('orders', 1, 1)")
    before, after = early.split("\n"), published.split("\n")
    assert before[2] == "0", "no publisher has numbered it, in any term"
    assert (before[:2], before[3:]) == (after[:2], after[3:])


def test_only_what_follows_the_end_of_the_stream_is_begun_with(quiet: Quiet) -> None:
    quiet.send()
    quiet.bench.publish()
    assert claimed_early(quiet, 1) is None, "there is nothing"
    quiet.send()
    assert claimed_early(quiet, 0) is None
    assert claimed_early(quiet, 2) is None
    assert claimed_early(quiet, 1) is not None
    quiet.bench.connection.execute("UPDATE events.outbox_event SET key_id = 'k' WHERE id = 2")
    assert claimed_early(quiet, 1) is None, "it is sealed"


def test_what_is_settled_is_not_begun_with(quiet: Quiet) -> None:
    lane = quiet.consumer()
    quiet.send()
    quiet.bench.connection.execute(
        "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
        " SELECT 'test.consumer', event_uuid, 2, 'dead' FROM events.outbox_event WHERE id = 2"
    )
    turn(lane)
    assert quiet.calls == [(1, 1, 1)]
    quiet.bench.publish()
    turn(lane)
    assert quiet.bench.settled() == [(1, "handled"), (2, "dead")]
    assert quiet.bench.rows(EFFECTS) == [1]


def words(quiet: Quiet, ear: EagerEar, stream_name: str) -> int:
    """How many senders an open ear was told of, up to a last word behind them."""
    last = "SELECT pg_notify('events_sent_' || (hashtext(%s) & 255), 'last')"
    quiet.bench.connection.execute(last, (stream_name,))
    assert ear._connection is not None
    told = [notify.payload for notify in ear._connection.notifies(timeout=0.05)]
    while "last" not in told:
        told += [n.payload for n in ear._connection.notifies(timeout=SOON_SECONDS, stop_after=1)]
    return told.index("last")


def test_streams_of_other_slots_are_not_heard(quiet: Quiet, database_url: str) -> None:
    with (
        closing(EagerEar(database_url, "payments")) as other,
        closing(EagerEar(database_url, "orders")) as own,
    ):
        other.tend()
        own.tend()
        quiet.send()
        assert words(quiet, own, "orders") == 1
        assert words(quiet, other, "payments") == 0


def test_a_busy_publisher_is_not_heard_by_anybody(quiet: Quiet, database_url: str) -> None:
    with closing(EagerEar(database_url, "orders")) as ear:
        ear.tend()
        quiet.send()
        assert words(quiet, ear, "orders") == 1, "a sleeping publisher's senders tell"
        quiet.bench.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'penstock wake-up'"
        )
        wait_until(
            lambda: (
                quiet.bench.rows("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [0]
            ),
            what="nobody sleeps any more",
        )
        quiet.send()
        assert words(quiet, ear, "orders") == 0


# ── what a wait leaves unanswered ──────────────────────────────────────────────────────────────

FENCE = Fence("origin", "incarnation", 1)


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisLog]:
    with closing(RedisLog(redis_url)) as log:
        log.open("orders", FENCE, base=0)
        yield log


@pytest.fixture
def bell() -> Iterator[tuple[socket.socket, int]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs.fileno()


def append(log: RedisLog, *positions: int) -> None:
    entries = [b"%d" % position for position in positions]
    log.append("orders", FENCE, first=positions[0], entries=entries)


def read(log: RedisLog, after: int, unless: int | None = None, seconds: float = 1.0) -> list[int]:
    found = log.read("orders", after=after, count=9, wait_seconds=seconds, unless=unless)
    return [position for position, _ in found]


def test_a_wait_ends_when_the_bell_rings_and_the_next_one_takes_its_reply(
    log: RedisLog, bell: tuple[socket.socket, int]
) -> None:
    ringer, unless = bell
    ringer.send(b"!")
    assert read(log, 0, unless) == []
    append(log, 1, 2)
    # One at a time: the old question is still there, and is answered with what came first.
    assert read(log, 0, seconds=0.0) == [1, 2]
    assert read(log, 1, unless) == [2]
    append(log, 3)
    assert read(log, 2) == [3]


def test_a_reply_comes_before_the_bell(log: RedisLog, bell: tuple[socket.socket, int]) -> None:
    ringer, unless = bell
    ringer.send(b"!")
    append(log, 1)
    wait_until(lambda: read(log, 0, unless) == [1], what="the reply is there as soon as the bell")


def test_a_reply_that_nobody_took_for_long_is_not_waited_for(
    log: RedisLog, bell: tuple[socket.socket, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ringer, unless = bell
    ringer.send(b"!")
    assert read(log, 0, unless) == []
    assert log._awaited is not None
    monkeypatch.setattr(redis_link, "REST_SECONDS_MAX", -5.0)
    connection = log._awaited[1]._connection
    asked_on = connection._sock
    append(log, 1)
    assert read(log, 0) == [1]
    assert asked_on.fileno() == -1, "its connection may have been cut meanwhile: it is closed"


def test_a_server_that_hangs_is_noticed_however_often_the_bell_rings(
    log: RedisLog, bell: tuple[socket.socket, int]
) -> None:
    ringer, unless = bell
    ringer.send(b"!")
    assert read(log, 0, unless) == []
    assert log._awaited is not None
    _, question = log._awaited
    question.due_at = 0.0
    assert question.is_answered(math.inf, unless), "what is overdue is not left alone"


def test_a_reader_that_was_moved_back_asks_anew(
    log: RedisLog, bell: tuple[socket.socket, int]
) -> None:
    ringer, unless = bell
    append(log, 1, 2)
    ringer.send(b"!")
    assert read(log, 2, unless) == []
    append(log, 3)
    assert read(log, 1) == [2, 3]


def test_a_server_that_takes_no_connection_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, is_over = threading.Event(), threading.Event()

    def hang(*_: str) -> None:
        asked.set()
        assert is_over.wait(SOON_SECONDS)
        raise psycopg.OperationalError

    monkeypatch.setattr(eager_ear, "connect", hang)
    ear = EagerEar("postgresql://nowhere", "orders")
    opening = threading.Thread(target=ear.tend)
    opening.start()
    assert asked.wait(SOON_SECONDS)
    assert ear.descriptor() is None
    assert not ear.is_heard()
    ear.drain()
    is_over.set()
    opening.join()
    ear.close()
