"""What is known, while a handler runs, to the code that it calls."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.wire import Entry

INHERITED_METADATA = ("traceparent", "tracestate", "correlation_id")
# What a handler sends may go to a stream that everybody reads: of a sealed event's metadata it
# carries on what is random by definition, and nothing that a person has written.
INHERITED_OF_SEALED = ("traceparent",)


class Cause(Protocol):
    """What a handler is called for: what it sends meanwhile is caused by it."""

    def inherited_metadata(self) -> dict[str, Any]:
        """What an event sent by this handler carries on."""


@dataclass(slots=True)
class Handling:
    """The event in a handler's hands: what is sent meanwhile is caused by it."""

    entry: Entry

    def inherited_metadata(self) -> dict[str, Any]:
        """What an event sent by this handler carries on from the event that it handles."""
        metadata = self.entry.metadata()
        names = INHERITED_OF_SEALED if self.entry.fields[2] else INHERITED_METADATA
        inherited = {name: metadata[name] for name in names if name in metadata}
        return {**inherited, "causation_id": self.entry.event_uuid}


current_handling: ContextVar[Cause | None] = ContextVar("penstock_handling", default=None)
