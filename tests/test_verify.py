"""`penstock verify`: books that balance are found so, and every single damage is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import sql

from penstock.core import verification
from penstock.core.books import Anomaly, ConsumerBooks
from penstock.core.settings import Settings
from penstock.errors import UsageError
from penstock.ops.verify import Report, Verify
from penstock.stores.postgres import connect
from penstock.stores.servers import Servers
from tests import honest_run
from tests.databases import name_of, new_database
from tests.honest_run import BILL, LATE, SHIP

Connection = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def told_once(servers: Servers, template_database: str) -> Iterator[str]:
    """A database with an honest history."""
    with new_database(servers.database_url, template_database) as url:
        honest_run.tell(url)
        with psycopg.connect(url) as connection:
            connection.execute(honest_run.SAVE.encode())
        yield url


@pytest.fixture
def honest(told_once: str) -> Iterator[str]:
    """The same for every test, whatever the one before has done to it."""
    yield told_once
    with psycopg.connect(told_once) as connection:
        connection.execute(honest_run.RESTORE.encode())


def verified(database_url: str, window_events: int = 4, **asked: Any) -> Report:
    """With windows so small that much lies at their borders."""
    settings = Settings(database_url=database_url)
    with closing(connect(database_url, "verify")) as connection:
        return Verify(connection, settings, window_events=window_events).run(**asked)


def told(report: Report) -> str:
    return "\n".join(map(str, report.findings))


def test_an_honest_run_balances_and_every_position_is_counted_once(honest: str) -> None:
    for window_events in (1, 2, 5, 1000):
        report = verified(honest, window_events)
        assert report.balance, told(report)
        (stream,) = report.streams
        assert (stream.head, stream.proved_from, stream.holes) == (honest_run.HEAD, 5, 25)
        assert stream.consumers == (
            ConsumerBooks(
                name=BILL,
                due=21,
                handled=4,
                passed=4,
                parked=5,
                dead=2,
                pending=3,
                pruned=3,
                holes=25,
            ),
            ConsumerBooks(
                name=LATE,
                due=14,
                handled=2,
                passed=3,
                parked=0,
                dead=0,
                pending=9,
                before=7,
                holes=25,
            ),
            ConsumerBooks(
                name=SHIP,
                due=21,
                handled=12,
                passed=3,
                parked=0,
                dead=0,
                pending=0,
                pruned=6,
                holes=25,
            ),
        )


def test_one_stream_or_one_consumer_is_looked_at_alone(honest: str) -> None:
    with psycopg.connect(honest) as connection:
        connection.execute(
            "DELETE FROM events.processed_event WHERE consumer = %s AND position = 7", (SHIP,)
        )
    (stream,) = verified(honest, consumer="bill").streams
    assert [books.name for books in stream.consumers] == [BILL]
    assert verified(honest, consumer=BILL).balance
    assert not verified(honest, consumer="ship", stream_name="orders").balance
    with pytest.raises(UsageError, match="no stream 'order'; there are: orders"):
        verified(honest, stream_name="order")


def test_nothing_at_all_balances(database_url: str) -> None:
    report = verified(database_url)
    assert report.balance
    assert report.streams == ()


READING = """
CREATE ROLE {0};
GRANT USAGE ON SCHEMA events TO {0};
GRANT SELECT ON ALL TABLES IN SCHEMA events TO {0};
REVOKE SELECT ON events.mac_key FROM {0};
"""


def test_a_role_that_may_only_read_is_enough_and_needs_no_secrets(honest: str) -> None:
    role = sql.Identifier(f"reader_{name_of(honest)}")
    with psycopg.connect(honest, autocommit=True) as connection:
        connection.execute(sql.SQL(READING).format(role))
        try:
            with closing(connect(honest, "verify")) as reading:
                reading.execute(sql.SQL("SET ROLE {}").format(role))
                assert Verify(reading, Settings(database_url=honest)).run().balance
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


# ── every damage has a name ────────────────────────────────────────────────────────────────────

UNACCOUNTED, PHANTOM, SKIPPED, LOST, REORDERED = (
    *(Anomaly.UNACCOUNTED, Anomaly.PHANTOM, Anomaly.SKIPPED, Anomaly.LOST, Anomaly.REORDERED),
)
A_LETTER = """
    INSERT INTO events.dead_letter (consumer, stream_name, position, event_uuid, event_type,
                                    version, key_hash, entry, reason)
    SELECT 'test.bill', 'orders', position, event_uuid, 'placed', 1, 7, '', 'fatal'
      FROM events.processed_event WHERE consumer = 'test.bill' AND position = 7"""
A_PARKED_ROW = """
    INSERT INTO events.parked_event (consumer, stream_name, position, event_uuid, key_hash, entry,
                                     next_attempt_at)
    SELECT 'test.ship', 'orders', position, event_uuid, 7, '', now()
      FROM events.outbox_event WHERE position = 7"""
SWAPPED = """
    UPDATE events.outbox_event SET position = 1000 WHERE position = 7;
    UPDATE events.outbox_event SET position = 7 WHERE position = 10;
    UPDATE events.outbox_event SET position = 10 WHERE position = 1000;
    UPDATE events.processed_event p SET position = o.position
      FROM events.outbox_event o WHERE o.event_uuid = p.event_uuid"""
ELSEWHERE = """
    DELETE FROM events.stream; DELETE FROM events.hole; DELETE FROM events.outbox_event;
    INSERT INTO events.source (stream_name, head) VALUES ('orders', 12)"""
A_ROW = "INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, payload, position)"

DAMAGES: dict[str, tuple[str, str, Anomaly, str]] = {
    "a settled row is gone": (
        "DELETE FROM events.processed_event WHERE consumer = 'test.ship' AND position = 9",
        *(SHIP, SKIPPED, "at 9, checkpoint 46"),
    ),
    "an event is gone": (
        "DELETE FROM events.outbox_event WHERE position = 9",
        *("the outbox of orders", UNACCOUNTED, "position 9 has no row"),
    ),
    "what was settled was never sent": (
        "DELETE FROM events.outbox_event WHERE position = 9",
        *(SHIP, PHANTOM, "is handled at 9, and was never sent"),
    ),
    "many events are gone": (
        "DELETE FROM events.outbox_event WHERE position BETWEEN 7 AND 14",
        *("the outbox of orders", UNACCOUNTED, "UNACCOUNTED 8 in"),
    ),
    "the last events are gone": (
        "DELETE FROM events.outbox_event WHERE position >= 45",
        *("the outbox of orders", UNACCOUNTED, "45..46 have no row"),
    ),
    "a position is given out twice": (
        (
            "DROP INDEX events.outbox_event_position;"
            f"{A_ROW} VALUES (gen_random_uuid(), 'orders', 'placed', '{{}}', 9)"
        ),
        *("the outbox of orders", UNACCOUNTED, "position 9 was given out 2 times"),
    ),
    "an event lies beyond the head": (
        f"{A_ROW} VALUES (gen_random_uuid(), 'orders', 'placed', '{{}}', 47)",
        *("the outbox of orders", UNACCOUNTED, "position 47 has a row, but the head is 46"),
    ),
    "an event lies in a hole": (
        f"{A_ROW} VALUES (gen_random_uuid(), 'orders', 'placed', '{{}}', 20)",
        *("the outbox of orders", UNACCOUNTED, "position 20 has a row and lies in the hole 16..40"),
    ),
    "holes overlap": (
        "INSERT INTO events.hole VALUES ('orders', 40, 40, 'another')",
        *("the outbox of orders", UNACCOUNTED, "the hole 40..40 overlaps"),
    ),
    "a hole goes beyond the head": (
        "INSERT INTO events.hole VALUES ('orders', 47, 50, 'another')",
        *("the outbox of orders", UNACCOUNTED, "47..50 goes beyond the head 46"),
    ),
    "the hole is forgotten": (
        "DELETE FROM events.hole",
        *("the outbox of orders", UNACCOUNTED, "positions 16..40 have no row"),
    ),
    "something is settled in a hole": (
        "INSERT INTO events.processed_event VALUES ('test.ship', gen_random_uuid(), 20, 'handled')",
        *(SHIP, UNACCOUNTED, "is handled at 20, in the hole 16..40"),
    ),
    "something is settled beyond the head": (
        "INSERT INTO events.processed_event VALUES ('test.ship', gen_random_uuid(), 99, 'handled')",
        *(SHIP, PHANTOM, "is handled at 99, beyond the head 46"),
    ),
    "more is published than there is": (
        "UPDATE events.stream SET published = 47",
        *("the outbox of orders", UNACCOUNTED, "published up to 47, beyond the head 46"),
    ),
    "a key is out of order": (
        SWAPPED,
        *("the outbox of orders", REORDERED, "of k1) comes after"),
    ),
    "a checkpoint lies beyond the head": (
        "UPDATE events.stream_lease SET checkpoint = 47 WHERE role LIKE 'consumer:test.ship%'",
        *(SHIP, UNACCOUNTED, "the checkpoint 47 of lane 0 lies beyond the head 46"),
    ),
    "a checkpoint went back": (
        "UPDATE events.stream_lease SET checkpoint = 11 WHERE role = 'consumer:test.bill'",
        *(BILL, UNACCOUNTED, "is settled ahead of the checkpoint 11"),
    ),
    "what is pending was pruned": (
        "UPDATE events.stream_lease SET checkpoint = 2 WHERE role = 'consumer:test.bill'",
        *(BILL, LOST, "its checkpoint is 2, and the outbox begins at 5"),
    ),
    "a parked row is gone": (
        "DELETE FROM events.parked_event WHERE consumer = 'test.bill' AND position = 9",
        *(BILL, UNACCOUNTED, "is parked and not among the parked events"),
    ),
    "a parked row is gone where the outbox is pruned": (
        (
            "DELETE FROM events.parked_event WHERE consumer = 'test.bill' AND position = 3;"
            "UPDATE events.parked_event SET next_attempt_at = now()"
        ),
        *(BILL, UNACCOUNTED, "is parked at 3 and not among the parked events"),
    ),
    "a parked row that nobody settled": (
        A_PARKED_ROW,
        *(SHIP, UNACCOUNTED, "is handled and also among the parked events"),
    ),
    "a parked row is of another key": (
        "UPDATE events.parked_event SET key_hash = 7 WHERE position = 12",
        *(BILL, UNACCOUNTED, "is parked under another key"),
    ),
    "a key that nobody will ever try": (
        "UPDATE events.parked_event SET next_attempt_at = NULL",
        *(BILL, UNACCOUNTED, "nobody will ever try it"),
    ),
    "a letter is gone": (
        "DELETE FROM events.dead_letter WHERE consumer = 'test.bill' AND position = 8",
        *(BILL, UNACCOUNTED, "is dead and has no letter"),
    ),
    "a letter is gone where the outbox is pruned": (
        "DELETE FROM events.dead_letter WHERE consumer = 'test.bill' AND position = 2",
        *(BILL, UNACCOUNTED, "is dead at 2 and has no letter"),
    ),
    "a letter of an event that is not dead": (
        A_LETTER,
        *(BILL, UNACCOUNTED, "is handled and has a letter"),
    ),
    "a dead event is not settled": (
        "DELETE FROM events.processed_event WHERE consumer = 'test.bill' AND position = 8",
        *(BILL, UNACCOUNTED, "at 8 was set aside and is not settled"),
    ),
    "a dead event is not settled where the outbox is pruned": (
        "DELETE FROM events.processed_event WHERE consumer = 'test.bill' AND position = 2",
        *(BILL, UNACCOUNTED, "at 2 was set aside and is not settled"),
    ),
    "it was settled at another position": (
        (
            "UPDATE events.processed_event SET position = 11"
            " WHERE consumer = 'test.ship' AND position = 9"
        ),
        *(SHIP, UNACCOUNTED, "stands at 9 and was settled at 11"),
    ),
    "it was settled before the start": (
        (
            "INSERT INTO events.processed_event SELECT 'test.late', event_uuid, 7, 'handled'"
            "  FROM events.outbox_event WHERE position = 7"
        ),
        *(LATE, UNACCOUNTED, "is handled and before its start"),
    ),
    "nobody sought": (
        "DELETE FROM events.seek",
        *(LATE, SKIPPED, "at 10, checkpoint 12"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named(honest: str, damage: str) -> None:
    query, where, anomaly, text = DAMAGES[damage]
    with psycopg.connect(honest) as connection:
        connection.execute(query.encode())
    report = verified(honest)
    named = [
        str(each) for each in report.findings if (each.where, each.anomaly) == (where, anomaly)
    ]
    assert len(named) == 1, told(report)
    assert text in named[0]


def test_the_order_of_keys_is_kept_in_mind_from_window_to_window_and_bounded(
    honest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(honest) as connection:
        connection.execute(SWAPPED.encode())
    assert not verified(honest, window_events=1).balance
    monkeypatch.setattr(verification, "KEYS_MAX", 1)
    assert verified(honest, window_events=1).streams


def test_a_hole_may_be_huge(honest: str) -> None:
    far = 10**15
    with psycopg.connect(honest) as connection:
        connection.execute("INSERT INTO events.hole VALUES ('orders', 47, %s, 'far')", (far,))
        connection.execute("UPDATE events.stream SET head = %s", (far,))
    report = verified(honest)
    assert report.balance, told(report)
    assert report.streams[0].holes == far - 47 + 1 + 25
    with psycopg.connect(honest) as connection:
        connection.execute("DELETE FROM events.hole WHERE last = %s", (far,))
    assert f"positions 47..{far} have no row" in told(verified(honest))


def test_of_a_stream_of_another_database_only_what_was_set_aside_is_compared(honest: str) -> None:
    with psycopg.connect(honest) as connection:
        connection.execute(ELSEWHERE.encode())
    report = verified(honest)
    assert report.balance, told(report)
    (stream,) = report.streams
    assert stream.is_foreign
    assert [(books.parked, books.dead) for books in stream.consumers] == [(5, 2), (0, 0), (0, 0)]
    with psycopg.connect(honest) as connection:
        connection.execute("DELETE FROM events.dead_letter WHERE position = 8")
        connection.execute("DELETE FROM events.processed_event WHERE position = 9")
    said = told(verified(honest))
    assert "is dead at 8 and has no letter" in said
    assert "at 9 was set aside and is not settled" in said
