"""Whether somebody should get up: what is wrong with a status, in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.leases import PUBLISHER
from penstock.ops.status import ConsumerStatus, Status, StreamStatus
from penstock.ops.timer_status import TimerStatus

UNPUBLISHED_SECONDS_MAX = 60.0
LAG_SECONDS_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and with whom."""

    kind: str
    name: str
    message: str


def find_problems(status: Status, lag_seconds_max: float = LAG_SECONDS_MAX) -> tuple[Problem, ...]:
    """Everything that needs a person. A pause is somebody's decision, and no problem."""
    published = {
        lease.stream_name for lease in status.leases if lease.role == PUBLISHER and lease.is_held
    }
    problems: list[Problem] = []
    for stream in status.streams:
        has_publisher = stream.name in published
        problems += _of_stream(stream, lag_seconds_max, has_publisher=has_publisher)
    for consumer in status.consumers:
        problems += _of_consumer(consumer, lag_seconds_max)
    problems += _of_timers(status.timers)
    return tuple(problems)


def _of_timers(timers: TimerStatus) -> Iterator[Problem]:
    late_seconds = -(timers.next_due_ms or 0) / 1000
    if late_seconds > UNPUBLISHED_SECONDS_MAX:
        yield Problem(
            "timers_late",
            "timers",
            f"timers: the next one is late by {late_seconds:,.0f} s, and {timers.late:,} or more "
            "are. Nothing is lost; start `penstock run --timers`, or look at its log.",
        )


def _of_stream(
    stream: StreamStatus, lag_seconds_max: float, *, has_publisher: bool
) -> Iterator[Problem]:
    waiting_seconds = stream.oldest_unnumbered_ms / 1000
    if not has_publisher and waiting_seconds > UNPUBLISHED_SECONDS_MAX:
        yield Problem(
            "no_publisher",
            stream.name,
            f"stream {stream.name}: events have waited for {waiting_seconds:,.0f} s, and no "
            "publisher holds its lease. Nothing is lost; start `penstock run --publisher`.",
        )
    elif waiting_seconds > lag_seconds_max:
        yield Problem(
            "publisher_late",
            stream.name,
            f"stream {stream.name}: events have waited for {waiting_seconds:,.0f} s although a "
            "publisher holds its lease. Nothing is lost; look at that publisher's log.",
        )


def _of_consumer(consumer: ConsumerStatus, lag_seconds_max: float) -> Iterator[Problem]:
    name = consumer.name
    if consumer.quarantined_at is not None:
        yield Problem(
            "quarantined",
            name,
            f"consumer {name}: quarantined since {consumer.quarantined_at:%Y-%m-%d %H:%M %Z} "
            f"({consumer.quarantine_reason}). Mend it, then `penstock quarantine release {name}`.",
        )
    if consumer.paused_at is not None or not consumer.lag_events:
        return
    if consumer.replay_of is not None:
        if not consumer.workers:
            yield Problem(
                "replay_interrupted",
                name,
                f"replay {name}: {consumer.lag_events:,} positions are left, and nobody works on "
                f"it. Nothing is lost; `penstock replay --resume {name}` continues it, "
                f"`penstock replay cancel {name}` gives it up.",
            )
        return
    lag_seconds = (consumer.lag_ms or 0) / 1000
    if not consumer.lanes_held:
        yield Problem(
            "no_worker",
            name,
            f"consumer {name}: {consumer.lag_events:,} events wait, and no worker holds a lane of "
            "it. Nothing is lost; start `penstock run`.",
        )
    elif lag_seconds > lag_seconds_max:
        yield Problem(
            "lag",
            name,
            f"consumer {name}: the next of {consumer.lag_events:,} events has waited for "
            f"{lag_seconds:,.0f} s, more than {lag_seconds_max:,.0f} s. Nothing is lost; see in "
            "`penstock top` whether it catches up, and if not, give it lanes, workers or a faster "
            "handler.",
        )


def things_to_look_at(status: Status) -> tuple[str, ...]:
    """What is no problem and still waits for a person, each with the command that shows it."""
    consumers = status.consumers
    counted = (
        (sum(c.held_keys for c in consumers), "held key", "penstock parked list"),
        (sum(c.dead_letters for c in consumers), "dead letter", "penstock dlq list --groups"),
        (sum(c.paused_at is not None for c in consumers), "paused consumer", ""),
        (status.timers.held, "held timer", "penstock timers list --held"),
    )
    return tuple(
        f"{count:,} {noun}{'' if count == 1 else 's'}{f' (`{command}`)' if command else ''}"
        for count, noun, command in counted
        if count
    )
