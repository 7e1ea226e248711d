"""Signals as log lines: one for each thing that happened, for a person or for a machine."""

from __future__ import annotations

import atexit
import json
import logging
import re
import sys
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from penstock.core.require import require
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.log_repeats import Repeats
from penstock.telemetry.signals import Signal

Format = Literal["human", "json"]
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
REPEATED = "repeated"
RESERVED_NAMES = frozenset(
    {"time", "level", "signal", "logger", "message", "exception", "fields", REPEATED}
)
"""What a JSON line calls its own; no signal has a field of such a name."""
QUOTING: dict[type[Signal], str] = {
    signals.BatchRolledBack: "reason",
    signals.CompletedThenFailed: "error",
    signals.EventBuried: "reason",
    signals.EventFailed: "error",
    signals.KeyHeld: "reason",
}
"""Fields with the text of an error that a handler raised, who had an event in hand."""
WITHHELD = "(withheld: the stream is not open)"

_logger = logging.getLogger("penstock")
_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[\w!#-<>-~]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_discreet: set[str] = set()
"""Consumers of streams that not everybody may read."""


def configure_logging(
    level: str = "info", log_format: Format | None = None, *, stream: TextIO | None = None
) -> None:
    """Write signals and Penstock's own messages to stderr, if there is one.

    A second call replaces the first. Without a format, a terminal gets lines for people and
    anything else gets JSON.
    """
    level = level.lower()
    require(level in LEVELS, f"log level {level!r} must be one of {', '.join(LEVELS)}")
    require(log_format in (None, "human", "json"), f'log format {log_format!r}: "human" or "json"')
    _logger.handlers[:] = [_handler_for(stream or sys.stderr, log_format)]
    _logger.setLevel(LEVELS[level])
    # The application's own handlers would say everything a second time.
    _logger.propagate = False
    _begin_counting()
    atexit.unregister(_tell_counted)
    atexit.register(_tell_counted)
    unsubscribe(write_signal)
    for signal_type in Signal.registry.values():
        # A signal that nobody wants is never built, so ask only for what will be written.
        if LEVELS[signal_type.level] >= LEVELS[level]:
            subscribe(signal_type, write_signal)


def _handler_for(stream: TextIO | None, log_format: Format | None) -> logging.Handler:
    # A process that was started with its stderr closed has none.
    if stream is None:
        return logging.NullHandler()
    chosen = log_format or ("human" if stream.isatty() else "json")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter() if chosen == "human" else JsonFormatter())
    return handler


def _begin_counting() -> None:
    """Tell what was counted before, to whom it was to be told, and begin anew."""
    global _repeats  # noqa: PLW0603 - one for the process, like the logger that it writes to
    _repeats.close()
    _repeats = Repeats(_write)


def _tell_counted() -> None:
    _repeats.close()


def withhold_errors_of(consumer: str) -> None:
    """Write no more than the kind of an error of this consumer: its stream is not open to all."""
    _discreet.add(consumer)


def write_signal(signal: Signal) -> None:
    """Write one signal as one log record; one that is repeated soon, once in a while."""
    _repeats.hear(signal)


def _write(signal: Signal, repeated: int) -> None:
    values = {field.name: getattr(signal, field.name) for field in fields(signal)}  # type: ignore[arg-type]
    if (quoting := QUOTING.get(type(signal))) is not None and values["consumer"] in _discreet:
        kind, colon, _text = values[quoting].partition(": ")
        # Without a colon it is not an error's text, but a sentence of our own.
        values[quoting] = f"{kind}: {WITHHELD}" if colon else kind
    if repeated:
        values[REPEATED] = repeated
    name = type(signal).__name__
    _logger.log(LEVELS[signal.level], "%s", name, extra={"signal": name, "fields": values})


_repeats = Repeats(_write)


class HumanFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO    BatchCommitted consumer=shop.bill_order last=7`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the values hold; a traceback follows below it."""
        values = " ".join(f"{name}={_shown(value)}" for name, value in _fields_of(record).items())
        message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage())
        line = f"{_time_of(record)} {record.levelname:<7} {message} {values}".rstrip()
        exception = _exception_of(self, record)
        return f"{line}\n{exception}" if exception else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, signal or message, and the values beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """Always one line: JSON escapes what would break it."""
        line: dict[str, Any] = {"time": _time_of(record), "level": record.levelname.lower()}
        if hasattr(record, "signal"):
            line["signal"] = record.signal
        else:
            line |= {"logger": record.name, "message": record.getMessage()}
        for name, value in _fields_of(record).items():
            line.setdefault(name, value)
        exception = _exception_of(self, record)
        if exception:
            line["exception"] = exception
        return json.dumps(line, default=str)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """A signal's values; of any other record, what its author added."""
    if hasattr(record, "signal"):
        values: dict[str, Any] = record.__dict__["fields"]
        return values
    return {name: value for name, value in vars(record).items() if name not in _ORDINARY}


def _exception_of(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    return formatter.formatException(record.exc_info) if record.exc_info else None


def _time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: object) -> str:
    """As it is where that is unmistakable, otherwise quoted: no value can forge a field."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=True)
