"""Child processes: started, started again when they die, stopped in order, never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from penstock.core.require import require
from penstock.errors import UsageError
from penstock.stores.identity import new_token
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

WORKER_ID = "{worker_id}"
"""Stands in a command line for the id that each start of a process gets anew."""

RESTART_FIRST_SECONDS = 0.1
RESTART_LONGEST_SECONDS = 5.0
HEALTHY_SECONDS = 10.0
LAST_RITES_SECONDS = 6.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
# The second: a process that was still starting, had nothing in hand, and simply ended.
_OBEDIENT = (0, -signal.SIGTERM)

_logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one child: a name for people, a command line, and what to add to its world."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Child:
    spec: ProcessSpec
    worker_id: str
    process: subprocess.Popen[bytes]
    started_at: float


@dataclass(frozen=True, slots=True)
class _StopRequested:
    number: int


class ProcessGroup:
    """Keeps processes running until SIGTERM or SIGINT, then ends them, kindly first."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        shutdown_seconds: float,
        on_death: Callable[[str], object],
    ) -> None:
        names = [spec.name for spec in specs]
        require(len(set(names)) == len(names), f"two processes share a name: {names}", UsageError)
        self._specs = tuple(specs)
        self._shutdown_seconds = shutdown_seconds
        self._on_death = on_death
        self._happenings: queue.SimpleQueue[_Child | _StopRequested] = queue.SimpleQueue()
        self._children: dict[str, _Child] = {}
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._last_rites: list[threading.Thread] = []

    def run(self) -> bool:
        """Run until told to stop. Returns whether every child then ended by itself, in time."""
        # Linux ends children with the thread that started them; only the main one surely lasts.
        assert threading.current_thread() is threading.main_thread()
        with self._stop_signals():
            try:
                for spec in self._specs:
                    self._start(spec)
                self._keep_running()
                return self._end()
            finally:
                self._kill()
                self._finish_last_rites()

    # ── running ───────────────────────────────────────────────────────────────────────────────

    def _keep_running(self) -> None:
        while True:
            match self._next_happening(min(self._due.values(), default=None)):
                case _StopRequested():
                    return
                case _Child() as child:
                    self._bury(child)
                    alive_seconds = time.monotonic() - child.started_at
                    self._plan_restart(child.spec, alive_seconds=alive_seconds)
            for spec in self._specs:
                if self._due.get(spec.name, float("inf")) <= time.monotonic():
                    del self._due[spec.name]
                    self._start(spec)

    def _start(self, spec: ProcessSpec) -> None:
        # A new id every time: the dead one's leases may be released after this one has begun.
        worker_id = f"{spec.name}-{new_token()}"
        try:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                [worker_id if part == WORKER_ID else part for part in spec.argv],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **spec.environment},
                # Out of the terminal's reach: Ctrl-C is for the parent, which stops its children.
                start_new_session=True,
            )
        except OSError as error:
            # Out of memory or processes, or an upgrade is replacing the files: that passes.
            _logger.warning("%s could not be started, trying again: %s", spec.name, error)
            self._plan_restart(spec, alive_seconds=0.0)
            return
        child = _Child(spec, worker_id, process, time.monotonic())
        self._children[spec.name] = child
        threading.Thread(target=self._await_end, args=(child,), daemon=True).start()

    def _await_end(self, child: _Child) -> None:
        child.process.wait()
        self._happenings.put(child)

    def _plan_restart(self, spec: ProcessSpec, *, alive_seconds: float) -> None:
        failures = 0 if alive_seconds >= HEALTHY_SECONDS else self._failures.get(spec.name, 0)
        self._failures[spec.name] = failures + 1
        self._due[spec.name] = time.monotonic() + restart_delay_seconds(failures)

    def _bury(self, child: _Child) -> None:
        """A process ended that was not asked to, or that had to be killed."""
        del self._children[child.spec.name]
        emit(signals.WorkerDied(child.spec.name, child.process.pid, child.process.returncode))
        # On a thread of its own: a database that does not answer must not hold up a restart.
        thread = threading.Thread(target=self._on_death, args=(child.worker_id,), daemon=True)
        thread.start()
        self._last_rites = [t for t in self._last_rites if t.is_alive()] + [thread]

    # ── ending ────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> bool:
        """Ask the children to stop; kill them after a while or at a second signal."""
        self._send(signal.SIGTERM)
        deadline: float | None = time.monotonic() + self._shutdown_seconds
        all_ended_themselves = True
        while self._children:
            match self._next_happening(deadline):
                case _Child() as child if child.process.returncode in _OBEDIENT:
                    del self._children[child.spec.name]
                case _Child() as child:
                    all_ended_themselves = False
                    self._bury(child)
                case _:
                    deadline = None
                    self._send(signal.SIGKILL)
        return all_ended_themselves

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        for child in self._children.values():
            child.process.wait()

    def _send(self, number: signal.Signals) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _finish_last_rites(self) -> None:
        deadline = time.monotonic() + LAST_RITES_SECONDS
        for thread in self._last_rites:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ── waiting ───────────────────────────────────────────────────────────────────────────────

    def _next_happening(self, deadline: float | None) -> _Child | _StopRequested | None:
        """The next end or signal; None when the deadline comes first."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(queue.Empty):
            return self._happenings.get(timeout=timeout)
        return None

    @contextlib.contextmanager
    def _stop_signals(self) -> Iterator[None]:
        def remember(number: int, _: FrameType | None) -> None:
            self._happenings.put(_StopRequested(number))

        before = {number: signal.signal(number, remember) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def restart_delay_seconds(failures: int) -> float:
    """How long to wait after so many deaths in a row before this one."""
    return float(min(RESTART_FIRST_SECONDS * 2 ** min(failures, 10), RESTART_LONGEST_SECONDS))


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel for a SIGTERM when the parent ends, and leave if it already has.

    Other systems than Linux have no such request.
    """
    if sys.platform == "linux":
        request = ctypes.CDLL(None, use_errno=True).prctl
        request(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def stop_on_signals(stop: threading.Event, shutdown_seconds: float) -> None:
    """Let SIGTERM and SIGINT set the event; a second one, or the time limit, ends the process.

    The main thread runs signal handlers, so it must not itself wait on the event: it could hold
    the event's lock when the signal comes.
    """
    asked = threading.Event()

    def request_stop(number: int, _: FrameType | None) -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()
        stop.set()
        # The kernel ends us when the time is up, even where nobody is left to do it, and even
        # while a handler does not let Python run.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, shutdown_seconds)

    for number in STOP_SIGNALS:
        signal.signal(number, request_stop)
