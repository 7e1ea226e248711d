"""What a handler of Redis timers may ask for: the timer, and a say in what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from penstock.core.require import require
from penstock.core.timer_envelope import CORRELATION_ID, REPLY_TO, unpack
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ack:
    """The timer is handled, whatever the handler does next."""


@dataclass(frozen=True, slots=True)
class Nack:
    """The timer is to be tried again, after a delay (None: as its retry policy says)."""

    delay: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """The timer is to be removed for good, without being handled."""


Decision = Ack | Nack | Reject


@dataclass(slots=True)
class TimerMessage:
    """A timer that is due, as its handler sees it.

    `body` is what was published, as its content type says. A handler that says nothing has
    handled it by returning. The first word on what becomes of the timer counts; it is carried out
    when the handler has returned.
    """

    timer_id: str
    topic: str
    body: Any
    headers: Mapping[str, str]
    correlation_id: str
    reply_to: str
    due_at: datetime
    """When it was due, by the server's clock; the same for every attempt."""
    attempt: int
    """1 for the first."""
    raw_body: bytes = b""
    """The body as it was published."""
    decision: Decision | None = field(default=None, init=False)
    """What the handler has said so far."""

    def ack(self) -> None:
        """Call the timer handled."""
        self._decide(Ack())

    def nack(self, delay: timedelta | None = None) -> None:
        """Ask for another attempt, which is counted; without a delay, when the policy says."""
        require(
            delay is None or isinstance(delay, timedelta),
            f"nack(delay=…) takes a timedelta, not {type(delay).__name__}.",
            UsageError,
        )
        self._decide(Nack(delay))

    def reject(self) -> None:
        """Have the timer removed for good."""
        self._decide(Reject())

    def _decide(self, decision: Decision) -> None:
        if self.decision is None:
            self.decision = decision


def read_message(
    payload: bytes, *, topic: str, timer_id: str, due_at: datetime, attempt: int
) -> TimerMessage:
    """A timer's payload as a message. Raises MalformedTimer where it cannot be read."""
    envelope = unpack(payload)
    return TimerMessage(
        timer_id=timer_id,
        topic=topic,
        body=envelope.value,
        headers=envelope.headers,
        # As in the other library: a timer without one goes by its own name.
        correlation_id=envelope.headers.get(CORRELATION_ID) or timer_id,
        reply_to=envelope.headers.get(REPLY_TO, ""),
        due_at=due_at,
        attempt=attempt,
        raw_body=envelope.body,
    )
