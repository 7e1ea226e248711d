"""Redis is down for the whole of a run: what consumers and senders keep of their throughput.

`python -m tests.brownout_drill [--runs N] [--events N] [--quick]` has two lines side by side that
differ in their Redis alone: one answers; on the other's port nobody has ever listened. They
work in turn, with the same handler and a publisher each. The machine should have nothing else to
do.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import psycopg

from benchmarks.bed import Bed, made_bed
from benchmarks.children import Child
from benchmarks.with_penstock import SEND_CHUNK, open_pipeline, user_created
from benchmarks.workload import METADATA, STREAM
from penstock import Pipeline
from penstock.ops.consumers import Consumers
from tests.failure_drill import say
from tests.machine import say_load
from tests.waiting import wait_until

RUNS = 7
EVENTS = 20_000
SENDERS = 4
SENDING_SECONDS = 2.0
SHAPE = "1x100"
"""One lane with the default batch size."""
HANDLER = "psycopg"
FULL_NAME = f"bench.{HANDLER}"
CATCH_UP_SECONDS = 300.0
CONSUMERS_KEEP = 0.5
SENDERS_KEEP = 0.9
HEAD = "SELECT coalesce(max(head), 0), coalesce(max(published), 0) FROM events.stream"
CHECKPOINT = "SELECT checkpoint FROM events.stream_lease WHERE role = %s"
# Between a fifth and four fifths everybody is at work: neither starting nor running dry.
RATE = """
SELECT 0.6 * count(*)
       / extract(epoch FROM percentile_disc(0.8) WITHIN GROUP (ORDER BY processed_at)
                          - percentile_disc(0.2) WITHIN GROUP (ORDER BY processed_at))::float8
  FROM events.processed_event WHERE position > %s
"""
COUNTS = """
SELECT (SELECT count(*) FROM events.outbox_event), (SELECT count(*) FROM bench.ledger),
       (SELECT count(*) FROM events.processed_event WHERE outcome = 'handled')
"""


class Side:
    """One line: a database, a publisher, a consumer, senders, and Redis or none."""

    def __init__(
        self,
        pipeline: Pipeline,
        connection: psycopg.Connection[Any],
        senders: list[Child],
        *,
        has_redis: bool,
    ) -> None:
        self._pipeline = pipeline
        self._connection = connection
        self._senders = senders
        self._has_redis = has_redis
        self._operator = Consumers(connection)
        self._sent = 0

    def as_they_come(self, count: int) -> float:
        """Events/s of the whole line: all are committed at once, the publisher numbers them."""
        before = self._sent
        self._send(count)
        self._wait_until_handled()
        return self._rate(before)

    def numbered_before(self, count: int) -> float:
        """Events/s of the consumer, while the publisher has nothing else to do."""
        before = self._sent
        self._operator.pause([FULL_NAME], by="drill")
        wait_until(lambda: not self._operator.lanes_held([FULL_NAME]), what="the consumer rests")
        self._send(count)
        target = (self._sent, self._sent if self._has_redis else 0)
        wait_until(
            lambda: self._ask(HEAD) == [target],
            seconds=CATCH_UP_SECONDS,
            what=lambda: f"{target} is {self._ask(HEAD)}",
        )
        self._operator.resume([FULL_NAME])
        self._wait_until_handled()
        return self._rate(before)

    def senders(self, seconds: float) -> float:
        """Commits/s of several senders, each with one event."""
        for sender in self._senders:
            sender.request(variant=0, seconds=seconds)
        replies = [sender.reply() for sender in self._senders]
        self._sent += sum(reply["sent"] for reply in replies)
        # What they have sent is nobody else's burden.
        self._wait_until_handled()
        return float(sum(reply["sent"] / reply["seconds"] for reply in replies))

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: self._operator.lanes_held([FULL_NAME]) == 1,
            seconds=CATCH_UP_SECONDS,
            what="the consumer is there",
        )
        self.as_they_come(SEND_CHUNK)

    def has_handled_all_once(self) -> bool:
        """Whether there is one effect for each event, and no event but those that were sent."""
        return self._ask(COUNTS) == [(self._sent,) * 3]

    def _send(self, count: int) -> None:
        first = self._sent + 1
        with psycopg.connect(self._connection.info.dsn) as connection:
            for start in range(first, first + count, SEND_CHUNK):
                numbers = range(start, min(start + SEND_CHUNK, first + count))
                events = map(user_created, numbers)
                self._pipeline.send_many(connection, STREAM, events, metadata=METADATA)
        self._sent += count

    def _wait_until_handled(self) -> None:
        role = f"consumer:{FULL_NAME}"
        wait_until(
            lambda: self._ask(CHECKPOINT, role) == [(self._sent,)],
            seconds=CATCH_UP_SECONDS,
            what=lambda: f"{self._sent} are handled, not {self._ask(CHECKPOINT, role)}",
        )

    def _rate(self, before: int) -> float:
        ((rate,),) = self._ask(RATE, before)
        return float(rate)

    def _ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query.encode(), parameters).fetchall()


@dataclass(frozen=True, slots=True)
class Measure:
    """One comparison: what is measured on both sides, and what has to be left without Redis."""

    name: str
    unit: str
    at_least: float
    take: Callable[[Side], float]


def measures(events: int, seconds: float) -> tuple[Measure, ...]:
    return (
        Measure(
            "consumer, events numbered before",
            "events/s",
            CONSUMERS_KEEP,
            lambda side: side.numbered_before(events),
        ),
        Measure(
            "publisher and consumer, as they come",
            "events/s",
            CONSUMERS_KEEP,
            lambda side: side.as_they_come(events),
        ),
        Measure(
            f"{SENDERS} senders", "commits/s", SENDERS_KEEP, lambda side: side.senders(seconds)
        ),
    )


@contextmanager
def opened_side(bed: Bed, name: str, redis_url: str, *, has_redis: bool) -> Iterator[Side]:
    """A line that works until the block ends."""
    url = bed.database(name)
    with ExitStack() as stack:
        for role in ("publisher", f"consumer:{HANDLER}"):
            arguments = ("worker", role, url, redis_url, name, SHAPE)
            stack.enter_context(Child("benchmarks.with_penstock", *arguments))
        senders = [
            stack.enter_context(Child("benchmarks.with_penstock", "sender", redis_url, url))
            for _ in range(SENDERS)
        ]
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        side = Side(open_pipeline(url, redis_url), connection, senders, has_redis=has_redis)
        side.wait_until_ready()
        yield side


@contextmanager
def nobody_listening() -> Iterator[str]:
    """The URL of a Redis that is not there; the port is taken, so that none can come."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}/0"


def report(measure: Measure, pairs: list[tuple[float, float]]) -> bool:
    """One line; whether the middle of all runs keeps the promise."""
    ratios = [without / with_redis for with_redis, without in pairs]
    with_redis, without = (median(side) for side in zip(*pairs, strict=True))
    is_kept = median(ratios) >= measure.at_least
    say(
        f"  {measure.name:<37} {median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        f" of at least {measure.at_least:g}; {without:,.0f} and {with_redis:,.0f} {measure.unit}"
        f"{'' if is_kept else '   NOT KEPT'}"
    )
    return is_kept


def main() -> int:
    """Measure both in turn, and say whether enough is left without Redis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--quick", action="store_true", help="a little, to see that it all runs")
    options = parser.parse_args()
    runs, events, seconds = options.runs, options.events, SENDING_SECONDS
    if options.quick:
        runs, events, seconds = 2, 3000, 0.3
    taken = measures(events, seconds)
    pairs: dict[str, list[tuple[float, float]]] = {measure.name: [] for measure in taken}
    with (
        made_bed(durable=True) as bed,
        nobody_listening() as nowhere,
        opened_side(bed, "with_redis", bed.redis_url, has_redis=True) as with_redis,
        opened_side(bed, "without", nowhere, has_redis=False) as without,
    ):
        for run in range(1, runs + 1):
            for measure in taken:
                # Who begins changes, so that neither always finds the warmer machine.
                sides = [with_redis, without] if run % 2 else [without, with_redis]
                rates = {side: measure.take(side) for side in sides}
                pairs[measure.name].append((rates[with_redis], rates[without]))
                say(
                    f"run {run}, {measure.name}: {rates[without]:,.0f} {measure.unit} without"
                    f" Redis, {rates[with_redis]:,.0f} with it"
                )
        is_whole = all(side.has_handled_all_once() for side in (with_redis, without))
    say("what is left without Redis: median (min..max)")
    are_kept = [report(measure, pairs[measure.name]) for measure in taken]
    say_load()
    say("every event has its effect, once" if is_whole else "LOST OR REPEATED")
    return 0 if all(are_kept) and is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
