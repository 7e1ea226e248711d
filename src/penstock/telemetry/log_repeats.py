"""Repeated failures as one log line: the first at once, the others as a number, a minute later."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Final

from penstock.telemetry import signals
from penstock.telemetry.signals import Level, Signal

LOG_REPEAT_SECONDS: Final = 60.0
"""For how long the same failure is counted instead of written."""
LOG_REPEATS_MAX: Final = 1000
"""How many different failures are remembered at a time; the oldest is told and forgotten."""
MEASURES: Final = frozenset(
    {
        "age_seconds",
        "attempt",
        "behind",
        "calls",
        "lag_events",
        "late_seconds",
        "oldest_seconds",
        "retry_after_seconds",
        "silent_seconds",
        "waiting",
    }
)
"""Fields that say how much, how long or which try: they do not make a failure another one."""
PLACES: Final[dict[type[Signal], frozenset[str]]] = {
    signals.EventFailed: frozenset({"position", "event_uuid"}),
    signals.TimerFailed: frozenset({"timer_id"}),
}
"""A thousand events that fail of the same are one failure; what is buried of them is told one by
one."""
_COLLAPSED = (Level.WARNING, Level.ERROR)

Write = Callable[[Signal, int], None]
"""Writes a signal, and how often it was repeated; 0: it is the first."""


@dataclass(slots=True)
class _Repeated:
    until: float
    signal: Signal
    count: int = 0


class Repeats:
    """Decides which signals are written now, which are counted, and tells the counts in time."""

    def __init__(
        self,
        write: Write,
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LOG_REPEAT_SECONDS,
    ) -> None:
        self._write = write
        self._clock = clock
        self._seconds = seconds
        self._known: OrderedDict[Hashable, _Repeated] = OrderedDict()
        """In the order in which they are due."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def hear(self, signal: Signal) -> None:
        """Write a signal, or count it where the same one was written within the time."""
        if signal.level not in _COLLAPSED:
            self._write(signal, 0)
            return
        self.tell_due()
        identity = _identity(signal)
        with self._changed:
            known = self._known.get(identity)
            if known is not None:
                known.signal, known.count = signal, known.count + 1
                self._watch()
                return
            self._known[identity] = _Repeated(self._clock() + self._seconds, signal)
            oldest = None
            if len(self._known) > LOG_REPEATS_MAX:
                _, oldest = self._known.popitem(last=False)
        self._write(signal, 0)
        if oldest is not None and oldest.count:
            self._write(oldest.signal, oldest.count)

    def tell_due(self) -> None:
        """Write what was counted and whose time is over; if it goes on, so does the counting."""
        self._tell(self._clock())

    def close(self) -> None:
        """Write all that was counted, and count no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._tell(float("inf"))

    def _tell(self, now: float) -> None:
        told: list[_Repeated] = []
        with self._changed:
            while self._known:
                identity, repeated = next(iter(self._known.items()))
                if repeated.until > now:
                    break
                del self._known[identity]
                if repeated.count:
                    told.append(repeated)
                    if not self._is_closed:
                        until = now + self._seconds
                        self._known[identity] = _Repeated(until, repeated.signal)
        # Outside of the lock: writing may take its time, and may be heard about here.
        for repeated in told:
            self._write(repeated.signal, repeated.count)

    def _watch(self) -> None:
        """Somebody has to tell the counts when nothing else happens."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._tell_in_time, name="penstock-log-repeats", daemon=True
            )
            self._thread.start()

    def _tell_in_time(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or not self._known:
                    # The next one that is repeated starts another.
                    self._thread = None
                    return
                due = next(iter(self._known.values())).until
                self._changed.wait(max(0.0, due - self._clock()))
            self.tell_due()


def _identity(signal: Signal) -> Hashable:
    ignored = MEASURES | PLACES.get(type(signal), frozenset())
    names = (field.name for field in fields(signal))  # type: ignore[arg-type]
    return (type(signal), *(getattr(signal, name) for name in names if name not in ignored))
