"""What is done to PostgreSQL: the servers, single backends, and rows that others wait for."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, LiteralString

import psycopg

from tests.chaos.postgres_pair import OWN_NAME, connected
from tests.chaos.scene import Fault, Scene, fault, mend, some

POSTGRES = "postgres"
ROW = "row"
CRASH_SECONDS = (0.0, 0.6)
FREEZE_SECONDS = (0.1, 1.2)
LOCK_SECONDS = (0.1, 1.5)
TRANSACTION_SECONDS = (1.0, 4.0)

BACKENDS: LiteralString = """
SELECT pid, application_name FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND application_name <> %s AND datname = current_database()
 ORDER BY application_name, backend_start
"""
STREAMS: LiteralString = "SELECT name FROM events.stream ORDER BY name"
LOCK_STREAM: LiteralString = "SELECT 1 FROM events.stream WHERE name = %s FOR UPDATE"
LEASES: LiteralString = """
SELECT stream_name, role FROM events.stream_lease
 WHERE lease_until > clock_timestamp() ORDER BY stream_name, role
"""
LOCK_LEASE: LiteralString = """
SELECT 1 FROM events.stream_lease WHERE stream_name = %s AND role = %s FOR UPDATE
"""
# Nobody waits for long when a fault is late itself.
PATIENCE: LiteralString = "SET lock_timeout = '2s'"


@fault("postgres-crashed", takes=POSTGRES, weight=1.0)
def postgres_crashed(scene: Scene, chance: random.Random) -> str | None:
    """The server ends without a checkpoint and recovers."""
    duration = chance.uniform(*CRASH_SECONDS)
    postgres = scene.world.postgres
    if not postgres.is_up:
        return None
    postgres.crash()
    try:
        scene.wait(duration)
    finally:
        mend(postgres.restart, what="PostgreSQL runs again")
    return f"PostgreSQL crashed and was away for {duration:.2f} s"


@fault("postgres-failed-over", takes=POSTGRES, weight=0.4)
def postgres_failed_over(scene: Scene, _chance: random.Random) -> str | None:
    """The primary is lost and the synchronous standby takes over, on a new timeline."""
    if not scene.world.postgres.fail_over():
        return None
    return f"PostgreSQL failed over for the {scene.world.postgres.failovers}. time"


@fault("postgres-frozen", takes=POSTGRES, weight=0.7)
def postgres_frozen(scene: Scene, chance: random.Random) -> str | None:
    """Every process of the primary stands still."""
    return _frozen(scene, chance, "primary")


@fault("standby-frozen", takes=POSTGRES, weight=0.7)
def standby_frozen(scene: Scene, chance: random.Random) -> str | None:
    """Nobody confirms commits for a while, so that each waits in the middle."""
    return _frozen(scene, chance, "standby")


def _frozen(scene: Scene, chance: random.Random, which: str) -> str | None:
    duration = chance.uniform(*FREEZE_SECONDS)
    if not scene.world.postgres.freeze(which):
        return None
    try:
        scene.wait(duration)
    finally:
        scene.world.postgres.thaw()
    return f"the {which} of PostgreSQL stood still for {duration:.2f} s"


@fault("backend-terminated", weight=2.5)
def backend_terminated(scene: Scene, chance: random.Random) -> str | None:
    """An administrator ends one connection."""
    with connected(scene.world.direct_database_url) as connection:
        target = some(chance, connection.execute(BACKENDS, [OWN_NAME]).fetchall())
        if target is None:
            return None
        pid, name = target
        ended = connection.execute("SELECT pg_terminate_backend(%s)", [pid]).fetchone()
    return f"backend {pid} of {name or 'a sender'} ended" if ended == (True,) else None


@fault("stream-row-locked", takes=ROW, weight=0.8)
def stream_row_locked(scene: Scene, chance: random.Random) -> str | None:
    """Somebody holds the row that numbering needs."""
    return _locked(scene, chance, STREAMS, LOCK_STREAM)


@fault("lease-row-locked", takes=ROW, weight=0.8)
def lease_row_locked(scene: Scene, chance: random.Random) -> str | None:
    """Somebody holds the row that a lease is renewed on."""
    return _locked(scene, chance, LEASES, LOCK_LEASE)


def _locked(
    scene: Scene, chance: random.Random, rows: LiteralString, lock: LiteralString
) -> str | None:
    duration = chance.uniform(*LOCK_SECONDS)
    with connected(scene.world.direct_database_url) as connection:
        row = some(chance, connection.execute(rows).fetchall())
        connection.execute(PATIENCE)
        if row is None or not _hold(scene, connection, lock, row, duration):
            return None
    return f"the row of {' '.join(row)} locked for {duration:.2f} s"


def _hold(
    scene: Scene,
    connection: psycopg.Connection[Any],
    lock: LiteralString,
    row: tuple[Any, ...],
    seconds: float,
) -> bool:
    is_held = False
    # A server that goes away meanwhile lets go of the row, too.
    with suppress(psycopg.Error), connection.transaction(force_rollback=True):
        is_held = connection.execute(lock, row).fetchone() is not None
        if is_held:
            scene.wait(seconds)
    return is_held


@fault("transaction-left-open", takes="transaction", weight=0.8)
def transaction_left_open(scene: Scene, chance: random.Random) -> str | None:
    """An early transaction id and an old snapshot stay in use: nothing behind them is finished.

    The senders are those who send early and commit late; this is somebody else.
    """
    duration = chance.uniform(*TRANSACTION_SECONDS)
    with connected(scene.world.direct_database_url) as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT pg_current_xact_id(), count(*) FROM events.stream")
        scene.wait(duration)
    return f"a transaction left open for {duration:.2f} s"


FAULTS: tuple[Fault, ...] = (
    postgres_crashed,
    postgres_failed_over,
    postgres_frozen,
    standby_frozen,
    backend_terminated,
    stream_row_locked,
    lease_row_locked,
    transaction_left_open,
)
