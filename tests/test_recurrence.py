"""When recurring timers are due, clocks that go forward and back included."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.recurrence import (
    RUNS_MAX,
    Recurrence,
    Runs,
    due_runs,
    parse_recurrence,
)
from penstock.errors import InvalidTimer

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
CRONS = (
    "30 2 * * *",
    "0 2-3 * * *",
    "15,45 1,2 * * *",
    "*/20 * * * *",
    "0 * * * *",
    "0 0 * * SUN",
    "0 0 1 * *",
    "0 30 2 * * *",
    "*/15 * * * * *",
)
ZONES = (None, BERLIN, NEW_YORK, "Australia/Lord_Howe", "America/Havana", "Africa/Cairo")


def local(zone: str, runs: Any, count: int) -> list[str]:
    """The first runs, as a clock on the wall would show them."""
    return [f"{run.astimezone(ZoneInfo(zone)):%d %H:%M %z}" for run in islice(runs, count)]


@pytest.mark.parametrize(
    ("zone", "before", "expected"),
    [
        # Berlin has no 02:30 on 29 March and two on 25 October; New York on 8 March, 1 November.
        (BERLIN, (2026, 3, 28), ["28 02:30 +0100", "29 03:00 +0200", "30 02:30 +0200"]),
        (BERLIN, (2026, 10, 24), ["24 02:30 +0200", "25 02:30 +0200", "26 02:30 +0100"]),
        (NEW_YORK, (2026, 3, 7), ["07 02:30 -0500", "08 03:00 -0400", "09 02:30 -0400"]),
        (NEW_YORK, (2026, 10, 31), ["31 02:30 -0400", "01 02:30 -0500", "02 02:30 -0500"]),
    ],
)
def test_a_daily_run_at_a_local_time_happens_once_a_day_when_the_clocks_change(
    zone: str, before: tuple[int, int, int], expected: list[str]
) -> None:
    recurrence = Recurrence(cron="30 2 * * *", zone=zone)
    start = datetime(*before, tzinfo=ZoneInfo(zone))
    assert local(zone, recurrence.runs_after(start), 3) == expected


def test_a_daily_run_in_new_yorks_repeated_hour_is_not_repeated() -> None:
    recurrence = Recurrence(cron="30 1 * * *", zone=NEW_YORK)
    runs = recurrence.runs_after(datetime(2026, 11, 1, tzinfo=ZoneInfo(NEW_YORK)))
    assert local(NEW_YORK, runs, 2) == ["01 01:30 -0400", "02 01:30 -0500"]
    repeated = datetime(2026, 11, 1, 1, 10, tzinfo=ZoneInfo(NEW_YORK), fold=1)
    assert local(NEW_YORK, recurrence.runs_after(repeated), 1) == ["02 01:30 -0500"]


def test_an_hourly_run_happens_every_real_hour_when_the_clocks_change() -> None:
    recurrence = Recurrence(cron="0 * * * *", zone=BERLIN)
    for day in (datetime(2026, 3, 28, 23, tzinfo=UTC), datetime(2026, 10, 24, 22, tzinfo=UTC)):
        runs = [day, *islice(recurrence.runs_after(day), 6)]
        assert {after - before for before, after in pairwise(runs)} == {timedelta(hours=1)}


@settings(max_examples=100)
@given(
    cron=st.sampled_from(CRONS),
    zone=st.sampled_from(ZONES),
    minutes=st.integers(0, 365 * 24 * 60),
    part=st.floats(0, 0.999),
)
def test_whenever_one_looks_the_next_run_is_the_same(
    cron: str, zone: str | None, minutes: int, part: float
) -> None:
    """Two schedulers, or one that was restarted, must agree on what comes next."""
    start = NOON + timedelta(minutes=minutes)
    recurrence = Recurrence(cron=cron, zone=zone)
    first, second = islice(recurrence.runs_after(start), 2)
    assert start < first < second
    assert recurrence.first_after(first + (second - first) * part) == second
    assert recurrence.newest_run(first, second - timedelta(microseconds=1)) == first


def test_a_fixed_rate_does_not_drift_and_counts_real_time() -> None:
    recurrence = Recurrence(every_seconds=86_400.0)
    before = datetime(2026, 3, 28, 12, tzinfo=ZoneInfo(BERLIN))
    assert recurrence.first_after(before).astimezone(ZoneInfo(BERLIN)).hour == 13
    late = due_runs(Recurrence(every_seconds=0.1 + 0.9), NOON, NOON + timedelta(seconds=7.25))
    assert late == Runs((NOON + timedelta(seconds=7),), NOON + timedelta(seconds=8))


def test_what_was_missed_is_made_up_for_as_it_was_asked() -> None:
    minutely = {choice: Recurrence(cron="* * * * *", catch_up=choice) for choice in CHOICES}
    now = NOON + timedelta(minutes=3, seconds=30)
    minutes = [NOON + timedelta(minutes=n) for n in range(5)]
    assert due_runs(minutely["one"], NOON, now) == Runs((minutes[3],), minutes[4])
    assert due_runs(minutely["none"], NOON, now) == Runs((minutes[3],), minutes[4])
    assert due_runs(minutely["all"], NOON, now) == Runs(tuple(minutes[:4]), minutes[4])


CHOICES: tuple[Any, ...] = ("one", "all", "none")


def test_a_run_that_is_more_than_a_minute_late_counts_as_missed() -> None:
    daily = Recurrence(every_seconds=86_400.0, catch_up="none")
    tomorrow = NOON + timedelta(days=1)
    assert due_runs(daily, NOON, NOON + timedelta(seconds=60)) == Runs((NOON,), tomorrow)
    assert due_runs(daily, NOON, NOON + timedelta(seconds=61)) == Runs((), tomorrow)
    eager = Recurrence(every_seconds=86_400.0, catch_up="one")
    assert due_runs(eager, NOON, NOON + timedelta(hours=5)) == Runs((NOON,), tomorrow)


def test_what_is_not_due_is_not_fired() -> None:
    for choice in CHOICES:
        recurrence = Recurrence(every_seconds=5.0, catch_up=choice)
        assert due_runs(recurrence, NOON, NOON - timedelta(microseconds=1)) == Runs((), NOON)


def test_making_up_for_much_goes_in_portions() -> None:
    recurrence = Recurrence(every_seconds=1.0, catch_up="all")
    now = NOON + timedelta(seconds=250)
    due_at, portions = NOON, []
    while due_at <= now:
        runs = due_runs(recurrence, due_at, now)
        portions.append(runs.fire)
        due_at = runs.next_due_at
    assert [len(fired) for fired in portions] == [RUNS_MAX, RUNS_MAX, 51]
    seconds = [NOON + timedelta(seconds=n) for n in range(251)]
    assert [run for fired in portions for run in fired] == seconds
    assert due_at == NOON + timedelta(seconds=251)


@pytest.mark.parametrize("cron", ["* * * * * *", "* * * * *", "0 0 1 1 *", "0 0 29 2 *"])
def test_years_without_anybody_to_fire_are_looked_through_quickly(cron: str) -> None:
    recurrence = Recurrence(cron=cron, zone=BERLIN)
    started_at = time.perf_counter()
    runs = due_runs(recurrence, NOON - timedelta(days=9 * 366), NOON)
    assert time.perf_counter() - started_at < 2.0
    assert len(runs.fire) == 1
    assert runs.fire[0] <= NOON < runs.next_due_at


@pytest.mark.parametrize(
    "recurrence",
    [
        Recurrence(every_seconds=90.5, catch_up="none"),
        Recurrence(cron="0 9 * * MON-FRI", zone=BERLIN, catch_up="all"),
        Recurrence(cron="0 9 * * MON-FRI"),
    ],
)
def test_what_is_stored_is_read_back(recurrence: Recurrence) -> None:
    assert Recurrence.from_json(recurrence.to_json()) == recurrence


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"every": timedelta(seconds=0.5)}, "at least 1 s"),
        ({"every": timedelta(days=40_000)}, "at most"),
        ({"every": 60}, "timedelta"),
        ({"every": timedelta(hours=1), "cron": "* * * * *"}, "not by both"),
        ({"every": timedelta(hours=1), "zone": BERLIN}, "belongs to cron"),
        ({"cron": "every day"}, "no cron expression"),
        ({"cron": "0 0 30 2 *"}, "no cron expression"),
        ({"cron": "0 0 31 2,4 */9"}, "cron"),
        ({"cron": "٣ * * * *"}, "ASCII"),
        ({"cron": 5}, "is a text"),
        ({"cron": "* * * * *", "zone": "Europe/Atlantis"}, "no time zone"),
        ({"cron": "* * * * *", "zone": "../../etc/passwd"}, "no time zone"),
        ({"cron": "* * * * *", "zone": "Europe"}, "no time zone"),
        ({"cron": "* * * * *", "zone": 5}, "is a name"),
        ({"cron": "* * * * *", "catch_up": "some"}, "catch_up"),
        ({"zone": BERLIN}, "no cron"),
        ({"catch_up": "all"}, "recurs"),
    ],
)
def test_what_cannot_recur_is_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidTimer, match=complaint):
        parse_recurrence(**arguments)


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"cron": 5},
        {"every_seconds": True},
        {"every_seconds": "9"},
        {"cron": "* * * * *", "x": 1},
    ],
)
def test_what_others_have_stored_wrongly_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimer):
        Recurrence.from_json(stored)


def test_without_anything_a_timer_does_not_recur() -> None:
    assert parse_recurrence() is None
    assert parse_recurrence(cron="  0   9 * * * ") == Recurrence(cron="0 9 * * *")
