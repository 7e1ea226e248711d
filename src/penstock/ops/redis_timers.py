"""What operators ask about timers in Redis, and do to them; one topic at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from penstock.core.timer_envelope import unpack
from penstock.core.timer_keys import require_timer_id
from penstock.errors import MalformedTimer, OperationRefused
from penstock.stores.timer_queue import DeadTimer, QueuedTimer, RedisTimers, Redriven
from penstock.stores.timer_values import moment_of

BODY_SHOWN_MAX: Final = 10_000
"""How many characters of a body are shown."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a timer carries, as far as it can be shown."""

    headers: Mapping[str, str]
    body: str
    size_bytes: int
    problem: str | None = None
    """Why it cannot be read, if so."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


class TopicTimers:
    """The timers of one topic."""

    def __init__(self, store: RedisTimers, topic: str) -> None:
        self._store = store
        self.topic = topic

    def clock(self) -> datetime:
        """The server's time, which is what timers go by."""
        # A claim of nothing takes nothing and tells the time.
        claims = self._store.claim(self.topic, count=0, lease_seconds=1.0)
        return moment_of(claims.now_score)

    def counts(self) -> tuple[int, int]:
        """How many there are, and how many dead ones."""
        return self._store.counts(self.topic)

    def pending(self, *, before: datetime | None = None, limit: int) -> list[QueuedTimer]:
        """Those that wait or are being handled, the next one first."""
        score = None if before is None else before.timestamp()
        return self._store.list_timers(self.topic, before_score=score, limit=limit)

    def find(self, timer_id: str) -> tuple[QueuedTimer, Content]:
        """One timer and what it carries. Raises OperationRefused where there is none."""
        require_timer_id(timer_id)
        found = self._store.find(self.topic, timer_id)
        if found is None:
            raise self._missing(timer_id, "no timer")
        timer, payload = found
        return timer, content_of(payload)

    def cancel(self, timer_id: str) -> None:
        """Take a timer back. Raises OperationRefused where there is none."""
        require_timer_id(timer_id)
        if not self._store.cancel(self.topic, timer_id):
            raise self._missing(timer_id, "no timer")

    def list_dead(self, *, limit: int) -> list[DeadTimer]:
        """The dead letters of the topic, the latest first."""
        return self._store.list_dead(self.topic, limit=limit)

    def find_dead(self, timer_id: str) -> tuple[DeadTimer, Content]:
        """One dead letter and what it carries. Raises OperationRefused where there is none."""
        require_timer_id(timer_id)
        found = self._store.find_dead(self.topic, timer_id)
        if found is None:
            raise self._missing(timer_id, "no dead timer")
        dead, payload = found
        return dead, content_of(payload)

    def redrive(self, timer_id: str) -> None:
        """Arm a dead timer again, due at once. Raises OperationRefused where that is not possible.

        Its attempts are counted anew.
        """
        require_timer_id(timer_id)
        match self._store.redrive(self.topic, timer_id):
            case Redriven.UNKNOWN:
                raise self._missing(timer_id, "no dead timer")
            case Redriven.PENDING:
                raise OperationRefused(
                    f"A timer {timer_id!r} of topic {self.topic!r} was armed since, and would be "
                    "replaced. Nothing was changed; wait for it, or cancel it first."
                )

    def discard(self, timer_id: str) -> None:
        """Give up a dead timer for good. Raises OperationRefused where there is none."""
        require_timer_id(timer_id)
        if not self._store.discard(self.topic, timer_id):
            raise self._missing(timer_id, "no dead timer")

    def _missing(self, timer_id: str, what: str) -> OperationRefused:
        return OperationRefused(
            f"Topic {self.topic!r} has {what} {timer_id!r}. Nothing was changed; it may be "
            "handled by now, or cancelled."
        )


def content_of(payload: bytes) -> Content:
    """What a payload carries, cut where it is long; bytes that are no text are counted only."""
    try:
        envelope = unpack(payload)
    except MalformedTimer as error:
        return Content({}, "", len(payload), problem=str(error))
    size_bytes = len(envelope.body)
    try:
        body = envelope.body.decode()
    except UnicodeDecodeError:
        body = f"({size_bytes} bytes that are no text)"
    if len(body) > BODY_SHOWN_MAX:
        body = f"{body[:BODY_SHOWN_MAX]}…"
    return Content(envelope.headers, body, size_bytes)


def queued_json(timer: QueuedTimer) -> dict[str, Any]:
    """A timer for programs."""
    return {
        "timer_id": timer.timer_id,
        "topic": timer.topic,
        "state": timer.state,
        "due_at": moment_of(timer.due_score),
        "next_at": moment_of(timer.score),
        "attempts": timer.attempts,
    }


def dead_json(dead: DeadTimer) -> dict[str, Any]:
    """A dead letter for programs."""
    return {
        "timer_id": dead.timer_id,
        "topic": dead.topic,
        "due_at": moment_of(dead.due_score),
        "buried_at": moment_of(dead.buried_score),
        "attempts": dead.attempts,
        "error_type": dead.error_type,
        "error_message": dead.error_message,
    }
