"""One event ends every process that handles it: it is buried, and all others are handled once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psycopg
import pytest

from tests.fatal_app import FATAL, TABLES
from tests.line import Worker
from tests.waiting import wait_until

EVENTS = 10_000


@pytest.mark.long
@pytest.mark.parametrize("lanes", [4])
def test_an_event_that_ends_its_process_is_buried_before_its_consumer_is_quarantined(
    database_url: str, redis_url: str, tmp_path: Path, lanes: int
) -> None:
    environment = {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "LANES": str(lanes),
    }
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(TABLES)
        connection.execute(
            "SELECT events.send('counts', 'fatal.counted', "
            "jsonb_build_object('key', 'k' || n %% 50, 'number', n), key => 'k' || n %% 50) "
            "FROM generate_series(1, %s) AS n",
            (EVENTS,),
        )

        def settled() -> dict[str, int]:
            rows = connection.execute(
                "SELECT outcome, count(*) FROM events.processed_event GROUP BY 1"
            )
            return dict(rows.fetchall())

        command = [sys.executable, "-m", "penstock", "--app", "tests.fatal_app:pipeline", "run"]
        host = Worker(command, environment, tmp_path / "log")
        try:
            wait_until(
                lambda: sum(settled().values()) == EVENTS,
                what=lambda: f"{settled()}\n{host.tail()}",
            )
            host.send(signal.SIGTERM)
            host.wait_until_dead()
        finally:
            host.end()
        assert settled() == {"handled": EVENTS - 1, "dead": 1}
        effects = connection.execute("SELECT number FROM effect ORDER BY number").fetchall()
        assert effects == [(n,) for n in range(1, EVENTS + 1) if n != FATAL]
        ((position, attempts),) = connection.execute(
            "SELECT position, attempts FROM events.dead_letter"
        ).fetchall()
        assert position == FATAL
        assert len({attempt["worker_id"] for attempt in attempts}) == 3
        assert connection.execute("SELECT * FROM events.quarantine").fetchall() == []
        assert connection.execute("SELECT * FROM events.suspect").fetchall() == []
