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
from penstock.errors import OperationRefused, ServerFailedToStart
from penstock.stores.configuration import gather, remove_dev_env, write_dev_env
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
    with _development_servers(Path.cwd()) as embedded:
        settings = invocation.pipeline.settings
        applied = migrate(settings.database_url, settings.schema)
        roles = choose_roles(
            invocation.pipeline.consumers,
            publisher=False,
            globs=(),
            topics=invocation.pipeline.timer_handlers,
            has_archive=settings.archive_url is not None,
        )
        if applied:
            print_note(f"Applied to schema {settings.schema}: {', '.join(applied)}")
        print_note(f"PostgreSQL  {masked_url(settings.database_url)}")
        print_note(f"Redis       {masked_url(settings.redis_url or 'none')}")
        print_note(
            "A second terminal in this folder finds them by itself. Try there:\n"
            "  penstock send --continuous\n"
            "  penstock status --watch"
        )
        with _ended_with(embedded):
            supervise(invocation, roles, supervision(invocation, logs))


@contextmanager
def _development_servers(folder: Path) -> Iterator[_Embedded]:
    """Run the servers that no setting names, and let everybody in this folder find them."""
    # What an earlier run may have left behind when it was killed must not count.
    given = gather({}, with_dev_env=False)
    urls = {name: given[name].value for name in SERVERS if name in given}
    if len(urls) == len(SERVERS):
        yield {}
        return
    servers = folder / SERVERS_FOLDER
    every: _Embedded = {
        "database_url": EmbeddedPostgres(servers / "postgres"),
        "redis_url": EmbeddedValkey(servers / "valkey"),
    }
    embedded = {name: server for name, server in every.items() if name not in urls}
    with _alone(servers), ExitStack() as stack:
        print_note("Starting servers …")
        for server in embedded.values():
            stack.callback(server.stop)
        # All run before any is waited for.
        for server in embedded.values():
            server.launch()
        for name, server in embedded.items():
            server.wait_until_ready()
            urls[name] = server.url
        stack.callback(remove_dev_env, folder)
        write_dev_env(folder, urls["database_url"], urls["redis_url"])
        for name, url in urls.items():
            os.environ[f"PENSTOCK_{name.upper()}"] = url or "none"
        yield embedded


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
