"""What a handler may know and ask besides its event."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from penstock.core.events import StreamEvent
from penstock.core.wire import Entry


@dataclass(frozen=True, slots=True)
class Context:
    """The circumstances of one attempt at handling one event."""

    consumer: str
    entry: Entry
    attempt: int = 1
    is_replay: bool = False
    is_dry_run: bool = False

    @property
    def event(self) -> StreamEvent[Any]:
        """The event as it stands in its stream, untyped."""
        return self.entry.as_stream_event(self.entry.plain_payload())

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that knows consumer, position and event."""
        extra = {
            "consumer": self.consumer,
            "position": self.entry.position,
            "event_uuid": self.entry.event_uuid,
        }
        return logging.LoggerAdapter(logging.getLogger(f"penstock.handler.{self.consumer}"), extra)

    def idempotency_key(self, effect: str) -> str:
        """The same for every attempt at this effect of this event by this consumer."""
        identity = "\0".join((self.consumer, self.entry.event_uuid, effect))
        return hashlib.sha256(identity.encode()).hexdigest()
