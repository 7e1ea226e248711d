"""Readings in the text format that Prometheus scrapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate

from penstock.telemetry.metrics import Distribution, Instrument, Kind, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_IN_LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SPECIAL = re.compile(r'[\\"\n]')
_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def exposed(readings: Iterable[Reading]) -> str:
    """Everything as text, each metric once with its HELP and TYPE before it."""
    by_instrument: dict[Instrument, list[Reading]] = {}
    for reading in readings:
        by_instrument.setdefault(reading.instrument, []).append(reading)
    # A thousand consumers are seventy thousand lines: one list, and joined once.
    lines: list[str] = []
    for instrument, found in by_instrument.items():
        name = instrument.prometheus_name
        lines.append(f"# HELP {name} {instrument.help.translate(_IN_HELP)}\n")
        lines.append(f"# TYPE {name} {instrument.kind}\n")
        if instrument.kind is Kind.HISTOGRAM:
            _add_histograms(lines, instrument, found)
        else:
            lines += [f"{name}{_braced(r)} {_number(r.value)}\n" for r in found]
    return "".join(lines)


def _add_histograms(lines: list[str], instrument: Instrument, readings: list[Reading]) -> None:
    """Prometheus counts in each bucket what the smaller ones hold as well."""
    name = instrument.prometheus_name
    limits = [*map(_number, instrument.buckets), "+Inf"]
    for reading in readings:
        seen, labels = reading.value, _labels(reading)
        assert isinstance(seen, Distribution)
        start = f'{name}_bucket{{{labels}{"," if labels else ""}le="'
        counts = [*accumulate(seen.counts)]
        lines += [
            f'{start}{limit}"}} {count}\n' for limit, count in zip(limits, counts, strict=True)
        ]
        braced = _braced(reading)
        lines.append(f"{name}_sum{braced} {_number(seen.total)}\n")
        lines.append(f"{name}_count{braced} {counts[-1]}\n")


def _braced(reading: Reading) -> str:
    labels = _labels(reading)
    return f"{{{labels}}}" if labels else ""


def _labels(reading: Reading) -> str:
    return ",".join(
        [
            f'{name}="{value.translate(_IN_LABEL) if _SPECIAL.search(value) else value}"'
            for name, value in zip(reading.instrument.labels, reading.labels, strict=True)
        ]
    )


def _number(value: float | Distribution) -> str:
    assert not isinstance(value, Distribution)
    return str(int(value)) if value == int(value) else repr(value)
