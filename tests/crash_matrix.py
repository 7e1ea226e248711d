"""Kills a real process at every signal that its role can emit, and closes the books afterwards.

`python -m tests.crash_matrix [--seed N] [--subset K] [--only SIGNAL …]`

The cases are made from `Signal.registry`: a signal that this file does not place fails the run.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import redis

from penstock.stores.servers import Servers, running_servers
from penstock.telemetry.signals import Signal
from tests import provocations as p
from tests.databases import new_database
from tests.line import CONSUMERS, PUBLISHER, Line, running_line, workload_template
from tests.waiting import wait_until

SENDER = "sender"
WORKERS = (PUBLISHER, *CONSUMERS)
# Those that begin with events which have no position yet.
EAGER = ("session", "cursor")
PARALLEL = 2
REACH_SECONDS = 30.0
TRIES_MAX = 2


@dataclass(frozen=True, slots=True)
class Emitter:
    """Roles that emit a signal, what makes them, and up to which emission to kill them at."""

    roles: tuple[str, ...]
    provocation: type[p.Provocation] = p.Provocation
    nth_max: int = 1


EMITTERS: dict[str, tuple[Emitter, ...]] = {
    "EventsInserted": (Emitter((SENDER,), nth_max=12),),
    "LeaseAcquired": (Emitter(WORKERS),),
    "LeaseRenewed": (Emitter(WORKERS, nth_max=2),),
    "LeaseLost": (Emitter(WORKERS, p.LeaseStolen),),
    "LeaseReleased": (Emitter(WORKERS, p.Terminated),),
    "PredecessorEnded": (Emitter(WORKERS, p.TransactionLeftOpen),),
    "BatchNumbered": (Emitter((PUBLISHER,), nth_max=4),),
    "BatchAppended": (Emitter((PUBLISHER,), nth_max=4),),
    "BatchConfirmed": (Emitter((PUBLISHER,), nth_max=4),),
    "HotLogOpened": (Emitter((PUBLISHER,)),),
    "HotLogLost": (Emitter((PUBLISHER,), p.LogFlushed),),
    "HotLogRebuilt": (Emitter((PUBLISHER,), p.LogForged),),
    "StreamRefused": (Emitter((PUBLISHER,), p.LogForeign),),
    "PositionsSkipped": (Emitter((PUBLISHER,), p.StandbyPromoted),),
    "PublishingDelayed": (Emitter((PUBLISHER,), p.RedisAwayForLong),),
    "PublisherSlept": (Emitter((PUBLISHER,), nth_max=2),),
    "ConsumerRegistered": (Emitter(CONSUMERS),),
    "LanesShared": (Emitter(CONSUMERS),),
    "ConsumerPaused": (Emitter(CONSUMERS, p.PausedForAWhile),),
    "ConsumerResumed": (Emitter(CONSUMERS, p.PausedForAWhile),),
    "BatchRead": (Emitter(CONSUMERS, nth_max=4),),
    "GapFound": (Emitter(CONSUMERS, p.LogTrimmed),),
    "ForgeryFound": (Emitter(CONSUMERS, p.LogAltered),),
    "HolePassed": (Emitter(CONSUMERS, p.StandbyPromoted),),
    "HotTierRead": (Emitter(CONSUMERS, nth_max=4),),
    "EarlyEventRead": (Emitter(EAGER, nth_max=20),),
    "WarmTierRead": (Emitter(CONSUMERS, p.LogTrimmed),),
    "BatchClaimed": (Emitter(CONSUMERS, nth_max=4), Emitter(CONSUMERS, p.Moody, nth_max=40)),
    "EventHandled": (Emitter(CONSUMERS, nth_max=30), Emitter(CONSUMERS, p.Moody, nth_max=90)),
    "EventSkipped": (Emitter(CONSUMERS, nth_max=2),),
    "BatchSealed": (
        Emitter(CONSUMERS, nth_max=4),
        Emitter(CONSUMERS, p.Moody, nth_max=40),
        Emitter(CONSUMERS, p.Hopeless, nth_max=15),
        Emitter(CONSUMERS, p.Holding, nth_max=15),
        Emitter(CONSUMERS, p.RedrivenInVain, nth_max=40),
    ),
    "BatchCommitted": (Emitter(CONSUMERS, nth_max=4), Emitter(CONSUMERS, p.Moody, nth_max=15)),
    "AttemptEnded": (Emitter(CONSUMERS, nth_max=4), Emitter(CONSUMERS, p.Moody, nth_max=15)),
    "BatchRolledBack": (Emitter(CONSUMERS, p.Moody, nth_max=15),),
    "EventFailed": (
        Emitter(CONSUMERS, p.Moody, nth_max=10),
        Emitter(CONSUMERS, p.Hopeless, nth_max=3),
    ),
    "EventParked": (Emitter(CONSUMERS, p.Moody, nth_max=10),),
    "SuccessorsParked": (Emitter(CONSUMERS, p.Moody, nth_max=4),),
    "ParkedHandled": (Emitter(CONSUMERS, p.Moody, nth_max=10),),
    "KeyBacklogged": (Emitter(CONSUMERS, p.Stubborn, nth_max=2),),
    "EventBuried": (
        Emitter(CONSUMERS, p.Hopeless, nth_max=4),
        Emitter(CONSUMERS, p.RedrivenInVain, nth_max=20),
    ),
    "KeyHeld": (Emitter(CONSUMERS, p.Holding, nth_max=2),),
    "ConsumerBlocked": (Emitter(CONSUMERS, p.Strict),),
    "WorkerStarted": (Emitter(WORKERS),),
    "WorkerStopped": (Emitter(WORKERS, p.Terminated),),
    "ServerLost": (Emitter(WORKERS, p.RedisAway),),
    "ServerFound": (Emitter(WORKERS, p.RedisReturns),),
}
NOT_REACHABLE: dict[str, str] = {
    "RowsPruned": "needs rows older than the retention; a batch lost in a crash is pruned again",
    "PruningHeld": "needs rows older than twice the retention; nothing is written after it",
    "PruningFailed": "needs a lock or a missing privilege; its batch was rolled back",
    "ConsumerStartedLate": "needs a pruned outbox; nothing is written before it",
    "HotWindowOnly": "needs a stream of another service; nothing is written before it",
    "EarlyEventGivenUp": "is told after its rollback, like BatchRolledBack",
    "ColdTierRead": "needs a pruned outbox; nothing is written before it",
    "ReplayBegan": "is emitted by a command; see tests/test_replay.py, which kills replays",
    "ReplayFinished": "like ReplayBegan",
    "ReplayCancelled": "like ReplayBegan",
    "CompletedThenFailed": "is told after its commit, instead of what BatchCommitted tells",
    "EffectStarted": "needs an outside that counts its calls; see tests/test_effects_killed.py",
    "EffectCalled": "like EffectStarted",
    "EffectRecorded": "like EffectStarted",
    "EffectInterrupted": "like EffectStarted",
    "WakeupSilent": "needs a transaction pooler between publisher and server",
    "WorkerDied": "is emitted by the supervisor, which holds no lease and writes nothing",
    "WorkerSilent": "is emitted by the supervisor, like WorkerDied",
    "WorkerQuarantined": "is emitted by the supervisor, like WorkerDied",
    "QuarantineReleased": "is emitted by the supervisor, like WorkerDied",
    "ConsumerFarBehind": "is emitted by the supervisor, like WorkerDied",
    "ArchiveBegun": "needs an archive; tests/archive_drill.py kills the archiver at each",
    "ArchiveOpened": "like ArchiveBegun",
    "ArchiveRefused": "like ArchiveBegun",
    "ManifestWritten": "like ArchiveBegun",
    "ObjectAdopted": "like ArchiveBegun",
    "ObjectArchived": "like ArchiveBegun",
    "ObjectPlanned": "like ArchiveBegun",
    "ObjectStored": "like ArchiveBegun",
    "ObjectSuperseded": "like ArchiveBegun",
    "KeyUnwrapped": "needs a confidential stream; nothing is written after it",
    "KeyOutlived": "like KeyUnwrapped",
    "KeyWithdrawn": "like KeyUnwrapped",
    "KeyRotated": "is told after its commit, by the janitor, who begins anew",
    "KeyRotationFailed": "like KeyRotated; nothing was written",
    "KeysCopied": "needs a confidential stream; the next sweep compares the copy again",
    "TamperingFound": "is told before what EventFailed tells",
    "EventsUnknown": "is told like EventSkipped, inside the same transaction",
    "EventShredded": "is told like EventSkipped, inside the same transaction",
    "TimersClaimed": "needs Redis timers; tests/test_timer_processes.py kills at those that matter",
    "TimerOrphaned": "like TimersClaimed",
    "TimerWritten": "like TimersClaimed",
    "TimerHandled": "like TimersClaimed",
    "TimerRepeated": "like TimersClaimed",
    "TimerFailed": "like TimersClaimed",
    "TimerRetried": "like TimersClaimed",
    "TimerBuried": "like TimersClaimed",
    "TimerRejected": "like TimersClaimed",
    "TimerReplaced": "like TimersClaimed",
    "TimerOvertaken": "like TimersClaimed",
    "TimerDeferred": "like TimersClaimed",
    "TimersGivenBack": "like TimersClaimed",
    "TimersFired": "needs timers, fired in one statement; tests/timer_drill.py kills there",
    "TimersLate": "like TimersFired",
    "TimerHeld": "needs a timer that cannot be fired; nothing is written after it",
    "TimerShredded": "like TimersFired",
    "TimersBlocked": "needs a KMS that is away; nothing is written after it",
    "TimersUnblocked": "like TimersBlocked",
    "FiringFailed": "needs a missing privilege; its statement was rolled back",
    "TimekeeperSlept": "needs timers; nothing is written after it",
    "HandlerStuck": "is emitted by a process that ends itself right after it",
}
CORE = (
    "BatchNumbered",
    "BatchAppended",
    "BatchConfirmed",
    "BatchClaimed",
    "EventHandled",
    "BatchSealed",
    "BatchCommitted",
    "EventParked",
    "ParkedHandled",
)


class Result(StrEnum):
    """How a case ended."""

    HIT = "hit, and the books balance"
    NOT_REACHED = "not reached"
    ANOMALY = "ANOMALY"


@dataclass(frozen=True, slots=True)
class Case:
    """One process to kill at one moment."""

    signal: str
    role: str
    provocation: type[p.Provocation]
    nth: int

    def __str__(self) -> str:
        mood = "" if self.provocation is p.Provocation else f", {self.provocation.__name__}"
        return f"{self.role} at {self.signal}:{self.nth}{mood}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case."""

    case: Case
    result: Result
    seconds: float
    details: str = ""


def unplaced_signals() -> list[str]:
    """Signals that nobody has given a role, and names that are no signals any more."""
    placed = EMITTERS.keys() | NOT_REACHABLE.keys()
    return sorted(placed ^ Signal.registry.keys())


def all_cases(seed: int) -> list[Case]:
    """Every (role, signal), each at an emission that the seed chooses."""
    chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
    return [
        Case(name, role, emitter.provocation, chance.randint(1, emitter.nth_max))
        for name in Signal.registry
        for emitter in EMITTERS.get(name, ())
        for role in emitter.roles
    ]


def choose(cases: Sequence[Case], seed: int, subset: int) -> list[Case]:
    """The dangerous ones, each in one role, and `subset` others; seeds go round through all."""
    core = [
        among[seed % len(among)]
        for name in CORE
        if (among := [case for case in cases if case.signal == name])
    ]
    others = [case for case in cases if case.signal not in CORE]
    start = seed * subset % len(others)
    return core + (others + others)[start : start + min(subset, len(others))]


# ── one case ───────────────────────────────────────────────────────────────────────────────────


def run_case(case: Case, servers: Servers, template: str, redis_database: int) -> Outcome:
    """Kill, take over, close the books; an anomaly is told, never raised."""
    started_at = time.monotonic()
    redis_url = urlsplit(servers.redis_url)._replace(path=f"/{redis_database}").geturl()
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    with (
        tempfile.TemporaryDirectory(prefix="crash-matrix-") as folder,
        new_database(servers.database_url, template) as database_url,
        running_line(database_url, redis_url, Path(folder)) as line,
    ):
        try:
            was_reached = _kill_and_take_over(case, line)
        except Exception:  # noqa: BLE001 - whatever it is, it belongs into the report
            details = f"{traceback.format_exc()}\n{line.tails()}"
            return Outcome(case, Result.ANOMALY, time.monotonic() - started_at, details)
        seconds = time.monotonic() - started_at
        if was_reached:
            return Outcome(case, Result.HIT, seconds)
        return Outcome(case, Result.NOT_REACHED, seconds, line.tails())


def _kill_and_take_over(case: Case, line: Line) -> bool:
    bystanders = p.bystanders_of(case.role)
    successors = () if case.role == SENDER else (case.role,)
    audited = tuple(role for role in (*bystanders, *successors) if role in CONSUMERS)
    provocation = case.provocation(line, case.role)
    line.send(20)
    with line.working(*bystanders):
        was_reached = _kill(case, line, provocation)
        midway = line.books(audited)
        assert midway.balance, f"between the crash and the takeover:\n{midway}"
        with _successor(line, successors):
            line.send(3)
            provocation.mend()
            line.close_books(audited)
            line.wait_until_hot_log_follows()
    return was_reached


@contextmanager
def _successor(line: Line, roles: Sequence[str]) -> Iterator[None]:
    if not roles:
        yield
        return
    with line.working(*roles):
        yield


def _kill(case: Case, line: Line, provocation: p.Provocation) -> bool:
    """Whether the victim died at its failpoint."""
    failpoint = f"{case.signal}:kill:{case.nth}"
    environment = provocation.prepare()
    if case.role == SENDER:
        victim = line.start_sender(300, failpoint=failpoint)
    else:
        victim = line.start(case.role, failpoint=failpoint, environment=environment)
    try:
        with line.feeding():
            provocation.act(victim)
            wait_until(lambda: not victim.is_alive, seconds=REACH_SECONDS, what="the victim dies")
    except AssertionError:
        if victim.is_alive:
            return False
        raise
    finally:
        was_killed = victim.was_killed
        victim.end()
        provocation.heal()
    return was_killed


# ── all cases ──────────────────────────────────────────────────────────────────────────────────


def run_cases(cases: Sequence[Case], servers: Servers) -> Iterator[Outcome]:
    """Run the cases, two at a time, each with a database and a hot log of its own."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(PARALLEL):
        free.put(number + 1)
    with workload_template(servers.database_url) as template:

        def run(case: Case) -> Outcome:
            number = free.get()
            try:
                for _ in range(TRIES_MAX):
                    outcome = run_case(case, servers, template, number)
                    if outcome.result is not Result.NOT_REACHED:
                        break
                return outcome
            finally:
                free.put(number)

        with ThreadPoolExecutor(PARALLEL) as pool:
            yield from pool.map(run, cases)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The report: what was hit, what was not and why, what went wrong."""
    counts = Counter(outcome.result for outcome in outcomes)
    hit: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result is Result.HIT:
            hit.setdefault(outcome.case.signal, []).append(outcome.case.role)
    lines = ["", "killed at, and the books balance:"]
    lines += [f"  {name:<20} {', '.join(roles)}" for name, roles in hit.items()]
    lines += ["not reached:"]
    lines += [f"  {name:<20} {why}" for name, why in NOT_REACHABLE.items()]
    lines += [
        f"  {o.case.signal:<20} {o.case.role}: not emitted within {REACH_SECONDS:g} s\n{o.details}"
        for o in outcomes
        if o.result is Result.NOT_REACHED
    ]
    anomalies = [outcome for outcome in outcomes if outcome.result is Result.ANOMALY]
    lines += ["anomalies:" if anomalies else "anomalies: none"]
    lines += [f"  {outcome.case}\n{outcome.details}" for outcome in anomalies]
    totals = ", ".join(f"{counts[result]} {result.name.lower()}" for result in Result)
    return "\n".join([*lines, f"{len(outcomes)} cases: {totals.replace('_', ' ')}"])


def day_number() -> int:
    """Rotates the subset: another one every day."""
    return datetime.now(UTC).toordinal()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=day_number())
    parser.add_argument("--subset", type=int, help="the core and this many others")
    parser.add_argument("--only", metavar="SIGNAL", nargs="+", choices=sorted(Signal.registry))
    options = parser.parse_args()
    if unplaced := unplaced_signals():
        sys.stderr.write(f"tests/crash_matrix.py places these wrongly: {', '.join(unplaced)}\n")
        return 2
    cases = all_cases(options.seed)
    if options.only:
        cases = [case for case in cases if case.signal in options.only]
    elif options.subset is not None:
        cases = choose(cases, options.seed, options.subset)
    sys.stdout.write(f"{len(cases)} cases, seed {options.seed}\n")
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="crash-matrix-") as folder,
        running_servers(Path(folder), durable=False) as servers,
    ):
        for number, outcome in enumerate(run_cases(cases, servers), 1):
            outcomes.append(outcome)
            sys.stdout.write(
                f"{number:>3}/{len(cases)} {outcome.case!s:<44} {outcome.result}"
                f" ({outcome.seconds:.1f} s)\n"
            )
            sys.stdout.flush()
    sys.stdout.write(summary(outcomes) + "\n")
    return 0 if all(outcome.result is Result.HIT for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
