"""One child process: how it is started, whether it lives, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.runtime.heartbeat import Listener
from penstock.runtime.metric_pipe import MetricListener, Sink
from penstock.stores.identity import new_token

WORKER_ID = "{worker_id}"
"""Stands in a command line for the id that each start of a process gets anew."""
HEARTBEAT_FD = "{heartbeat_fd}"
"""Stands in a command line for the pipe to beat into; without it nobody listens."""
METRICS_FD = "{metrics_fd}"
"""Stands in a command line for the pipe to tell counts through; without it nobody wants them."""

FIRST_BEAT_SECONDS = 120.0
"""A child may take so long to start, however short the timeout is afterwards."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one child: a name for people, a command line, and what to add to its world."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    quarantine_as: str | None = None
    """Whom a crash loop sets aside; None: it is never set aside, only started more slowly."""
    assignment: str | None = None
    """What makes a spare one of these: a line for its standard input."""
    apart: tuple[ProcessSpec, ...] = ()
    """What runs instead once this process, in which they were together, has crashed."""
    on_metrics: Sink | None = None
    """Told what the child has counted; needs METRICS_FD in the command line."""

    @property
    def everybody(self) -> frozenset[str]:
        """Who would be set aside, if it came to that."""
        names = (part.quarantine_as for part in (self, *self.apart))
        return frozenset(name for name in names if name is not None)


class _Launched:
    """A process, and the pipes it writes into. Raises OSError where it cannot be started."""

    def __init__(self, spec: ProcessSpec, worker_id: str, stdin: int) -> None:
        self._spec, self._worker_id, self._stdin = spec, worker_id, stdin
        self.process: subprocess.Popen[bytes]
        self.listener: Listener | None = None
        self.metrics: MetricListener | None = None
        if spec.on_metrics is not None and METRICS_FD in spec.argv:
            self.metrics = MetricListener(spec.on_metrics, self._listen)
        else:
            self._listen(None)

    def close(self) -> None:
        """Take what was written last, and let go of the pipes."""
        if self.listener is not None:
            self.listener.close()
        if self.metrics is not None:
            self.metrics.drain()
            self.metrics.close()

    def _listen(self, metrics_fd: int | None) -> None:
        if HEARTBEAT_FD in self._spec.argv:
            self.listener = Listener(lambda heartbeat_fd: self._open(heartbeat_fd, metrics_fd))
        else:
            self._open(None, metrics_fd)

    def _open(self, heartbeat_fd: int | None, metrics_fd: int | None) -> None:
        values = {
            WORKER_ID: self._worker_id,
            HEARTBEAT_FD: str(heartbeat_fd),
            METRICS_FD: str(metrics_fd),
        }
        self.process = subprocess.Popen(  # noqa: S603 - our own command line
            [values.get(part, part) for part in self._spec.argv],
            stdin=self._stdin,
            env={**os.environ, **self._spec.environment},
            pass_fds=[fd for fd in (heartbeat_fd, metrics_fd) if fd is not None],
            # Out of the terminal's reach: Ctrl-C is for the parent, which stops its children.
            start_new_session=True,
        )


class Spare:
    """A process that has imported everything and waits to be told what it is.

    Importing an application takes a second or more; where a worker has died, that is too long.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self.launched = _Launched(spec, spec.name, subprocess.PIPE)

    @property
    def is_there(self) -> bool:
        """Whether it still waits."""
        return self.launched.process.poll() is None

    def assign(self, assignment: str) -> bool:
        """Tell it; returns False where it is gone."""
        stdin = self.launched.process.stdin
        assert stdin is not None
        try:
            stdin.write(assignment.encode() + b"\n")
            stdin.close()
        except OSError:
            return False
        return self.is_there

    def end(self) -> None:
        """It is needed no more."""
        self.launched.process.kill()
        self.launched.process.wait()
        with contextlib.suppress(OSError):
            assert self.launched.process.stdin is not None
            self.launched.process.stdin.close()
        self.launched.close()


class Child:
    """A running child. Raises OSError where it cannot be started."""

    def __init__(self, spec: ProcessSpec, spare: Spare | None = None) -> None:
        self.spec = spec
        # A new id every time: the dead one's leases may be released after this one has begun.
        self.worker_id = f"{spec.name}-{new_token()}"
        launched = None
        if spare is not None and spec.assignment is not None:
            if spare.assign(spec.assignment.replace(WORKER_ID, self.worker_id)):
                launched = spare.launched
            else:
                spare.end()
        launched = launched or _Launched(spec, self.worker_id, subprocess.DEVNULL)
        self._launched = launched
        self.process, self.listener = launched.process, launched.listener
        self.started_at = time.monotonic()
        self.beat_at: float | None = None
        self._heard_at = self.started_at
        self.was_silent = False
        self.kill_at: float | None = None
        """Set once it was asked to stop; its end is then no crash."""

    def listen(self, now: float) -> None:
        """Take note of heartbeats, and of what it has counted."""
        if self._launched.metrics is not None:
            self._launched.metrics.drain()
        if self.listener is not None and self.listener.heard():
            self.beat_at = self._heard_at = now

    def excuse(self, now: float) -> None:
        """Its silence until now proves nothing: it was we who did not listen."""
        self._heard_at = now

    def silent_seconds(self, now: float, timeout_seconds: float) -> float | None:
        """How long it has been silent, if that is too long."""
        if self.listener is None:
            return None
        patience = timeout_seconds
        if self.beat_at is None:
            patience = max(timeout_seconds, FIRST_BEAT_SECONDS)
        silent = now - self._heard_at
        return silent if silent > patience else None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; one that has just ended does not mind."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def dismiss(self, now: float, patience_seconds: float) -> None:
        """Ask it to stop; after a while it is killed."""
        self.kill_at = now + patience_seconds
        self.send(signal.SIGTERM)

    def close(self) -> None:
        """Let go of what was held for it."""
        self._launched.close()
