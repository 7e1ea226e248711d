"""The loop outlives servers; leases run on whatever handlers do, and come back after a loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from penstock.core.leases import Lease
from penstock.core.progress import IDLE, Progress
from penstock.core.settings import Settings
from penstock.errors import LeaseLost, SchemaMismatch, ServerUnavailable
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop
from penstock.stores import outage
from penstock.stores.leases import LeaseTable
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from tests.proxy import Proxy
from tests.publishing import at
from tests.waiting import wait_until

STREAM, ROLE = "orders", "consumer:test.c"


class Script:
    """A stage whose steps do what they are told, then stop the loop."""

    def __init__(self, stop: threading.Event, *actions: Progress | Exception) -> None:
        self.stop = stop
        self.actions = list(actions)
        self.opened = self.closed = self.waited = 0

    def open(self) -> Script:
        self.opened += 1
        return self

    def step(self) -> Progress:
        if not self.actions:
            self.stop.set()
            return IDLE
        action = self.actions.pop(0)
        if isinstance(action, Exception):
            raise action
        return action

    def wait(self, stop: threading.Event) -> None:  # noqa: ARG002 - the protocol's
        self.waited += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    found: list[Any] = []
    subscribe_to_all(found.append)
    yield found
    unsubscribe(found.append)


def run(*actions: Progress | Exception) -> Script:
    stop = threading.Event()
    script = Script(stop, *actions)
    Loop("test", script.open, stop).run()
    return script


def test_an_idle_stage_waits_and_a_busy_one_does_not() -> None:
    assert run(Progress(5), IDLE, Progress(0, pause_seconds=0.001)).waited == 2


def test_a_server_that_goes_away_is_said_once_and_waited_for(heard: list[Any]) -> None:
    script = run(ServerUnavailable("gone"), psycopg.OperationalError("gone"), Progress(1))
    assert script.opened == 3
    assert script.closed == 3
    names = [type(signal).__name__ for signal in heard]
    assert names == ["ServerLost", "ServerFound"]


def test_a_server_that_comes_and_goes_is_tried_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: clock.now))
    server = outage.Outage("test", "PostgreSQL")

    def pause_after(seconds: float) -> float:
        clock.now += seconds
        server.begin(ServerUnavailable("gone"))
        pause_seconds = round(server.pause_seconds, 3)
        clock.now += pause_seconds
        server.end()
        return pause_seconds

    assert [pause_after(0.01) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert pause_after(outage.STEADY_SECONDS) == 0.05


def test_a_stage_that_works_and_cannot_wait_is_not_opened_twenty_times_a_second() -> None:
    class Sleepless(Script):
        def wait(self, stop: threading.Event) -> None:
            super().wait(stop)
            raise ServerUnavailable("it took the statement, and cut the connection after that")

    stop = threading.Event()
    script = Sleepless(stop, IDLE, IDLE, IDLE, IDLE)
    began = time.monotonic()
    Loop("test", script.open, stop).run()
    assert script.opened == 5
    assert time.monotonic() - began > 0.05 + 0.1 + 0.2 + 0.4


@pytest.mark.parametrize(
    "name", ["25006", "25P03", "25P04", "53100", "53200", "53300", "57P01", "58030"]
)
def test_a_server_that_is_not_well_is_waited_for(name: str, heard: list[Any]) -> None:
    error = psycopg.errors.lookup(name)
    run(error("not now"), DBAPIError("SELECT 1", None, error("not now")), Progress(1))
    assert [type(signal) for signal in heard] == [signals.ServerLost, signals.ServerFound]


def test_a_right_that_was_taken_is_waited_for(heard: list[Any]) -> None:
    run(psycopg.errors.InsufficientPrivilege("not for you"), Progress(1))
    assert [type(signal) for signal in heard] == [signals.ServerLost, signals.ServerFound]


def test_a_lost_lease_reopens_the_stage() -> None:
    assert run(LeaseLost("taken")).opened == 2


@pytest.mark.parametrize("error", [SchemaMismatch("old"), psycopg.errors.UndefinedTable("x")])
def test_what_no_waiting_can_cure_comes_out(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(error)


# ── leases ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        LeaseTable().ensure(connection, STREAM, ROLE)
        yield connection


def keeper(database_url: str, **settings: Any) -> LeaseKeeper:
    chosen = {"lease_seconds": 30.0, "lease_renew_seconds": 10.0, **settings}
    return LeaseKeeper(Settings(database_url=database_url, **chosen))


def acquired(keeper: LeaseKeeper, connection: psycopg.Connection[Any]) -> Lease:
    lease = keeper.acquire(connection, STREAM, ROLE)
    assert lease is not None
    return lease


def test_a_lease_has_one_holder_and_a_growing_term(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    first, second = keeper(database_url), keeper(database_url)
    lease = acquired(first, connection)
    assert second.acquire(connection, STREAM, ROLE) is None
    first.release(connection, lease)
    assert acquired(second, connection).term == lease.term + 1
    first.close()
    second.close()


def test_a_lease_whose_acquisition_breaks_off_is_not_kept_and_can_be_taken_at_once(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    kept = keeper(database_url)
    with psycopg.connect(database_url, autocommit=True) as doomed:
        pid = doomed.info.backend_pid

        def end_backend() -> None:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))

        with at(signals.LeaseAcquired, end_backend), pytest.raises(psycopg.OperationalError):
            kept.acquire(doomed, STREAM, ROLE)
    again = acquired(kept, connection)
    assert again.was_clean, "whoever held it is alive: it is this very process"
    kept.close()


def test_a_lease_that_was_granted_without_an_answer_can_be_taken_at_once(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    # So long that it is not over before the test.
    kept = keeper(database_url, lease_seconds=300.0, lease_renew_seconds=100.0)
    with Proxy.to(database_url) as proxy:
        cut_off = psycopg.connect(proxy.url(database_url), autocommit=True)
        proxy.cut_reply_to(b"UPDATE events.stream_lease")
        with pytest.raises(psycopg.OperationalError):
            kept.acquire(cut_off, STREAM, ROLE)
        wait_until(lambda: proxy.cuts == 1, what="the reply was cut off")
        cut_off.close()
    wait_until(
        lambda: kept.acquire(connection, STREAM, ROLE) is not None, what="it is ours to take"
    )
    kept.close()


def test_renewal_outlives_the_lease_time_and_never_waits_for_a_handler(
    database_url: str, connection: psycopg.Connection[Any], heard: list[Any]
) -> None:
    # Three seconds, so that a machine that stands still for one or two does not lose the lease.
    short = keeper(database_url, lease_seconds=3.0, lease_renew_seconds=0.1)
    lease = acquired(short, connection)
    ((first_until,),) = connection.execute("SELECT lease_until FROM events.stream_lease").fetchall()

    def is_outlived() -> bool:
        return connection.execute("SELECT clock_timestamp() > %s", [first_until]).fetchone() == (
            True,
        )

    wait_until(is_outlived, what="the first lease time is over")
    assert any(isinstance(signal, signals.LeaseRenewed) for signal in heard)
    assert short.is_held(lease)
    assert keeper(database_url).acquire(connection, STREAM, ROLE) is None
    short.close()


def test_a_lease_that_cannot_be_renewed_is_known_to_be_over(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    short = keeper(database_url, lease_seconds=0.4, lease_renew_seconds=0.1)
    lease = acquired(short, connection)
    connection.execute("UPDATE events.stream_lease SET owner_id = 'rival', term = term + 1")
    wait_until(lambda: not short.is_held(lease), what="the loss is noticed")
    short.close()


def test_a_renewal_that_arrives_too_late_does_not_bring_a_lease_back(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    late, rival = keeper(database_url), keeper(database_url)
    lease = acquired(late, connection)
    connection.execute("UPDATE events.stream_lease SET lease_until = clock_timestamp()")
    assert LeaseTable().renew(connection, [lease], 30.0) == {}
    assert acquired(rival, connection).term == lease.term + 1
    late.close()
    rival.close()


def test_a_lease_that_was_given_up_in_time_and_renewed_after_all_is_taken_again_at_once(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    with Proxy.to(database_url) as proxy, proxy.refusing():
        own = keeper(proxy.url(database_url), lease_seconds=0.4, lease_renew_seconds=0.1)
        lease = acquired(own, connection)
        ended = threading.Event()
        own.guard(lease, ended.set)
        wait_until(lambda: not own.is_held(lease) and ended.is_set(), what="it is given up")
        # As by a renewal that was under way for long.
        connection.execute("UPDATE events.stream_lease SET lease_until = 'infinity'")
        again = acquired(own, connection)
        assert (again.term, again.was_clean) == (lease.term + 1, True)
        # Whoever still has the former one in hand takes nothing away from the new one.
        own.forget(lease, "too late")
        assert own.is_held(again)
        own.close()


def test_a_lease_whose_checkpoint_went_back_is_given_up_and_taken_anew(
    database_url: str, connection: psycopg.Connection[Any], heard: list[Any]
) -> None:
    with closing(keeper(database_url, lease_renew_seconds=0.05)) as ours:
        lease = acquired(ours, connection)
        connection.execute("UPDATE events.stream_lease SET checkpoint = 5")
        ours.note(lease.at(5))
        wait_until(lambda: told(heard, signals.LeaseRenewed) > 1, what="two renewals")
        assert ours.is_held(lease)
        # As after a failover to a standby that lacked the last commits.
        connection.execute("UPDATE events.stream_lease SET checkpoint = 4")
        wait_until(lambda: not ours.is_held(lease), what="it is noticed without any event")
        (lost,) = (signal for signal in heard if isinstance(signal, signals.LeaseLost))
        assert "lost commits" in lost.reason
        again = acquired(ours, connection)
        assert (again.checkpoint, again.term) == (4, lease.term + 1)


def told(heard: list[Any], kind: type) -> int:
    return sum(isinstance(signal, kind) for signal in heard)


def test_a_lease_that_could_not_be_given_back_is_taken_again_at_once(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    own, rival = keeper(database_url), keeper(database_url)
    lease = acquired(own, connection)
    own.abandon(lease, "the connection broke")
    assert rival.acquire(connection, STREAM, ROLE) is None
    assert acquired(own, connection).term == lease.term + 1
    own.close()
    rival.close()


def test_a_dead_workers_leases_are_released_for_it(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    dead, successor = keeper(database_url), keeper(database_url)
    lease = acquired(dead, connection)
    assert LeaseTable().release_worker(connection, dead.worker_id) == [(STREAM, ROLE)]
    taken = acquired(successor, connection)
    assert not taken.was_clean
    assert LeaseTable().read(connection, lease) is None
    dead.close()
    successor.close()


def test_taking_over_ends_the_predecessors_open_transaction(
    database_url: str, connection: psycopg.Connection[Any], heard: list[Any]
) -> None:
    with psycopg.connect(database_url) as predecessor:
        predecessor.execute(
            "SELECT pg_advisory_xact_lock_shared(hashtext('penstock lane'), hashtext(%s))",
            (f"{STREAM} {ROLE}",),
        )
        successor = keeper(database_url)
        acquired(successor, connection)
        assert [s for s in heard if isinstance(s, signals.PredecessorEnded)]
        with pytest.raises(psycopg.OperationalError):
            predecessor.execute("SELECT 1")
        successor.close()
