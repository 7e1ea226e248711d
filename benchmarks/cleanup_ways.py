"""Ways to get rid of settled rows: what each costs whoever settles, and whoever cleans up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.bed import Bed

DELETE_BATCH = 1000
CLAIM_BATCH = 500
REPEATS = 60
PARTITIONS = 14
HANDLER_SECONDS = 0.5
BRIN_ROWS_MAX = 500_000

COLUMNS = """
    consumer text NOT NULL, event_uuid uuid NOT NULL, position bigint NOT NULL,
    outcome text NOT NULL CHECK (outcome IN ('handled', 'parked', 'dead', 'skipped', 'discarded')),
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (consumer, event_uuid)
"""
SOURCE = """
CREATE TABLE ways.source AS
SELECT n, (lpad(to_hex(1700000000000 + n), 12, '0') || '7' || substr(md5(n::text), 1, 3)
           || '8' || substr(md5(n::text), 4, 15))::uuid AS event_uuid
  FROM generate_series(1, %(rows)s::bigint) AS n
"""
FILL = """
INSERT INTO {table} (consumer, event_uuid, position, outcome, processed_at)
SELECT 'bench.ways', event_uuid, n, 'handled',
       now() - interval '14 days' + n * (interval '14 days' / {rows})
  FROM ways.source WHERE n <= {rows}
"""
CLAIM = """
INSERT INTO {table} (consumer, event_uuid, position, outcome)
SELECT 'bench.ways', event_uuid, n, 'handled'
  FROM ways.source WHERE n BETWEEN %(first)s AND %(last)s ORDER BY n
    ON CONFLICT DO NOTHING
"""
DELETE = """
WITH looked AS MATERIALIZED (
    SELECT ctid AS place, {key} AS key FROM {table}
     WHERE consumer >= 'bench.ways' AND {key} > %(after)s
       AND processed_at < now() - interval '7 days' AND outcome NOT IN ('parked', 'dead')
     ORDER BY {order} LIMIT %(batch)s
), pruned AS (
    DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT place FROM looked)) RETURNING 1
)
SELECT (SELECT count(*) FROM pruned), max(key::text) FROM looked
"""
# The same by age, each row locked first and stepped over where somebody else has it.
DELETE_UNLOCKED = """
WITH looked AS MATERIALIZED (
    SELECT ctid AS place FROM ways.by_age
     WHERE processed_at > %(after)s::timestamptz
       AND processed_at < now() - interval '7 days' AND outcome NOT IN ('parked', 'dead')
     ORDER BY processed_at LIMIT %(batch)s
), free AS MATERIALIZED (
    SELECT ctid AS place FROM ways.by_age WHERE ctid = ANY(ARRAY(SELECT place FROM looked))
       FOR UPDATE SKIP LOCKED
), pruned AS (
    DELETE FROM ways.by_age WHERE ctid = ANY(ARRAY(SELECT place FROM free)) RETURNING processed_at
)
SELECT count(*), max(processed_at) FROM pruned
"""
# A few rows stay for long (dead letters), the others go, and their space is used again.
REUSE = (
    "UPDATE {table} SET outcome = 'dead' WHERE position % 200 = 0 AND position <= {half}",
    "DELETE FROM {table} WHERE position <= {half} AND outcome <> 'dead'",
    "VACUUM {table}",
    """
    INSERT INTO {table} (consumer, event_uuid, position, outcome)
    SELECT 'bench.ways', gen_random_uuid(), n, 'handled' FROM generate_series(1, {half}) AS n
    """,
    "VACUUM ANALYZE {table}",
)
FIND = """
SELECT count(*) FROM (
    SELECT ctid FROM {table}
     WHERE processed_at < now() - interval '7 days' AND outcome NOT IN ('parked', 'dead')
     LIMIT 1000) AS found
"""
WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
SIZES = "SELECT pg_relation_size(%(table)s), pg_indexes_size(%(table)s)"


@dataclass(frozen=True, slots=True)
class Way:
    """A table with the index by which its old rows are found."""

    name: str
    index: str | None
    key: str
    order: str
    beginning: str

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier("ways", self.name)


WAYS = (
    Way("primary_key", None, "event_uuid", "consumer, event_uuid", "0" * 32),
    Way(
        "by_age",
        "CREATE INDEX ON {} (processed_at) WHERE outcome NOT IN ('parked', 'dead')",
        "processed_at",
        "processed_at",
        "-infinity",
    ),
    Way(
        "by_position",
        "CREATE INDEX ON {} (consumer, position)",
        "position",
        "consumer, position",
        "0",
    ),
)


def compare_ways(bed: Bed, rows: int, report: Callable[[str], None]) -> None:
    """Print what claims, deletes and drops cost at this many rows."""
    url = bed.database("cleanup_ways")
    with psycopg.connect(url, autocommit=True) as connection:
        # The processor's share is compared; the disk's would be the same for all and hide it.
        connection.execute("SET synchronous_commit = off")
        connection.execute("SET enable_seqscan = off")
        connection.execute("CREATE SCHEMA ways")
        connection.execute(SOURCE.encode(), {"rows": rows + REPEATS * CLAIM_BATCH})
        connection.execute("CREATE UNIQUE INDEX ON ways.source (n)")
        for way in WAYS:
            _make(connection, way, rows)
            report(f"{way.name} is filled")
        _make_partitions(connection, rows)
        report("partitions are filled")
        connection.execute("CHECKPOINT")
        _compare_claims(connection, rows)
        _compare_deletes(connection, rows)
        _time_a_drop(connection, url, rows)
        _time_a_reused_brin(connection, rows)


def _make(connection: psycopg.Connection[Any], way: Way, rows: int) -> None:
    connection.execute(_sql("CREATE TABLE {table} (" + COLUMNS + ")", way))
    if way.index is not None:
        connection.execute(sql.SQL(way.index).format(way.table))
    connection.execute(_sql(FILL, way, rows=sql.Literal(rows)))
    connection.execute(_sql("VACUUM ANALYZE {table}", way))


def _make_partitions(connection: psycopg.Connection[Any], rows: int) -> None:
    """A partition a day, by the range of its ids, and one for ids that are not of this kind."""
    connection.execute(
        f"CREATE TABLE ways.parted ({COLUMNS}) PARTITION BY RANGE (event_uuid)".encode()
    )
    bounds = [
        connection.execute(
            "SELECT event_uuid FROM ways.source WHERE n = %s", [1 + day * rows // PARTITIONS]
        ).fetchone()
        for day in range(PARTITIONS)
    ]
    edges = [str(bound[0]) for bound in bounds if bound] + ["01900000-0000-0000-0000-000000000000"]
    for day, (low, high) in enumerate(pairwise(edges)):
        connection.execute(
            sql.SQL("CREATE TABLE {} PARTITION OF ways.parted FOR VALUES FROM ({}) TO ({})").format(
                sql.Identifier("ways", f"day_{day}"), sql.Literal(low), sql.Literal(high)
            )
        )
    connection.execute("CREATE TABLE ways.day_none PARTITION OF ways.parted DEFAULT")
    connection.execute(
        sql.SQL(FILL).format(table=sql.Identifier("ways", "parted"), rows=sql.Literal(rows))
    )
    connection.execute("VACUUM ANALYZE ways.parted")


def _compare_claims(connection: psycopg.Connection[Any], rows: int) -> None:
    """What whoever settles pays for the index, or for the partitions."""
    tables = {way.name: way.table for way in WAYS} | {"parted": sql.Identifier("ways", "parted")}
    times: dict[str, list[float]] = {name: [] for name in tables}
    for repeat in range(REPEATS):
        first = rows + repeat * CLAIM_BATCH + 1
        for name in _rotated(list(tables), repeat):
            statement = sql.SQL(CLAIM).format(table=tables[name])
            started = time.perf_counter()
            connection.execute(statement, {"first": first, "last": first + CLAIM_BATCH - 1})
            times[name].append((time.perf_counter() - started) * 1000)
    base = median(times["primary_key"])
    for name, taken in times.items():
        heap, indexes = _sizes(connection, name)
        print(
            f"claim {CLAIM_BATCH} rows, {name}: {median(taken):.2f} ms, "
            f"{median(taken) / base:.2f} of the primary key alone; "
            f"table {heap} MB, indexes {indexes} MB"
        )


def _compare_deletes(connection: psycopg.Connection[Any], rows: int) -> None:
    """What a batch costs, by the index that finds its rows."""
    times: dict[str, list[float]] = {way.name: [] for way in WAYS}
    wal: dict[str, int] = dict.fromkeys(times, 0)
    after: dict[str, Any] = {way.name: way.beginning for way in WAYS}
    batch = min(DELETE_BATCH, rows // (4 * REPEATS))
    for _ in range(REPEATS):
        for way in WAYS:
            statement = _sql(DELETE, way, key=sql.SQL(way.key), order=sql.SQL(way.order))
            wal_before = _one(connection, WAL)
            started = time.perf_counter()
            row = connection.execute(statement, {"after": after[way.name], "batch": batch})
            deleted, last = row.fetchone() or (0, None)
            times[way.name].append((time.perf_counter() - started) * 1000)
            wal[way.name] += int(_one(connection, WAL) - wal_before)
            assert deleted == batch, f"{way.name}: {deleted} of {batch} rows"
            after[way.name] = last
    _delete_unlocked(connection, batch, after["by_age"], times, wal)
    for name, taken in times.items():
        print(
            f"delete {batch} rows, {name}: {median(taken):.2f} ms (longest {max(taken):.2f}), "
            f"{wal[name] / (batch * REPEATS):.0f} bytes of WAL a row"
        )


def _delete_unlocked(
    connection: psycopg.Connection[Any],
    batch: int,
    after: Any,
    times: dict[str, list[float]],
    wal: dict[str, int],
) -> None:
    name = "by_age with SKIP LOCKED"
    times[name] = []
    wal_before = _one(connection, WAL)
    for _ in range(REPEATS):
        started = time.perf_counter()
        row = connection.execute(DELETE_UNLOCKED.encode(), {"after": after, "batch": batch})
        deleted, after = row.fetchone() or (0, None)
        times[name].append((time.perf_counter() - started) * 1000)
        assert deleted == batch, f"{name}: {deleted} of {batch} rows"
    wal[name] = int(_one(connection, WAL) - wal_before)


def _time_a_reused_brin(connection: psycopg.Connection[Any], rows: int) -> None:
    """Pages that were freed and filled again hold old and new rows; a BRIN cannot tell them."""
    count = min(rows, BRIN_ROWS_MAX)
    brin = Way("brin", "CREATE INDEX ON {} USING brin (processed_at)", "", "", "")
    _make(connection, brin, count)
    for statement in REUSE:
        connection.execute(_sql(statement, brin, half=sql.Literal(count // 2)))
    started = time.perf_counter()
    found = connection.execute(_sql(FIND, brin)).fetchone() or (0,)
    print(
        f"find what is old by a BRIN, {count:,} rows, half of them in freed space: "
        f"{found[0]} rows in {(time.perf_counter() - started) * 1000:.1f} ms"
    )


def _time_a_drop(connection: psycopg.Connection[Any], url: str, rows: int) -> None:
    """A drop is quick, but waits for every open batch, and every claim then waits for the drop."""
    wal_before = _one(connection, WAL)
    started = time.perf_counter()
    connection.execute("DROP TABLE ways.day_0")
    print(
        f"drop a partition of {rows // PARTITIONS:,} rows, nobody at work: "
        f"{(time.perf_counter() - started) * 1000:.1f} ms, "
        f"{int(_one(connection, WAL) - wal_before):,} bytes of WAL"
    )
    with psycopg.connect(url) as handler, psycopg.connect(url, autocommit=True) as other:
        # The batch of a handler that takes its time.
        handler.execute(
            "DELETE FROM ways.parted WHERE position = -1 AND event_uuid = %s", ["f" * 32]
        )
        drop = threading.Thread(target=lambda: connection.execute("DROP TABLE ways.day_1"))
        drop.start()
        _wait_for_a_waiting_drop(other)
        release = threading.Timer(HANDLER_SECONDS, handler.rollback)
        release.start()
        started = time.perf_counter()
        other.execute(
            "INSERT INTO ways.parted (consumer, event_uuid, position, outcome)"
            " VALUES ('bench.other', gen_random_uuid(), 1, 'handled')"
        )
        waited = time.perf_counter() - started
        drop.join()
        release.join()
    print(
        f"a claim beside a drop that waits for a batch of {HANDLER_SECONDS * 1000:.0f} ms: "
        f"{waited * 1000:.0f} ms"
    )


def _wait_for_a_waiting_drop(connection: psycopg.Connection[Any]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if _one(connection, "SELECT count(*) FROM pg_locks WHERE NOT granted"):
            return
    raise RuntimeError("the drop does not wait for anybody")


def _sizes(connection: psycopg.Connection[Any], name: str) -> tuple[int, int]:
    tables = [name] if name != "parted" else [f"day_{day}" for day in range(PARTITIONS)]
    sizes = [
        connection.execute(SIZES.encode(), {"table": f"ways.{table}"}).fetchone() or (0, 0)
        for table in tables
    ]
    return sum(size[0] for size in sizes) >> 20, sum(size[1] for size in sizes) >> 20


def _sql(text: str, way: Way, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(text).format(table=way.table, **parts)


def _one(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def _rotated(names: Sequence[str], by: int) -> Sequence[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]
