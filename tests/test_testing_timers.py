"""Tests of applications let time pass as they like; what is due then is sent."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from penstock import Pipeline, RawEvent
from penstock.errors import InvalidTimer, UsageError
from penstock.testing import fire_timers
from tests.vault import STREAM, Admitted, Vault, new_key_file

NOON = datetime(2100, 6, 1, 12, tzinfo=UTC)
AN_HOUR = timedelta(hours=1)
SENT = text("SELECT payload ->> 'n', metadata, event_uuid FROM events.outbox_event ORDER BY id")


@pytest.fixture
def pipeline(database_url: str) -> Iterator[Pipeline]:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    yield pipeline
    pipeline.engine.dispose()


def test_timers_are_fired_in_the_tests_own_transaction(pipeline: Pipeline) -> None:
    with Session(pipeline.engine) as session:

        def schedule(n: int, **options: Any) -> None:
            event = RawEvent("T", {"n": n}, key="k")
            pipeline.schedule(session, "orders", event, timer_id=f"t{n}", **options)

        schedule(1, delay=timedelta(0), metadata={"tenant": "a"})
        schedule(2, at=NOON)
        schedule(3, at=NOON - AN_HOUR, every=AN_HOUR)
        (first,) = fire_timers(pipeline, session)
        assert fire_timers(pipeline, session) == []
        later = fire_timers(pipeline, session, until=NOON + AN_HOUR)
        rows = session.execute(SENT).fetchall()
        assert [row[0] for row in rows] == ["1", "3", "2", "3", "3"]
        assert [row[2] for row in rows] == [first, *later]
        assert rows[0][1]["tenant"] == "a"
        assert rows[0][1]["__timer_id__"] == "t1"
        assert rows[2][1]["__timer_due_ms__"] == int(NOON.timestamp() * 1000)
        (left,) = pipeline.pending(session)
        assert (left.timer_id, left.due_at) == ("t3", NOON + 2 * AN_HOUR)
        session.rollback()
    assert pipeline.pending() == []


def test_what_cannot_be_fired_so_is_refused(
    pipeline: Pipeline, database_url: str, tmp_path: Path
) -> None:
    vault = Vault(database_url, None, new_key_file(tmp_path))
    vault.make_confidential()
    with psycopg.connect(database_url) as connection:
        event = Admitted(patient="Ada", diagnosis="measles")
        vault.pipeline.schedule(connection, STREAM, event, at=NOON)
        with pytest.raises(UsageError, match="only a worker can fire it"):
            fire_timers(pipeline, connection, until=NOON)
        with pytest.raises(InvalidTimer, match="no time zone"):
            fire_timers(pipeline, connection, until=NOON.replace(tzinfo=None))
        assert fire_timers(pipeline, connection) == []
    vault.close()
