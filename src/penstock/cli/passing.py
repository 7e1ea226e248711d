"""What commands need that leave nothing behind: servers for their own time, and a way to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey, Servers


@contextmanager
def running_servers(folder: Path) -> Iterator[Servers]:
    """Both servers, durable; PostgreSQL remembers when each transaction committed."""
    postgres = EmbeddedPostgres(folder / "postgres", settings={"track_commit_timestamp": "on"})
    valkey = EmbeddedValkey(folder / "valkey")
    with ExitStack() as stack:
        stack.callback(valkey.stop)
        stack.callback(postgres.stop)
        valkey.launch()
        postgres.launch()
        valkey.wait_until_ready()
        postgres.wait_until_ready()
        yield Servers(database_url=postgres.url, redis_url=valkey.url)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Leave through every `finally`, so that neither a server nor a file stays behind."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        # Below nohup, a closed terminal is nothing to leave for.
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
