"""Writes docs/SIGNALS.md from the signals themselves: `python -m tests.signal_docs [--check]`.

Which metrics a signal moves is found out by emitting one and looking at the meters.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.telemetry.bus import emit
from penstock.telemetry.log_repeats import LOG_REPEAT_SECONDS
from penstock.telemetry.meters import Meters
from penstock.telemetry.metrics import (
    INSTRUMENTS,
    SECONDS_BUCKETS,
    STATE,
    Distribution,
    Instrument,
    Reading,
)
from penstock.telemetry.signals import Signal
from penstock.telemetry.tracing import LINKS_MAX, SPANS

PATH = Path(__file__).parent.parent / "docs" / "SIGNALS.md"
ORDER = (
    "line",
    "reading",
    "failure",
    "keys",
    "archive",
    "replay",
    "timers",
    "redis_timers",
    "work",
)
HEAD = f"""\
# Signals

Written by `make docs` from the code; do not edit.

A signal is something that happened, as a value. Signals are the only instrumentation: logs,
metrics and crash tests subscribe to them, and so may an application, with
`@pipeline.on(EventBuried)`. They are delivered in the process and in the thread that emits them; a
subscriber that raises is logged and stops nobody.

- **Level** is that of the log line. Lines are JSON, or for people on a terminal (`--log-format`),
  with the signal's name and its fields. A warning or an error that is repeated within
  {LOG_REPEAT_SECONDS:g} seconds, with the same fields, is counted instead and told once, with
  `repeated=N`, at the end of that time. Numbers that say how much, how long or which try do not
  make it another one.
- Texts of errors may quote the event that they happened on. Of sealed events they are withheld from
  the signal, and of a consumer whose stream is restricted, as it was when its worker started, from
  the log.
- **Metric** is what one such signal adds to. Gauges are not counted from signals but read: from
  PostgreSQL and Redis, or from the supervisor.
- **Trace** is the span that tells of the same thing; see below.
"""
TRACES = f"""
## Traces

With `penstock[otel]` installed and `OTEL_EXPORTER_OTLP_ENDPOINT` set, workers export spans over
OTLP/HTTP, under `OTEL_SERVICE_NAME` or else the pipeline's name; the other `OTEL_*` variables of
the SDK count as well. An application that has its own tracer provider keeps it. An application that
only sends has to have one: there, nothing is set up for it.

| span | kind | parent | links | lasts |
|---|---|---|---|---|
| `send <stream>` | producer | the current span | — | from the call until the event is in \
the outbox, or remembered for the commit |
| `publish <stream>` | producer | the event's `send` | the batch's `publish` | as long as \
the append of its batch |
| `publish <stream>` | internal | — | the `send` of each event | the append of a batch |
| `batch <consumer>` | internal | — | — | one attempt at a batch, with its transaction |
| `handle <consumer>` | consumer | the event's `send` | the `batch` | one call of a handler |
| `handle <consumer>`, lists | consumer | the `batch` | the `batch`, the `send` of each event | \
one call of a handler |

An event carries its trace in the metadata, as `traceparent` and `tracestate` (W3C), unless the
caller has put them there; on a confidential stream they are sealed like everything else, and only
the handler's span knows them. Whatever a handler does while it is called, its own SQL and what it
sends included, stands below its span. At most {LINKS_MAX} events are linked, and as many have a
`publish` of their own.

`penstock.outcome` says what became of a call: `settled`, `failed`, `unsettled` (it returned, and
its batch was rolled back or not settled for another reason: it is called again) or `unknown` (the
connection broke at the end; the checkpoint tells). Spans name streams, consumers, positions, types
and ids, and of an error its kind: never a value of an event, a key, or what an error says.
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, group in groupby(sorted(Signal.registry.values(), key=_place), key=_module):
        module = inspect.getdoc(sys.modules[name]) or ""
        parts.append(f"\n## {module.splitlines()[0].removesuffix('.')}\n")
        parts.append(_table(group))
    parts.append(TRACES)
    parts.append("## Metrics\n")
    parts.append("| metric | kind | labels | what it says | from |\n|---|---|---|---|---|")
    feeding = _feeding()
    parts += [_metric_row(each, feeding.get(each, [])) for each in INSTRUMENTS]
    return "\n".join(parts) + "\n"


def _place(signal_type: type[Signal]) -> tuple[int, str, int]:
    name = signal_type.__module__.rpartition(".")[2]
    index = ORDER.index(name) if name in ORDER else len(ORDER)
    return index, name, inspect.getsourcelines(signal_type)[1]


def _module(signal_type: type[Signal]) -> str:
    return signal_type.__module__


def _table(group: Iterator[type[Signal]]) -> str:
    rows = [
        "| signal | what it says | fields | level | metric | trace |",
        "|---|---|---|---|---|---|",
    ]
    for signal_type in group:
        says = _cell(inspect.getdoc(signal_type) or "")
        names = ", ".join(f"`{name}`" for name in _types(signal_type)) or "—"
        moved = "<br>".join(f"`{each.name}`" for each in moved_by(signal_type)) or "—"
        span = SPANS.get(signal_type, "—")
        level = signal_type.level
        rows.append(f"| `{signal_type.__name__}` | {says} | {names} | {level} | {moved} | {span} |")
    return "\n".join(rows)


def _metric_row(instrument: Instrument, feeding: list[str]) -> str:
    labels = ", ".join(f"`{name}`" for name in instrument.labels) or "—"
    source = ", ".join(f"`{name}`" for name in feeding) or _read_from(instrument)
    kind = f"{instrument.kind}, {instrument.unit}"
    text = _cell(instrument.help)
    return f"| `{instrument.name}` | {kind} | {labels} | {text} | {source} |"


def _read_from(instrument: Instrument) -> str:
    return "the servers" if instrument in STATE else "the supervisor"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def _feeding() -> dict[Instrument, list[str]]:
    feeding: dict[Instrument, list[str]] = {}
    for name, signal_type in Signal.registry.items():
        for instrument in moved_by(signal_type):
            feeding.setdefault(instrument, []).append(name)
    return feeding


# ── which metric ───────────────────────────────────────────────────────────────────────────────


def moved_by(signal_type: type[Signal]) -> list[Instrument]:
    """The instruments that one signal of this type adds to."""
    moved = {
        reading.instrument
        for sample in _samples(signal_type)
        for reading in _readings_after(sample)
        if _is_moved(reading)
    }
    return [instrument for instrument in INSTRUMENTS if instrument in moved]


def _readings_after(sample: Signal) -> list[Reading]:
    meters = Meters()
    meters.start()
    try:
        meters.sums.take()
        emit(sample)
        return meters.sums.take()
    finally:
        meters.stop()


def _is_moved(reading: Reading) -> bool:
    value = reading.value
    return sum(value.counts) > 0 if isinstance(value, Distribution) else value > 0


def _types(signal_type: type[Signal]) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields(signal_type)}  # type: ignore[arg-type]


def _samples(signal_type: type[Signal]) -> list[Signal]:
    """One with every number set, and for each number one without it: some exclude each other."""
    whole = {name: _sample(name, kind) for name, kind in _types(signal_type).items()}
    samples = [whole] + [{**whole, name: 0} for name in whole if whole[name] == 1]
    return [signal_type(**sample) for sample in samples]


def _sample(name: str, kind: str) -> Any:
    if name == "calls" and kind != "int":
        return (1,) * (len(SECONDS_BUCKETS) + 1)
    return {"int": 1, "float": 1.0, "bool": True, "str": "x"}.get(kind, ())


def main() -> int:
    """Write the page, or with --check say whether it is as it should be."""
    is_current = PATH.exists() and PATH.read_text() == document()
    if "--check" in sys.argv[1:]:
        return 0 if is_current else 1
    if not is_current:
        PATH.write_text(document())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
