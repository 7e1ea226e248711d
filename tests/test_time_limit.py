"""A handler that exceeds its time is ended, and nothing of that reaches the next one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from penstock.errors import HandlerTimeout
from penstock.runtime.time_limit import EXIT_STUCK, TimeLimit

ROOT = Path(__file__).parent.parent
LONG_SECONDS = 30.0


def spin(until: float) -> str:
    """Python at work until a moment, if it is let."""
    while time.monotonic() < until:
        pass
    return "done"


def spin_for(seconds: float) -> str:
    return spin(time.monotonic() + seconds)


def limit(seconds: float, on_overdue: Callable[[], object] = lambda: None) -> TimeLimit:
    return TimeLimit(seconds, consumer="shop.bill", on_overdue=on_overdue)


def test_a_call_in_time_returns_what_it_returns() -> None:
    assert limit(LONG_SECONDS).call(spin_for, 0.0) == "done"


def test_an_error_in_time_is_the_callers_own() -> None:
    with pytest.raises(ZeroDivisionError):
        limit(LONG_SECONDS).call(divmod, 1, 0)


def test_a_call_that_takes_too_long_is_ended_and_says_what_to_do() -> None:
    started = time.monotonic()
    with pytest.raises(HandlerTimeout, match=r"shop\.bill exceeded its timeout_seconds=0\.05"):
        limit(0.05).call(spin_for, LONG_SECONDS)
    assert time.monotonic() - started < LONG_SECONDS / 2


def test_except_exception_does_not_save_a_handler() -> None:
    def stubborn() -> None:
        while True:
            with suppress(Exception):
                spin_for(LONG_SECONDS)

    with pytest.raises(HandlerTimeout):
        limit(0.05).call(stubborn)


def test_a_handler_that_returns_late_has_failed_all_the_same() -> None:
    def late() -> str:
        try:
            return spin_for(LONG_SECONDS)
        except BaseException:  # noqa: BLE001 - the point
            return "as if nothing had happened"

    with pytest.raises(HandlerTimeout):
        limit(0.05).call(late)


def test_a_query_in_progress_is_cancelled(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        limited = limit(0.1, on_overdue=connection.cancel)
        with pytest.raises(HandlerTimeout):
            limited.call(connection.execute, "SELECT pg_sleep(30)")
        connection.rollback()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_the_cancellation_is_over_when_the_call_is() -> None:
    begun, over = threading.Event(), threading.Event()

    def slow_cancel() -> None:
        begun.set()
        threading.Event().wait(0.1)
        over.set()

    with pytest.raises(HandlerTimeout):
        limit(0.05, on_overdue=slow_cancel).call(begun.wait, LONG_SECONDS)
    assert over.is_set()


def test_a_failing_cancellation_does_not_save_the_handler() -> None:
    def broken() -> None:
        raise ValueError

    with pytest.raises(HandlerTimeout):
        limit(0.05, on_overdue=broken).call(spin_for, LONG_SECONDS)


def test_limits_of_several_threads_do_not_mix() -> None:
    ends: dict[str, str] = {}

    def run(name: str, seconds: float, work_seconds: float) -> None:
        try:
            ends[name] = limit(seconds).call(spin_for, work_seconds)
        except HandlerTimeout:
            ends[name] = "ended"

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in (("short", 0.05, LONG_SECONDS), ("long", LONG_SECONDS, 0.3))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECONDS)
    assert ends == {"short": "ended", "long": "done"}


@pytest.mark.slow
def test_nothing_is_raised_after_calls_that_end_just_at_their_limit() -> None:
    """The window is a few microseconds wide, so thousands of calls aim at it from both sides."""
    seconds = 0.0008
    tight = limit(seconds)
    ends = {"done": 0, "ended": 0}
    stop_at = time.monotonic() + 4.0
    n = 0
    while n < 6000 and time.monotonic() < stop_at:
        n += 1
        offset = (n % 50 - 5) * 1e-5
        try:
            ends[tight.call(spin, time.monotonic() + seconds + offset)] += 1
        except HandlerTimeout:
            ends["ended"] += 1
        # Whatever were still pending would be raised in here.
        spin_for(0.00005)
    assert ends["done"] > 100
    assert ends["ended"] > 100


@pytest.mark.slow
def test_a_handler_that_cannot_be_interrupted_ends_its_process() -> None:
    code = (
        "import threading\n"
        "from penstock.runtime.time_limit import TimeLimit\n"
        "from penstock.telemetry.logs import configure_logging\n"
        "configure_logging()\n"
        "TimeLimit(0.05, consumer='shop.bill').call(threading.Event().wait, 60)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == EXIT_STUCK, ended.stderr
    assert "HandlerStuck" in ended.stderr


def test_a_limit_costs_little() -> None:
    generous = limit(LONG_SECONDS)

    def nothing() -> None:
        return None

    def seconds_for(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        for _ in range(5000):
            call()
        return time.perf_counter() - started

    bare = min(seconds_for(nothing) for _ in range(5))
    limited = min(seconds_for(lambda: generous.call(nothing)) for _ in range(5))
    assert (limited - bare) / 5000 < 10e-6
