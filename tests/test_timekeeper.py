"""Timers become events when they are due: each once, in order, whatever stands in the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from penstock.cli.invocation import Invocation
from penstock.cli.running import choose_roles
from penstock.cli.supervision import Supervision, process_specs
from penstock.core.leases import TIMERS
from penstock.core.outgoing import OutgoingEvent
from penstock.core.recurrence import Recurrence
from penstock.core.sealing import DataKey, opened_event
from penstock.pipeline import timekeeper as module
from penstock.pipeline.timekeeper import Timekeeper
from penstock.stores import sealing
from penstock.stores.data_keys import DataKeys
from penstock.stores.timer_wakeup import TimerWakeup
from penstock.stores.unwrapping import unwrapping
from penstock.telemetry import signals
from tests.fake_kms import FakeKms, running_kms
from tests.publishing import in_threads, told
from tests.timekeeping import Clockwork, clockwork, ticking, wait_for_sleep
from tests.timer_races_drill import race
from tests.vault import STREAM, Admitted, Vault, new_key_file
from tests.waiting import SOON_SECONDS, wait_until

MINUTELY = {"cron": "* * * * *", "catch_up": "one"}


@pytest.fixture
def clock(database_url: str) -> Iterator[Clockwork]:
    with clockwork(database_url) as made:
        yield made


def ago(**time: float) -> str:
    return (datetime.now(UTC) - timedelta(**time)).isoformat()


# ── firing ─────────────────────────────────────────────────────────────────────────────────────


def test_due_timers_become_events_in_the_order_in_which_they_are_due(clock: Clockwork) -> None:
    for number in (3, 1, 2):
        clock.schedule(f"t{number}", at=ago(seconds=100 - number), payload={"n": number}, key="k")
    clock.schedule("later", "1 hour")
    with told(signals.TimersFired) as fired:
        assert clock.fire() == ["t1", "t2", "t3"]
    assert [row[1:3] for row in clock.sent()] == [({"n": n}, "k") for n in (1, 2, 3)]
    assert fired[0].count == 3
    assert clock.row("SELECT timer_id FROM events.timer") == ("later",)
    assert clock.fire() == []


def test_more_than_a_batch_is_fired_in_one_pass(
    clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_SIZE", 3)
    names = [f"t{number}" for number in range(8)]
    for number, name in enumerate(names):
        clock.schedule(name, at=ago(seconds=100 - number))
    assert clock.timekeeper.step().has_more
    assert clock.fire() == names[3:]


def test_what_comes_late_is_found_by_a_timekeeper_that_is_busy(
    clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d"):
        clock.schedule(name)
        if name == "b":
            assert clock.timekeeper.step().moved == 2
    clock.schedule("late", at=ago(hours=1))
    monkeypatch.setattr(clock.timekeeper, "_sweep_at", float("inf"))
    assert clock.timekeeper.step().moved == 2, "it begins a little before now"
    monkeypatch.setattr(clock.timekeeper, "_sweep_at", 0.0)
    assert clock.fire() == ["late"]
    assert module.SWEEP_SECONDS < module.LOOK_SECONDS


def test_each_firing_is_a_new_event_that_tells_its_timer_and_its_run(clock: Clockwork) -> None:
    for moment in ("2026-01-01 00:00:00.123456+00", "2026-01-01 00:00:01+00"):
        clock.schedule("again", at=moment)
        assert clock.fire() == ["again"]
    assert [row[3] for row in clock.sent()] == [1767225600123, 1767225601000]
    assert clock.row("SELECT count(DISTINCT event_uuid) FROM events.outbox_event") == (2,)


def test_two_timekeepers_at_once_fire_each_timer_once(clock: Clockwork) -> None:
    for number in range(300):
        every = {"every_seconds": 3600} if number % 3 == 0 else None
        clock.schedule(f"t{number}", key=f"k{number % 7}", recurrence=every)
    keepers = [Timekeeper(clock.settings) for _ in range(3)]

    def work(keeper: Timekeeper) -> None:
        while clock.row("SELECT count(*) FROM events.timer WHERE due_at < now()") != (0,):
            keeper.step()

    in_threads([lambda keeper=keeper: work(keeper) for keeper in keepers])  # type: ignore[misc]
    for keeper in keepers:
        keeper.close()
    assert sorted(clock.fired()) == sorted(f"t{number}" for number in range(300))


# ── what stands in the way ─────────────────────────────────────────────────────────────────────


def test_a_key_that_a_transaction_holds_delays_only_its_own_timers(
    clock: Clockwork, database_url: str
) -> None:
    for number in range(4):
        clock.schedule(f"held{number}", at=ago(seconds=50 - number), key="held")
        clock.schedule(f"free{number}", at=ago(seconds=50 - number), key=f"free{number}")
    every = {"every_seconds": 60}
    clock.schedule("held again", at=ago(seconds=10), key="held", recurrence=every)
    clock.schedule("free again", at=ago(seconds=10), key="other", recurrence=every)
    with psycopg.connect(database_url) as sender:
        sender.execute("SELECT events.send('reminders', 'T', '1', key => 'held')")
        assert clock.fire() == ["free0", "free1", "free2", "free3", "free again"]
        # It comes back for the others soon, and not at once.
        assert 0 < clock.timekeeper._seconds_until_next_look() <= module.LEFT_LONGEST_SECONDS
        assert clock.fire() == []
        sender.rollback()
    assert clock.fire() == ["held0", "held1", "held2", "held3", "held again"]


def test_a_timer_that_is_being_changed_is_left_to_whoever_changes_it(
    clock: Clockwork, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One at a time, so that what is left alone must not stand in the way of the next.
    monkeypatch.setattr(module, "PREPARED_SIZE", 1)
    for name in ("moved", "moved back", "cancelled"):
        clock.schedule(name)
    clock.schedule("other", at=ago(seconds=0.5))
    clock.schedule("special", at=ago(seconds=0.1), recurrence=MINUTELY)
    clock.schedule("moved special", recurrence=MINUTELY)
    with psycopg.connect(database_url) as changing:
        changing.execute("SELECT events.reschedule('moved', delay => interval '1 hour')")
        changing.execute("SELECT events.reschedule('moved special', delay => interval '1 hour')")
        changing.execute("SELECT events.cancel_timer('cancelled')")
        with psycopg.connect(database_url) as undecided:
            undecided.execute("SELECT events.cancel_timer('moved back')")
            assert clock.fire() == ["other", "special"]
            undecided.rollback()
        assert clock.fire() == ["moved back"]
    assert clock.fire() == []
    left = "SELECT array_agg(timer_id ORDER BY 1) FROM events.timer WHERE due_at > now()"
    assert clock.row(left) == (["moved", "moved special", "special"],)


def test_what_was_changed_after_it_was_prepared_is_not_fired(
    clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.schedule("changed", recurrence=MINUTELY)
    clock.schedule("same", at=ago(seconds=0.5), recurrence=MINUTELY)
    fire_prepared = clock.timekeeper._timekeeping.fire_prepared

    def changed_before(*arguments: Any) -> Any:
        monkeypatch.undo()
        clock.schedule("changed", payload="new", recurrence=MINUTELY)
        return fire_prepared(*arguments)

    monkeypatch.setattr(clock.timekeeper._timekeeping, "fire_prepared", changed_before)
    assert clock.fire() == ["same"]
    assert clock.fire() == ["changed"]
    assert [row[1] for row in clock.sent()] == [1, "new"]


def test_a_timer_that_cannot_be_fired_is_held_alone(clock: Clockwork) -> None:
    clock.connection.execute(
        "ALTER TABLE events.outbox_event ADD CONSTRAINT good CHECK (payload <> '\"bad\"')"
    )
    for number in range(6):
        clock.schedule(f"t{number}", payload="bad" if number in (1, 4) else "good")
    clock.schedule("bad again", payload="bad", recurrence=MINUTELY)
    clock.schedule("no recurrence", recurrence={"cron": "never"})
    with told(signals.TimerHeld) as held:
        assert clock.fire() == ["t0", "t2", "t3", "t5"]
    assert [each.timer_id for each in held] == ["t1", "t4", "bad again", "no recurrence"]
    held_rows = "SELECT held_reason FROM events.timer WHERE held_at IS NOT NULL"
    reasons = [reason for (reason,) in clock.connection.execute(held_rows.encode())]
    assert len(reasons) == 4
    assert not any('"bad"' in reason for reason in reasons), "a payload is nobody's business"
    clock.connection.execute("ALTER TABLE events.outbox_event DROP CONSTRAINT good")
    clock.connection.execute("SELECT events.reschedule('t1', delay => interval '0')")
    assert clock.fire() == ["t1"]


def test_of_timers_that_are_prepared_together_only_the_bad_one_is_held(clock: Clockwork) -> None:
    bad = "ALTER TABLE events.outbox_event ADD CONSTRAINT good CHECK (payload <> '2')"
    clock.connection.execute(bad)
    for number in (1, 2, 3):
        clock.schedule(f"t{number}", payload=number, recurrence=MINUTELY)
    assert clock.fire() == ["t1", "t3"]
    assert clock.row("SELECT timer_id FROM events.timer WHERE held_at IS NOT NULL") == ("t2",)


def test_a_refusal_that_is_no_timers_fault_holds_none_and_ends_nothing(clock: Clockwork) -> None:
    clock.schedule("t")
    clock.connection.execute("ALTER FUNCTION events.send_many(jsonb) RENAME TO gone")
    with told(signals.FiringFailed) as failed:
        assert clock.timekeeper.step().pause_seconds == module.FAILED_SECONDS
        assert clock.timekeeper.step().pause_seconds == module.FAILED_SECONDS
    assert len(failed) == 1, "it is said once"
    clock.connection.execute("ALTER FUNCTION events.gone(jsonb) RENAME TO send_many")
    assert clock.fire() == ["t"]


def test_being_late_is_said_once_a_minute(clock: Clockwork) -> None:
    with told(signals.TimersLate) as late:
        for name in ("a", "b"):
            clock.schedule(name, at=ago(hours=1))
            made = "UPDATE events.timer SET created_at = now() - interval '2 hours'"
            clock.connection.execute(made)
            assert clock.fire() == [name]
    assert [each.late_seconds for each in late] == [3600]


# ── what recurs ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("zone", "before", "changed"),
    [
        # There is no 02:30 in Berlin and New York when clocks go forward; two when they go back.
        ("Europe/Berlin", "2026-03-28 02:30", "2026-03-29T01:00:00+00:00"),
        ("Europe/Berlin", "2025-10-25 02:30", "2025-10-26T00:30:00+00:00"),
        ("America/New_York", "2026-03-07 02:30", "2026-03-08T07:00:00+00:00"),
        ("America/New_York", "2025-11-01 01:30", "2025-11-02T05:30:00+00:00"),
    ],
)
def test_a_zoned_cron_keeps_to_the_local_clock_when_it_changes(
    clock: Clockwork, zone: str, before: str, changed: str
) -> None:
    """Through the table: a run before the change, the run in it, and the run after it."""
    first = datetime.fromisoformat(before).replace(tzinfo=ZoneInfo(zone))
    cron = f"{first.minute} {first.hour} * * *"
    recurrence = Recurrence(cron=cron, zone=zone, catch_up="all")
    clock.schedule("daily", at=first.isoformat(), recurrence=recurrence.to_json())
    clock.timekeeper.step()
    due = [datetime.fromtimestamp(row[3] / 1000, UTC) for row in clock.sent()[:3]]
    after = (first + timedelta(days=2)).astimezone(UTC)
    assert due == [first.astimezone(UTC), datetime.fromisoformat(changed), after]


@pytest.mark.parametrize(("catch_up", "expected"), [("one", 1), ("all", 4), ("none", 0)])
def test_missed_runs_are_made_up_for_as_the_timer_says(
    clock: Clockwork, catch_up: str, expected: int
) -> None:
    every = {"every_seconds": 3600, "catch_up": catch_up}
    clock.schedule("hourly", at=ago(hours=3, minutes=30), recurrence=every)
    assert clock.fire() == ["hourly"] * expected
    left = clock.row("SELECT due_at - now() FROM events.timer")[0]
    assert timedelta(minutes=29) < left <= timedelta(minutes=30)
    assert clock.fire() == []


def test_all_missed_runs_are_made_up_for_whatever_their_number(clock: Clockwork) -> None:
    every = {"every_seconds": 1, "catch_up": "all"}
    clock.schedule("often", at=ago(seconds=250.5), recurrence=every)
    clock.fire()
    due = [row[3] for row in clock.sent()]
    assert 251 <= len(due) <= 260
    assert due == [due[0] + 1000 * n for n in range(len(due))]


# ── what is confidential ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def vault(database_url: str, tmp_path: Path) -> Iterator[Vault]:
    made = Vault(database_url, None, new_key_file(tmp_path))
    sealing.forget()
    yield made
    made.close()


def seal_timer(vault: Vault, timer_id: str, diagnosis: str, **when: Any) -> None:
    with psycopg.connect(vault.database_url) as connection:
        event = Admitted(patient="p1", diagnosis=diagnosis)
        delay = when.pop("delay", timedelta(0))
        vault.pipeline.schedule(connection, STREAM, event, delay=delay, timer_id=timer_id, **when)


def outbox(vault: Vault) -> list[OutgoingEvent]:
    rows = vault.connection.execute(
        "SELECT event_uuid, stream_name, event_type, version, key, payload::text, metadata::text,"
        " key_id FROM events.outbox_event ORDER BY id"
    )
    names = ("event_uuid", "stream_name", "event_type", "version", "key", "payload", "metadata")
    return [OutgoingEvent(**dict(zip((*names, "key_id"), row, strict=True))) for row in rows]


def data_key(vault: Vault, event: OutgoingEvent) -> DataKey:
    keys = DataKeys().read(vault.connection, event.stream_name)
    return unwrapping().key(next(key for key in keys if key.key_id == event.key_id)).key


def test_confidential_timers_are_opened_and_sealed_anew_for_every_event(
    vault: Vault, clock: Clockwork
) -> None:
    vault.make_confidential()
    seal_timer(vault, "once", "measles")
    DataKeys().rotate(vault.connection, STREAM)
    sealing.forget()
    seal_timer(vault, "again", "mumps", every=timedelta(hours=1), at=None)
    clock.connection.execute("UPDATE events.timer SET due_at = now()")
    with clock.connection.cursor() as cursor:
        waiting = cursor.execute("SELECT timer_id, payload FROM events.timer").fetchall()
    clock.fire()
    opened = [opened_event(event, data_key(vault, event)) for event in outbox(vault)]
    told_of = {json.loads(each.payload)["diagnosis"]: json.loads(each.metadata) for each in opened}
    timers = {diagnosis: told["__timer_id__"] for diagnosis, told in told_of.items()}
    assert timers == {"measles": "once", "mumps": "again"}
    assert {each.key for each in opened} == {"p1"}
    rows = "SELECT key_id, payload, key FROM events.outbox_event ORDER BY id"
    found = clock.connection.execute(rows.encode()).fetchall()
    assert len({key_id for key_id, _, _ in found}) == 1, "all are under the active key"
    assert not {payload for _, payload, _ in found} & {payload for _, payload in waiting}
    assert len({key for _, _, key in found}) == 1, "a key's events keep their order"


def test_a_plain_timer_of_a_stream_that_became_confidential_is_sealed_when_it_fires(
    vault: Vault, clock: Clockwork
) -> None:
    seal_timer(vault, "early", "measles")
    vault.make_confidential()
    clock.fire()
    assert clock.row(
        "SELECT key_id IS NOT NULL, metadata - '__creation_timestamp_ms__' = '{}'"
        " FROM events.outbox_event"
    ) == (True, True)


def test_a_sealed_timer_stays_sealed_when_its_stream_is_open_again(
    vault: Vault, clock: Clockwork
) -> None:
    vault.make_confidential()
    seal_timer(vault, "secret", "measles")
    vault.connection.execute("UPDATE events.stream_policy SET security_level = 'open'")
    vault.connection.execute("SELECT events.apply_policies()")
    own = clock.row("SELECT key_id FROM events.timer")
    clock.fire()
    assert clock.row("SELECT key_id FROM events.outbox_event") == own


def test_a_timer_of_a_shredded_key_is_dropped_and_a_tampered_one_is_held(
    vault: Vault, clock: Clockwork
) -> None:
    vault.make_confidential()
    seal_timer(vault, "shredded", "measles")
    DataKeys().rotate(vault.connection, STREAM)
    sealing.forget()
    seal_timer(vault, "renamed", "mumps")
    seal_timer(vault, "good", "flu")
    vault.connection.execute("UPDATE events.timer SET timer_id = 'x' WHERE timer_id = 'renamed'")
    DataKeys().shred(vault.connection, STREAM, 1)
    with told(signals.TimerShredded, signals.TimerHeld) as told_of:
        clock.fire()
    assert [(type(each), each.timer_id) for each in told_of] == [
        (signals.TimerHeld, "x"),
        (signals.TimerShredded, "shredded"),
    ]
    assert clock.row("SELECT count(*) FROM events.outbox_event") == (1,)
    assert clock.row("SELECT array_agg(timer_id) FROM events.timer") == (["x"],)


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKms]:
    with running_kms(monkeypatch) as fake:
        yield fake


def test_timers_wait_for_a_kms_that_is_away_and_others_go_on(
    database_url: str, kms: FakeKms, clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEY_MISSING_SECONDS", 0.1)
    monkeypatch.setattr(module, "PREPARED_SIZE", 2)
    vault = Vault(database_url, None, kms.arn)
    sealing.forget()
    vault.make_confidential()
    for name in "abc":
        seal_timer(vault, name, "measles")
    unwrapping.cache_clear()
    kms.answer = "fail"
    clock.schedule("plain")
    clock.schedule("again", recurrence=MINUTELY)
    with told(signals.TimersBlocked, signals.TimersUnblocked, signals.TimerHeld) as told_of:
        wait_until(
            lambda: set(step_and_look(clock)) == {"plain", "again"}, what="the others are fired"
        )
        wait_until(lambda: clock.fire() == [] and bool(told_of), what="it is said")
        kms.answer = "serve"
        wait_until(lambda: step_and_look(clock).count(None) == 3, what="they are fired")
    assert [type(each) for each in told_of] == [signals.TimersBlocked, signals.TimersUnblocked]
    assert {each.stream_name for each in told_of} == {STREAM}
    vault.close()


def step_and_look(clock: Clockwork) -> list[str | None]:
    clock.timekeeper.step()
    return [row[0] for row in clock.sent()]


# ── sleep ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def deaf_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a notification explains it if something is found soon."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 10 * SOON_SECONDS)


@pytest.mark.usefixtures("deaf_look")
def test_a_sleeper_wakes_when_a_timer_is_due_and_when_one_is_scheduled(clock: Clockwork) -> None:
    with ticking(clock.settings):
        wait_for_sleep(clock.settings.database_url)
        for name, delay in (("now", "0"), ("soon", "300 ms"), ("sooner", "100 ms")):
            clock.schedule(name, delay)
        wait_until(lambda: len(clock.fired()) == 3, what="all are fired")
    assert clock.fired() == ["now", "sooner", "soon"]


@pytest.mark.usefixtures("deaf_look")
def test_a_sleeper_does_not_fall_asleep_over_an_undecided_transaction(
    clock: Clockwork, database_url: str
) -> None:
    stop = threading.Event()
    with psycopg.connect(database_url) as undecided, told(signals.TimekeeperSlept) as slept:
        clock.schedule("undecided", "0", connection=undecided)
        for _ in range(5):
            assert clock.timekeeper.step().is_idle
            clock.timekeeper.wait(stop)
        assert slept == []
        undecided.commit()
        assert clock.fire() == ["undecided"]


@pytest.mark.usefixtures("deaf_look")
def test_what_is_scheduled_right_before_the_sleep_is_not_slept_over(clock: Clockwork) -> None:
    stop = threading.Event()
    assert clock.timekeeper.step().is_idle
    clock.schedule("in between", "0")
    falling_asleep = threading.Thread(target=clock.timekeeper.wait, args=(stop,))
    falling_asleep.start()
    falling_asleep.join(SOON_SECONDS)
    assert not falling_asleep.is_alive(), "nobody notifies it of what came before"
    assert clock.fire() == ["in between"]


@pytest.mark.usefixtures("deaf_look")
def test_those_who_schedule_notify_a_sleeper_only(clock: Clockwork, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("LISTEN events_timer")

        def notified() -> int:
            return len(list(listener.notifies(timeout=0.05)))

        clock.schedule("nobody sleeps", "1 s")
        assert notified() == 0
        with ticking(clock.settings):
            wait_for_sleep(database_url)
            notified()
            clock.schedule("far away", "1 hour")
            assert notified() == 0
            clock.schedule("soon", "5 s")
            assert notified() == 1


@pytest.mark.usefixtures("deaf_look")
def test_a_second_timekeeper_stands_in_for_the_first(clock: Clockwork) -> None:
    with ticking(clock.settings, "second"):
        # The first one listens, holds the lock, and hangs: nothing wakes it any more.
        stopped = TimerWakeup(clock.settings.database_url)
        wait_for_sleep(clock.settings.database_url, 2)
        clock.schedule("stood in for", "0")
        wait_until(lambda: clock.fired() == ["stood in for"], what="it is fired")
        stopped.close()


@pytest.mark.usefixtures("deaf_look")
def test_a_timekeeper_behind_another_sleeper_hears_what_that_one_hears(clock: Clockwork) -> None:
    hanging = TimerWakeup(clock.settings.database_url)
    assert hanging.try_be_first()
    assert hanging.try_hold() == "held"
    with ticking(clock.settings):
        wait_for_sleep(clock.settings.database_url, 2)
        clock.schedule("heard", "0")
        wait_until(lambda: clock.fired() == ["heard"], what="it is fired")
    hanging.close()


@pytest.mark.usefixtures("deaf_look")
def test_what_is_scheduled_while_it_tests_its_ears_is_not_slept_over(
    clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears = TimerWakeup.hears

    def hears_both(self: TimerWakeup, *others: Any) -> bool:
        clock.schedule("meanwhile", "0")
        is_heard = hears(self, *others)
        self.drop_heard()
        return is_heard

    with closing(TimerWakeup(clock.settings.database_url)) as first:
        assert first.try_be_first()
        assert first.try_hold() == "held"
        monkeypatch.setattr(TimerWakeup, "hears", hears_both)
        with ticking(clock.settings):
            wait_until(lambda: clock.fired() == ["meanwhile"], what="it is fired")


def test_a_timekeeper_that_hears_nothing_says_so_and_polls(
    clock: Clockwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimerWakeup, "hears", lambda *_: False)
    with told(signals.WakeupSilent) as silent, ticking(clock.settings):
        for name in ("a", "b"):
            clock.schedule(name, "0")
            wait_until(lambda name=name: name in clock.fired(), what="it is found")  # type: ignore[misc]
        wait_until(lambda: bool(silent), what="it is said")
    assert silent == [signals.WakeupSilent(module.POLL_MODE_SECONDS)]


@pytest.mark.usefixtures("deaf_look")
def test_a_timekeeper_outlives_its_connections(clock: Clockwork) -> None:
    end = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE application_name = 'penstock timer wake-up' AND datname = current_database()"
    )
    with ticking(clock.settings):
        wait_for_sleep(clock.settings.database_url)
        assert clock.row(end) == (1,)
        clock.schedule("after", "100 ms")
        wait_until(lambda: clock.fired() == ["after"], what="it is fired")


# ── the role ───────────────────────────────────────────────────────────────────────────────────


def test_timers_are_fired_beside_the_publisher_or_in_a_process_of_their_own(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    everything = choose_roles(["c"], publisher=False, globs=())
    alone = choose_roles(["c"], publisher=False, globs=(), timers=True)
    apart = choose_roles(["c"], publisher=True, globs=(), timers=True)
    assert alone == [TIMERS]
    invocation = Invocation(None)
    how = Supervision(environment={}, shutdown_seconds=1.0, heartbeat_timeout_seconds=30.0)

    def processes(roles: list[str]) -> dict[str, list[str]]:
        specs = process_specs(invocation, [role for role in roles if role != "consumer:c"], how)
        return {each.name: json.loads(each.assignment or "")["roles"] for each in specs}

    assert processes(everything) == {"publisher": ["publisher", "janitor", "timers"]}
    assert processes(alone) == {"timers": ["timers"]}
    assert processes(apart) == {"publisher": ["publisher", "janitor"], "timers": ["timers"]}


def test_a_scheduled_event_reaches_its_handler(database_url: str) -> None:
    vault = Vault(database_url, None, "file:none")
    seen: list[str] = []

    def read(event: Admitted) -> None:
        seen.append(event.diagnosis)

    with vault.working(read, roles=("publisher", "timers")):
        seal_timer(vault, "t", "measles", delay=timedelta(milliseconds=50))
        vault.wait_for_outcomes("handled")
    assert seen == ["measles"]
    vault.close()


# ── races ──────────────────────────────────────────────────────────────────────────────────────


def test_a_change_that_races_the_firing_is_never_lost_and_never_half(database_url: str) -> None:
    assert race(database_url, races=150, seed=8).anomalies == []
