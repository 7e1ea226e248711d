"""A whole line over the models: production publishers, consumers and lanes in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

import psycopg

from penstock.core.forensics import Forensics
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.errors import PenstockError
from penstock.pipeline import (
    calling,
    consumer,
    gate,
    intake,
    judgement,
    lane,
    parking,
    publisher,
    reader,
    window,
)
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.gate import Gate
from penstock.pipeline.publisher import Publisher
from penstock.pipeline.seams import ConsumerSeams
from penstock.runtime import leases, loop
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop, Stage
from penstock.stores import outage
from tests.simulation.connections import ModelConnection, ModelWorker, Wire
from tests.simulation.cooperation import Clock, Dice, Event, Threading, present
from tests.simulation.database import Database, Snapshot
from tests.simulation.early import Eagerness, ModelEar
from tests.simulation.handling import Conduct, Handlers
from tests.simulation.hot_log import HotServer, ModelHotLog
from tests.simulation.machine import Actor, Machine, Process
from tests.simulation.rows import Effect, OutboxRow
from tests.simulation.shapes import Shape, options_of

# Everything takes a while of the same order, so that no history waits long for anything.
SETTINGS = Settings(
    database_url="postgresql://model",
    wakeup="poll",
    poll_seconds=0.8,
    lease_seconds=1.0,
    lease_renew_seconds=0.4,
    publish_batch_size=3,
    mac_key="key1:" + b"0123456789abcdef".hex(),
)
TIMES: tuple[tuple[Any, str, float], ...] = (
    (publisher, "SWEEP_SECONDS", 0.8),
    (publisher, "REFUSED_RETRY_SECONDS", 0.8),
    (publisher, "POLL_MODE_SECONDS", 0.4),
    (consumer, "WATCH_SECONDS", 0.8),
    (consumer, "WATCH_OTHERS_SECONDS", 0.8),
    (reader, "HEAD_CHECK_SECONDS", 0.4),
    (reader, "USELESS_SECONDS", 0.3),
    (lane, "WAIT_SECONDS", 0.8),
    (lane, "BROWNOUT_POLL_SECONDS", 0.4),
    (lane, "ADVANCE_SECONDS", 0.4),
    (lane, "BLOCKED_PAUSE_SECONDS", 0.5),
    (parking, "LOOK_SECONDS", 0.8),
    (parking, "LOOK_SOON_SECONDS", 0.3),
)
# The model of PostgreSQL notifies nobody; whether a consumer hears a sender is left to chance.
EAGER = replace(SETTINGS, wakeup="notify")
WRONG_SHARE = 0.2
Role = Literal["publisher", "consumer"]
FORENSICS = Forensics("Error", "", "", "")


class KEYS:
    """Who signs."""

    own = MacKeys.parse(SETTINGS.mac_key or "")
    forged = MacKeys(b"key1", {b"key1": b"fedcba9876543210"})


class Crew:
    """Runs the lanes of a process as actors."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._members: dict[str, tuple[Actor, Event]] = {}

    def start(self, name: str, open_stage: Callable[..., Stage]) -> None:
        member = self._members.get(name)
        if member is not None and member[0].is_alive:
            return
        stop = Event()
        actor = self._worker.loop(name, lambda: open_stage(stop, nullcontext()), stop)
        self._members[name] = (actor, stop)

    def stop(self, name: str) -> None:
        if name in self._members:
            self._members[name][1].set()

    def wait(self, names: set[str]) -> None:
        while any(self._members[name][0].is_alive for name in names if name in self._members):
            present.machine.sleep(0.2)


class Control:
    """The connection that a process shares for everything but handling."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._connection = ModelConnection(wire)

    def get(self) -> Any:
        if self._connection.closed:
            self._connection = ModelConnection(self._wire)
        return self._connection

    def close(self) -> None:
        self._connection.close()


class Keeper(LeaseKeeper):
    """The lease keeper without threads of its own: an actor renews and ends."""

    def __init__(self, worker_id: str, wire: Wire) -> None:
        super().__init__(SETTINGS, worker_id)
        self.control = Control(wire)  # type: ignore[assignment]

    def _ensure_thread(self) -> None:
        pass

    def keep(self) -> None:
        while True:
            present.machine.sleep(SETTINGS.lease_renew_seconds)
            self._end_what_runs_out()
            try:
                self._renew(self.control.get())
            except (psycopg.Error, PenstockError):
                continue


class Worker:
    """One process: a publisher, or a consumer with its lanes."""

    def __init__(self, world: World, name: str, role: Role) -> None:
        self.world = world
        self.process = Process(name)
        self.role = role
        self._keeper = Keeper(name, world.wire)
        machine = world.machine
        machine.start(self.process, "keeper", self._keeper.keep)
        self._shape = world.shape
        self._deployed_at = datetime.fromtimestamp(machine.now, UTC)
        open_stage = self._publisher if role == "publisher" else self._consumer
        self.loop(role, open_stage, Event())

    def loop(self, name: str, open_stage: Callable[[], Stage], stop: Event) -> Actor:
        """Run a stage as production does, as an actor."""
        run = Loop(name, open_stage, stop).run  # type: ignore[arg-type]
        return self.world.machine.start(self.process, name, run)

    def _publisher(self) -> Stage:
        hot_log = ModelHotLog(self.world.hot)
        return Publisher(SETTINGS, self._keeper, hot_log)

    def _consumer(self) -> Stage:
        world = self.world
        consuming = Consuming(
            name=Database.consumer,
            options=options_of(self._shape),
            plan=Handlers(world, self.process).plan(self._shape.guarantee),
            settings=EAGER,
            leases=self._keeper,
            seams=ConsumerSeams(
                open_worker=lambda: ModelWorker(world.wire, self.process),
                insert_sends=lambda _worker, _session: None,
            ),
            gate=Gate(),
            control=self._keeper.control.get,
        )
        return Consumer(
            consuming,
            Crew(self),
            lambda: ModelHotLog(world.hot),
            deployed_at=self._deployed_at,
            excused=nullcontext(),
        )


class World:
    """The servers, the worker processes, and what is expected of them."""

    def __init__(self, seed: int) -> None:
        self.machine = machine = Machine(seed)
        present.machine = machine
        self.database = Database(machine)
        self.hot = HotServer(machine)
        self.hot.alive_seconds = 1.0
        self.database.on_sent = self.hot.ring
        self.database.wrong_share = WRONG_SHARE
        self.wire = present.wire = Wire(self.database)
        self.conduct: dict[str, Conduct] = {}
        self.on_attempt: Callable[[Effect, Process], None] = lambda _effect, _process: None
        """Told of every call of a handler, when it begins."""
        self.on_call: Callable[[Effect], None] = lambda _effect: None
        """Told of effects that are outside of the database, when they happen."""
        self.on_failure: Callable[[str, Process], None] = lambda _event_uuid, _process: None
        self.faults: dict[str, int] = {}
        self.workers: list[Worker] = []
        self.saved = self.hot.snapshot()
        self.roles: tuple[Role, ...] = ("publisher", "consumer")
        """Which kinds of workers there are; a part of a line alone has half of the turns to pay."""
        self.shape = Shape()
        self.forgotten: dict[tuple[int, str], OutboxRow] = {}
        """Events that a failover has lost; who still finds them on the hot log may handle them."""
        self.redriven: set[str] = set()
        """Dead letters that somebody has put back: these and their keys have no order."""
        self.standby: Snapshot = {}
        """What a failover leaves, where commits may be lost."""
        self.may_lose_commits = False
        self.at_fail_over: list[Callable[[], None]] = []
        self._born = 0
        self.deaths_seen = 0

    def start_worker(self, role: Role | None = None) -> None:
        """One more process; without a role, of either kind."""
        if role is None:
            role = self.roles[int(self.machine.dice() * len(self.roles))]
        self._born += 1
        self.workers.append(Worker(self, f"{role[0]}{self._born}", role))

    def alive(self) -> list[Worker]:
        """The workers that nobody has killed."""
        return [worker for worker in self.workers if not worker.process.is_dead]

    def supervise(self) -> None:
        """Somebody sees to it that there is a worker of each kind. Asked when one has died."""
        self.deaths_seen = self.machine.deaths
        self.workers = self.alive()
        present_roles = {worker.role for worker in self.workers}
        for role in self.roles:
            if role not in present_roles:
                self.start_worker(role)

    def note_fault(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1
        if self.machine.tell is not None:
            self.machine.note(f"FAULT {kind}")


def _connect(_url: str, _name: str) -> ModelConnection:
    machine = present.machine
    machine.breathe()
    return ModelConnection(present.wire)


def _closed(stage: Stage | None) -> None:
    """As in production, except that a killed process closes nothing."""
    actor = present.machine.current
    if stage is not None and not (actor is not None and actor.process.is_dead):
        stage.close()


def _token() -> str:
    return present.machine.token()


def _owner_id(role: str, _stream_name: str, token: str) -> str:
    return f"{role}-{token}"


@contextmanager
def models_in_place() -> Iterator[None]:
    """Production modules see the models' clock, threads and connections for a while."""
    with ExitStack() as stack:
        clock: Any = Clock
        for module in (publisher, reader, lane, parking, calling, outage, leases):
            stack.enter_context(patch.object(module, "time", clock))
        for module in (window, gate):
            stack.enter_context(patch.object(module, "threading", Threading))
        for module in (publisher, consumer):
            stack.enter_context(patch.object(module, "connect_stage", _connect))
            stack.enter_context(patch.object(module, "require_current", lambda *_: None))
        stack.enter_context(patch.object(consumer, "EagerEar", ModelEar))
        stack.enter_context(
            patch.object(intake.Intake, "may_begin_early", Eagerness(), create=True)
        )
        # The model has no libpq: statements go the ordinary way.
        stack.enter_context(patch.object(publisher, "Direct", lambda _: None))
        stack.enter_context(patch.object(judgement, "forensics_about", lambda *_: FORENSICS))
        stack.enter_context(patch.object(judgement, "random", Dice))
        stack.enter_context(patch.object(loop, "_closed", _closed))
        stack.enter_context(patch.object(leases, "new_token", _token))
        stack.enter_context(patch.object(leases, "owner_id", _owner_id))
        stack.enter_context(patch.object(MacKeys, "parse", cache(MacKeys.parse)))
        for module, name, seconds in TIMES:
            stack.enter_context(patch.object(module, name, seconds))
        yield
