"""How many timers wait, for whoever looks at everything."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg

from penstock.stores.queries import DEFAULT_SCHEMA, Queries

SQL_FILE = "timer.sql"
COUNT_MAX: Final = 10_000
LATE_SECONDS: Final = 5.0
"""A timer that is due for so long, and not fired, is late."""

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class TimerStatus:
    """How many timers wait, counted up to a limit."""

    pending: int
    late: int
    held: int
    is_capped: bool
    """There are more than were counted."""
    next_due_ms: int | None
    """Until the next is due, negative where it is late; None: nothing waits."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def read_timer_status(connection: Connection, schema: str = DEFAULT_SCHEMA) -> TimerStatus:
    """Count what waits, what is late and what is held, last in a transaction of the caller's."""
    sql = Queries(SQL_FILE, schema)
    connection.execute(sql["use_order"])
    parameters = {"count_max": COUNT_MAX, "late_seconds": LATE_SECONDS}
    row = connection.execute(sql["summary"], parameters).fetchone()
    assert row is not None
    *counts, next_due_ms = row
    pending, late, held = (min(count, COUNT_MAX) for count in counts)
    return TimerStatus(pending, late, held, max(counts) > COUNT_MAX, next_due_ms)
