"""A million events archived by archivers that die at every signal, into a store that fails.

`python -m tests.archive_drill [--events N] [--seed S]`. Archivers run one after another, each armed
with a failpoint: killed at a signal, or stopped there until its successor has worked for a while.
The store speaks S3 over HTTP, behind a proxy that cuts, refuses and delays at random. Afterwards
`penstock archive verify` must find nothing, and every line must be what the outbox holds.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import psycopg
from moto.server import ThreadedMotoServer

from penstock.core.archive import object_name
from penstock.stores.archive_manifest import read_manifest
from penstock.stores.cold_tier import source_cold_tier
from penstock.stores.migrations import migrate
from penstock.stores.objects import open_store
from penstock.stores.servers import running_servers
from penstock.telemetry.failpoints import Hit
from tests.archiving import STREAM, checkpoint
from tests.failure_drill import say
from tests.proxy import Proxy
from tests.publishing import ask
from tests.waiting import wait_until

BUCKET = "drill"
URL = f"s3://{BUCKET}/archive"
COUNT_MAX = 5_000
BATCHES = 48
LIFE_SECONDS = 10.0
LEASE = {"PENSTOCK_LEASE_SECONDS": "2", "PENSTOCK_LEASE_RENEW_SECONDS": "0.5"}
AWS = {
    "AWS_ACCESS_KEY_ID": "drill",
    "AWS_SECRET_ACCESS_KEY": "drill",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
SIGNALS = (
    "ArchiveBegun",
    "ArchiveOpened",
    "ObjectPlanned",
    "ObjectStored",
    "ObjectAdopted",
    "ObjectArchived",
    "ManifestWritten",
    "ObjectSuperseded",
    "LeaseAcquired",
    "LeaseRenewed",
    "ServerLost",
    "ServerFound",
)
REPEATED = ("ObjectPlanned", "ObjectStored", "ObjectArchived", "ManifestWritten")
"""Every object has them, so that it is worth dying at a later one."""
LEASE_STATE = "SELECT term, clean FROM events.stream_lease WHERE role = 'archiver'"
GROW = """
WITH grown AS (
    UPDATE events.stream SET head = head + %(count)s WHERE name = %(stream)s
    RETURNING head - %(count)s AS base)
INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, key, payload, metadata,
                                 position, term, published_at)
SELECT gen_random_uuid(), %(stream)s, 'orders.placed', 'customer-' || n %% 1000,
       jsonb_build_object('order_id', n, 'cents', n * 7.10, 'note', md5(n::text)), '{"a": "b"}',
       base + n, 1, clock_timestamp()
  FROM grown, generate_series(1, %(count)s) AS n
"""


@dataclass
class Life:
    """An archiver's process, and what it is to die of."""

    process: subprocess.Popen[bytes]
    signal: str
    is_stopping: bool
    started_at: float

    def is_over(self) -> bool:
        """Whether it died, stands still, or has lived long enough."""
        if time.monotonic() - self.started_at > LIFE_SECONDS:
            return True
        return self.process.poll() is not None or (self.is_stopping and self._stands_still())

    def _stands_still(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat")
        return status.read_text().rpartition(")")[2].split()[0] == "T"


def grow(database_url: str, count: int) -> None:
    """More events, as a publisher would leave them."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(GROW, {"count": count, "stream": STREAM})


def trouble(proxy: Proxy, chance: random.Random, stop: threading.Event) -> None:
    """A store that is away, slow or cut off, now and then."""
    while not stop.wait(chance.uniform(0.2, 1.0)):
        match chance.randrange(4):
            case 0:
                proxy.cut()
            case 1:
                with proxy.refusing():
                    stop.wait(chance.uniform(0.1, 1.0))
            case 2:
                with proxy.swallowing_replies():
                    stop.wait(chance.uniform(0.1, 0.5))
                proxy.cut()
            case _:
                proxy.delay(0.02)
                stop.wait(0.3)
        proxy.heal()


class Drill:
    """One run."""

    def __init__(self, database_url: str, endpoint: str, folder: Path, options: argparse.Namespace):
        self._database_url = database_url
        self._endpoint = endpoint
        self._hits = folder / "hits"
        self._events: int = options.events
        self._chance = random.Random(options.seed)  # noqa: S311 - repeatable, not secret
        self._grown = 0
        self._stopped: Life | None = None
        self.lives = 0

    def run(self) -> None:
        """Archive everything, one life after the other."""
        while not self._is_done():
            count = min(-(-self._events // BATCHES), self._events - self._grown)
            if count:
                grow(self._database_url, count)
                self._grown += count
            self._live(SIGNALS[self.lives % len(SIGNALS)])
        self._wake()

    def _is_done(self) -> bool:
        return checkpoint(self._database_url) == self._events

    def _live(self, signal_name: str) -> None:
        self.lives += 1
        if signal_name == "ObjectSuperseded":
            self._leave_a_stray()
        # Every second round they stand still instead, past their lease.
        is_stopping = self.lives // len(SIGNALS) % 2 == 1
        life = self._start(signal_name, is_stopping=is_stopping)
        wait_until(
            lambda: life.is_over() or self._is_done(), what="it is over", seconds=LIFE_SECONDS * 3
        )
        self._wake()
        if is_stopping and life.process.poll() is None:
            self._stopped = life
        else:
            _end(life)

    def _wake(self) -> None:
        """Whoever stood still finds that others have gone on."""
        life, self._stopped = self._stopped, None
        if life is not None:
            life.process.send_signal(signal.SIGCONT)
            wait_until(life.is_over, what="it has woken up and been seen", seconds=LIFE_SECONDS * 2)
            _end(life)

    def _start(self, signal_name: str, *, is_stopping: bool) -> Life:
        action = "stop" if is_stopping else "kill"
        when = self._chance.randint(1, 3) if signal_name in REPEATED else 1
        environment = {
            **os.environ,
            **LEASE,
            "PENSTOCK_DATABASE_URL": self._database_url,
            "PENSTOCK_REDIS_URL": "none",
            "PENSTOCK_ARCHIVE_URL": URL,
            "PENSTOCK_ARCHIVE_COUNT_MAX": str(COUNT_MAX),
            "PENSTOCK_ARCHIVE_AGE_SECONDS": "5",
            "AWS_ENDPOINT_URL": self._endpoint,
            "PENSTOCK_FAILPOINT": f"hits={self._hits},{signal_name}:{action}:{when}",
        }
        argv = [sys.executable, "-m", "penstock", "work", "--role", "archiver"]
        process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
        return Life(process, signal_name, is_stopping, time.monotonic())

    def _leave_a_stray(self) -> None:
        """As a failover would that has lost what was archived last."""
        far = (checkpoint(self._database_url) or 0) + self._events
        open_store(URL).put(object_name(STREAM, far, far), b"lost")

    def hits(self) -> Counter[str]:
        """How often an archiver died or stood still at which signal."""
        lines = self._hits.read_text().splitlines() if self._hits.exists() else []
        return Counter(Hit.parse(line).signal for line in lines)


def _end(life: Life) -> None:
    life.process.kill()
    life.process.wait()


def compare(database_url: str) -> int:
    """How many lines are exactly what the outbox holds; every one must be."""
    tier, after = source_cold_tier(URL, STREAM), 0
    while rows := tier.read(after, COUNT_MAX):
        warm = ask(
            database_url,
            "SELECT entry_position, body FROM events.read_entries(%s, %s, %s)",
            *(STREAM, after, len(rows)),
        )
        assert rows == warm, f"the archive differs behind {after}"
        after = rows[-1][0]
    return after


@contextmanager
def store() -> Iterator[str]:
    """An empty store that speaks S3; yields its address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    os.environ.update({**AWS, "AWS_ENDPOINT_URL": endpoint})
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    try:
        yield endpoint
    finally:
        server.stop()


def run(options: argparse.Namespace, folder: Path) -> None:
    """Archive, verify, compare; raises where anything is wrong."""
    with (
        running_servers(folder / "servers", durable=False) as servers,
        store() as endpoint,
        Proxy.to(endpoint) as proxy,
    ):
        url = servers.database_url
        migrate(url)
        ask(
            url, "INSERT INTO events.stream (name, origin) SELECT %s, id FROM events.origin", STREAM
        )
        stop = threading.Event()
        chance = random.Random(options.seed)  # noqa: S311 - repeatable, not secret
        troubling = threading.Thread(target=trouble, args=(proxy, chance, stop))
        troubling.start()
        started_at = time.monotonic()
        drill = Drill(url, proxy.url(endpoint), folder, options)
        try:
            drill.run()
        finally:
            stop.set()
            troubling.join()
        seconds = time.monotonic() - started_at
        hits = drill.hits()
        say(f"{options.events:,} events archived in {seconds:.0f} s by {drill.lives} archivers")
        say(f"died or stood still: {dict(hits.most_common())}; never: {set(SIGNALS) - hits.keys()}")
        _settle(url, options.events)
        environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_ARCHIVE_URL": URL}
        command = [sys.executable, "-m", "penstock", "archive", "verify"]
        subprocess.run(command, env=environment, check=True)
        say(f"{compare(url):,} positions are byte for byte what the outbox holds")


def _settle(database_url: str, events: int) -> None:
    """One archiver that nobody disturbs: it lists what a dying one could not."""
    variables = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_ARCHIVE_URL": URL}
    argv = [sys.executable, "-m", "penstock", "work", "--role", "archiver"]
    [(term, _)] = ask(database_url, LEASE_STATE)
    process = subprocess.Popen(argv, env={**os.environ, **LEASE, **variables})
    try:
        wait_until(
            lambda: ask(database_url, LEASE_STATE)[0][0] > term and _listed_to() == events,
            what="another archiver has listed everything",
        )
    finally:
        process.terminate()
        process.wait()
    wait_until(lambda: bool(ask(database_url, LEASE_STATE)[0][1]), what="it gave its lease back")


def _listed_to() -> int:
    return read_manifest(open_store(URL), STREAM)[-1].last


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.archive_drill", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-archive-") as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
