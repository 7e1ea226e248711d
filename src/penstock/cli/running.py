"""`penstock run`: a process per role, kept running. `work` is such a process."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from typing import Annotated

import psycopg
import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.output import print_error, print_note
from penstock.cli.supervision import Supervision, supervise
from penstock.cli.telling import addresses
from penstock.core.leases import ARCHIVER, PUBLISHER, TIMERS, consumer_role
from penstock.core.settings import DAY_SECONDS
from penstock.core.timer_options import timer_role
from penstock.errors import ExtraMissing, ServerUnavailable, ServerUnsuitable, UsageError
from penstock.runtime.heartbeat import Pulse
from penstock.runtime.metric_pipe import measured
from penstock.runtime.posts import EXIT_SURROUNDINGS
from penstock.runtime.stopping import end_with_parent, stop_on_signals
from penstock.stores.identity import new_token
from penstock.stores.postgres import trouble_in_words
from penstock.telemetry.logs import LEVELS, Format, configure_logging

ARCHIVING = ("obstore", "zstandard")

LogLevel = Annotated[
    str,
    typer.Option(envvar="PENSTOCK_LOG_LEVEL", help="debug, info, warning or error."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(envvar="PENSTOCK_LOG_FORMAT", help="human or json; by default as fits stderr."),
]
Processes = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Pack the consumers into N processes."),
]
HealthPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", min=0, max=65535, help="Serve /healthz, /readyz, /metrics; 0: any port."
    ),
]
RunArchiver = Annotated[bool, typer.Option("--archiver", help="Archive, into archive_url.")]
RunTimers = Annotated[
    bool, typer.Option("--timers", help="Fire and handle timers, in processes of their own.")
]
HealthHost = Annotated[str, typer.Option(metavar="HOST", help="Where to serve them.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=0, max=65535, help="Serve the same for Prometheus; 0: any."),
]
_patience = partial(typer.Option, metavar="SECONDS", min=0.1, max=DAY_SECONDS)
HeartbeatTimeout = Annotated[
    float | None, _patience(help="Replace a worker that is silent for so long: 30 s.")
]
GracefulShutdownTimeout = Annotated[
    float | None, _patience(help="Kill what has not stopped by then: 30 s.")
]


@dataclass(frozen=True, slots=True)
class LogChoice:
    """How this process and its children write their logs."""

    level: str
    log_format: Format | None

    @classmethod
    def of(cls, level: str, log_format: str | None) -> LogChoice:
        """Check what the command line says. Raises UsageError."""
        if level.lower() not in LEVELS:
            raise UsageError(f"--log-level {level!r} must be one of {', '.join(LEVELS)}.")
        match log_format:
            case "human" | "json" | None:
                return cls(level.lower(), log_format)
        raise UsageError(f"--log-format {log_format!r} must be human or json.")

    def apply(self) -> None:
        """Write the logs of this process that way."""
        configure_logging(self.level, self.log_format)

    @property
    def variables(self) -> dict[str, str]:
        """What makes a child process do the same."""
        variables = {"PENSTOCK_LOG_LEVEL": self.level}
        return variables | ({"PENSTOCK_LOG_FORMAT": self.log_format} if self.log_format else {})


def run(
    context: typer.Context,
    *,
    publisher: Annotated[bool, typer.Option("--publisher", help="Run the publisher.")] = False,
    consumers: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Run the consumers whose names match, e.g. 'bill_*'."),
    ] = None,
    archiver: RunArchiver = False,
    timers: RunTimers = False,
    processes: Processes = None,
    spare: Annotated[
        bool, typer.Option(help="Keep a process ready that replaces one that dies at once.")
    ] = True,
    heartbeat_timeout: HeartbeatTimeout = None,
    graceful_shutdown_timeout: GracefulShutdownTimeout = None,
    health_port: HealthPort = None,
    health_host: HealthHost = "127.0.0.1",
    metrics_port: MetricsPort = None,
    metrics_host: HealthHost = "127.0.0.1",
    log_level: LogLevel = "info",
    log_format: LogFormat = None,
) -> None:
    """Run publisher, archiver and consumers, a process each; without a flag, everything."""
    invocation = invocation_of(context)
    logs = LogChoice.of(log_level, log_format)
    if invocation.app is None and (consumers or not (publisher or archiver or timers)):
        raise UsageError("To run consumers, say where they are: --app module:attribute.")
    roles = choose_roles(
        invocation.pipeline.consumers,
        publisher=publisher,
        globs=consumers or (),
        archiver=archiver,
        timers=timers,
        topics=invocation.pipeline.timer_handlers,
        has_archive=invocation.settings.archive_url is not None,
    )
    _look_at_servers(invocation, roles)
    how = replace(
        supervision(invocation, logs, heartbeat_timeout, graceful_shutdown_timeout),
        processes=processes,
        with_spare=spare,
        addresses=addresses(
            health=(health_host, health_port), metrics=(metrics_host, metrics_port)
        ),
    )
    supervise(invocation, roles, how)


def _look_at_servers(invocation: Invocation, roles: Iterable[str]) -> None:
    """Raise what no waiting cures, before anything is started."""
    try:
        invocation.connect("run").close()
        invocation.pipeline.register_contracts()
        invocation.pipeline.check_hot_log()
        invocation.pipeline.check_timers(roles)
    except (ServerUnavailable, psycopg.Error) as error:
        told = error if isinstance(error, ServerUnavailable) else trouble_in_words(error)
        if not isinstance(told, ServerUnavailable):
            raise
        # Workers outlive an absent server, so its absence now is no reason to give up.
        print_note(f"{told} The workers wait for it.")


def work(
    context: typer.Context,
    *,
    role: Annotated[
        list[str] | None,
        typer.Option(help="publisher, timers, archiver, consumer:NAME or timer:TOPIC; repeatable."),
    ] = None,
    spare: Annotated[bool, typer.Option("--spare", help="Read role and id from stdin.")] = False,
    worker_id: Annotated[str | None, typer.Option(help="Names this process in leases.")] = None,
    parent: Annotated[int | None, typer.Option(help="End when this process ends.")] = None,
    heartbeat_fd: Annotated[int | None, typer.Option(help="A pipe to beat into.")] = None,
    metrics_fd: Annotated[int | None, typer.Option(help="A pipe to tell counts through.")] = None,
    heartbeat_timeout: HeartbeatTimeout = None,
    graceful_shutdown_timeout: GracefulShutdownTimeout = None,
    deployed_at: Annotated[
        str | None, typer.Option(help="When the supervisor started, in ISO 8601.")
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = None,
) -> None:
    """Work in this process, in the given roles, until SIGTERM."""
    if parent is not None:
        end_with_parent(parent)
    LogChoice.of(log_level, log_format).apply()
    deployed = _moment(deployed_at)
    pipeline = invocation_of(context).pipeline
    settings = pipeline.settings
    roles = role or []
    if spare:
        roles, worker_id = _assignment()
    if not roles:
        raise UsageError("A worker needs --role.")
    stop = threading.Event()
    stop_on_signals(stop, _or_default(graceful_shutdown_timeout, settings.shutdown_seconds))
    pulse: Pulse | None = None
    if heartbeat_fd is not None:
        pulse = Pulse(
            heartbeat_fd,
            timeout_seconds=_or_default(heartbeat_timeout, settings.heartbeat_timeout_seconds),
            longest_wait_seconds=settings.poll_seconds,
        )
        pulse.start()
    try:
        with measured(metrics_fd, pipeline.name, worker_id or f"worker-{new_token()}"):
            pipeline.run_worker(roles, stop, worker_id, deployed_at=deployed, pulse=pulse)
    except (ServerUnavailable, ServerUnsuitable) as error:
        # The supervisor waits longer then, instead of putting the worker into quarantine for it.
        print_error(str(error))
        raise typer.Exit(EXIT_SURROUNDINGS) from None


def _assignment() -> tuple[list[str], str]:
    """Wait for the line that says what to be; leave where none comes."""
    line = sys.stdin.readline()
    if not line:
        raise typer.Exit
    assignment = json.loads(line)
    return assignment["roles"], assignment["worker_id"]


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UsageError(f"--deployed-at {text!r} is no moment in ISO 8601 with its offset.")
    return moment


def _or_default(given: float | None, default: float) -> float:
    return default if given is None else given


def supervision(
    invocation: Invocation,
    logs: LogChoice,
    heartbeat_timeout: float | None = None,
    graceful_shutdown_timeout: float | None = None,
) -> Supervision:
    """How processes are run unless more is said, with the logs set up."""
    settings = invocation.settings
    logs.apply()
    return Supervision(
        environment=logs.variables,
        shutdown_seconds=_or_default(graceful_shutdown_timeout, settings.shutdown_seconds),
        heartbeat_timeout_seconds=_or_default(
            heartbeat_timeout, settings.heartbeat_timeout_seconds
        ),
    )


def choose_roles(
    names: Iterable[str],
    *,
    publisher: bool,
    globs: Iterable[str],
    archiver: bool = False,
    timers: bool = False,
    topics: Iterable[str] = (),
    has_archive: bool = False,
) -> list[str]:
    """The roles that the flags ask for; without any flag, all that there is something to do for."""
    names, globs = list(names), list(globs)
    is_everything = not (publisher or archiver or timers or globs)
    if has_archive and (archiver or is_everything):
        _require_archiving()
    if is_everything:
        handlers = [*map(consumer_role, names), *map(timer_role, topics)]
        return [PUBLISHER, *[ARCHIVER] * has_archive, *handlers]
    if archiver and not has_archive:
        raise UsageError(
            "--archiver needs a place to archive into: set PENSTOCK_ARCHIVE_URL to s3://bucket/"
            "prefix, or to the path of a folder."
        )
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            known = ", ".join(names) or "none"
            raise UsageError(f"--consumers {glob!r} matches no consumer; registered are: {known}.")
    chosen = [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
    chosen_roles = [PUBLISHER] * publisher + [TIMERS] * timers + [ARCHIVER] * archiver
    chosen_roles += [consumer_role(name) for name in chosen]
    return chosen_roles + [timer_role(topic) for topic in topics if timers]


def _require_archiving() -> None:
    """Raise ExtraMissing where an archiver would end as soon as it was started, again and again."""
    for package in ARCHIVING:
        if find_spec(package) is None:
            raise ExtraMissing("The archiver", package, "archive")
