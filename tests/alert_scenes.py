"""What may befall an installation, each with the alerts that have to fire, and no others."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass

import redis

from penstock.ops.consumers import Consumers
from tests.alert_app import BILL, PIPELINE, SHIP, STREAM
from tests.alert_site import Site, consumer_labels
from tests.waiting import wait_until

BILL_WORKER, SHIP_WORKER = f"consumer:{BILL}", f"consumer:{SHIP}"
PUBLISHER, ARCHIVER = "publisher", "archiver"
BACKLOG = 10_001
NOBODY = "nobody"

Cause = Callable[[Site], AbstractContextManager[None]]


@dataclass(frozen=True)
class Scene:
    """Something that goes wrong while its block lasts; what is put right again comes after it."""

    what: str
    cause: Cause
    fires: frozenset[str]
    minutes: float = 12.0
    supervisors: int = 1

    @property
    def is_mortal(self) -> bool:
        """Whether nobody is left to put anything right."""
        return "PenstockSupervisorDown" in self.fires


def waiting(minutes: float, count: int = 1) -> Cause:
    """A consumer stands still, and what waits for it is so old."""

    @contextmanager
    def cause(site: Site) -> Iterator[None]:
        with site.stopped(BILL_WORKER):
            site.send(count)
            site.wait_until_told(
                "events_pipeline_consumer_lag_events_count", count, **consumer_labels(BILL)
            )
            if minutes:
                site.age(minutes)
                site.wait_until_told(
                    "events_pipeline_consumer_lag_ms", minutes * 60_000, **consumer_labels(BILL)
                )
            yield

    return cause


@contextmanager
def without_postgres(site: Site) -> Iterator[None]:
    """PostgreSQL does not answer."""
    with site.proxy.refusing():
        wait_until(lambda: site.lag(BILL) is None, what="nobody knows the lag")
        yield


@contextmanager
def pruned(site: Site) -> Iterator[None]:
    """A consumer stands still, and what it has to handle next has left the outbox."""
    with site.stopped(BILL_WORKER):
        site.send()
        site.wait_until_told(
            "events_pipeline_consumer_lag_events_count", 1, **consumer_labels(BILL)
        )
        site.connection.execute("DELETE FROM events.outbox_event")
        labels = consumer_labels(BILL)
        wait_until(
            lambda: site.first.told("events_pipeline_consumer_lag_ms", **labels) is None,
            what="its age is not known",
        )
        yield


@contextmanager
def paused(site: Site) -> Iterator[None]:
    """Somebody has paused a consumer, and old events wait for it."""
    consumers, names = Consumers(site.connection), [f"{PIPELINE}.{BILL}"]
    consumers.pause(names, by="somebody")
    wait_until(lambda: not consumers.lanes_held(names), what="it is paused")
    site.send()
    site.age(10)
    site.wait_until_told("events_pipeline_consumer_lag_ms", 300_000, **consumer_labels(BILL))
    yield
    site.command("consumers", "resume", BILL)


@contextmanager
def poisoned(site: Site) -> Iterator[None]:
    """A consumer buries an event."""
    site.send(trouble=BILL)
    site.wait_until_told("events_pipeline_consumer_dead_letters", 1, **consumer_labels(BILL))
    yield


@contextmanager
def held(site: Site) -> Iterator[None]:
    """A consumer holds a key."""
    site.send(customer=NOBODY, trouble=SHIP)
    site.wait_until_told("events_pipeline_consumer_held_keys", 1, **consumer_labels(SHIP))
    yield
    of_ship = ("--consumer", SHIP, "--state", "held")
    site.command("dead-letters", "discard", *of_ship, "--reason", "nobody lives there", "--yes")


@contextmanager
def unpublished(site: Site) -> Iterator[None]:
    """The publisher stands still."""
    with site.stopped(PUBLISHER):
        site.send()
        site.age(2)
        site.wait_until_told("events_pipeline_outbox_age_ms", 60_000, stream=STREAM)
        yield


@contextmanager
def flushed(site: Site) -> Iterator[None]:
    """Redis has forgotten everything."""
    with closing(redis.Redis.from_url(site.redis_url)) as client:
        client.flushdb()
    site.send()
    site.wait_until_told("events_pipeline_hot_log_lost_total", stream=STREAM)
    yield


@contextmanager
def unarchived(site: Site) -> Iterator[None]:
    """The archiver stands still."""
    site.wait_until_told("events_pipeline_archive_lag_events", 0, stream=STREAM)
    with site.stopped(ARCHIVER):
        site.send()
        site.age(120)
        site.wait_until_told("events_pipeline_archive_lag_ms", 3_600_000, stream=STREAM)
        yield


@contextmanager
def late_timer(site: Site) -> Iterator[None]:
    """Nobody fires timers."""
    with site.stopped(PUBLISHER):
        site.schedule("late")
        site.connection.execute("UPDATE events.timer SET due_at = due_at - interval '2 minutes'")
        site.wait_until_told("events_pipeline_timers_late_ms", 60_000)
        yield


@contextmanager
def held_timer(site: Site) -> Iterator[None]:
    """A timer cannot become an event as it is."""
    site.connection.execute(
        "ALTER TABLE events.outbox_event"
        " ADD CONSTRAINT known CHECK (payload ->> 'customer' <> 'nobody') NOT VALID"
    )
    site.schedule("held", customer=NOBODY)
    site.wait_until_told("events_pipeline_timers_held")
    yield
    site.connection.execute("ALTER TABLE events.outbox_event DROP CONSTRAINT known")
    site.command("timers", "reschedule", "held", "--delay", "0s")


@contextmanager
def crash_loop(site: Site) -> Iterator[None]:
    """A consumer's process dies again and again."""
    site.kill_again_and_again(SHIP_WORKER)
    site.wait_until_told("supervisor_workers_quarantined")
    yield
    site.command("quarantine", "release", SHIP)


@contextmanager
def dead_publisher(site: Site) -> Iterator[None]:
    """The publisher's process dies again and again."""
    site.kill_again_and_again(PUBLISHER)
    yield


@contextmanager
def supervisor_lost(site: Site) -> Iterator[None]:
    """A supervisor dies."""
    site.first.send(signal.SIGKILL)
    site.first.wait_until_dead()
    yield


def alerts(*names: str) -> frozenset[str]:
    return frozenset(f"Penstock{name}" for name in names)


SCENES = (
    Scene("a consumer is late", waiting(2), alerts("ConsumerLate")),
    Scene("a consumer is very late", waiting(10), alerts("ConsumerLate", "ConsumerVeryLate")),
    Scene("many events wait", waiting(0, BACKLOG), alerts("ConsumerBacklog")),
    Scene("a consumer handles nothing", waiting(0), alerts("ConsumerStuck"), minutes=17),
    Scene("PostgreSQL does not answer", without_postgres, alerts("LagUnknown")),
    Scene("the next event is in no table", pruned, alerts("LagUnknown")),
    Scene("a consumer is paused", paused, alerts("ConsumerPaused"), minutes=62),
    Scene("an event is buried", poisoned, alerts("DeadLettersRising")),
    # What is held is among the dead letters.
    Scene("a key is held", held, alerts("KeysHeld", "DeadLettersRising")),
    Scene("nobody publishes", unpublished, alerts("OutboxOld", "ConsumerLate")),
    Scene("Redis is flushed", flushed, alerts("HotLogRefilled")),
    Scene("nobody archives", unarchived, alerts("ArchiveLate")),
    Scene("nobody fires timers", late_timer, alerts("TimersLate")),
    Scene("a timer is held", held_timer, alerts("TimersHeld")),
    Scene("a consumer crashes", crash_loop, alerts("CrashLoop", "WorkersQuarantined")),
    Scene("the publisher crashes", dead_publisher, alerts("WorkersMissing")),
    Scene("one of two hosts is gone", supervisor_lost, alerts("SupervisorDown"), supervisors=2),
    Scene(
        "all hosts are gone",
        supervisor_lost,
        alerts("SupervisorDown", "NoSupervisor", "LagUnknown"),
    ),
)
