"""`penstock dev`: everything on embedded servers, for as long as these live."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import print_error, print_note
from penstock.cli.running import LogChoice, LogFormat, LogLevel, choose_roles, supervision
from penstock.cli.supervision import supervise
from penstock.core.masking import masked_url
from penstock.errors import EmbeddedServersUnavailable, OperationRefused, ServerFailedToStart
from penstock.stores.configuration import PREFIX, Given, gather, remove_dev_env, write_dev_env
from penstock.stores.migrations import migrate
from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey, claimed

EXIT_NO = 1
LOOK_SECONDS = 0.5
SERVERS_FOLDER = Path(".penstock", "servers")
SERVERS = {"database_url": "PostgreSQL", "redis_url": "Redis"}

_Embedded = Mapping[str, EmbeddedPostgres | EmbeddedValkey]


def dev(context: typer.Context, log_level: LogLevel = "info", log_format: LogFormat = None) -> None:
    """Run everything on embedded servers that live in .penstock, for development."""
    invocation = invocation_of(context)
    logs = LogChoice.of(log_level, log_format)
    # A terminal that is closed ends it as well, and leaves no address of servers that are gone.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    # What an earlier run may have left behind when it was killed must not count.
    given = gather({}, with_dev_env=False)
    with _development_servers(Path.cwd(), given) as embedded:
        settings = invocation.pipeline.settings
        roles = choose_roles(
            invocation.pipeline.consumers,
            publisher=False,
            globs=(),
            topics=invocation.pipeline.timer_handlers,
            has_archive=settings.archive_url is not None,
        )
        if applied := migrate(settings.database_url, settings.schema):
            print_note(f"Applied to schema {settings.schema}: {', '.join(applied)}")
        print_note(f"PostgreSQL  {masked_url(settings.database_url)}")
        print_note(f"Redis       {masked_url(settings.redis_url or 'none')}")
        print_note(
            f"{second_terminal(given)} Try there:\n"
            "  penstock send --continuous\n"
            "  penstock status --watch"
        )
        with _ended_with(embedded):
            supervise(invocation, roles, supervision(invocation, logs))


def second_terminal(given: Mapping[str, Given]) -> str:
    """What another terminal in this folder needs to find the same servers."""
    # Not written down for it: they hold the passwords of servers that outlive this.
    origins = [given[name].origin for name in SERVERS if name in given]
    variables = [origin for origin in origins if origin.startswith(PREFIX)]
    if variables:
        return f"For a second terminal, set {' and '.join(variables)} there as here."
    return "A second terminal in this folder finds them by itself."


@contextmanager
def _development_servers(folder: Path, given: Mapping[str, Given]) -> Iterator[_Embedded]:
    """Run the servers that no setting names, and let everybody in this folder find them."""
    if all(name in given for name in SERVERS):
        yield {}
        return
    servers = folder / SERVERS_FOLDER
    every: _Embedded = {
        "database_url": EmbeddedPostgres(servers / "postgres"),
        "redis_url": EmbeddedValkey(servers / "valkey"),
    }
    embedded = {name: server for name, server in every.items() if name not in given}
    with _alone(servers), ExitStack() as stack:
        print_note("Starting servers …")
        for server in embedded.values():
            stack.callback(server.stop)
        # All run before any is waited for.
        with offering_your_own():
            for server in embedded.values():
                server.launch()
        for server in embedded.values():
            server.wait_until_ready()
        stack.callback(remove_dev_env, folder)
        urls = {name: server.url for name, server in embedded.items()}
        write_dev_env(folder, urls)
        for name, url in urls.items():
            os.environ[f"{PREFIX}{name.upper()}"] = url
        yield embedded


@contextmanager
def offering_your_own() -> Iterator[None]:
    """Where there are no embedded servers, say what to do without them."""
    try:
        yield
    except EmbeddedServersUnavailable as error:
        raise EmbeddedServersUnavailable(
            f"{error} Or use servers of your own: set PENSTOCK_DATABASE_URL and PENSTOCK_REDIS_URL."
        ) from None


@contextmanager
def _alone(servers: Path) -> Iterator[None]:
    """Raise OperationRefused where another one runs; its end, however sudden, gives way."""
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(servers, patience_seconds=0))
        except ServerFailedToStart:
            raise OperationRefused(
                f"A `penstock dev` runs in {servers.parent.parent} already. Nothing was started; "
                "commands in this folder find its servers, or end it first."
            ) from None
        yield


@contextmanager
def _ended_with(embedded: _Embedded) -> Iterator[None]:
    """Say when a server ends, and end this process too: nothing would bring it back."""
    is_over = threading.Event()
    fallen: list[str] = []

    def watch() -> None:
        while not fallen and not is_over.wait(LOOK_SECONDS):
            fallen.extend(SERVERS[name] for name, one in embedded.items() if not one.is_running)
        if fallen:
            print_error(
                f"{fallen[0]} ended, and its log in {SERVERS_FOLDER} may say why. What was "
                "committed stays; start `penstock dev` again."
            )
            os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=watch, name="penstock-dev-servers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        if fallen:
            raise typer.Exit(EXIT_NO)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, so that servers stop and dev.env goes."""
    sys.exit(128 + number)
