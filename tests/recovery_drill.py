"""Faults under a steady load, one after the other, and how soon the next event is handled.

`python -m tests.recovery_drill [--runs N] [--only NAME] [--no-spare] [--quick]` runs `penstock run`
with every setting at its default, on servers that keep what they are told, sends a few hundred
events a second, and strikes. Of each fault it tells the time from its clock's start to the commit
of the first event that was *sent after* that moment, by the database's commit timestamps; and how
long there was no commit at all. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
import redis

from penstock.core.settings import Settings
from penstock.stores.configuration import PREFIX
from penstock.stores.migrations import migrate
from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey
from tests.failure_drill import say
from tests.fleet import Host, send
from tests.line import SETTINGS, Line, create_tables, running_line
from tests.machine import say_load
from tests.recovery_app import CONSUMER, FULL_NAME
from tests.waiting import wait_until
from tests.workload import STREAM, Sender

RUNS = 7
SENDERS = 2
PAUSE_SECONDS = 0.015
"""Between two transactions of a sender; each has three events or so."""
SETTLE_SECONDS = 3.0
"""For so long events flow before the next fault: whoever was replaced has a spare again."""
DOWN_SECONDS = 6.0
"""So long that the pauses between attempts to reach a server have become as long as they get."""
CHILDREN = 2
"""A publisher and a consumer; beside them a spare."""
CATCH_UP_SECONDS = 120.0
LOG = f"penstock:{{{STREAM}}}:log"
APP = "tests.recovery_app:pipeline"
WORKER = "SELECT pid FROM events.worker WHERE consumer = %s AND alive_until > clock_timestamp()"
PUBLISHER = """
SELECT split_part(owner_id, '-', -2)::int FROM events.stream_lease
 WHERE role = 'publisher' AND lease_until > clock_timestamp()
"""
IS_HANDLED = """
SELECT EXISTS (SELECT FROM effect e JOIN events.outbox_event o USING (event_uuid)
                WHERE e.number > %s AND o.created_at > %s)
"""
# What a transaction wrote is there from its commit on, not from the statement on.
WHAT_CAME = """
WITH came AS (
    SELECT pg_xact_commit_timestamp(e.xmin) AS committed_at, o.created_at
      FROM effect e JOIN events.outbox_event o USING (event_uuid) WHERE e.number >= %s
), gaps AS (
    SELECT committed_at - lag(committed_at) OVER (ORDER BY committed_at) AS gap FROM came
)
SELECT extract(epoch FROM min(committed_at) FILTER (WHERE created_at > %s) - %s)::float,
       (SELECT extract(epoch FROM max(gap)) FROM gaps)::float,
       extract(epoch FROM max(committed_at - created_at) FILTER (WHERE committed_at > %s))::float
  FROM came
"""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one fault cost, in seconds."""

    next_event: float
    """From the clock's start to the commit of the first event that was sent after it."""
    gap: float
    """The longest time without any commit of the consumer."""
    wait: float
    """The longest time from an event's INSERT to the commit of its effect."""
    hot_log: float
    """From the clock's start until the hot log holds what had been numbered by then."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done, what its clock starts at, and how soon the next event must be handled."""

    name: str
    clock: str
    at_most: float
    strike: Callable[[Scene], datetime]


class Scene:
    """Real servers, a supervisor with its workers, senders; everything that may be struck."""

    def __init__(
        self,
        line: Line,
        host: Host,
        postgres: EmbeddedPostgres,
        valkey: EmbeddedValkey,
        kept: Path,
        *,
        has_spare: bool,
    ) -> None:
        self.line = line
        self.host = host
        self.down_seconds = DOWN_SECONDS
        self.has_spare = has_spare
        self._postgres = postgres
        self._valkey = valkey
        self._kept = kept

    # ── faults ────────────────────────────────────────────────────────────────────────────────

    def do_nothing(self) -> datetime:
        return now()

    def kill_worker(self) -> datetime:
        return self._kill(WORKER, FULL_NAME)

    def kill_publisher(self) -> datetime:
        return self._kill(PUBLISHER)

    def _kill(self, query: str, *parameters: str) -> datetime:
        pid = self.line.value(query, *parameters)
        assert pid in self.host.workers(), f"{pid} is not one of {self.host.workers()}"
        clock = now()
        send(pid, signal.SIGKILL)
        return clock

    def flush(self) -> datetime:
        with self.line.client() as client:
            client.flushall()
        return now()

    def restart_redis(self) -> datetime:
        self._valkey.crash()
        wait(self.down_seconds)
        self._valkey.start()
        return now()

    def restart_redis_empty(self) -> datetime:
        self._valkey.crash()
        shutil.rmtree(self._kept)
        wait(self.down_seconds)
        self._valkey.start()
        return now()

    def crash_postgres(self) -> datetime:
        self._postgres.crash()
        self._postgres.start()
        return now()

    def take_postgres_away(self) -> datetime:
        self._postgres.crash()
        wait(self.down_seconds)
        self._postgres.start()
        return now()

    # ── measuring ─────────────────────────────────────────────────────────────────────────────

    def measure(self, fault: Fault) -> Recovery:
        """Strike once the line flows, and look at what was committed since."""
        self.wait_until_steady()
        before = self.line.value("SELECT max(number) FROM effect")
        begun = now()
        clock = fault.strike(self)
        hot_log = self._seconds_until_hot(clock)
        self._wait_until_handled(before, clock)
        self.wait_until_steady()
        ((next_event, gap, waited),) = self._ask(WHAT_CAME, before, clock, clock, begun)
        return Recovery(next_event, gap, waited, hot_log)

    def wait_until_steady(self) -> None:
        """Everybody is there, and events that are sent from now on are handled, for a while."""
        wait_until(self._is_complete, what=lambda: f"all are there\n{self.host.tail()}")
        ((last,),) = self._ask("SELECT coalesce(max(number), 0) FROM effect")
        wait(SETTLE_SECONDS)
        self._wait_until_handled(last, now())

    def _is_complete(self) -> bool:
        """A spare counts when it waits for its role: until then it is importing."""
        workers = self.host.workers()
        waiting = [pid for pid in workers if "pipe_read" in Path(f"/proc/{pid}/wchan").read_text()]
        return len(workers) == CHILDREN + self.has_spare and len(waiting) == self.has_spare

    def _wait_until_handled(self, after: int, since: datetime) -> None:
        wait_until(
            lambda: self._ask(IS_HANDLED, after, since) == [(True,)],
            what=lambda: f"an event sent after {since} is handled\n{self.host.tail()}",
        )

    def _seconds_until_hot(self, clock: datetime) -> float:
        ((head,),) = self._ask("SELECT head FROM events.stream")
        with self.line.client() as client:
            wait_until(
                lambda: _last(client) >= head, what=lambda: f"the hot log\n{self.host.tail()}"
            )
        return (now() - clock).total_seconds()

    def _ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Ask a server that may have been restarted since."""
        with suppress(psycopg.OperationalError):
            return self.line.ask(query, *parameters)
        return self.line.ask(query, *parameters)


FAULTS = (
    # What the machine itself costs: where this is much, the others tell little.
    Fault("nothing", "at any moment", 1.0, Scene.do_nothing),
    Fault("worker", "its SIGKILL", 2.0, Scene.kill_worker),
    Fault("publisher", "its SIGKILL", 2.0, Scene.kill_publisher),
    Fault("flushall", "its reply", 2.0, Scene.flush),
    Fault("redis-empty", "commands are accepted", 3.0, Scene.restart_redis_empty),
    Fault("redis-with-data", "commands are accepted", 3.0, Scene.restart_redis),
    Fault("postgres", "connections are accepted", 5.0, Scene.crash_postgres),
    Fault("postgres-away", "connections are accepted", 5.0, Scene.take_postgres_away),
)


def now() -> datetime:
    """The clock of this machine, which is the servers' too."""
    return datetime.now(UTC)


def wait(seconds: float) -> None:
    """Let time pass: it is what is wanted here, not what is waited for."""
    threading.Event().wait(seconds)


def _last(client: redis.Redis) -> int:
    entries: Any = client.xrevrange(LOG, count=1)
    return int(entries[0][0].split(b"-")[0]) if entries else 0


@contextmanager
def sending(line: Line) -> Iterator[None]:
    """A few hundred events a second meanwhile, whatever happens to the servers."""
    stop = threading.Event()

    def feed(sender: Sender) -> None:
        while not stop.wait(PAUSE_SECONDS):
            sender.send()

    senders = [line.sender(seed) for seed in range(SENDERS)]
    threads = [threading.Thread(target=feed, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def opened_scene(folder: Path, *, has_spare: bool) -> Iterator[Scene]:
    """Everything is started, and everything ends."""
    with ExitStack() as stack:
        # Durable, as a crash of PostgreSQL would lose commits otherwise.
        settings = {"track_commit_timestamp": "on"}
        postgres = stack.enter_context(EmbeddedPostgres(folder / "postgres", settings=settings))
        valkey = stack.enter_context(EmbeddedValkey(folder / "valkey"))
        migrate(postgres.url)
        create_tables(postgres.url)
        defaults = {f.name: f.default for f in fields(Settings) if f.name in SETTINGS}
        line = stack.enter_context(running_line(postgres.url, valkey.url, folder, **defaults))
        urls = {f"{PREFIX}DATABASE_URL": postgres.url, f"{PREFIX}REDIS_URL": valkey.url}
        argv = [sys.executable, "-m", "penstock", "--app", APP, "run"]
        argv += [] if has_spare else ["--no-spare"]
        host = Host(argv, urls, folder / "host.log")
        stack.callback(host.end)
        kept = folder / "valkey" / "appendonlydir"
        yield Scene(line, host, postgres, valkey, kept, has_spare=has_spare)


def drill(scene: Scene, faults: Sequence[Fault], runs: int) -> dict[str, list[Recovery]]:
    """Every fault in turn, so many times: a consumer that dies too often would be quarantined."""
    measured: dict[str, list[Recovery]] = {fault.name: [] for fault in faults}
    with sending(scene.line):
        for run in range(1, runs + 1):
            for fault in faults:
                recovery = scene.measure(fault)
                measured[fault.name].append(recovery)
                say(
                    f"run {run}, {fault.name}: next event after {recovery.next_event:.2f} s, gap"
                    f" {recovery.gap:.2f} s, longest wait {recovery.wait:.2f} s,"
                    f" hot log after {recovery.hot_log:.2f} s"
                )
    return measured


def report(faults: Sequence[Fault], measured: dict[str, list[Recovery]]) -> bool:
    """The table; whether every promise was kept, in the worst case too."""
    is_kept = True
    say("")
    say(
        f"{'fault':<16} {'clock starts when':<25} {'next event':>13} {'at most':>7}"
        f" {'gap':>13} {'wait':>13} {'hot log':>13}"
    )
    for fault in faults:
        values = measured[fault.name]
        worst = max(value.next_event for value in values)
        is_kept = is_kept and worst <= fault.at_most
        cells = [
            f"{median(column):5.2f} / {max(column):5.2f}"
            for column in (
                [value.next_event for value in values],
                [value.gap for value in values],
                [value.wait for value in values],
                [value.hot_log for value in values],
            )
        ]
        say(
            f"{fault.name:<16} {fault.clock:<25} {cells[0]} {fault.at_most:>7g}"
            f" {cells[1]} {cells[2]} {cells[3]}{'' if worst <= fault.at_most else '   NOT KEPT'}"
        )
    say("median / worst, in seconds")
    say_load()
    return is_kept


def main() -> int:
    """Strike, and say whether every recovery was soon enough."""
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", choices=names, action="append", help="only this fault")
    parser.add_argument("--no-spare", dest="spare", action="store_false", help="none is ready")
    parser.add_argument("--quick", action="store_true", help="once, to see that everything runs")
    parser.add_argument("--log", type=Path, help="keep what the supervisor and its workers said")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.name in (options.only or names)]
    with (
        tempfile.TemporaryDirectory(prefix="recovery-") as name,
        opened_scene(Path(name), has_spare=options.spare) as scene,
    ):
        try:
            scene.down_seconds = 0.5 if options.quick else DOWN_SECONDS
            measured = drill(scene, faults, 1 if options.quick else options.runs)
            books = scene.line.close_books((CONSUMER,), CATCH_UP_SECONDS)
        finally:
            if options.log:
                shutil.copy(scene.host.log, options.log)
    is_kept = report(faults, measured)
    say(str(books))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
