"""Changes that race the firing: rescheduled and cancelled timers, thousands of them.

`python -m tests.timer_races_drill [--races N] [--seed N]` schedules timers that are due within
milliseconds and changes each around that moment, while timekeepers fire. Whatever the change was
told has to be what happened: True, and it counts; False, and the timer was fired as it was.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

from penstock.core.settings import Settings
from penstock.stores.migrations import migrate
from penstock.stores.servers import running_servers
from tests.failure_drill import say
from tests.publishing import in_threads
from tests.timekeeping import ticking
from tests.waiting import wait_until

RACERS = 4
TIMEKEEPERS = 2
DUE_WITHIN_SECONDS = 0.008
CHANGED_WITHIN_SECONDS = 0.014
MOVED_BY_SECONDS = (0.0, 0.03)
KEYS = 50

SCHEDULE = """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() + %(delay)s * interval '1 s' AS due_at)
SELECT due_at, events.schedule(%(timer_id)s, 'races', 'T', '1', due_at => due_at, key => %(key)s,
                               recurrence => %(recurrence)s::jsonb)
  FROM moment
"""
RESCHEDULE = """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() + %(delay)s * interval '1 s' AS due_at)
SELECT due_at, events.reschedule(%(timer_id)s, due_at => due_at) FROM moment
"""
CANCEL = "SELECT clock_timestamp(), events.cancel_timer(%(timer_id)s)"
FIRED = """
SELECT metadata ->> '__timer_id__', (metadata ->> '__timer_due_ms__')::bigint,
       floor(extract(epoch FROM created_at) * 1000)::bigint
  FROM events.outbox_event ORDER BY id
"""
# A recurring timer stays; its next run is an hour away.
LEFT = "SELECT count(*) FROM events.timer WHERE due_at < clock_timestamp() + interval '30 min'"


@dataclass(frozen=True, slots=True)
class Race:
    """One timer, what was done to it, and what the answer was."""

    timer_id: str
    change: str
    recurs: bool
    due_ms: int
    new_due_ms: int
    answer: bool


@dataclass(slots=True)
class Outcome:
    """What came of all of them."""

    anomalies: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)


def race(database_url: str, *, races: int, seed: int) -> Outcome:
    """Run so many races; the database is new and migrated."""
    settings = Settings(database_url=database_url)
    run: list[Race] = []
    with ExitStack() as stack:
        for number in range(TIMEKEEPERS):
            stack.enter_context(ticking(settings, f"timekeeper-{number}"))
        share = -(-races // RACERS)
        in_threads([_racer(database_url, n, share, seed + n, run) for n in range(RACERS)])
        with psycopg.connect(database_url, autocommit=True) as connection:
            wait_until(
                lambda: connection.execute(LEFT).fetchone() == (0,), what="all timers are fired"
            )
            fired: dict[str, list[tuple[int, int]]] = {}
            for timer_id, due_ms, sent_ms in connection.execute(FIRED):
                fired.setdefault(timer_id, []).append((due_ms, sent_ms))
    outcome = Outcome()
    for each in run:
        outcome.answers[f"{each.change}{' recurring' * each.recurs}: {each.answer}"] += 1
        complaint = _complaint(each, fired.get(each.timer_id, []))
        if complaint is not None:
            outcome.anomalies.append(f"{each}: {complaint}")
    return outcome


def _racer(
    database_url: str, number: int, share: int, seed: int, run: list[Race]
) -> Callable[[], None]:
    def work() -> None:
        chance = random.Random(seed)  # noqa: S311
        with psycopg.connect(database_url, autocommit=True) as connection:
            run.extend([_one(connection, f"r{number}-{n}", chance) for n in range(share)])

    return work


def _one(connection: psycopg.Connection[Any], timer_id: str, chance: random.Random) -> Race:
    recurs = chance.random() < 0.3
    scheduled = {
        "timer_id": timer_id,
        "delay": chance.uniform(0, DUE_WITHIN_SECONDS),
        "key": chance.choice([None, f"k{chance.randrange(KEYS)}"]),
        "recurrence": '{"every_seconds": 3600}' if recurs else None,
    }
    due_at, _ = _ask(connection, SCHEDULE, scheduled)
    threading.Event().wait(chance.uniform(0, CHANGED_WITHIN_SECONDS))
    change = chance.choice(["reschedule", "cancel"])
    query = RESCHEDULE if change == "reschedule" else CANCEL
    changed = {"timer_id": timer_id, "delay": chance.uniform(*MOVED_BY_SECONDS)}
    new_due_at, answer = _ask(connection, query, changed)
    return Race(timer_id, change, recurs, _ms(due_at), _ms(new_due_at), answer)


def _complaint(race: Race, fired: list[tuple[int, int]]) -> str | None:
    """What is wrong with how often, for when, and when a timer was fired."""
    if any(sent_ms < due_ms for due_ms, sent_ms in fired):
        return f"it was fired early: {fired}"
    due = [due_ms for due_ms, _ in fired]
    if not race.answer:
        expected = [[race.due_ms]]
    elif race.change == "cancel":
        # What recurs may have been fired before, and was there to be cancelled all the same.
        expected = [[], [race.due_ms]] if race.recurs else [[]]
    else:
        moved = [race.new_due_ms]
        expected = [moved, [race.due_ms, *moved]] if race.recurs else [moved]
    return None if due in expected else f"it was fired for {due}, not {expected}"


def _ask(connection: psycopg.Connection[Any], query: str, parameters: dict[str, Any]) -> Any:
    return connection.execute(query.encode(), parameters).fetchone()


def _ms(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000 + moment.microsecond // 1000


def main() -> int:
    """Run it on servers of its own; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--races", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))  # noqa: S311
    options = parser.parse_args()
    say(f"seed {options.seed}")
    with tempfile.TemporaryDirectory() as name, running_servers(Path(name)) as servers:
        migrate(servers.database_url)
        outcome = race(servers.database_url, races=options.races, seed=options.seed)
    for what, count in sorted(outcome.answers.items()):
        say(f"  {what}: {count}")
    for anomaly in outcome.anomalies[:20]:
        say(f"  ANOMALY {anomaly}")
    say(f"{sum(outcome.answers.values())} races, {len(outcome.anomalies)} anomalies")
    is_a_race = all(
        outcome.answers[f"{change}: {answer}"]
        for change in ("cancel", "reschedule")
        for answer in (True, False)
    )
    if not is_a_race:
        say("NOT A RACE: one side always won")
    return 0 if is_a_race and not outcome.anomalies else 1


if __name__ == "__main__":
    sys.exit(main())
