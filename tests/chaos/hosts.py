"""The hosts of a chaos run: supervisors with their workers, and senders, kept running by a thread.

Whatever dies is started again, so a fault only has to kill. Everything is started by that one
thread, because the kernel ends a child together with the thread that started it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from penstock.stores.configuration import PREFIX
from penstock.telemetry.failpoints import ENVIRONMENT_NAME, Action
from tests.chaos.app import CONSUMERS, FOLDER, LANES, LATE, PIPELINE, SINGLE, Surroundings
from tests.chaos.arming import Armoury
from tests.chaos.clocks import Clocks
from tests.chaos.deaths import Deaths
from tests.chaos.operator import Operator
from tests.fleet import Host, send

HOSTS = 2
SENDERS = 2
TURN_SECONDS = 0.05
LOGS_KEPT = 3
STOP_SECONDS = 3.0
"""How long a process stands still at a failpoint: longer than its leases."""
SUPERVISOR, SENDER = "supervisor", "sender"
JUMPING = LATE
"""The host whose wall clock may jump: that makes every process on it slower, so it is the least."""
SINGLE_NAME = f"{PIPELINE}.{SINGLE}"
SETTINGS: Mapping[str, Any] = {
    "lease_seconds": 2.0,
    "lease_renew_seconds": 0.5,
    "poll_seconds": 1.0,
    "shutdown_seconds": 6.0,
    "heartbeat_timeout_seconds": 8.0,
    "crashes_max": 1000,
    "crash_window_seconds": 1.0,
    "parked_per_key_max": 3,
    "publish_batch_size": 200,
    "hot_log_length_max": 20_000,
    "outbox_backlog_max": 20,
}


class Servers(Protocol):
    """What hosts need to know of the servers."""

    @property
    def database_url(self) -> str:
        """For those who may be hurt."""

    @property
    def redis_url(self) -> str:
        """For those who may be hurt."""

    @property
    def direct_database_url(self) -> str:
        """For operators."""

    clocks: Clocks


@dataclass(frozen=True, slots=True)
class Process:
    """Something that a fault may kill, stop or continue."""

    pid: int
    role: str
    """supervisor, sender, publisher, consumer:NAME, or worker."""
    host: str


@dataclass(slots=True)
class Seat:
    """One program that shall run, and the process that does."""

    name: str
    argv: Callable[[], Sequence[str]]
    is_sender: bool = False
    is_wanted: bool = True
    starts: int = 0
    process: Host | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive


@dataclass(slots=True)
class Stop:
    """A process that stands still, until when."""

    pid: int
    until: float


class Hosts:
    """Several supervisors that stand for hosts, several senders, and what operators do to them."""

    def __init__(
        self,
        servers: Servers,
        folder: Path,
        armoury: Armoury,
        *,
        seed: int,
        events_per_second: float,
    ) -> None:
        self._servers = servers
        self._folder = folder
        self._armoury = armoury
        self._seed = seed
        self._events_per_second = events_per_second
        self._lanes = 3
        self._deaths = Deaths()
        self._stopped: list[Stop] = []
        self._lock = threading.RLock()
        self._end = threading.Event()
        self.surroundings = Surroundings(folder)
        self.operator = Operator(lambda: servers.direct_database_url)
        self.seats = self._make_seats()
        # Known from the beginning, although that host may come late.
        servers.clocks.environment(JUMPING)
        self._thread = threading.Thread(target=self._keep_running, name="hosts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave nothing behind."""
        self._end.set()
        self._thread.join()
        for seat in self.seats.values():
            if seat.process is not None:
                seat.process.end()
        # Workers that stood still when their supervisor was killed are nobody's children any more.
        for pid in processes_of(self._folder):
            send(pid, signal.SIGKILL)

    # ── what runs ─────────────────────────────────────────────────────────────────────────────

    def processes(self) -> list[Process]:
        """Everything that runs now; any of it may be killed, or stopped and continued."""
        with self._lock:
            seats = [(seat, seat.process) for seat in self.seats.values() if seat.is_alive]
        found = []
        for seat, process in seats:
            assert process is not None
            pid = process.process.pid
            found.append(Process(pid, SENDER if seat.is_sender else SUPERVISOR, seat.name))
            if not seat.is_sender:
                found += [Process(child, role_of(child), seat.name) for child in process.workers()]
        return found

    def workers(self) -> list[Process]:
        """Those that publish and handle."""
        return [one for one in self.processes() if one.role not in (SUPERVISOR, SENDER)]

    def host_names(self) -> list[str]:
        """The supervisors that run now."""
        return [one.host for one in self.processes() if one.role == SUPERVISOR]

    # ── what faults do ────────────────────────────────────────────────────────────────────────

    def lose(self, name: str) -> None:
        """A host is gone at once with everything on it; a new one takes its place."""
        with self._lock:
            process = self.seats[name].process
            if process is not None:
                process.end()

    def restart(self, name: str) -> None:
        """Ask a host to stop in order, as a deploy does; it is started again when it has."""
        process = self.seats[name].process
        if process is not None:
            send(process.process.pid, signal.SIGTERM)

    def freeze(self, name: str) -> list[int]:
        """A host stands still with everything on it. Returns the processes, to be continued."""
        process = self.seats[name].process
        if process is None:
            return []
        pids = [process.process.pid, *process.workers()]
        for pid in pids:
            send(pid, signal.SIGSTOP)
        return pids

    def set_slow(self, seconds: float) -> None:
        """Every handler takes so long from now on; 0: as long as it takes."""
        self.surroundings.set_slow(seconds)

    # ── what operators do ─────────────────────────────────────────────────────────────────────

    def add_consumer(self) -> str:
        """A new consumer begins with the next event of the stream, on a host of its own."""
        self.seats[LATE].is_wanted = True
        return f"{PIPELINE}.{LATE}"

    @property
    def has_added_consumer(self) -> bool:
        return self.seats[LATE].is_wanted

    @property
    def consumer_names(self) -> list[str]:
        """The full names of all consumers that have begun."""
        late = [LATE] if self.has_added_consumer else []
        return [f"{PIPELINE}.{name}" for name in (*CONSUMERS, *late)]

    def change_lanes(self, count: int) -> None:
        """Deploy another number of lanes, on one host; the others follow, and keep it later."""
        self._lanes = count
        for name in self.host_names()[:1]:
            self.restart(name)

    def pause(self, consumer: str = SINGLE_NAME) -> None:
        """A consumer handles nothing, on any host, until it is resumed."""
        self.operator.pause(consumer)

    def resume(self, consumer: str = SINGLE_NAME) -> None:
        """It goes on."""
        self.operator.resume(consumer)

    def redrive(self, seconds: float = 2.0) -> int:
        """Give every dead letter one more attempt; returns how many."""
        return self.operator.redrive(seconds)

    # ── ending ────────────────────────────────────────────────────────────────────────────────

    def calm_down(self) -> None:
        """No failpoint acts any more, and everything that stands still goes on."""
        self._armoury.disarm()
        self.set_slow(0)
        with self._lock:
            self._stopped = [Stop(stop.pid, 0.0) for stop in self._stopped]
        for process in self.processes():
            send(process.pid, signal.SIGCONT)

    def stop_senders(self) -> None:
        """Nothing more is sent. Returns when all have ended."""
        with self._lock:
            senders = [seat for seat in self.seats.values() if seat.is_sender]
            for seat in senders:
                seat.is_wanted = False
        for seat in senders:
            if seat.process is not None and seat.process.is_alive:
                seat.process.process.terminate()
                seat.process.wait_until_dead()

    def ended_by_themselves(self) -> list[str]:
        """The workers that ended though nobody killed them or put a bug into them."""
        with self._lock:
            for log in self._folder.glob("*.log"):
                self._deaths.read(log)
        return self._deaths.unexplained(self._armoury.log)

    def tails(self) -> str:
        """The last words of everybody."""
        present = [seat.process for seat in self.seats.values() if seat.process is not None]
        return "\n".join(f"{process.log.name}:\n{process.tail()}" for process in present)

    # ── keeping it running ────────────────────────────────────────────────────────────────────

    def _keep_running(self) -> None:
        while not self._end.wait(TURN_SECONDS):
            for hit in self._armoury.turn():
                if hit.action is Action.STOP:
                    self._stopped.append(Stop(hit.pid, time.monotonic() + STOP_SECONDS))
            self._continue()
            with self._lock:
                for seat in self.seats.values():
                    if seat.is_wanted and not seat.is_alive:
                        self._start(seat)

    def _continue(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [stop for stop in self._stopped if stop.until <= now]
            self._stopped = [stop for stop in self._stopped if stop.until > now]
        for stop in due:
            send(stop.pid, signal.SIGCONT)

    def _start(self, seat: Seat) -> None:
        if seat.process is not None:
            # Its workers end with it, but not before they have noticed.
            seat.process.process.wait()
        seat.starts += 1
        oldest = self._folder / f"{seat.name}-{seat.starts - LOGS_KEPT}.log"
        self._deaths.read(oldest)
        oldest.unlink(missing_ok=True)
        log = self._folder / f"{seat.name}-{seat.starts}.log"
        argv = [sys.executable, "-m", "tests.chaos.child", str(os.getpid()), *seat.argv()]
        seat.process = Host(argv, self._environment(seat), log)

    def _environment(self, seat: Seat) -> dict[str, str]:
        settings = {
            **SETTINGS,
            "database_url": self._servers.database_url,
            "redis_url": self._servers.redis_url,
        }
        return {
            **{f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()},
            ENVIRONMENT_NAME: f"@{self._armoury.plan}",
            FOLDER: str(self._folder),
            # Hundreds of processes start in a run, and compiling takes half of that.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self._folder / "bytecode"),
            LANES: str(self._lanes),
            **(self._servers.clocks.environment(seat.name) if seat.name == JUMPING else {}),
        }

    def _make_seats(self) -> dict[str, Seat]:
        run = ["-m", "penstock", "--app", "tests.chaos.app:pipeline", "run", "--no-spare"]
        everything = [
            "--publisher",
            *(part for name in CONSUMERS for part in ("--consumers", name)),
        ]
        seats = [Seat(f"host-{n + 1}", lambda: [*run, *everything]) for n in range(HOSTS)]
        seats.append(Seat(LATE, lambda: [*run, "--consumers", LATE], is_wanted=False))
        seats += [self._sender_seat(number) for number in range(SENDERS)]
        return {seat.name: seat for seat in seats}

    def _sender_seat(self, number: int) -> Seat:
        seat = Seat(f"sender-{number + 1}", list, is_sender=True)

        def argv() -> list[str]:
            journal = self._folder / f"{seat.name}.journal"
            # Another seed with every start: the same again would be the same events.
            seed = f"{self._seed}-{number}-{seat.starts}"
            rate = f"{self._events_per_second / SENDERS:g}"
            return ["-m", "tests.chaos.senders", str(journal), seed, rate]

        seat.argv = argv
        return seat


def processes_of(folder: Path) -> list[int]:
    """Every process that was started for the run in this folder, whoever its parent is now."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # Others come and go, or are not ours to look at.
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def role_of(pid: int) -> str:
    """What a worker process does, by its command line."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return "worker"
    roles = [argv[n + 1] for n, part in enumerate(argv[:-1]) if part == "--role"]
    return roles[0] if roles else "worker"
