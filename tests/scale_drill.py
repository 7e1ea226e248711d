"""A hundred streams with ten consumers each: how long `penstock status` and a scrape take.

`python -m tests.scale_drill [--streams N] [--consumers N] [--runs N]` fills the books as if all of
them had been at work for a while: some are behind, some have parked events and dead letters. Of
status, the command as people type it is timed, and its answer alone, without the start of Python. A
scrape is told over HTTP what the
servers say, asked anew, and what the workers of all consumers have counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import psycopg
import redis

from benchmarks.bed import Bed, made_bed
from penstock.cli.telling import pipeline_parts
from penstock.core.settings import Settings
from penstock.ops.metrics_state import MetricsState
from penstock.ops.status import read_status
from penstock.runtime.health import GroupReport
from penstock.runtime.health_server import HealthServer
from penstock.runtime.state_cache import StateCache
from penstock.stores.hot_log_keys import log_key
from penstock.stores.postgres import connect
from penstock.telemetry import metrics
from penstock.telemetry.meters import Sums
from penstock.telemetry.metrics import Kind
from tests.failure_drill import say
from tests.machine import say_load

STATUS_SECONDS_MAX = 1.0
BETWEEN_SECONDS = 6.5
SCRAPE_SECONDS_MAX = 0.2
EVENTS_PER_STREAM = 1000
FILL = (
    """
INSERT INTO events.outbox_event
       (event_uuid, stream_name, event_type, key, payload, position, term, published_at)
SELECT gen_random_uuid(), 'stream-' || s, 'placed', 'k' || n %% 50, '{}', n, 1, now()
  FROM generate_series(1, %(streams)s) AS s, generate_series(1, %(events)s) AS n
""",
    """
INSERT INTO events.stream (name, origin, head, published)
SELECT 'stream-' || s, gen_random_uuid(), %(events)s, %(events)s
  FROM generate_series(1, %(streams)s) AS s
""",
    """
INSERT INTO events.consumer (name, stream_name, start_position)
SELECT 'shop.consumer-' || s || '-' || c, 'stream-' || s, 1
  FROM generate_series(1, %(streams)s) AS s, generate_series(1, %(consumers)s) AS c
""",
    """
INSERT INTO events.stream_lease (stream_name, role, owner_id, worker_id, term, lease_until,
                                 checkpoint)
SELECT stream_name, 'consumer:' || name, 'owner', 'worker', 1, now() + '1 h'::interval,
       (%(events)s * random())::bigint
  FROM events.consumer
""",
    """
INSERT INTO events.worker (consumer, worker_id, host, pid, alive_until)
SELECT name, 'worker', 'host', 1, now() + '1 h'::interval FROM events.consumer
""",
    """
INSERT INTO events.parked_event
       (consumer, stream_name, position, event_uuid, key_hash, entry, next_attempt_at)
SELECT c.name, c.stream_name, n, gen_random_uuid(), n %% 5, '', now()
  FROM events.consumer c, generate_series(1, 20) AS n WHERE c.name LIKE '%%-1'
""",
    """
INSERT INTO events.dead_letter (consumer, stream_name, position, event_uuid, event_type, version,
                                key_hash, entry, reason)
SELECT c.name, c.stream_name, n, gen_random_uuid(), 'placed', 1, n, '', 'fatal'
  FROM events.consumer c, generate_series(1, 20) AS n WHERE c.name LIKE '%%-2'
""",
    "ANALYZE",
)


def fill(settings: Settings, streams: int, consumers: int) -> None:
    """Write the books and the hot logs of a pipeline of this size."""
    numbers = {"streams": streams, "consumers": consumers, "events": EVENTS_PER_STREAM}
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        for statement in FILL:
            connection.execute(statement.encode(), numbers)
    assert settings.redis_url is not None
    with redis.Redis.from_url(settings.redis_url) as client, client.pipeline(False) as pipe:
        for number in range(1, streams + 1):
            for position in range(1, EVENTS_PER_STREAM + 1, 10):
                pipe.xadd(
                    log_key(settings.redis_prefix, f"stream-{number}"),
                    {"e": "x" * 200},
                    id=f"{position}-0",
                )
        pipe.execute()


def counted(streams: int, consumers: int) -> Sums:
    """What the workers of all consumers would have counted."""
    sums = Sums()
    for stream in range(1, streams + 1):
        for number in range(1, consumers + 1):
            labels = (f"shop.consumer-{stream}-{number}", f"stream-{stream}")
            for instrument in metrics.FROM_SIGNALS:
                if instrument.labels != metrics.CONSUMER:
                    continue
                if instrument.kind is Kind.COUNTER:
                    sums.count(instrument, labels, stream * number)
                else:
                    sums.observe(instrument, labels, 0.001 * number)
    return sums


@contextmanager
def served(settings: Settings, sums: Sums) -> Iterator[str]:
    """The endpoint of a supervisor; yields its address."""
    state = MetricsState(settings)
    cache = StateCache(state.read, state.close)
    with ExitStack() as stack:
        stack.callback(cache.close)
        server = HealthServer(
            "127.0.0.1",
            0,
            lambda: GroupReport(time.monotonic(), (), (), 0, time.monotonic()),
            more=lambda: pipeline_parts(cache, sums),
        )
        stack.callback(server.close)
        yield f"http://127.0.0.1:{server.port}/metrics"


def scrape(url: str) -> tuple[float, int]:
    """How long one took, and how many lines it gave."""
    began_at = time.perf_counter()
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own server
        said = answer.read()
    return time.perf_counter() - began_at, said.count(b"\n")


def run_command(settings: Settings, *words: str) -> float:
    """How long a command took, as people type it."""
    assert settings.redis_url is not None
    environment = {
        **os.environ,
        "PENSTOCK_DATABASE_URL": settings.database_url,
        "PENSTOCK_REDIS_URL": settings.redis_url,
    }
    began_at = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    return time.perf_counter() - began_at


def ask_status(settings: Settings) -> float:
    """How long connecting, asking and writing it down took."""
    began_at = time.perf_counter()
    with connect(settings.database_url, "penstock scale drill") as connection:
        json.dumps(read_status(connection, settings.schema).as_json(), default=str)
    return time.perf_counter() - began_at


def report(what: str, taken: list[float], limit_seconds: float) -> bool:
    """Say it; returns whether the median is within the limit."""
    is_kept = median(taken) < limit_seconds
    say(
        f"{what}: median {median(taken) * 1000:.0f} ms, from {min(taken) * 1000:.0f} to "
        f"{max(taken) * 1000:.0f} ms; limit {limit_seconds * 1000:.0f} ms: "
        f"{'kept' if is_kept else 'NOT kept'}"
    )
    return is_kept


def drill(bed: Bed, streams: int, consumers: int, runs: int) -> bool:
    """Fill, measure, and say; returns whether both limits were kept."""
    settings = Settings(database_url=bed.database("scale"), redis_url=bed.redis_url)
    fill(settings, streams, consumers)
    say(f"{streams} streams with {consumers} consumers and {EVENTS_PER_STREAM} events each")
    times = range(runs)
    starts = [run_command(settings, "--help") for _ in times]
    say(f"starting Python with everything imported: median {median(starts) * 1000:.0f} ms")
    taken = [run_command(settings, "status", "--json") for _ in times]
    is_kept = report("`penstock status`, its start included", taken, STATUS_SECONDS_MAX)
    report("its answer", [ask_status(settings) for _ in times], STATUS_SECONDS_MAX)
    sums = counted(streams, consumers)
    with served(settings, sums) as url:
        # Connections are opened once in a supervisor's life.
        _, lines = scrape(url)
        taken = []
        for _ in times:
            threading.Event().wait(BETWEEN_SECONDS)
            taken.append(scrape(url)[0])
    say(f"a scrape has {lines:,} lines")
    what = f"scrape, {BETWEEN_SECONDS:g} s after the one before"
    return report(what, taken, SCRAPE_SECONDS_MAX) and is_kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scale_drill", description=__doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--consumers", type=int, default=10)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    say_load()
    with made_bed(durable=False) as bed:
        is_kept = drill(bed, options.streams, options.consumers, options.runs)
    say_load()
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
