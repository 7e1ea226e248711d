"""Signs of life: a worker process writes them to a pipe while all of its loops are well."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

BEATS_PER_TIMEOUT = 4
_BEAT = b"."

_logger = logging.getLogger("penstock")


class LoopPulse:
    """How one loop shows that it is well; a handler excuses it for as long as that takes.

    A loop belongs to one thread, so nothing here needs a lock.
    """

    __slots__ = ("_excuses", "_turned_at", "excused", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._turned_at = time.monotonic()
        self._excuses = 0
        self.excused = _Excuse(self)
        """Entered around what may rightly take long: a handler, a pause."""

    def turned(self) -> None:
        """The loop has come round once more."""
        self._turned_at = time.monotonic()

    def is_well(self, hung_after_seconds: float) -> bool:
        """Whether the loop turned lately, or has an excuse."""
        return self._excuses > 0 or time.monotonic() - self._turned_at < hung_after_seconds


class _Excuse:
    __slots__ = ("_pulse",)

    def __init__(self, pulse: LoopPulse) -> None:
        self._pulse = pulse

    def __enter__(self) -> None:
        self._pulse._excuses += 1  # noqa: SLF001 - the two are one

    def __exit__(self, *_: object) -> None:
        # First the time, then the excuse: in between the loop must not look hung.
        self._pulse.turned()
        self._pulse._excuses -= 1  # noqa: SLF001 - the two are one


class Pulse:
    """The heartbeat of this process, from a thread that a handler can stop only with the GIL."""

    def __init__(self, descriptor: int, *, timeout_seconds: float, longest_wait_seconds: float):
        self._descriptor = descriptor
        self._every_seconds = timeout_seconds / BEATS_PER_TIMEOUT
        # A loop that waits for work is well, however long its waits are.
        self._hung_after_seconds = timeout_seconds + longest_wait_seconds
        self._loops: set[LoopPulse] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reported: str | None = None
        os.set_blocking(descriptor, False)
        # What a handler starts must not keep the pipe open after this process has died.
        os.set_inheritable(descriptor, False)

    def start(self) -> None:
        """Beat at once, and from now on."""
        threading.Thread(target=self._beat_for_ever, name="penstock-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()

    def watch(self, name: str) -> LoopPulse:
        """One more loop has to be well; it is until it has had time to turn."""
        pulse = LoopPulse(name)
        with self._lock:
            self._loops.add(pulse)
        return pulse

    def forget(self, pulse: LoopPulse) -> None:
        """A loop has ended."""
        with self._lock:
            self._loops.discard(pulse)

    def hung(self) -> str | None:
        """The name of a loop that should have turned and has not."""
        with self._lock:
            loops = list(self._loops)
        return next((p.name for p in loops if not p.is_well(self._hung_after_seconds)), None)

    def _beat_for_ever(self) -> None:
        while True:
            hung = self.hung()
            if hung is None and not self._beat():
                return
            if hung is not None and hung != self._reported:
                _logger.error(
                    "%s has not turned for %g s, so this process stops its heartbeat; its "
                    "supervisor replaces it. Nothing is lost: what it had in hand rolls back.",
                    hung,
                    self._hung_after_seconds,
                )
            self._reported = hung
            if self._stop.wait(self._every_seconds):
                return

    def _beat(self) -> bool:
        """Whether there is still somebody to beat for."""
        try:
            # A full pipe is full of beats: whoever reads it will find enough.
            with contextlib.suppress(BlockingIOError):
                os.write(self._descriptor, _BEAT)
        except OSError:
            return False
        return True


class Listener:
    """The supervisor's end of a pipe that a child writes into."""

    def __init__(self, open_child: Callable[[int], object]) -> None:
        """Open the pipe, start the child with its other end, and keep this one."""
        self._reading, writing = os.pipe()
        try:
            os.set_blocking(self._reading, False)
            open_child(writing)
        except BaseException:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)

    def heard(self) -> bool:
        """Whether the child has beaten since the last look."""
        return bool(self.read(65536))

    def read(self, count: int) -> bytes:
        """What the child has written; nothing where that is nothing yet, or will be for ever."""
        try:
            return os.read(self._reading, count)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Listen no more."""
        os.close(self._reading)
