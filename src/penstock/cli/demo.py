"""`penstock demo`: events flow while processes are killed and Redis forgets; then the books."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis
from rich.console import Console
from sqlalchemy import Connection

from penstock import Pipeline
from penstock.cli.demo_app import EFFECTS, PIDS_FOLDER, Base, build_pipeline
from penstock.cli.demo_display import Display
from penstock.cli.demo_report import Report, read_books, read_counts, read_latency
from penstock.cli.demo_senders import Senders
from penstock.cli.output import PIPE_WIDTH, print_json
from penstock.cli.passing import leaving_on_signals, running_servers
from penstock.core.leases import PUBLISHER
from penstock.ops.workers import release_dead_worker
from penstock.runtime.children import WORKER_ID, ProcessSpec
from penstock.runtime.processes import ProcessGroup
from penstock.stores.migrations import migrate
from penstock.stores.servers import Servers
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.signals import WorkerDied

APP = "penstock.cli.demo_app:pipeline"
EXIT_FINE, EXIT_NO, EXIT_INTERRUPTED = 0, 1, 130
SENDING_SECONDS = 14.0
RATE_MIN = 500.0
DEADLINE_SECONDS = 120.0
LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Act:
    """Something that is done to the line once every consumer has handled this share."""

    share: float
    what: str
    do: Callable[[], str | None]
    """Returns what was done; None: not possible just now."""


class Director:
    """Runs the demo beside the worker processes: sends, breaks things, watches."""

    def __init__(
        self, pipeline: Pipeline, display: Display, events: int, seed: int, pids: Path
    ) -> None:
        self.acts_done: list[str] = []
        self.seconds = 0.0
        self.is_done = False
        """Whether it came to its own end: everything is handled, or the time is up."""
        self.stop = threading.Event()
        rate = max(RATE_MIN, events / SENDING_SECONDS)
        self.senders = Senders(pipeline, events, rate, seed, self.stop)
        self._pipeline = pipeline
        self._display = display
        self._events = events
        self._pids = pids
        self._handled = 0
        self._acts = self._plan(random.Random(seed))  # noqa: S311 - a script, not a secret
        self._error: BaseException | None = None
        self._is_finishing = False
        self._thread = threading.Thread(target=self._run, name="director")

    def start(self) -> None:
        """Begin; ends this process's worker group when everything is handled."""
        self._thread.start()

    def finish(self) -> None:
        """Stop what still runs; an error on the way comes out here."""
        self._is_finishing = True
        self.stop.set()
        self._thread.join()
        self.senders.finish()
        if self._error is not None:
            raise self._error

    def _plan(self, chance: random.Random) -> list[Act]:
        first, second = chance.sample(list(EFFECTS), 2)
        kill = self._kill
        return [
            Act(chance.uniform(0.10, 0.18), first, partial(kill, first)),
            Act(chance.uniform(0.28, 0.36), "FLUSHALL", self._flush),
            Act(chance.uniform(0.46, 0.54), PUBLISHER, partial(kill, PUBLISHER)),
            Act(chance.uniform(0.68, 0.76), second, partial(kill, second)),
        ]

    def _kill(self, name: str) -> str | None:
        path = self._pids / (name if name == PUBLISHER else f"consumer:{name}")
        if not path.exists():
            return None
        pid = int(path.read_text(encoding="utf-8"))
        # Gone until the successor writes its own, so that nobody is killed twice.
        path.unlink()
        os.kill(pid, signal.SIGKILL)
        kind = "the publisher" if name == PUBLISHER else f"the consumer {name}"
        return f"kill -9 of {kind} (pid {pid})"

    def _flush(self) -> str:
        assert self._pipeline.settings.redis_url is not None
        with redis.Redis.from_url(self._pipeline.settings.redis_url) as client:
            client.flushall()
        return "FLUSHALL of Redis"

    def _run(self) -> None:
        try:
            self._direct()
        except BaseException as error:  # noqa: BLE001 - raised again by `finish`
            self._error = error
        finally:
            # The group of workers, which has the main thread, ends at this signal.
            if not self._is_finishing:
                os.kill(os.getpid(), signal.SIGTERM)

    def _direct(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        # Nobody is late because the workers were not there yet.
        while len(list(self._pids.iterdir())) < len(EFFECTS) + 1:
            if self.stop.wait(LOOK_SECONDS) or time.monotonic() > deadline:
                break
        self.senders.handled = lambda: self._handled
        self.senders.start()
        engine = self._pipeline.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            while not self.stop.wait(LOOK_SECONDS) and time.monotonic() < deadline:
                self._look(connection)
                if self._handled >= self._events == self.senders.sent and not self._acts:
                    self.is_done = True
                    return
        if not self.stop.is_set():
            self.is_done = True
            self._display.tell(f"gave up after {DEADLINE_SECONDS:.0f} s")

    def _look(self, connection: Connection) -> None:
        counts = read_counts(connection)
        if counts.slowest > self._handled:
            self.seconds = time.monotonic() - self.senders.journal.first_at
        self._handled = counts.slowest
        self._display.show(self.senders.sent, counts)
        if self._acts and self._handled >= self._acts[0].share * self._events:
            done = self._acts[0].do()
            if done is not None:
                self._acts.pop(0)
                self.acts_done.append(done)
                self._display.tell(done)


def run_demo(events: int = 20_000, seed: int | None = None, json_output: bool = False) -> int:
    """Run the demo on embedded servers; 0 if the books balance, 1 if they do not."""
    console = Console(stderr=json_output, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    with leaving_on_signals(), tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        console.print("Starting PostgreSQL and Valkey …")
        with running_servers(Path(folder)) as servers:
            report = _run_on(servers, Path(folder), console, events, seed)
    if report is None:
        console.print("Stopped. Nothing is left behind.")
        return EXIT_INTERRUPTED
    if json_output:
        print_json({"seed": seed, **report.as_plain()})
    else:
        console.print(report.render())
    return EXIT_FINE if report.is_complete else EXIT_NO


def _run_on(
    servers: Servers, folder: Path, console: Console, events: int, seed: int
) -> Report | None:
    """None: somebody has stopped it."""
    migrate(servers.database_url)
    pipeline = build_pipeline(database_url=servers.database_url, redis_url=servers.redis_url)
    Base.metadata.create_all(pipeline.engine)
    pids = folder / "pids"
    pids.mkdir()
    display = Display(console, events)
    director = Director(pipeline, display, events, seed, pids)
    group = ProcessGroup(
        [_worker_spec(role, servers, pids) for role in (PUBLISHER, *map(_role, EFFECTS))],
        shutdown_seconds=10.0,
        on_death=partial(release_dead_worker, pipeline.settings),
    )
    console.print(
        f"{events:,} events, two consumers, real processes (seed {seed}). Ctrl-C stops it."
    )
    try:
        with display.live(), _told_of_deaths(display):
            director.start()
            try:
                group.run()
            finally:
                director.finish()
        return _read_report(pipeline, director) if director.is_done else None
    finally:
        pipeline.engine.dispose()


def _read_report(pipeline: Pipeline, director: Director) -> Report:
    engine = pipeline.engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        return Report(
            books=read_books(connection, director.senders.journal),
            acts=tuple(director.acts_done),
            seconds=director.seconds,
            latency={name: read_latency(connection, effect) for name, effect in EFFECTS.items()},
        )


def _role(consumer: str) -> str:
    return f"consumer:{consumer}"


def _worker_spec(role: str, servers: Servers, pids: Path) -> ProcessSpec:
    argv = [sys.executable, "-m", "penstock", "--app", APP, "work", "--role", role]
    argv += ["--worker-id", WORKER_ID, "--parent", str(os.getpid())]
    environment = {
        "PENSTOCK_DATABASE_URL": servers.database_url,
        "PENSTOCK_REDIS_URL": servers.redis_url,
        "PENSTOCK_LOG_LEVEL": "error",
        PIDS_FOLDER: str(pids),
    }
    return ProcessSpec(role, argv, environment)


@contextmanager
def _told_of_deaths(display: Display) -> Iterator[None]:
    def tell(death: WorkerDied) -> None:
        display.tell(f"{death.worker} (pid {death.pid}) is dead, another one starts")

    subscribe(WorkerDied, tell)
    try:
        yield
    finally:
        unsubscribe(tell)
