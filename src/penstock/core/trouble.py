"""What somebody should be told of: a dead letter, a held key, a key with too many waiting."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from penstock.core.events import RawEvent

TROUBLE_EVENT_TYPE = "penstock.dead_letter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """One such occasion, without the event's payload."""

    kind: Literal["buried", "held", "backlogged"]
    consumer: str
    stream_name: str
    position: int
    event_uuid: str | None = None
    event_type: str | None = None
    reason: str = ""
    error: str = ""
    waiting: int = 0
    """How many events wait behind it, where that is the trouble."""

    def as_event(self) -> RawEvent:
        """The same as an event; all of a consumer's in order."""
        return RawEvent(TROUBLE_EVENT_TYPE, asdict(self), version=1, key=self.consumer)
