"""Both servers at once: what the demo, development and the tests run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.stores.servers.postgres import EmbeddedPostgres
from penstock.stores.servers.valkey import EmbeddedValkey


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Where a running pair of servers is reached."""

    database_url: str
    redis_url: str


@contextmanager
def running_servers(folder: Path, *, durable: bool = True) -> Iterator[Servers]:
    """Run PostgreSQL and Valkey below the folder while the block lasts.

    Without `durable` they are faster and forget: Valkey at its end, PostgreSQL when the machine
    fails.
    """
    postgres = EmbeddedPostgres(folder / "postgres", durable=durable)
    valkey = EmbeddedValkey(folder / "valkey", persistence="everysec" if durable else "none")
    with ExitStack() as stack:
        stack.callback(valkey.stop)
        stack.callback(postgres.stop)
        # Both run before either is waited for.
        valkey.launch()
        postgres.launch()
        valkey.wait_until_ready()
        postgres.wait_until_ready()
        yield Servers(database_url=postgres.url, redis_url=valkey.url)
