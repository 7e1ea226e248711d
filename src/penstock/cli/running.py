"""`penstock run` and `dev`: a process per role, kept running. `work` is such a process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.output import print_note
from penstock.core.leases import PUBLISHER, consumer_role
from penstock.core.masking import masked_url
from penstock.errors import ServerUnavailable, UsageError
from penstock.ops.workers import release_dead_worker
from penstock.runtime.processes import (
    WORKER_ID,
    ProcessGroup,
    ProcessSpec,
    end_with_parent,
    stop_on_signals,
)
from penstock.stores.configuration import gather, remove_dev_env, write_dev_env
from penstock.stores.migrations import migrate
from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey, running_servers
from penstock.telemetry.logs import LEVELS, Format, configure_logging

SERVERS_FOLDER = Path(".penstock", "servers")

LogLevel = Annotated[
    str,
    typer.Option(envvar="PENSTOCK_LOG_LEVEL", help="debug, info, warning or error."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(envvar="PENSTOCK_LOG_FORMAT", help="human or json; by default as fits stderr."),
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
    publisher: Annotated[bool, typer.Option("--publisher", help="Run the publisher.")] = False,
    consumers: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Run the consumers whose names match, e.g. 'bill_*'."),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = None,
) -> None:
    """Run publisher and consumers, a process each; without a flag, everything."""
    invocation = invocation_of(context)
    logs = LogChoice.of(log_level, log_format)
    if invocation.app is None and not (publisher and not consumers):
        raise UsageError("To run consumers, say where they are: --app module:attribute.")
    roles = choose_roles(invocation.pipeline.consumers, publisher=publisher, globs=consumers or ())
    try:
        invocation.connect("run").close()
        invocation.pipeline.check_hot_log()
    except ServerUnavailable as error:
        # Workers outlive an absent server, so its absence now is no reason to give up.
        print_note(f"{error} The workers wait for it.")
    _supervise(invocation, roles, logs)


def dev(context: typer.Context, log_level: LogLevel = "info", log_format: LogFormat = None) -> None:
    """Run everything on embedded servers that live in .penstock, for development."""
    invocation = invocation_of(context)
    logs = LogChoice.of(log_level, log_format)
    signal.signal(signal.SIGTERM, _leave)
    with _development_servers(Path.cwd()):
        settings = invocation.pipeline.settings
        applied = migrate(settings.database_url, settings.schema)
        roles = choose_roles(invocation.pipeline.consumers, publisher=False, globs=())
        if applied:
            print_note(f"Applied to schema {settings.schema}: {', '.join(applied)}")
        print_note(f"PostgreSQL  {masked_url(settings.database_url)}")
        print_note(f"Redis       {masked_url(settings.redis_url or 'none')}")
        print_note(
            "A second terminal in this folder finds them by itself. Try there:\n"
            "  penstock send --continuous\n"
            "  penstock status --watch"
        )
        _supervise(invocation, roles, logs)


def work(
    context: typer.Context,
    *,
    role: Annotated[list[str], typer.Option(help="publisher or consumer:NAME; repeatable.")],
    worker_id: Annotated[str | None, typer.Option(help="Names this process in leases.")] = None,
    parent: Annotated[int | None, typer.Option(help="End when this process ends.")] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = None,
) -> None:
    """Work in this process, in the given roles, until SIGTERM."""
    if parent is not None:
        end_with_parent(parent)
    LogChoice.of(log_level, log_format).apply()
    pipeline = invocation_of(context).pipeline
    stop = threading.Event()
    stop_on_signals(stop, pipeline.settings.shutdown_seconds)
    pipeline.run_worker(role, stop, worker_id)


def choose_roles(names: Iterable[str], *, publisher: bool, globs: Iterable[str]) -> list[str]:
    """The roles that the flags ask for; without any flag, all of them."""
    names, globs = list(names), list(globs)
    if not publisher and not globs:
        return [PUBLISHER, *map(consumer_role, names)]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            known = ", ".join(names) or "none"
            raise UsageError(f"--consumers {glob!r} matches no consumer; registered are: {known}.")
    chosen = [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
    return [PUBLISHER] * publisher + [consumer_role(name) for name in chosen]


def _supervise(invocation: Invocation, roles: list[str], logs: LogChoice) -> NoReturn:
    settings = invocation.settings
    logs.apply()
    group = ProcessGroup(
        [_worker_spec(invocation.app, role, logs.variables) for role in roles],
        shutdown_seconds=settings.shutdown_seconds,
        on_death=partial(release_dead_worker, settings),
    )
    print_note(f"Running {', '.join(roles)}. Ctrl-C stops.")
    raise typer.Exit(0 if group.run() else 1)


def _worker_spec(app: str | None, role: str, environment: Mapping[str, str]) -> ProcessSpec:
    argv = [sys.executable, "-m", "penstock"]
    if app is not None:
        argv += ["--app", app]
    argv += ["work", "--role", role, "--worker-id", WORKER_ID, "--parent", str(os.getpid())]
    return ProcessSpec(role, argv, environment)


@contextmanager
def _development_servers(folder: Path) -> Iterator[None]:
    """Run the servers that no setting names, and let everybody in this folder find them."""
    # What an earlier run may have left behind when it was killed must not count.
    given = gather({}, with_dev_env=False)
    urls = {name: given[name].value for name in ("database_url", "redis_url") if name in given}
    if len(urls) == 2:
        yield
        return
    servers = folder / SERVERS_FOLDER
    with ExitStack() as stack:
        print_note("Starting servers …")
        if not urls:
            running = stack.enter_context(running_servers(servers))
            urls = {"database_url": running.database_url, "redis_url": running.redis_url}
        elif "redis_url" in urls:
            urls["database_url"] = stack.enter_context(EmbeddedPostgres(servers / "postgres")).url
        else:
            urls["redis_url"] = stack.enter_context(EmbeddedValkey(servers / "valkey")).url
        stack.callback(remove_dev_env, folder)
        write_dev_env(folder, urls["database_url"], urls["redis_url"])
        for name, url in urls.items():
            os.environ[f"PENSTOCK_{name.upper()}"] = url or "none"
        yield


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, so that servers stop and dev.env goes."""
    sys.exit(128 + signal.SIGTERM)
