"""What an application says of its own streams."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.events import Event
from penstock.core.outgoing import is_stream_name
from penstock.core.require import require
from penstock.errors import RegistrationError


@dataclass(frozen=True, slots=True)
class Stream:
    """A declared stream and the events that it carries; none named: any."""

    name: str
    events: tuple[type[Event], ...]

    def __post_init__(self) -> None:
        require(
            is_stream_name(self.name),
            f"pipeline.stream({self.name!r}, …): that cannot name a stream. Start with a letter or "
            "digit and go on with letters, digits and . _ : / - (200 at most).",
            RegistrationError,
        )
        for event in self.events:
            require(
                _is_event_class(event),
                f"pipeline.stream({self.name!r}, …): {event!r} is no event class. Write "
                'pipeline.stream("orders", OrderPlaced, OrderCancelled).',
                RegistrationError,
            )


def _is_event_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Event) and value is not Event


def require_stream_name(stream: object) -> None:
    """Refuse what names no stream; a bare `@pipeline.consumer` hands over its function."""
    require(
        is_stream_name(stream),
        f"A consumer names its stream; {getattr(stream, '__name__', stream)!r} is no name. Write "
        '@pipeline.consumer("orders", name="bill_order").',
        RegistrationError,
    )
