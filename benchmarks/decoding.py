"""Reading a payload: validated as an event class, against parsed as JSON and no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

from benchmarks.bed import Bed
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from penstock import Event
from penstock.core.wire import Entry
from penstock.pipeline.signature import read_signature

# 200,000 events a second where orjson alone parses two million.
CLAIM = Claim("decode", "decode and validate, by orjson alone", 0.1)
FIELDS = (b"1", b"1", b"", b"1700000000000000", b'"customer-17"', b"{}")
UUID = "00000000-0000-0000-0000-00000000000a"


class Ordered(Event, type="bench.ordered", version=1, key="customer"):
    """An order, with what orders have."""

    order_id: int
    customer: str
    cents: int
    currency: str
    note: str | None = None


def take(event: Ordered) -> None:
    """Asks for validated events."""


class Decoding:
    """Measures both in turn, over the same bytes."""

    claim = CLAIM

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        event = Ordered(order_id=1_234_567, customer="customer-17", cents=990, currency="EUR")
        self._payload = event.model_dump_json().encode()
        self._entry = Entry("orders", 1, "bench", UUID, "bench.ordered", 1, FIELDS, self._payload)
        self._plan = read_signature(take, "bench")

    def measure(self) -> Round:
        """One round: slices of both sides in turn."""
        seconds = [0.0, 0.0]
        for _ in range(self._scale.slices):
            seconds[0] += self._taken(self._plan.decode, self._entry)
            seconds[1] += self._taken(orjson.loads, self._payload)
        count = self._scale.decoded * self._scale.slices
        return Round({"events/s": count / seconds[0]}, {"events/s": count / seconds[1]})

    def _taken(self, function: Callable[[Any], Any], argument: Any) -> float:
        started_at = time.perf_counter()
        for _ in range(self._scale.decoded):
            function(argument)
        return time.perf_counter() - started_at


@contextmanager
def opened_decoding(_bed: Bed, scale: Scale) -> Iterator[Sequence[Decoding]]:
    """The one comparison; it needs no server."""
    yield [Decoding(scale)]
