"""The stages of one worker process: each in a thread of its own, started and stopped one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from penstock.runtime.heartbeat import LoopPulse, Pulse
from penstock.runtime.loop import Loop, Stage

OpenStage = Callable[[threading.Event, AbstractContextManager[Any]], Stage]
"""Opens a stage that ends after `stop`; it enters the other around what may rightly take long."""


@dataclass(frozen=True, slots=True)
class _Member:
    thread: threading.Thread
    stop: threading.Event


class Crew:
    """Runs stages side by side. An error that no waiting can cure stops all of them."""

    def __init__(self, pulse: Pulse | None = None) -> None:
        self._pulse = pulse
        self._members: dict[str, _Member] = {}
        self._lock = threading.Lock()
        self._is_stopping = False
        self.errors: list[BaseException] = []

    def start(self, name: str, open_stage: OpenStage) -> None:
        """Run a stage until it is stopped; one that runs already is left alone."""
        with self._lock:
            member = self._members.get(name)
            if self._is_stopping or (member is not None and member.thread.is_alive()):
                return
            stop = threading.Event()
            thread = threading.Thread(
                target=self._run,
                args=(name, open_stage, stop),
                name=f"penstock-{name}",
                daemon=True,
            )
            self._members[name] = _Member(thread, stop)
            thread.start()

    def stop(self, name: str) -> None:
        """Ask a stage to end after what it has in hand."""
        with self._lock:
            member = self._members.get(name)
        if member is not None:
            member.stop.set()

    def stop_all(self) -> None:
        """Ask all stages to end; none is started any more."""
        with self._lock:
            self._is_stopping = True
            members = list(self._members.values())
        for member in members:
            member.stop.set()

    def wait(self, names: set[str]) -> None:
        """Wait until these have ended. Not for a stage to call on itself."""
        with self._lock:
            members = [self._members[name] for name in names if name in self._members]
        for member in members:
            member.thread.join()

    def join(self, seconds: float) -> bool:
        """Wait for a stage to end, at most so long; returns whether all have."""
        with self._lock:
            alive = [member for member in self._members.values() if member.thread.is_alive()]
        if alive:
            alive[0].thread.join(timeout=seconds)
        return not alive

    def _run(self, name: str, open_stage: OpenStage, stop: threading.Event) -> None:
        pulse = LoopPulse(name) if self._pulse is None else self._pulse.watch(name)
        try:
            Loop(name, lambda: open_stage(stop, pulse.excused), stop, pulse).run()
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, raised there
            self.errors.append(error)
            self.stop_all()
        finally:
            if self._pulse is not None:
                self._pulse.forget(pulse)
