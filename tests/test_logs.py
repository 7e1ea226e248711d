"""Signals become log lines: one each, at their level, unforgeable, without repetition."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest

from penstock.errors import SettingsError
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted, unsubscribe
from penstock.telemetry.logs import RESERVED_NAMES, configure_logging, write_signal
from penstock.telemetry.signals import Signal

DIED = signals.WorkerDied("consumer:shop.bill_order", 17, -9)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Other tests find the logger as it was."""
    logger = logging.getLogger("penstock")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    unsubscribe(write_signal)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_lines_for_people() -> None:
    stream = Terminal()
    configure_logging(stream=stream)
    emit(DIED)
    moment, rest = stream.getvalue().split(" ", 1)
    assert moment.endswith("Z")
    assert rest == "ERROR   WorkerDied worker=consumer:shop.bill_order pid=17 exit_code=-9\n"


def test_anything_else_gets_json() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    emit(DIED)
    line = json.loads(stream.getvalue())
    del line["time"]
    assert line == {
        "level": "error",
        "signal": "WorkerDied",
        "worker": "consumer:shop.bill_order",
        "pid": 17,
        "exit_code": -9,
    }


def test_the_format_can_be_chosen() -> None:
    stream = Terminal()
    configure_logging(log_format="json", stream=stream)
    emit(DIED)
    assert json.loads(stream.getvalue())["signal"] == "WorkerDied"


def test_what_lies_below_the_level_is_not_even_asked_for() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream)
    assert not is_wanted(signals.EventHandled)
    assert not is_wanted(signals.WorkerStarted)
    emit(signals.WorkerStarted("publisher", 1))
    assert stream.getvalue() == ""
    configure_logging("debug", stream=stream)
    assert is_wanted(signals.EventHandled)


def test_configuring_twice_does_not_write_twice() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    configure_logging(stream=stream)
    emit(DIED)
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_no_value_can_forge_a_line_or_a_field(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging(log_format="human" if log_format == "human" else "json", stream=stream)
    emit(signals.ServerLost("w", "PostgreSQL", "gone\n2026 ERROR forged x=1\x1b[2J\u2028"))
    logging.getLogger("penstock.handler").error("said\nforged\x1b[2J")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in stream.getvalue()


def test_messages_of_handlers_bring_their_context_and_traceback() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("penstock.handler.shop").exception("billing", extra={"position": 7})
    line = json.loads(stream.getvalue())
    assert (line["message"], line["position"]) == ("billing", 7)
    assert "ValueError: inside" in line["exception"]


def test_no_signal_has_a_field_that_a_line_calls_its_own() -> None:
    for signal_type in Signal.registry.values():
        names = {field.name for field in fields(signal_type)}  # type: ignore[arg-type]
        assert not names & RESERVED_NAMES, signal_type


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(SettingsError, match="must be one of"):
        configure_logging("loud")


def test_without_stderr_nothing_is_logged_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    configure_logging()
    emit(DIED)
    logging.getLogger("penstock.handler").error("said")
