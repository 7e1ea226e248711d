"""A failing event blocks its key and nothing else: parked, tried again, buried or held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Event
from penstock.app import Pipeline
from penstock.core.isolation import Batch
from penstock.core.retry import Retry
from penstock.core.wire import decode_body
from penstock.errors import (
    ContractError,
    FatalError,
    KeyUnavailable,
    RetryableError,
    ServerUnavailable,
)
from penstock.pipeline import parking
from penstock.pipeline.context import Context
from penstock.pipeline.lane import Lane
from penstock.pipeline.unsealing import Openable, Unsealing
from penstock.stores.operations import Kind, Operation
from penstock.stores.parked import Parked
from penstock.stores.queries import Queries
from penstock.stores.worker_connection import WorkerConnection
from penstock.telemetry import signals
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.failing import AT_ONCE, LATER, Rests, drive, effects, heard, look_now, outcomes, parked
from tests.test_seams import working
from tests.waiting import SOON_SECONDS, wait_until


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url, parked_per_key_max=4)
    bench.connection.execute("CREATE TABLE effect (serial bigserial, n bigint)")
    yield bench
    bench.close()


class Moody:
    """Fails on some events until it is told to stop."""

    def __init__(self, *bad: int, error: Exception | None = None) -> None:
        self.bad = set(bad)
        self.error = error or ValueError("not today")
        self.seen: list[int] = []

    def _judge(self, n: int) -> None:
        self.seen.append(n)
        if n in self.bad:
            raise self.error

    def on_session(self, event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        self._judge(event.n)

    def on_cursor(self, event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.n,))
        if event.n in self.bad:
            cursor.execute("SELECT 1/0")

    def on_list(self, events: list[Placed], session: Session) -> None:
        for event in events:
            self.on_session(event, session)

    async def on_async(self, event: Placed, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        self._judge(event.n)


# Workbench.send gives event n the key "k{n % 3}".


@pytest.mark.parametrize("shape", ["on_session", "on_cursor", "on_list", "on_async"])
@pytest.mark.parametrize("hot", [True, False])
def test_a_failing_event_blocks_its_key_and_nothing_else(
    database_url: str, redis_url: str, shape: str, hot: bool
) -> None:
    bench = Workbench(database_url, redis_url if hot else None)
    bench.connection.execute("CREATE TABLE effect (serial bigserial, n bigint)")
    try:
        bench.send(12)
        bench.publish()
        moody = Moody(5)
        lane = bench.consumer(getattr(moody, shape), retry=LATER)
        run_until_idle(lane)
        assert effects(bench) == [1, 2, 3, 4, 6, 7, 9, 10, 12]
        assert outcomes(bench)["parked"] == [5, 8, 11]
        assert bench.checkpoint() == 12
        moody.bad.clear()
        bench.connection.execute(
            "UPDATE events.parked_event SET next_attempt_at = clock_timestamp()"
            " WHERE next_attempt_at IS NOT NULL"
        )
        look_now(lane)
        drive(lane, lambda: not parked(bench))
        assert effects(bench)[-3:] == [5, 8, 11]
        assert outcomes(bench) == {"handled": list(range(1, 13))}
    finally:
        bench.close()


def test_the_first_of_a_key_is_tried_again_alone_and_its_successors_never_before_it(
    bench: Workbench,
) -> None:
    bench.send(9)
    bench.publish()
    moody = Moody(2)
    lane = bench.consumer(moody.on_session, retry=AT_ONCE)
    with heard(signals.EventFailed) as failures:
        drive(lane, lambda: len(failures) == 3)
    assert [(f.position, f.attempt) for f in failures] == [(2, 1), (2, 2), (2, 3)]
    assert not {5, 8} & set(effects(bench))
    moody.bad.clear()
    drive(lane, lambda: not parked(bench))
    assert [n for n in effects(bench) if n in {2, 5, 8}] == [2, 5, 8]


def test_each_failed_event_is_tried_again_by_itself_with_its_own_attempts(
    bench: Workbench,
) -> None:
    bench.send(2)
    bench.publish()
    attempts: list[tuple[int, int]] = []

    def handler(event: Placed, context: Context) -> None:
        attempts.append((event.n, context.attempt))
        if context.attempt < 3:
            raise ValueError("not yet")

    lane = bench.consumer(handler, retry=LATER)
    run_until_idle(lane)
    for due in ((1,), (1, 2), (2,)):
        bench.connection.execute(
            "UPDATE events.parked_event SET next_attempt_at = clock_timestamp()"
            " WHERE position = ANY(%s)",
            (list(due),),
        )
        look_now(lane)
        run_until_idle(lane)
    # Its first attempt is in a batch with others, and then by itself.
    assert sorted(set(attempts)) == [(n, attempt) for n in (1, 2) for attempt in (1, 2, 3)]
    assert outcomes(bench) == {"handled": [1, 2]}


def test_what_a_batch_does_not_come_to_is_neither_parked_nor_taken_for_handled(
    bench: Workbench,
) -> None:
    bench.send(3)
    bench.publish()
    moody = Moody(2)
    lane = bench.consumer(moody.on_session, retry=LATER, batch_seconds=1e-9)
    run_until_idle(lane)
    bench.send(6)  # positions 5 and 8 are of the key that waits behind 2
    bench.publish()
    lane.step()
    assert (bench.checkpoint(), parked(bench)) == (5, [2, 5])
    run_until_idle(lane)
    assert parked(bench) == [2, 5, 8]
    moody.bad.clear()
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp() WHERE position = 2"
    )
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert effects(bench) == [1, 3, 1, 3, 4, 6, 2, 2, 5]
    assert outcomes(bench) == {"handled": list(range(1, 10))}


def test_what_is_due_beside_a_redriven_event_has_all_its_attempts(bench: Workbench) -> None:
    bench.send(5)  # 5 waits behind 2
    bench.publish()
    moody = Moody(1, 2)
    lane = bench.consumer(moody.on_session, retry=LATER)
    run_until_idle(lane)
    redrive = Operation(bench.connection, "redrive", {}, consumer=None, by="me", reason="")
    moody.error = FatalError("not today")
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp() WHERE position = 1"
    )
    look_now(lane)
    run_until_idle(lane)
    assert redrive.move(bench.rows("SELECT id FROM events.dead_letter")) == 1
    bench.connection.execute("DELETE FROM events.parked_event WHERE position = 2")
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp() WHERE position = 5"
    )
    moody.bad, moody.error = {5}, ValueError("not today")
    look_now(lane)
    with heard(signals.EventBuried) as buried:
        drive(lane, lambda: 1 in effects(bench))
        run_until_idle(lane)
    assert buried == []
    assert 5 in outcomes(bench)["parked"]


class OutOfReach(Unsealing):
    """The data key of the second event, as long as the fourth fails."""

    def __init__(self, moody: Moody) -> None:
        super().__init__("test.consumer", None)
        self._moody = moody

    @contextmanager
    def openable(self, batch: Batch) -> Iterator[Openable]:
        is_away = self._moody.bad and self._moody.seen
        if is_away and any(entry.position == 2 for entry in batch.entries):
            yield Openable(batch.until(1), batch.after(1), "no key")
        else:
            yield Openable(batch)


def test_nothing_passes_an_event_whose_key_is_away_while_a_failure_is_isolated(
    bench: Workbench,
) -> None:
    bench.send(4)
    bench.publish()
    moody = Moody(4)
    lane = bench.consumer(moody.on_session, retry=LATER)
    lane._unsealing = OutOfReach(moody)
    for _ in range(5):
        lane.step()
    assert (effects(bench), bench.checkpoint()) == ([1], 1)
    moody.bad.clear()
    run_until_idle(lane)
    assert effects(bench) == [1, 2, 3, 4]


def test_a_handler_decides_how_long_to_wait(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    moody = Moody(1, error=RetryableError("busy", after_seconds=42))
    lane = bench.consumer(moody.on_session)
    with heard(signals.EventParked) as events:
        run_until_idle(lane)
    assert [event.retry_after_seconds for event in events] == [42]
    (seconds,) = bench.rows(
        "SELECT extract(epoch FROM next_attempt_at - clock_timestamp())::int"
        " FROM events.parked_event"
    )
    assert 35 <= seconds <= 42


def test_attempts_are_counted_across_workers(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    moody = Moody(1)
    with heard(signals.EventFailed) as failures:
        for count in (1, 2, 3):
            lane = bench.consumer(moody.on_session, retry=AT_ONCE)
            drive(lane, lambda count=count: len(failures) == count)  # type: ignore[misc]
            lane.close()
    assert [failure.attempt for failure in failures] == [1, 2, 3]


def test_an_exhausted_event_is_a_dead_letter_with_all_that_is_known(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    lane = bench.consumer(Moody(2).on_session, retry=Retry.fixed(seconds=0.001, attempts_max=3))
    with heard(signals.EventBuried) as buried:
        drive(lane, lambda: bool(buried) and not parked(bench))
    assert outcomes(bench) == {"handled": [1, 3, 4, 5, 6], "dead": [2]}
    row = bench.connection.execute(
        "SELECT position, event_type, reason, error_type, error_message, traceback, handler,"
        "       jsonb_array_length(attempts), attempts -> 0 ->> 'error', host IS NOT NULL,"
        "       length(fingerprint), entry LIKE '%%\"n\": 2%%' FROM events.dead_letter"
    ).fetchone()
    assert row is not None
    position, kind, reason, error_type, message, trace, handler, count, error, *rest = row
    assert (position, kind, reason) == (2, "placed", "exhausted")
    assert (error_type, message) == ("ValueError", "not today")
    assert "in _judge" in trace
    assert handler == "tests.test_parking.Moody.on_session"
    assert (count, error) == (3, "ValueError: not today")
    assert rest == [True, 16, True]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(FatalError("no use"), "fatal"), (ContractError("does not fit"), "contract")],
)
def test_what_cannot_succeed_is_buried_at_once(
    bench: Workbench, error: Exception, reason: str
) -> None:
    bench.send(6)
    bench.publish()
    moody = Moody(2, error=error)
    run_until_idle(bench.consumer(moody.on_session))
    assert outcomes(bench) == {"handled": [1, 3, 4, 5, 6], "dead": [2]}
    assert bench.rows("SELECT reason FROM events.dead_letter") == [reason]


def test_classes_named_as_fatal_are_buried_at_once(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    retry = Retry.exponential(fatal=(ValueError,))
    run_until_idle(bench.consumer(Moody(1).on_session, retry=retry))
    assert outcomes(bench) == {"dead": [1]}


def test_a_held_key_waits_and_everything_else_goes_on(bench: Workbench) -> None:
    bench.send(9)
    bench.publish()
    lane = bench.consumer(
        Moody(2, error=FatalError("ask somebody")).on_session, on_exhausted="hold"
    )
    with heard(signals.KeyHeld) as held:
        run_until_idle(lane)
    assert [h.position for h in held] == [2]
    assert outcomes(bench) == {"handled": [1, 3, 4, 6, 7, 9], "parked": [2, 5, 8]}
    assert bench.rows("SELECT position FROM events.parked_event WHERE held") == [2]
    assert bench.rows("SELECT position FROM events.dead_letter") == [2]


def test_order_by_stream_lets_nothing_pass(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    moody = Moody(3)
    lane = bench.consumer(moody.on_session, retry=AT_ONCE, order="stream")
    with heard(signals.EventFailed) as failures:
        drive(lane, lambda: len(failures) == 3)
    assert effects(bench) == [1, 2]
    moody.bad.clear()
    drive(lane, lambda: bench.checkpoint() == 6)
    assert effects(bench) == [1, 2, 3, 4, 5, 6]


def test_without_order_successors_overtake(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    moody = Moody(2, 5)
    lane = bench.consumer(moody.on_session, retry=LATER, order="none", allow_reordering=True)
    run_until_idle(lane)
    assert outcomes(bench) == {"handled": [1, 3, 4, 6], "parked": [2, 5]}
    assert bench.rows("SELECT next_attempt_at IS NULL FROM events.parked_event") == [False, False]


def test_a_consumer_that_gives_up_its_order_leaves_nobody_waiting(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    moody = Moody(2)
    first = bench.consumer(moody.on_session, retry=LATER)
    run_until_idle(first)
    first.close()
    assert parked(bench) == [2, 5]
    second = bench.consumer(moody.on_session, retry=LATER, order="none", allow_reordering=True)
    drive(second, lambda: parked(bench) == [2])
    assert effects(bench) == [1, 3, 4, 6, 5]


def test_events_without_a_key_block_nobody(bench: Workbench) -> None:
    for n in (1, 2, 3):
        bench.connection.execute(
            "SELECT events.send('orders', 'placed', jsonb_build_object('n', %s::int))", (n,)
        )
    bench.publish()
    run_until_idle(bench.consumer(Moody(1).on_session, retry=LATER))
    assert outcomes(bench) == {"parked": [1], "handled": [2, 3]}


def test_a_key_with_too_many_waiting_is_reported_again_when_they_double(bench: Workbench) -> None:
    moody = Moody(3)
    lane = bench.consumer(moody.on_session, retry=LATER, batch_size=6)
    with heard(signals.KeyBacklogged) as backlogs:
        for _ in range(12):
            bench.send(6)  # two of key k0, of which event 3 fails
            bench.publish()
            run_until_idle(lane)
    # 3 and then 23 more of its key: 4 wait, then 8, then 16.
    assert [b.waiting for b in backlogs] == [5, 9, 17]
    assert {b.position for b in backlogs} == {3}
    moody.bad.clear()
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp() WHERE position = 3"
    )
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert outcomes(bench) == {"handled": list(range(1, 73))}


def test_the_attempt_is_told_to_the_handler(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    attempts: list[int] = []

    def handler(event: Placed, session: Session, context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) < 3:
            raise ValueError

    lane = bench.consumer(handler, retry=AT_ONCE)
    drive(lane, lambda: outcomes(bench) == {"handled": [1]})
    assert attempts == [1, 2, 3]


def test_one_consumer_parks_and_another_goes_on(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    failing, other = Moody(2), Moody()
    run_until_idle(bench.consumer(failing.on_session, name="failing", retry=LATER))
    run_until_idle(bench.consumer(other.on_session, name="other"))
    assert other.seen == [1, 2, 3, 4, 5, 6]
    assert bench.rows("SELECT DISTINCT consumer FROM events.parked_event") == ["test.failing"]


def test_a_version_without_a_contract_parks_its_key_if_asked_to(bench: Workbench) -> None:
    send = "SELECT events.send('orders', 'placed', '{\"n\": 7}', key => %s, version => %s)"
    for key, version in (("a", 9), ("a", 1), ("b", 1)):
        bench.connection.execute(send, (key, version))
    bench.publish()
    moody = Moody()
    run_until_idle(bench.consumer(moody.on_session, on_unknown_version="park"))
    assert outcomes(bench) == {"parked": [1, 2], "handled": [3]}


class Booked(Event, type="parking.booked", version=1):
    n: int


class BookedLater(Event, type="parking.booked", version=2):
    n: int


def wait_for_a_version(bench: Workbench, **options: Any) -> list[float]:
    """An event in a version that is deployed later is set aside five times; for how long each."""
    send = "SELECT events.send('orders', 'parking.booked', '{\"n\": 7}', key => 'a', version => 2)"
    bench.connection.execute(send)
    bench.publish()

    def handler(event: Booked) -> None: ...

    lane = bench.consumer(handler, on_unknown_version="park", **options)
    with heard(signals.EventParked) as waits:
        for count in range(1, 6):
            make_due(bench, lane)
            drive(lane, lambda count=count: len(waits) == count)  # type: ignore[misc]
    lane.close()
    return [wait.retry_after_seconds for wait in waits]


def make_due(bench: Workbench, lane: Lane) -> None:
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp()"
        " WHERE next_attempt_at IS NOT NULL"
    )
    look_now(lane)


def test_waiting_for_a_version_uses_up_no_attempt(bench: Workbench) -> None:
    retry = Retry.fixed(seconds=0.001, attempts_max=3)
    wait_for_a_version(bench, retry=retry)
    assert bench.rows("SELECT attempts FROM events.parked_event") == [0]
    attempts: list[int] = []

    def handler(event: BookedLater, session: Session, context: Context) -> None:
        attempts.append(context.attempt)
        if len(attempts) < 3:
            raise ValueError("not today")

    lane = bench.consumer(handler, on_unknown_version="park", retry=retry)
    make_due(bench, lane)
    drive(lane, lambda: outcomes(bench) == {"handled": [1]})
    assert attempts == [1, 2, 3]


def test_waiting_for_a_version_is_tried_ever_more_rarely(bench: Workbench) -> None:
    waits = wait_for_a_version(bench)
    for n, seconds in enumerate(waits):
        assert 0.25 * 2**n <= seconds <= 0.5 * 2**n


def test_what_waits_behind_a_missing_version_is_not_taken_in_hand_with_it(
    bench: Workbench,
) -> None:
    """It would be handled first where the event in front is put off once more."""
    wait_for_a_version(bench)
    for n in (1, 2):
        bench.connection.execute(
            f"SELECT events.send('orders', 'placed', '{{\"n\": {n}}}', key => 'a')"
        )
    bench.publish()
    lane = bench.consumer(Moody().on_session)
    drive(lane, lambda: len(parked(bench)) == 3)
    make_due(bench, lane)
    (batch,) = lane._parking.due()
    assert [entry.position for entry in batch.entries] == [1]


def test_attempts_before_a_wait_count_and_the_wait_does_not(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    moody = Moody(1)
    lane = bench.consumer(moody.on_session, retry=Retry.fixed(seconds=0.001, attempts_max=3))
    errors = [ValueError("not today"), *[KeyUnavailable("no KMS")] * 5, ValueError("not today")]
    with heard(signals.EventParked) as waits:
        for count, moody.error in enumerate(errors, 1):
            make_due(bench, lane)
            drive(lane, lambda count=count: len(waits) == count)  # type: ignore[misc]
    assert bench.rows("SELECT attempts FROM events.parked_event") == [2]
    drive(lane, lambda: not parked(bench))
    assert outcomes(bench) == {"dead": [1]}


def test_a_version_without_a_contract_is_buried_if_asked_to(bench: Workbench) -> None:
    bench.connection.execute("SELECT events.send('orders', 'placed', '{\"n\": 7}', version => 9)")
    bench.publish()
    run_until_idle(bench.consumer(Moody().on_session, on_unknown_version="bury"))
    assert bench.rows("SELECT reason FROM events.dead_letter") == ["contract"]


def test_a_discard_at_the_moment_of_parking_leaves_nobody_stuck(bench: Workbench) -> None:
    """The head goes away in a transaction that neither sees the newcomer nor is seen by it."""
    bench.send(3)
    bench.publish()
    moody = Moody(3)
    lane = bench.consumer(moody.on_session, retry=LATER)
    run_until_idle(lane)
    moody.bad.clear()
    with psycopg.connect(bench.settings.database_url) as operator:
        operator.execute("DELETE FROM events.parked_event WHERE position = 3")
        bench.send(3)
        bench.publish()
        run_until_idle(lane)
        assert parked(bench) == [3, 6]
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert outcomes(bench)["handled"] == [1, 2, 4, 5, 6]


def test_a_parked_event_that_an_operator_took_away_is_not_handled(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    moody = Moody(1)
    lane = bench.consumer(moody.on_session, retry=AT_ONCE)
    with heard(signals.EventParked) as events:
        while not events:
            lane.step()
    moody.bad.clear()
    moody.seen.clear()
    # Read as due, then discarded before its transaction begins.
    due, batches = lane._parking.due, lane._parked

    def is_due() -> bool:
        batches.extend(due())
        return bool(batches)

    wait_until(is_due, what="it is due")
    bench.connection.execute("DELETE FROM events.parked_event")
    bench.connection.execute("UPDATE events.processed_event SET outcome = 'discarded'")
    run_until_idle(lane)
    assert moody.seen == []
    assert outcomes(bench) == {"discarded": [1]}


def test_an_event_that_is_due_waits_for_an_earlier_one_of_its_key(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    moody = Moody(2)
    lane = bench.consumer(moody.on_session, retry=LATER)
    run_until_idle(lane)
    assert parked(bench) == [2, 5]
    bench.connection.execute(
        "UPDATE events.parked_event SET next_attempt_at = clock_timestamp() WHERE position = 5"
    )
    look_now(lane)
    run_until_idle(lane)
    assert parked(bench) == [2, 5]
    assert 5 not in effects(bench)


def test_a_lease_is_in_good_hands_when_the_first_look_fails(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Parked.look
    broken = [True]

    def look_once_in_vain(self: Parked, *arguments: Any, **options: Any) -> Any:
        if broken.pop() if broken else False:
            raise psycopg.OperationalError
        return look(self, *arguments, **options)

    monkeypatch.setattr(Parked, "look", look_once_in_vain)
    handled: list[int] = []
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)

    @pipeline.consumer("orders", name="count")
    def count(event: Placed) -> None:
        handled.append(event.n)

    pipeline.send_now("orders", Placed(n=1))
    with working(pipeline, "publisher", "consumer:count"):
        wait_until(lambda: handled == [1], what="another try handles it")
    pipeline.engine.dispose()
    assert not broken


# ── operators ──────────────────────────────────────────────────────────────────────────────────


def held_key(bench: Workbench, moody: Moody) -> Lane:
    """Event 2 is held, and 5 and 8 of its key wait behind it."""
    bench.send(9)
    bench.publish()
    lane = bench.consumer(moody.on_session, on_exhausted="hold", retry=Retry.none())
    run_until_idle(lane)
    assert parked(bench) == [2, 5, 8]
    return lane


def operation(bench: Workbench, kind: Kind) -> Operation:
    return Operation(bench.connection, kind, {}, consumer=None, by="me", reason="")


def test_a_redrive_of_a_held_event_drains_its_key_in_order(bench: Workbench) -> None:
    moody = Moody(2)
    lane = held_key(bench, moody)
    moody.bad.clear()
    redrive = operation(bench, "redrive")
    assert redrive.move(bench.rows("SELECT id FROM events.dead_letter")) == 1
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert effects(bench)[-3:] == [2, 5, 8]
    assert outcomes(bench) == {"handled": list(range(1, 10))}
    assert bench.rows("SELECT id FROM events.dead_letter") == []
    assert redrive.tally() == (0, 0)


def test_a_redrive_in_vain_holds_the_key_again(bench: Workbench) -> None:
    lane = held_key(bench, Moody(2))
    redrive = operation(bench, "redrive")
    redrive.move(bench.rows("SELECT id FROM events.dead_letter"))
    look_now(lane)
    drive(lane, lambda: redrive.tally() == (0, 1))
    assert parked(bench) == [2, 5, 8]
    assert bench.rows("SELECT held FROM events.parked_event ORDER BY position") == [
        True,
        False,
        False,
    ]
    assert bench.rows("SELECT jsonb_array_length(attempts) FROM events.dead_letter") == [2]
    assert bench.rows("SELECT redrives FROM events.dead_letter") == [1]


def test_a_redriven_event_that_waits_is_on_its_way(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    moody = Moody(1)
    lane = bench.consumer(moody.on_session, retry=Retry.none())
    run_until_idle(lane)
    moody.error = KeyUnavailable("no KMS")
    redrive = operation(bench, "redrive")
    redrive.move(bench.rows("SELECT id FROM events.dead_letter"))
    with heard(signals.EventParked) as waits:
        look_now(lane)
        drive(lane, lambda: bool(waits))
    assert redrive.tally() == (1, 0)
    moody.error = ValueError("not today")
    make_due(bench, lane)
    drive(lane, lambda: not parked(bench))
    assert redrive.tally() == (0, 1)


def test_a_stream_that_waits_for_a_redriven_event_keeps_nobody_busy(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    moody = Moody(1)
    lane = bench.consumer(moody.on_session, retry=Retry.none(), order="stream")
    run_until_idle(lane)
    moody.error = KeyUnavailable("no KMS")
    bench.send(1)
    bench.publish()
    lane.wait(threading.Event())
    assert lane._intake.has_more
    operation(bench, "redrive").move(bench.rows("SELECT id FROM events.dead_letter"))
    look_now(lane)
    lane._is_parked_turn = True
    run_until_idle(lane)
    assert parked(bench) == [1]
    lane.wait(rests := Rests())
    assert len(rests.seconds) == 1


def test_at_most_once_a_redrive_in_vain_is_written_down(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()

    def handler(event: Placed) -> None:
        raise ValueError("not today")

    lane = bench.consumer(handler, guarantee="at_most_once", retry=Retry.none())
    drive(lane, lambda: outcomes(bench) == {"dead": [1]})
    for count in (1, 2):
        redrive = operation(bench, "redrive")
        redrive.move(bench.rows("SELECT id FROM events.dead_letter"))
        look_now(lane)
        drive(lane, lambda redrive=redrive: redrive.tally() == (0, 1))  # type: ignore[misc]
        assert bench.rows("SELECT redrives FROM events.dead_letter") == [count]


def test_what_waits_behind_a_held_event_does_not_go_with_an_earlier_one_that_is_redriven(
    bench: Workbench,
) -> None:
    bench.send(3)
    bench.publish()
    moody = Moody(2)
    first = bench.consumer(moody.on_session, retry=Retry.none())
    run_until_idle(first)
    first.close()
    bench.send(6)
    bench.publish()
    lane = bench.consumer(moody.on_session, on_exhausted="hold", retry=Retry.none())
    run_until_idle(lane)
    assert outcomes(bench)["dead"] == [2]
    assert parked(bench) == [5, 8]
    moody.bad.clear()
    letters = bench.rows("SELECT id FROM events.dead_letter ORDER BY position")
    operation(bench, "redrive").move(letters[:1])
    look_now(lane)
    drive(lane, lambda: "dead" not in outcomes(bench))
    run_until_idle(lane)
    assert parked(bench) == [5, 8]
    operation(bench, "redrive").move(letters[1:])
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    # Positions 2, 5 and 8.
    assert effects(bench)[-3:] == [2, 2, 5]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_what_waits_behind_an_event_that_is_held_again_in_time_goes_on_waiting(
    bench: Workbench, guarantee: str
) -> None:
    """Read as due together, then the first is taken back before the attempt begins."""
    called: list[int] = []

    def handler(event: Placed) -> None:
        called.append(event.n)
        if event.n == 2:
            raise FatalError("not today")

    bench.send(9)
    bench.publish()
    options: Any = {"on_exhausted": "hold", "batch_size": 10, "guarantee": guarantee}
    lane = bench.consumer(handler, **options)
    run_until_idle(lane)
    redrive = operation(bench, "redrive")
    redrive.move(bench.rows("SELECT id FROM events.dead_letter"))
    called.clear()
    look_now(lane)
    lane._parked.extend(lane._parking.due())
    assert [e.position for batch in lane._parked for e in batch.entries] == [2, 5, 8]
    assert redrive.take_back(10) == 1
    run_until_idle(lane)
    assert called == []
    assert parked(bench) == [2, 5, 8]


def test_a_discard_of_a_held_event_lets_its_key_go_on(bench: Workbench) -> None:
    lane = held_key(bench, Moody(2))
    assert operation(bench, "discard").discard(bench.rows("SELECT id FROM events.dead_letter")) == 1
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert effects(bench)[-2:] == [5, 8]
    assert outcomes(bench) == {"handled": [1, 3, 4, 5, 6, 7, 8, 9], "discarded": [2]}


def test_buried_events_are_redriven_in_the_order_of_their_key_with_one_attempt_each(
    bench: Workbench,
) -> None:
    bench.send(9)
    bench.publish()
    moody = Moody(2, 5, 8)
    lane = bench.consumer(moody.on_session, retry=Retry.none())
    run_until_idle(lane)
    assert outcomes(bench)["dead"] == [2, 5, 8]
    moody.bad = {5}
    moody.seen.clear()
    redrive = operation(bench, "redrive")
    redrive.move(bench.rows("SELECT id FROM events.dead_letter ORDER BY id"))
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert effects(bench)[-2:] == [2, 8]
    assert outcomes(bench)["dead"] == [5]
    assert redrive.tally() == (0, 1)


def test_a_lane_with_more_parked_keys_than_it_remembers_asks_with_every_batch(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "KEYS_MAX", 0)
    bench.send(3)
    bench.publish()
    moody = Moody(1, 2)
    lane = bench.consumer(moody.on_session, retry=LATER)
    run_until_idle(lane)
    bench.send(3)
    bench.publish()
    look_now(lane)
    run_until_idle(lane)
    assert outcomes(bench) == {"handled": [3, 6], "parked": [1, 2, 4, 5]}
    moody.bad.clear()
    bench.connection.execute("UPDATE events.parked_event SET next_attempt_at = clock_timestamp()")
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert [n for n in effects(bench) if n != 3] in ([1, 1, 2, 2], [1, 2, 1, 2])


class OpenTransaction:
    """A worker's transaction, as far as parking needs one."""

    def __init__(self, database_url: str) -> None:
        self.connection = psycopg.connect(database_url)

    def fetch(self, query: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode(), parameters).fetchall()


LEASE_ENDS = "UPDATE events.stream_lease SET lease_until = '-infinity' WHERE role LIKE 'consumer:%'"
EPOCH_ENDS = "SELECT events.begin_epoch('test.consumer', 1)"


@pytest.mark.parametrize("end", [LEASE_ENDS, EPOCH_ENDS], ids=["lease", "epoch"])
@pytest.mark.parametrize("kind", ["live", "live behind parked ones", "parked"])
def test_whoever_hangs_with_a_batch_of_any_kind_is_ended_by_its_successor(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    monkeypatch.setattr(parking, "KEYS_MAX", 0)
    is_hanging, has_ended = threading.Event(), threading.Event()

    def handler(event: Placed, connection: psycopg.Connection[Any]) -> None:
        if kind != "live" and bench.checkpoint() == 0:
            raise ValueError("not today")
        is_hanging.set()
        connection.execute("SELECT pg_sleep(20)")

    def hang() -> None:
        with pytest.raises(ServerUnavailable):
            run_until_idle(lane)
        has_ended.set()

    bench.send(1)
    bench.publish()
    lane = bench.consumer(handler, retry=LATER)
    if kind != "live":
        drive(lane, lambda: bench.checkpoint() == 1)
        look_now(lane)
        run_until_idle(lane)
    if kind == "live behind parked ones":
        bench.send(2)
        bench.publish()
    if kind == "parked":
        bench.connection.execute("UPDATE events.parked_event SET next_attempt_at = now()")
        look_now(lane)
    threading.Thread(target=hang).start()
    assert is_hanging.wait(SOON_SECONDS)
    bench.connection.execute(end.encode())
    with heard(signals.PredecessorEnded) as ended:
        bench.consumer(Moody().on_session).step()
    assert len(ended) == 1
    assert has_ended.wait(SOON_SECONDS)


def test_a_discard_that_passes_the_turn_on_while_another_is_parked_leaves_nobody_stuck(
    bench: Workbench,
) -> None:
    """Neither sees the other's row, and the event in the middle must not be held by either."""
    bench.send(9)
    bench.publish()
    lane = bench.consumer(Moody(2).on_session, on_exhausted="hold", retry=Retry.none())
    run_until_idle(lane)
    (body,) = bench.rows("DELETE FROM events.parked_event WHERE position = 8 RETURNING entry")
    entry = decode_body("orders", 8, body.encode())
    worker = OpenTransaction(bench.settings.database_url)
    with psycopg.connect(bench.settings.database_url) as operator, worker.connection:
        (row,) = operator.execute(
            "DELETE FROM events.parked_event WHERE position = 2 RETURNING key_hash"
        ).fetchall()
        Parked().park(cast("WorkerConnection", worker), "test.consumer", [entry])
        operator.execute(
            Queries("redrive.sql")["promote_after"].encode(),
            {"consumer": "test.consumer", "key_hashes": [row[0]], "positions": [2]},
        )
        operator.commit()
    assert bench.rows(
        "SELECT next_attempt_at IS NOT NULL FROM events.parked_event ORDER BY position"
    ) == [True, True]
