"""Crashes are counted in two windows, and a healthy run forgives in one of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.core.crash_budget import Crash, CrashBudget, CrashLimits
from penstock.errors import SettingsError

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def crash(at_seconds: float, ran_seconds: float = 0.1) -> Crash:
    return Crash(f"w-{at_seconds:g}", at_seconds, ran_seconds, 3, EPOCH)


def budget_after(*crashes: Crash, limits: CrashLimits | None = None) -> CrashBudget:
    budget = CrashBudget(limits or CrashLimits())
    for each in crashes:
        budget.record(each)
    return budget


def test_the_fifth_crash_in_a_minute_is_one_too_many() -> None:
    assert budget_after(*map(crash, (0, 1, 2, 3))).excess is None
    assert budget_after(*map(crash, (0, 1, 2, 3, 60))).excess == "5 crashes within 60 s"


def test_crashes_outside_the_window_do_not_count() -> None:
    assert budget_after(*map(crash, (0, 1, 2, 3, 61))).excess is None


def test_a_healthy_run_forgives_what_was_before_it() -> None:
    limits = CrashLimits(window_seconds=600)
    crashes = [*map(crash, (0, 1, 2, 3)), crash(70, ran_seconds=60)]
    assert budget_after(*crashes, limits=limits).excess is None
    crashes += map(crash, (71, 72, 73, 74))
    assert budget_after(*crashes, limits=limits).excess == "5 crashes within 600 s"


def test_a_crash_every_61_seconds_is_found_within_the_hour() -> None:
    crashes = [crash(61.0 * n, ran_seconds=60.9) for n in range(15)]
    assert budget_after(*crashes[:-1]).excess is None
    assert budget_after(*crashes).excess == "15 crashes within 3600 s"


def test_the_slow_budget_forgets_after_an_hour() -> None:
    assert budget_after(*(crash(300.0 * n, ran_seconds=299) for n in range(100))).excess is None


def test_a_crash_that_is_somebody_elses_doing_does_not_count() -> None:
    budget = budget_after(*map(crash, (0, 1, 2, 3, 4)))
    budget.excuse("w-2")
    assert budget.excess is None
    assert [each.at_seconds for each in budget.crashes] == [0, 1, 3, 4]


def test_a_release_is_a_clean_sheet() -> None:
    budget = budget_after(*map(crash, (0, 1, 2, 3, 4)))
    budget.forgive()
    budget.record(crash(5))
    assert budget.excess is None


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingsError, match="crashes_max"):
        CrashLimits(crashes_max=0)
    with pytest.raises(SettingsError, match="crash_window_seconds"):
        CrashLimits(window_seconds=0)
