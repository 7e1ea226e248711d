"""What is done to a line so that a certain signal is emitted; most need nothing done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

import psycopg

from penstock.ops.redriving import Plan, Redrive, Redriven
from penstock.stores.configuration import PREFIX
from penstock.stores.dead_letters import Criteria
from tests.line import PUBLISHER, Line, Worker, lease_role
from tests.proxy import Proxy
from tests.waiting import SOON_SECONDS, wait_until
from tests.workload import MOOD, STREAM, Mood

LOG_KEY = f"penstock:{{{STREAM}}}:log"
META_KEY = f"penstock:{{{STREAM}}}:meta"
IS_AT_HEAD = """
SELECT NOT EXISTS (SELECT 1 FROM events.outbox_event WHERE position IS NULL)
       AND checkpoint >= (SELECT max(head) FROM events.stream)
  FROM events.stream_lease WHERE role = %s
"""


class Provocation:
    """Nothing is done: an ordinary day on the line."""

    def __init__(self, line: Line, role: str) -> None:
        self.line = line
        self.role = role
        self.stack = ExitStack()

    def prepare(self) -> Mapping[str, str]:
        """Before the victim starts; returns what to add to its environment."""
        return {}

    def act(self, victim: Worker) -> None:
        """While the victim runs."""

    def heal(self) -> None:
        """After the victim's death: what an operator would do."""
        self.stack.close()

    def mend(self) -> None:
        """While its successor works: what an operator would do then."""

    def wait(self, victim: Worker, condition: str, *parameters: object) -> None:
        """Until a query says true, or the victim is dead."""
        wait_until(
            lambda: not victim.is_alive or bool(self.line.value(condition, *parameters)),
            what=lambda: f"{condition}\n{victim.tail()}",
        )

    def wait_until_held(self, victim: Worker) -> None:
        self.wait(
            victim,
            "SELECT EXISTS (SELECT 1 FROM events.stream_lease WHERE role = %s AND owner_id IS NOT"
            " NULL)",
            lease_role(self.role),
        )


class Moody(Provocation):
    """Some events fail a few times; their keys are parked, and drained in between."""

    mood = Mood.MOODY

    def prepare(self) -> Mapping[str, str]:
        return {MOOD: self.mood}


class Stubborn(Moody):
    """Some events fail as long as the victim lives, and queues grow longer than they should."""

    mood = Mood.STUBBORN

    def prepare(self) -> Mapping[str, str]:
        return {**super().prepare(), f"{PREFIX}PARKED_PER_KEY_MAX": "3"}


class Hopeless(Moody):
    """Some events are buried. An operator redrives them while the victim's successor works."""

    mood = Mood.HOPELESS

    def mend(self) -> None:
        # Not at once: the successor comes by later events of these keys before they are redriven.
        wait_until(
            lambda: bool(self.line.value(IS_AT_HEAD, lease_role(self.role))),
            what="the successor has passed everything",
        )
        deadline = time.monotonic() + SOON_SECONDS
        redriven = self.redrive(lambda: time.monotonic() > deadline)
        assert redriven.ended_as == "done", redriven
        assert redriven.tally.failed == 0, redriven

    def redrive(self, is_interrupted: Callable[[], bool]) -> Redriven:
        plan = Plan(criteria=Criteria(), by="the crash matrix")
        with psycopg.connect(self.line.database_url, autocommit=True) as connection:
            return Redrive(connection, plan).run(is_interrupted)


class RedrivenInVain(Hopeless):
    """The operator redrives while the victim works, too, and what was dead is dead again."""

    def act(self, victim: Worker) -> None:
        deadline = time.monotonic() + SOON_SECONDS
        while victim.is_alive and time.monotonic() < deadline:
            self.wait(
                victim,
                "SELECT EXISTS (SELECT 1 FROM events.processed_event WHERE outcome = 'dead')",
            )
            self.redrive(lambda: not victim.is_alive)


class Holding(Hopeless):
    """The same, and the keys of such events wait for the operator."""

    mood = Mood.HOLDING


class Strict(Moody):
    """The victim comes to an event that it must know, and does not."""

    mood = Mood.STRICT


class Terminated(Provocation):
    """The victim is asked to stop after some work."""

    def act(self, victim: Worker) -> None:
        self.wait_until_held(victim)
        if victim.is_alive:
            victim.process.terminate()


class PausedForAWhile(Provocation):
    """An operator pauses the consumers, and resumes them once they have let go."""

    def act(self, victim: Worker) -> None:
        self.wait_until_held(victim)
        self.line.ask("UPDATE events.consumer SET paused_at = now()")
        self.wait(
            victim,
            "SELECT NOT EXISTS (SELECT 1 FROM events.stream_lease WHERE role = %s AND owner_id IS"
            " NOT NULL)",
            lease_role(self.role),
        )
        self.line.ask("UPDATE events.consumer SET paused_at = NULL")

    def heal(self) -> None:
        self.line.ask("UPDATE events.consumer SET paused_at = NULL")
        super().heal()


class LeaseStolen(Provocation):
    """Somebody else takes the lease, as after a pause that was too long."""

    def act(self, victim: Worker) -> None:
        self.wait_until_held(victim)
        self.line.ask(
            "UPDATE events.stream_lease SET owner_id = 'thief', worker_id = NULL, term = term + 1,"
            " lease_until = clock_timestamp() + interval '0.5 s' WHERE role = %s",
            lease_role(self.role),
        )


class TransactionLeftOpen(Provocation):
    """A former holder of the lease has a transaction open."""

    def prepare(self) -> Mapping[str, str]:
        leftover = self.stack.enter_context(closing(psycopg.connect(self.line.database_url)))
        leftover.execute(
            "SELECT pg_advisory_xact_lock_shared("
            "hashtext('penstock lane'), hashtext(%s || ' ' || %s))",
            (STREAM, lease_role(self.role)),
        )
        return {}


class LogTrimmed(Provocation):
    """The hot log no longer holds what the consumer needs first."""

    def prepare(self) -> Mapping[str, str]:
        wait_until(
            lambda: bool(
                self.line.value("SELECT coalesce(max(published), 0) > 20 FROM events.stream")
            ),
            what="something is published",
        )
        with closing(self.line.client()) as client:
            client.xtrim(LOG_KEY, minid="15-0", approximate=False)
        return {}


class LogFlushed(Provocation):
    """Redis forgets everything after it was published."""

    def act(self, victim: Worker) -> None:
        self.wait(victim, "SELECT coalesce(max(published), 0) > 0 FROM events.stream")
        with closing(self.line.client()) as client:
            client.flushdb()


class LogForged(Provocation):
    """Somebody writes into the hot log, far ahead."""

    def act(self, victim: Worker) -> None:
        self.wait(victim, "SELECT coalesce(max(published), 0) > 0 FROM events.stream")
        with closing(self.line.client()) as client:
            client.xadd(LOG_KEY, {"e": "forged"}, id="1000000-0")


class LogAltered(LogTrimmed):
    """Somebody has changed what the consumer reads first."""

    def prepare(self) -> Mapping[str, str]:
        super().prepare()
        with closing(self.line.client()) as client:
            found: Any = client.xrange(LOG_KEY)
            client.delete(LOG_KEY)
            for entry_id, fields in found:
                client.xadd(LOG_KEY, {"e": fields[b"e"] + b" "}, id=entry_id)
        return {}

    def heal(self) -> None:
        with closing(self.line.client()) as client:
            client.delete(LOG_KEY)
        super().heal()


class StandbyPromoted(Provocation):
    """The stream was numbered on another timeline: positions may be in use that nobody knows."""

    def prepare(self) -> Mapping[str, str]:
        if self.role != PUBLISHER:
            wait_until(
                lambda: bool(self.line.value("SELECT max(published) > 0 FROM events.stream")),
                what="the publisher has begun",
            )
        self.line.ask(
            "INSERT INTO events.stream (name, origin, timeline)"
            " SELECT %s, id, '00000000' FROM events.origin"
            " ON CONFLICT (name) DO UPDATE SET timeline = '00000000'",
            STREAM,
        )
        self.line.send(1)
        if self.role != PUBLISHER:
            wait_until(
                lambda: bool(self.line.value("SELECT EXISTS (SELECT 1 FROM events.hole)")),
                what="the publisher has left a hole",
            )
        return {}


class LogForeign(Provocation):
    """The hot log belongs to another database."""

    def prepare(self) -> Mapping[str, str]:
        with closing(self.line.client()) as client:
            client.hset(META_KEY, mapping={"origin": "someone-else", "term": 1, "base": 0})
        return {}

    def heal(self) -> None:
        with closing(self.line.client()) as client:
            client.delete(META_KEY, LOG_KEY)
        super().heal()


class RedisAway(Provocation):
    """Redis cannot be reached by the victim."""

    def prepare(self) -> Mapping[str, str]:
        assert self.line.redis_url is not None
        proxy = self.stack.enter_context(Proxy.to(self.line.redis_url))
        self.refusal = self.stack.enter_context(ExitStack())
        self.refusal.enter_context(proxy.refusing())
        return {"PENSTOCK_REDIS_URL": proxy.url(self.line.redis_url)}


class RedisAwayForLong(RedisAway):
    """So much is not in the hot log that somebody should know."""

    def prepare(self) -> Mapping[str, str]:
        return {**super().prepare(), f"{PREFIX}OUTBOX_BACKLOG_MAX": "1"}


class RedisReturns(RedisAway):
    """Redis is away when the victim starts, and comes back."""

    def act(self, victim: Worker) -> None:
        wait_until(
            lambda: victim.has_said("ServerLost") or not victim.is_alive,
            what="the victim misses Redis",
        )
        self.refusal.close()


def bystanders_of(role: str) -> tuple[str, ...]:
    """Who else works while a victim of this role is at it."""
    if role == PUBLISHER:
        return ("session",)
    return (PUBLISHER, "session") if role == "sender" else (PUBLISHER,)
