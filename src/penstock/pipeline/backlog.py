"""Raises the alarm when the hot log takes nothing for so long that the outbox fills up."""

from __future__ import annotations

from penstock.pipeline.log_writer import Publication
from penstock.telemetry import signals
from penstock.telemetry.bus import emit


class BacklogAlarm:
    """Tells of every stream whose hot log is far behind; again whenever it got twice as bad."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next: dict[str, int] = {}

    def look(self, publication: Publication, reason: str) -> None:
        """Compare the stream with its hot log, as far as that is known."""
        name = publication.stream_name
        reached = publication.published if publication.last is None else publication.last
        behind = publication.head - reached
        if behind < self._limit:
            self._next.pop(name, None)
        elif behind >= self._next.get(name, self._limit):
            self._next[name] = behind * 2
            emit(signals.PublishingDelayed(name, behind, reason))
