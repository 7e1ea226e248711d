"""Event classes that many tests share: a type and version is written once in a process."""

from __future__ import annotations

from penstock import Event


class Placed(Event, type="placed", version=1):
    """The nth event."""

    n: int


class Cancelled(Event, type="cancelled", version=1):
    """The nth event, of another type."""

    n: int
