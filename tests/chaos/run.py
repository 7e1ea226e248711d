"""One run: servers, hosts, faults for a while, calm, and everything that was written down."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import LiteralString, NamedTuple, Self

import psycopg

from penstock.errors import PenstockError
from penstock.stores.migrations import migrate
from penstock.telemetry.failpoints import Action, Hit
from tests.chaos.app import STREAM
from tests.chaos.arming import Armoury
from tests.chaos.checker import Checker
from tests.chaos.hosts import STOP_SECONDS, Hosts
from tests.chaos.nemesis import GAP_SECONDS, Nemesis
from tests.chaos.probes import Probes
from tests.chaos.report import Demands, Injected, Report
from tests.chaos.servers import World
from tests.chaos.tripwires import lay_tripwires
from tests.chaos.watch import Watch
from tests.line import create_tables
from tests.waiting import wait_until

OPERATOR_SECONDS = 0.5
REDRIVE_EVERY_SECONDS = 5.0
REDRIVE_SECONDS = 1.5
VERIFY_EVERY_SECONDS = 20.0
VERIFY_PART = 0.1
"""Of the time, where verifying takes long: that of the server is the line's."""
BEGUN_SECONDS = 60.0
ADDED_AFTER = 0.6
LOOK_SECONDS = 1.0
BEHIND_MAX = 20_000
"""A consumer that is further behind is waited for: a heap that only grows proves little."""
LONGER_FACTOR = 2.5
"""A run whose events are too few by then goes on, up to so many times as long."""
CALMER_SECONDS = 40.0
EVENTS_PER_SECOND = 500.0
FLOW: LiteralString = """
SELECT s.head - (SELECT coalesce(sum(h.last - h.first + 1), 0)::bigint
                   FROM events.hole h WHERE h.stream_name = s.name),
       s.head - coalesce(min(l.checkpoint), 0)
  FROM events.stream s
  LEFT JOIN events.consumer c ON c.name = ANY(%(consumers)s)
  LEFT JOIN events.stream_lease l ON l.stream_name = s.name AND l.epoch = c.epoch
        AND split_part(l.role, '/', 1) = 'consumer:' || c.name
 WHERE s.name = %(stream)s
 GROUP BY s.name
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run shall be like."""

    seed: int
    seconds: float
    profile: str = "everything"
    events_per_second: float = EVENTS_PER_SECOND
    gap_seconds: float = GAP_SECONDS
    """How much time passes between two faults, on average."""
    demands: Demands = field(default_factory=Demands)

    def is_over(self, seconds: float, events: int) -> bool:
        """Whether it lasted as long as it shall: for its time, and until its events are sent."""
        is_enough = events >= self.demands.events or seconds >= self.seconds * LONGER_FACTOR
        return seconds >= self.seconds and is_enough

    @property
    def command(self) -> str:
        """How to do it again."""
        options = {
            "--seed": self.seed,
            "--seconds": f"{self.seconds:g}",
            "--profile": self.profile,
            "--rate": f"{self.events_per_second:g}",
            "--gap": f"{self.gap_seconds:g}",
        }
        parts = [part for name, value in options.items() for part in (name, str(value))]
        return shlex.join(["python", "-m", "tests.chaos", *parts])


@dataclass(frozen=True, slots=True)
class Chaos:
    """What a fault gets: the servers and the hosts."""

    world: World
    hosts: Hosts


def run(plan: Plan, folder: Path) -> Report:
    """Run, heal, wait, check. Everything that was started has ended when this returns."""
    folder.mkdir(exist_ok=True)
    armoury = Armoury(
        folder,
        plan.seed,
        gap_seconds=plan.gap_seconds,
        times_wanted=max(1, plan.demands.failpoint_hits),
    )
    with World(folder / "servers") as world:
        migrate(world.direct_database_url)
        create_tables(world.direct_database_url)
        lay_tripwires(world.direct_database_url)
        hosts = Hosts(
            world, folder, armoury, seed=plan.seed, events_per_second=plan.events_per_second
        )
        with hosts:
            _wait_until_begun(world, hosts)
            with Watch(lambda: world.direct_database_url, STREAM) as watch:
                armoury.arm()
                started_at = time.monotonic()
                with Shift(hosts) as shift:
                    nemesis = _disturb(Chaos(world, hosts), plan, folder)
                seconds = time.monotonic() - started_at
                hosts.calm_down()
                hosts.stop_senders()
                checker = Checker(world, folder, hosts.operator, names=hosts.consumer_names)
                settled_seconds = checker.settle(plan.demands.settled_seconds)
            ends = hosts.ended_by_themselves()
            meanwhile = [*watch.ratchet.faults, *shift.faults, *ends]
            verdict = checker.check(settled_seconds, meanwhile)
        # Last, with nobody left who could come between.
        probes = Probes(world.direct_database_url, world.direct_redis_url)
        verdict = replace(verdict, faults=(*verdict.faults, *probes.run()))
    return Report(
        seed=plan.seed,
        seconds=seconds,
        profile=plan.profile,
        command=plan.command,
        faults=_injected(nemesis, armoury.log),
        impossible=nemesis.unavailable,
        hits=armoury.hits,
        missed=armoury.missed,
        stalls=watch.progress.stalls,
        effects=sum(consumer.handled for consumer in verdict.books.consumers),
        quarantined=hosts.operator.quarantined,
        verified=hosts.operator.verified,
        verdict=verdict,
        demands=plan.demands,
    )


def _disturb(chaos: Chaos, plan: Plan, folder: Path) -> Nemesis:
    """Faults for as long as the plan says. Returns when all have healed."""
    nemesis = Nemesis(
        chaos,
        seed=plan.seed,
        profile=plan.profile,
        gap_seconds=plan.gap_seconds,
        # It has one host, which nobody takes over from, and has to catch up all the same.
        later={"consumer-added": plan.seconds * ADDED_AFTER},
    )
    try:
        with nemesis:
            never = threading.Event()
            started_at = time.monotonic()
            calmer_seconds = min(CALMER_SECONDS, plan.seconds / 4)
            flow = Flow(0, 0)
            while not plan.is_over(time.monotonic() - started_at + calmer_seconds, flow.events):
                never.wait(LOOK_SECONDS)
                flow = _flow(chaos.world, chaos.hosts.consumer_names) or flow
                chaos.hosts.surroundings.set_lull(flow.behind > BEHIND_MAX)
            # What is sent in a full run's last moments is more than can be handled after it.
            chaos.hosts.surroundings.set_lull(True)
            never.wait(calmer_seconds)
    finally:
        # For whoever has kept the folder and looks for the cause of something.
        told = [f"{one.started_at:.2f} {one.healed_at:.2f} {one.text}" for one in nemesis.history]
        (folder / "faults").write_text("\n".join(told))
    return nemesis


class Flow(NamedTuple):
    """How many events there are, and how many of them the slowest of the consumers has left."""

    events: int
    behind: int


def _flow(world: World, consumers: list[str]) -> Flow | None:
    """How it stands; None while nobody answers."""
    with suppress(psycopg.Error), psycopg.connect(world.direct_database_url) as connection:
        row = connection.execute(FLOW, {"stream": STREAM, "consumers": consumers}).fetchone()
        return Flow(*row) if row else None
    return None


def _injected(nemesis: Nemesis, hits: Sequence[Hit]) -> list[Injected]:
    """Faults and failpoints; a process that stands still is hurt until somebody continues it."""
    faults = [Injected(one.kind, one.started_at, one.healed_at) for one in nemesis.history]
    for hit in hits:
        seconds = STOP_SECONDS if hit.action is Action.STOP else 0.0
        faults.append(Injected(f"failpoint-{hit.action}", hit.at, hit.at + seconds))
    return faults


def _wait_until_begun(world: World, hosts: Hosts) -> None:
    """Events flow through every consumer before the first fault."""

    def has_begun() -> bool:
        with psycopg.connect(world.direct_database_url) as connection:
            rows = connection.execute("SELECT DISTINCT consumer FROM effect").fetchall()
        return {name for (name,) in rows} == set(hosts.consumer_names)

    wait_until(has_begun, seconds=BEGUN_SECONDS, what=lambda: f"events flow:\n{hosts.tails()}")


class Shift:
    """Somebody looks after the line meanwhile: redrives, releases, and verifies."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="operator")
        self._due_at: dict[str, float] = {}
        self.faults: list[str] = []
        """What the books said in the middle of it: they have to balance at any moment."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        operator = self._hosts.operator
        while not self._end.wait(OPERATOR_SECONDS):
            # A server that is away, or goes away in the middle, is nothing special here.
            with suppress(psycopg.Error, PenstockError):
                operator.release_quarantined()
                if self._is_due("redrive", REDRIVE_EVERY_SECONDS):
                    operator.redrive(REDRIVE_SECONDS)
                if self._is_due("verify", VERIFY_EVERY_SECONDS):
                    self._verify()

    def _verify(self) -> None:
        started_at = time.monotonic()
        self.faults += self._hosts.operator.verify()
        ended_at = time.monotonic()
        rest_seconds = max(VERIFY_EVERY_SECONDS, (ended_at - started_at) / VERIFY_PART)
        self._due_at["verify"] = ended_at + rest_seconds

    def _is_due(self, what: str, every_seconds: float) -> bool:
        now = time.monotonic()
        is_due = now >= self._due_at.setdefault(what, now + every_seconds)
        if is_due:
            self._due_at[what] = now + every_seconds
        return is_due
