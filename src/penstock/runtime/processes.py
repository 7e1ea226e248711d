"""Child processes: started, watched, started again when they die, stopped in order."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

from penstock.core.crash_budget import CrashLimits
from penstock.core.require import require
from penstock.errors import UsageError
from penstock.runtime.bench import Bench
from penstock.runtime.children import Child, ProcessSpec
from penstock.runtime.happenings import (
    Happening,
    InquiryEnded,
    QuarantineChanged,
    StopInsisted,
    StopRequested,
)
from penstock.runtime.health import COUNTER_QUARANTINED, GAUGE_QUARANTINED, GroupReport
from penstock.runtime.last_rites import LastRites
from penstock.runtime.posts import (
    AwaitInquiry,
    Post,
    RestartAfter,
    SetAside,
    restart_delay_seconds,
)
from penstock.runtime.quarantine import Quarantine, Quarantined
from penstock.runtime.stopping import told_of_stop_signals
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

TURN_SECONDS = 1.0
STARTING_TURN_SECONDS = 0.1
STARTING_PER_CORE = 2
# The second: a process that was still starting, had nothing in hand, and simply ended.
_OBEDIENT = (0, -signal.SIGTERM)

_logger = logging.getLogger("penstock")


class ProcessGroup:
    """Keeps processes running until SIGTERM or SIGINT, then ends them, kindly first."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        shutdown_seconds: float,
        on_death: Callable[[str], object],
        on_death_seconds: float = 30.0,
        heartbeat_timeout_seconds: float = 30.0,
        limits: CrashLimits | None = None,
        quarantine: Quarantine | None = None,
        spare: ProcessSpec | None = None,
    ) -> None:
        """`on_death` cleans up after a worker id; True from it explains the death.

        While its server is away it is called again, for `on_death_seconds`.
        """
        names = [spec.name for spec in specs]
        require(len(set(names)) == len(names), f"two processes share a name: {names}", UsageError)
        self._specs = tuple(specs)
        self._shutdown_seconds = shutdown_seconds
        self._heartbeat_timeout_seconds = heartbeat_timeout_seconds
        self._turn_seconds = min(TURN_SECONDS, heartbeat_timeout_seconds / 8)
        self._starting_max = STARTING_PER_CORE * (os.cpu_count() or 1)
        self._limits = limits
        self._quarantine = quarantine or Quarantine()
        self._quarantines = 0
        self._bench = Bench(spare)
        self._happenings: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._posts: dict[str, Post] = {}
        self._last_rites = LastRites(
            on_death,
            lambda child, is_explained: self._happenings.put(InquiryEnded(child, is_explained)),
            patience_seconds=on_death_seconds,
        )
        self._turned_at = time.monotonic()
        self._is_stopping = False
        self.report: GroupReport | None = None
        """The state of things, made anew at every turn; None before the first."""

    def run(self) -> bool:
        """Run until told to stop. Returns whether every child then ended by itself, in time."""
        # Linux ends children with the thread that started them; only the main one surely lasts.
        assert threading.current_thread() is threading.main_thread()
        with told_of_stop_signals(
            lambda: self._happenings.put(StopRequested()),
            insist=lambda: self._happenings.put(StopInsisted()),
        ):
            self._quarantine.start(lambda: self._happenings.put(QuarantineChanged()))
            was_known = self._quarantine.is_known
            try:
                for spec in self._specs:
                    self._create(spec)
                self._keep_running(was_known=was_known)
                return self._end()
            finally:
                self._bench.close()
                self._kill()
                self._last_rites.finish()
                self._quarantine.stop()

    # ── running ───────────────────────────────────────────────────────────────────────────────

    def _keep_running(self, *, was_known: bool) -> None:
        while True:
            self._fill_posts()
            self._make_report()
            self._bench.prepare(is_quiet=all(post.is_filled for post in self._posts.values()))
            match self._next_happening(self._next_turn_at()):
                case StopRequested():
                    return
                case Child() as child:
                    self._replace(child)
                case InquiryEnded(child, is_explained):
                    self._end_inquiry(child, is_explained=is_explained)
                case QuarantineChanged():
                    self._heed_quarantine(is_late=not was_known)
                    was_known = True
            self._watch()

    def _next_turn_at(self) -> float:
        now = time.monotonic()
        turn_seconds = self._turn_seconds
        if any(post.is_starting for post in self._posts.values()):
            # Others may be waiting for it to be done.
            turn_seconds = min(turn_seconds, STARTING_TURN_SECONDS)
        dues = (post.due_at for post in self._posts.values() if post.due_at is not None)
        return min([now + turn_seconds, *(due_at for due_at in dues if due_at > now)])

    def _create(self, spec: ProcessSpec, delay_seconds: float = 0.0) -> None:
        """A post for a new spec; for its parts, where one of them must not run."""
        if any(part.quarantine_as in self._quarantine.names for part in spec.apart):
            for part in spec.apart:
                self._create(part, delay_seconds)
            return
        post = self._posts[spec.name] = Post(spec, self._limits)
        self._open(post, delay_seconds)

    def _open(self, post: Post, delay_seconds: float = 0.0) -> None:
        if post.spec.quarantine_as in self._quarantine.names:
            self._leave_empty(post)
        else:
            post.due_at = time.monotonic() + delay_seconds

    def _fill_posts(self) -> None:
        for post in self._posts.values():
            if post.due_at is None or post.due_at > time.monotonic():
                continue
            starting = sum(other.is_starting for other in self._posts.values())
            if not post.was_filled and starting >= self._starting_max:
                # Forty imports at once would all take so long that they look hung.
                continue
            try:
                child = post.fill(self._bench.take(post.spec))
            except OSError as error:
                # Out of memory or processes, or an upgrade is replacing the files: that passes.
                _logger.warning("%s cannot be started, trying again: %s", post.spec.name, error)
                self._act(post)
                continue
            threading.Thread(target=self._await_end, args=(child,), daemon=True).start()

    def _await_end(self, child: Child) -> None:
        child.process.wait()
        self._happenings.put(child)

    def _watch(self) -> None:
        """Kill who is silent for too long, or does not leave when asked to."""
        now = time.monotonic()
        was_away = now - self._turned_at > self._heartbeat_timeout_seconds / 2
        self._turned_at = now
        for child in self._children():
            child.listen(now)
            if was_away:
                child.excuse(now)
            silent = child.silent_seconds(now, self._heartbeat_timeout_seconds)
            if silent is not None and not child.was_silent:
                child.was_silent = True
                emit(signals.WorkerSilent(child.spec.name, child.process.pid, round(silent, 3)))
                child.send(signal.SIGKILL)
            elif child.kill_at is not None and child.kill_at <= now:
                child.send(signal.SIGKILL)

    # ── after a death ─────────────────────────────────────────────────────────────────────────

    def _replace(self, child: Child) -> None:
        post = self._posts[child.spec.name]
        was_dismissed = child.kill_at is not None
        if was_dismissed and child.process.returncode in _OBEDIENT:
            self._forget(child)
        else:
            self._bury(child)
        if child.spec.apart:
            self._part(post)
        elif was_dismissed:
            self._open(post)
        else:
            post.record_death(child)
            self._act(post)

    def _part(self, post: Post) -> None:
        """Who crashed in company is found by running everybody alone."""
        names = ", ".join(part.name for part in post.spec.apart)
        _logger.warning("%s ended; from now on a process each runs %s", post.spec.name, names)
        del self._posts[post.spec.name]
        for part in post.spec.apart:
            self._create(part, restart_delay_seconds(0))

    def _act(self, post: Post) -> None:
        name = post.spec.quarantine_as
        if name is not None and name in self._quarantine.names:
            self._leave_empty(post)
            return
        match post.decide():
            case RestartAfter(seconds, excess):
                post.due_at = time.monotonic() + seconds
                if excess is not None:
                    text = "%s keeps crashing (%s); the next start is in %g s"
                    _logger.error(text, post.spec.name, excess, seconds)
            case AwaitInquiry():
                post.is_waiting_for_inquiry = True
            case SetAside(reason):
                assert name is not None
                self._set_aside(post, name, reason)

    def _end_inquiry(self, child: Child, *, is_explained: bool) -> None:
        post = self._posts.get(child.spec.name)
        if post is None:
            return
        post.end_inquiry(child.worker_id, is_explained=is_explained)
        if post.is_waiting_for_inquiry:
            post.is_waiting_for_inquiry = False
            self._act(post)

    def _set_aside(self, post: Post, name: str, reason: str) -> None:
        self._quarantines += 1
        self._quarantine.add(Quarantined(name, reason, post.crashes))
        post.is_quarantined = True
        emit(signals.WorkerQuarantined(name, len(post.crashes), reason))
        self._tell_quarantine("%s is quarantined: %s", name, reason)

    def _leave_empty(self, post: Post) -> None:
        post.is_quarantined = True
        name = post.spec.quarantine_as
        self._tell_quarantine(
            "%s stays quarantined; to start it: penstock quarantine release %s", name, name
        )

    def _heed_quarantine(self, *, is_late: bool) -> None:
        """Start who was released. Whoever is well stays, unless nobody could ask before it ran."""
        names = self._quarantine.names
        now = time.monotonic()
        for post in self._posts.values():
            name = post.spec.quarantine_as
            if post.is_quarantined and name is not None and name not in names:
                post.release()
                emit(signals.QuarantineReleased(name))
                self._tell_quarantine("%s is released from quarantine", name)
            elif is_late and post.child is not None and names & post.spec.everybody:
                post.child.dismiss(now, self._shutdown_seconds)

    def _tell_quarantine(self, message: str, *values: object) -> None:
        aside = sum(post.is_quarantined for post in self._posts.values())
        numbers = {COUNTER_QUARANTINED: self._quarantines, GAUGE_QUARANTINED: aside}
        _logger.warning(message, *values, extra=numbers)

    def _bury(self, child: Child) -> None:
        """A process ended that was not asked to, or that had to be killed."""
        self._forget(child)
        emit(signals.WorkerDied(child.spec.name, child.process.pid, child.process.returncode))
        self._last_rites.begin(child)

    # ── ending ────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> bool:
        """Ask the children to stop; kill them after a while or if somebody insists."""
        self._is_stopping = True
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + self._shutdown_seconds
        all_ended_themselves = True
        while self._children():
            self._make_report()
            match self._next_happening(min(deadline, time.monotonic() + self._turn_seconds)):
                case Child() as child if child.process.returncode in _OBEDIENT:
                    self._forget(child)
                case Child() as child:
                    all_ended_themselves = False
                    self._bury(child)
                case StopInsisted():
                    self._send(signal.SIGKILL)
            if time.monotonic() >= deadline:
                self._send(signal.SIGKILL)
        return all_ended_themselves

    def _kill(self) -> None:
        self._send(signal.SIGKILL)
        for child in self._children():
            child.process.wait()

    def _send(self, number: signal.Signals) -> None:
        for child in self._children():
            child.send(number)

    def _children(self) -> list[Child]:
        return [post.child for post in self._posts.values() if post.child is not None]

    def _forget(self, child: Child) -> None:
        self._posts[child.spec.name].child = None
        child.close()

    # ── waiting and telling ───────────────────────────────────────────────────────────────────

    def _next_happening(self, deadline: float) -> Happening | None:
        """The next end or signal; None when the deadline comes first."""
        with contextlib.suppress(queue.Empty):
            return self._happenings.get(timeout=max(0.0, deadline - time.monotonic()))
        return None

    def _make_report(self) -> None:
        now = time.monotonic()
        posts = self._posts.values()
        self.report = GroupReport(
            made_at=now,
            workers=tuple(post.report(now) for post in posts),
            quarantined=tuple(str(p.spec.quarantine_as) for p in posts if p.is_quarantined),
            quarantines=self._quarantines,
            database_answered_at=self._quarantine.answered_at,
            is_stopping=self._is_stopping,
        )
