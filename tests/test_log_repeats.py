"""Repeated failures are one line in a minute; whatever is different is told."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import psycopg
import pytest

from penstock import Pipeline, RawEvent
from penstock.core.events import StreamEvent
from penstock.core.policy import Member, MemberKind, SecurityLevel
from penstock.core.policy_change import PolicyChange
from penstock.ops.policy import set_policy
from penstock.stores.policies import forget_policies
from penstock.telemetry import log_repeats, logs, signals
from penstock.telemetry.bus import emit, unsubscribe
from penstock.telemetry.log_repeats import LOG_REPEAT_SECONDS, MEASURES, Repeats
from penstock.telemetry.logs import QUOTING, configure_logging, write_signal
from penstock.telemetry.signals import Level, Signal
from tests.waiting import SOON_SECONDS, wait_until

CANARY = "canary-20e7"


class Log:
    """What is written, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[Signal, int]] = []
        self.repeats = Repeats(
            lambda signal, repeated: self.lines.append((signal, repeated)), clock=lambda: self.now
        )


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.repeats.close()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes; afterwards the logger is as it was."""
    logger = logging.getLogger("penstock")
    before = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    configure_logging(stream=stream)
    yield stream
    logs._repeats.close()
    logger.handlers[:], logger.level, logger.propagate = before
    unsubscribe(write_signal)
    logs._discreet.clear()


def failed(attempt: int = 1, *, position: int = 7, error: str = "ValueError: no") -> Signal:
    return signals.EventFailed("shop.bill", position, "uuid", attempt, error)


def test_the_same_failure_is_written_once_and_counted_until_the_minute_is_over(log: Log) -> None:
    for attempt in (1, 2, 3):
        log.repeats.hear(failed(attempt))
        log.now += 1
    assert log.lines == [(failed(1), 0)]
    log.now = LOG_REPEAT_SECONDS
    log.repeats.tell_due()
    assert log.lines == [(failed(1), 0), (failed(3), 2)]


def test_what_goes_on_is_one_line_a_minute(log: Log) -> None:
    for second in range(int(5 * LOG_REPEAT_SECONDS)):
        log.now = float(second)
        log.repeats.hear(failed(second))
    assert len(log.lines) == 5
    log.repeats.close()
    assert sum(repeated or 1 for _, repeated in log.lines) == 5 * LOG_REPEAT_SECONDS


def test_what_has_ended_is_forgotten_and_told_at_once_when_it_returns(log: Log) -> None:
    log.repeats.hear(failed())
    log.now += LOG_REPEAT_SECONDS
    log.repeats.hear(failed(2))
    assert log.lines == [(failed(), 0), (failed(2), 0)]


@pytest.mark.parametrize(
    "other",
    [
        failed(error="ValueError: another"),
        signals.EventFailed("shop.tell", 7, "uuid", 1, "ValueError: no"),
        signals.EventBuried("shop.bill", 7, "uuid", "ValueError: no"),
    ],
)
def test_what_is_different_is_told(log: Log, other: Signal) -> None:
    log.repeats.hear(failed())
    log.repeats.hear(other)
    assert log.lines == [(failed(), 0), (other, 0)]


def test_events_that_fail_of_the_same_are_one_failure(log: Log) -> None:
    for position in range(100):
        log.repeats.hear(failed(position=position))
    log.repeats.close()
    assert log.lines == [(failed(position=0), 0), (failed(position=99), 99)]


def test_what_is_no_failure_is_never_counted(log: Log) -> None:
    started = signals.WorkerStarted("publisher", 1)
    for _ in range(3):
        log.repeats.hear(started)
    assert log.lines == [(started, 0)] * 3


def test_counts_are_told_when_nothing_else_happens() -> None:
    told = threading.Event()
    repeats = Repeats(lambda _signal, repeated: told.set() if repeated else None, seconds=0.05)
    repeats.hear(failed())
    repeats.hear(failed(2))
    assert told.wait(SOON_SECONDS)
    repeats.close()


def test_only_so_many_failures_are_remembered(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_repeats, "LOG_REPEATS_MAX", 2)
    log.repeats.hear(failed(error="a"))
    log.repeats.hear(failed(2, error="a"))
    for error in ("b", "c"):
        log.repeats.hear(failed(error=error))
    # The oldest made room, and what was counted of it is told.
    assert log.lines[-1] == (failed(2, error="a"), 1)
    assert [repeated for _, repeated in log.lines] == [0, 0, 0, 1]


def test_measures_are_fields_of_failures() -> None:
    failures = [t for t in Signal.registry.values() if t.level in (Level.WARNING, Level.ERROR)]
    names = {field.name for t in failures for field in fields(t)}  # type: ignore[arg-type]
    assert names >= MEASURES


def test_the_line_says_how_often(stream: io.StringIO) -> None:
    emit(failed(1))
    emit(failed(2))
    emit(failed(3))
    configure_logging(stream=stream)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["attempt"], "repeated" in first) == (1, False)
    assert (second["attempt"], second["repeated"]) == (3, 2)


# ── what is not for everybody ──────────────────────────────────────────────────────────────────


def test_every_signal_with_the_text_of_an_error_is_known() -> None:
    for signal_type, name in QUOTING.items():
        names = {field.name for field in fields(signal_type)}  # type: ignore[arg-type]
        assert {"consumer", name} <= names, signal_type


def test_errors_on_a_restricted_stream_are_told_by_their_kind(
    database_url: str, stream: io.StringIO
) -> None:
    forget_policies()
    restricted = PolicyChange(
        stream_name="orders",
        security_level=SecurityLevel.RESTRICTED,
        producers=(Member(MemberKind.PRODUCER, "shop"),),
        consumers=(Member(MemberKind.CONSUMER, "shop.bill"),),
    )
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)

    def quote(event: StreamEvent[Any]) -> None:
        raise ValueError(f"cannot use {event.payload}")

    for name in ("orders", "news"):
        consumer = "bill" if name == "orders" else "tell"
        pipeline.consumer(name, name=consumer)(quote)
    with psycopg.connect(database_url) as connection:
        set_policy(connection, restricted, by="tests")
        for name in ("orders", "news"):
            pipeline.send(connection, name, RawEvent("T", {"said": f"{CANARY} in {name}"}))
    stop = threading.Event()
    roles = ["publisher", "consumer:bill", "consumer:tell"]
    thread = threading.Thread(target=pipeline.run_worker, args=(roles, stop))
    thread.start()
    try:
        wait_until(
            lambda: {"shop.bill", "shop.tell"} == {each["consumer"] for each in _failures(stream)},
            what="both consumers have failed",
        )
    finally:
        stop.set()
        thread.join()
        pipeline.engine.dispose()
        forget_policies()
    assert f"{CANARY} in news" in stream.getvalue()
    assert f"{CANARY} in orders" not in stream.getvalue()
    told = {each["error"] for each in _failures(stream) if each["consumer"] == "shop.bill"}
    assert told == {"ValueError: (withheld: the stream is not open)"}


def _failures(stream: io.StringIO) -> list[dict[str, Any]]:
    lines = map(json.loads, stream.getvalue().splitlines())
    return [line for line in lines if line.get("signal") == "EventFailed"]
