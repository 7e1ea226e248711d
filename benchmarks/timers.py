"""Timers in PostgreSQL: scheduled, cancelled and fired among a million others, and among few."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg

from benchmarks.bed import Bed
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from penstock.core.settings import Settings
from penstock.pipeline.timekeeper import Timekeeper

# The cost should not depend on how many wait; a tree that is deeper by a level may show.
TARGET = 0.8
FEW = 1_000
FILL = """
INSERT INTO events.timer (timer_id, stream_name, event_type, key, payload, due_at)
SELECT 'pending' || n, 'bench', 'bench.rang', 'k' || n % 1000, jsonb_build_object('n', n),
       clock_timestamp() + interval '1 day' + random() * interval '30 days'
  FROM generate_series(1, {count}) AS n
"""
SCHEDULE = """
SELECT events.schedule(%(timer_id)s, 'bench', 'bench.rang', '{"n": 1}',
                       delay => interval '10 days', key => %(key)s)
"""
CANCEL = "SELECT events.cancel_timer(%(timer_id)s)"
SCHEDULE_DUE = """
SELECT events.schedule('due' || n, 'bench', 'bench.rang', '{"n": 1}', delay => interval '0',
                       key => 'k' || n %% 1000)
  FROM generate_series(1, %(count)s) AS n
"""


class Pending:
    """One database with so many timers in it."""

    def __init__(self, database_url: str, count: int) -> None:
        self._connection: psycopg.Connection[Any] = psycopg.connect(database_url, autocommit=True)
        self._connection.execute(FILL.replace("{count}", str(count)).encode())
        self._connection.execute("VACUUM ANALYZE events.timer")
        self._timekeeper = Timekeeper(Settings(database_url=database_url))

    def close(self) -> None:
        self._timekeeper.close()
        self._connection.close()

    def schedule(self, count: int) -> float:
        """Timers a second, a transaction each."""
        seconds = self._timed(SCHEDULE, count)
        self._connection.execute("DELETE FROM events.timer WHERE timer_id LIKE 'measured%'")
        return count / seconds

    def cancel(self, count: int) -> float:
        """The same the other way."""
        self._timed(SCHEDULE, count)
        return count / self._timed(CANCEL, count)

    def fire(self, count: int) -> float:
        """Timers a second that are due and become events."""
        self._connection.execute(SCHEDULE_DUE, {"count": count})
        started_at, left = time.perf_counter(), count
        while left > 0:
            left -= self._timekeeper.step().moved
        return count / (time.perf_counter() - started_at)

    def _timed(self, query: str, count: int) -> float:
        started_at = time.perf_counter()
        for number in range(count):
            parameters = {"timer_id": f"measured{number}", "key": f"k{number % 1000}"}
            self._connection.execute(query.encode(), parameters)
        return time.perf_counter() - started_at


class Comparison:
    """One act among many timers, by the same among few."""

    def __init__(
        self,
        claim: Claim,
        act: Callable[[Pending, int], float],
        many: Pending,
        few: Pending,
        scale: Scale,
    ) -> None:
        self.claim = claim
        self._act = act
        self._many = many
        self._few = few
        self._scale = scale

    def measure(self) -> Round:
        """One round: slices among many and among few in turn, the first ones to warm up."""
        self._slice()
        slices = [self._slice() for _ in range(self._scale.slices)]
        # Of rates over equal counts, the harmonic mean is the rate over all.
        many, few = (
            len(side) / sum(1 / rate for rate in side) for side in zip(*slices, strict=True)
        )
        return Round({"timers/s": many}, {"timers/s": few})

    def _slice(self) -> tuple[float, float]:
        count = self._scale.timers
        return self._act(self._many, count), self._act(self._few, count)


@contextmanager
def opened_timers(bed: Bed, scale: Scale) -> Iterator[Sequence[Comparison]]:
    """Two databases that differ in how many timers wait."""
    with ExitStack() as stack:
        many, few = (
            stack.enter_context(closing(Pending(bed.database(f"timers_{name}"), count)))
            for name, count in (("many", scale.timers_pending), ("few", FEW))
        )
        shown = f"{scale.timers_pending:,} pending / {FEW:,}"
        acts = {"schedule": Pending.schedule, "cancel": Pending.cancel, "fire": Pending.fire}
        yield [
            Comparison(Claim(f"timers-{name}", f"{name}, {shown}", TARGET), act, many, few, scale)
            for name, act in acts.items()
        ]
