"""A consumer at work until everything that was sent to it is settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from penstock import Pipeline
from tests.events import Placed
from tests.test_seams import working
from tests.waiting import wait_until

SETTLED = "SELECT count(*) FROM events.processed_event WHERE outcome <> 'parked'"


def settle(database_url: str, handler: Callable[..., Any], events: int, **options: Any) -> None:
    """Send so many events to a handler that may write into the table `effect`, and wait."""
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    pipeline.consumer("orders", name="bill", **options)(handler)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (n bigint)")
        for n in range(1, events + 1):
            pipeline.send_now("orders", Placed(n=n))
        with working(pipeline, "publisher", "consumer:bill"):
            wait_until(
                lambda: connection.execute(SETTLED).fetchone() == (events,), what="all are settled"
            )
    pipeline.engine.dispose()


def effects(database_url: str) -> list[int]:
    """What is in that table."""
    with psycopg.connect(database_url) as connection:
        return [n for (n,) in connection.execute("SELECT n FROM effect ORDER BY n")]
