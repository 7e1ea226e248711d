"""Redis timers due over a minute, while their workers are killed and stopped at random.

`python -m tests.redis_timer_drill [--timers 100000] [--seconds 60] [--workers 3] [--once]
[--skew] [--calm] [--seed N]`

Every timer has to be handled, none early. Without a session, a kill, or a stop longer than the
lease, may repeat what the worker had in hand, and no more; with one (--once), nothing is repeated.
With --skew the workers' clocks are ten minutes ahead and behind, and nobody is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import redis

from penstock.stores.migrations import migrate
from penstock.stores.servers import Servers, running_servers
from penstock.stores.timer_queue import RedisTimers
from tests.chaos.clocks import Clocks, usable_library
from tests.redis_timer_app import ONCE, PLAIN
from tests.timers_at_work import envelope
from tests.waiting import wait_until

CONCURRENT = 5
LEASE_SECONDS = 3.0
LEAD_SECONDS = 2.0
ARMED_PER_SECOND = 5000
BATCH = 1000
NOTES = "notes"
SKEWS_SECONDS = (600.0, -600.0, 0.0)
PAUSE_SECONDS = (1.0, 4.0)
P50_MS, P99_MS = 20.0, 150.0


@dataclass
class Worker:
    """One process, and the next one when it was killed."""

    number: int
    environment: dict[str, str]
    folder: Path
    topic: str
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        argv = [sys.executable, "-m", "penstock", "--app", "tests.redis_timer_app:pipeline"]
        argv += ["work", "--role", f"timer:{self.topic}", "--log-level", "warning"]
        log = self.folder / f"worker{self.number}.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                argv, env=self.environment, stdout=output, stderr=output
            )

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(30)


@dataclass
class Tally:
    """What was done to the workers."""

    kills: int = 0
    stops: int = 0
    long_stops: int = 0

    @property
    def repeats_max(self) -> int:
        return CONCURRENT * (self.kills + self.long_stops)


@dataclass(frozen=True)
class Handled:
    """One call of a handler."""

    timer_id: str
    late_seconds: float


@contextmanager
def hurting(workers: Sequence[Worker], chance: random.Random) -> Iterator[Tally]:
    """Kill or stop a worker every few seconds, and bring it back."""
    over = threading.Event()
    tally = Tally()

    def hurt() -> None:
        while not over.wait(chance.uniform(*PAUSE_SECONDS)):
            worker = chance.choice(workers)
            if chance.random() < 0.5:
                tally.kills += 1
                worker.process.kill()
                worker.process.wait()
                worker.start()
                continue
            seconds = LEASE_SECONDS * chance.uniform(0.1, 1.6)
            tally.stops += 1
            begun = time.monotonic()
            worker.process.send_signal(signal.SIGSTOP)
            over.wait(seconds)
            worker.process.send_signal(signal.SIGCONT)
            # A lease may be a third older than the stop.
            tally.long_stops += time.monotonic() - begun > LEASE_SECONDS * 2 / 3 - 0.2

    thread = threading.Thread(target=hurt, daemon=True)
    thread.start()
    try:
        yield tally
    finally:
        over.set()
        thread.join(30)


def arm_all(client: redis.Redis, topic: str, count: int, seconds: float) -> float:
    """Timers due one after the other, written as the other library writes them."""
    keys = RedisTimers(client).names.of(topic)
    now, microseconds = client.time()
    begin = now + microseconds / 1e6 + LEAD_SECONDS + count / ARMED_PER_SECOND
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        with client.pipeline(transaction=False) as batch:
            for number in numbers:
                payload = envelope({"n": number}, correlation_id=f"c{number}")
                batch.hset(keys.payloads, f"t{number}", payload)
                batch.zadd(keys.timeline, {f"t{number}": begin + seconds * number / count})
            batch.execute()
    return begin


def handled_plainly(client: redis.Redis, notes: Path) -> list[Handled]:
    """What plain handlers have noted, turned into the server's time: theirs may be wrong."""
    # The answer takes its time, so each look tells too little; the greatest is the nearest.
    looks = [(*client.time(), time.monotonic()) for _ in range(100)]
    ahead = max(seconds + millionths / 1e6 - own for seconds, millionths, own in looks)
    rows = [line.split() for line in notes.read_text().splitlines()]
    off = Counter(round((float(own) - float(begun) - ahead) / 60) for _, _, begun, own in rows)
    say(f"handlers called, by how many minutes their process's clock was off: {dict(off)}")
    return [Handled(name, float(begun) + ahead - float(due)) for name, due, begun, _ in rows]


def handled_once(database_url: str) -> list[Handled]:
    """What handlers have written in their transactions."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT timer_id, extract(epoch FROM begun_at - due_at) FROM drill_effect"
            " ORDER BY begun_at"
        )
        return [Handled(timer_id, float(late)) for timer_id, late in rows]


def anomalies(handled: list[Handled], count: int, repeats_max: int) -> list[str]:
    """What must not have happened."""
    counts = Counter(each.timer_id for each in handled)
    found = [
        f"{timer_id} was never handled" for n in range(count) if not counts[timer_id := f"t{n}"]
    ]
    early = [each for each in handled if each.late_seconds < -0.001]
    found += [f"{each.timer_id} was handled {-each.late_seconds:.3f} s early" for each in early]
    repeats = len(handled) - len(counts)
    if repeats > repeats_max:
        found.append(f"{repeats} repeated deliveries, and at most {repeats_max} are explained")
    return found


def percentile(sorted_values: Sequence[float], part: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * part))]


def run(options: argparse.Namespace, servers: Servers, folder: Path) -> int:
    topic = ONCE if options.once else PLAIN
    migrate(servers.database_url)
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE drill_effect (timer_id text, due_at timestamptz, begun_at timestamptz)"
        )
    clocks = Clocks(folder / "clocks")
    environment = {
        **os.environ,
        "PENSTOCK_DATABASE_URL": servers.database_url,
        "PENSTOCK_REDIS_URL": servers.redis_url,
        "DRILL_CONCURRENT": str(CONCURRENT),
        "DRILL_LEASE": str(LEASE_SECONDS),
        "DRILL_NOTES": str(folder / NOTES),
    }
    workers = []
    for number in range(options.workers):
        skewed = clocks.environment(f"w{number}") if options.skew else {}
        if options.skew:
            clocks.set(f"w{number}", SKEWS_SECONDS[number % len(SKEWS_SECONDS)])
        workers.append(Worker(number, {**environment, **skewed}, folder, topic))
        workers[-1].start()
    with closing(redis.Redis.from_url(servers.redis_url)) as client:
        return watch(options, workers, client, servers.database_url, folder / NOTES)


def watch(
    options: argparse.Namespace,
    workers: list[Worker],
    client: redis.Redis,
    database_url: str,
    notes: Path,
) -> int:
    topic = workers[0].topic
    keys = RedisTimers(client).names.of(topic)
    timeline = keys.timeline
    wait_until(
        lambda: client.pubsub_numsub(keys.channel)[0][1] == len(workers),
        what="all workers listen",
    )
    begin = arm_all(client, topic, options.timers, options.seconds)
    say(f"{options.timers} timers are due over {options.seconds:g} s, seed {options.seed}")
    tally = Tally()
    chance = random.Random(options.seed)  # noqa: S311 - reproducible, not secret
    try:
        if options.skew or options.calm:
            wait_until_due(begin + options.seconds)
        else:
            with hurting(workers, chance) as tally:
                wait_until_due(begin + options.seconds)
        wait_until(
            lambda: client.zcard(timeline) == 0,
            seconds=60 + LEASE_SECONDS * 3,
            what=lambda: f"all timers are done; {client.zcard(timeline)} are not",
        )
    finally:
        for worker in workers:
            worker.end()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    load = os.getloadavg()[0]
    say(
        f"workers used {used.ru_utime + used.ru_stime:.1f} s of CPU; load of the machine {load:.1f}"
    )
    handled = handled_once(database_url) if options.once else handled_plainly(client, notes)
    return report(options, handled, tally)


def report(options: argparse.Namespace, handled: list[Handled], tally: Tally) -> int:
    first = {each.timer_id: each.late_seconds * 1000 for each in reversed(handled)}
    late = sorted(first.values())
    repeats = len(handled) - len(first)
    repeats_max = 0 if options.once else tally.repeats_max
    say(f"killed {tally.kills}, stopped {tally.stops}, {tally.long_stops} of them for a lease")
    say(f"handled {len(first)} timers in {len(handled)} calls: {repeats} repeated of {repeats_max}")
    if late:
        p50, p99 = percentile(late, 0.5), percentile(late, 0.99)
        say(
            f"late: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {late[-1]:.0f} ms, min {late[0]:.2f} ms"
        )
        reached = "reached" if p50 <= P50_MS and p99 <= P99_MS else "MISSED"
        say(f"p50 <= {P50_MS:g} ms and p99 <= {P99_MS:g} ms: {reached}")
    found = anomalies(handled, options.timers, repeats_max)
    for anomaly in found[:20]:
        say(f"ANOMALY: {anomaly}")
    say(f"{len(found)} anomalies")
    return 1 if found else 0


def wait_until_due(moment: float) -> None:
    threading.Event().wait(max(0.0, moment - time.time()))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timers", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--once", action="store_true", help="handlers with a Session")
    parser.add_argument("--skew", action="store_true", help="clocks ten minutes off, no kills")
    parser.add_argument("--calm", action="store_true", help="no kills and no stops")
    options = parser.parse_args()
    if options.skew and usable_library()[0] is None:
        say(usable_library()[1])
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="redis-timer-drill-") as folder,
        running_servers(Path(folder) / "servers", durable=False) as servers,
    ):
        return run(options, servers, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
