"""Whether a consumer may read its stream, asked before it is entered into any books."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg

from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.errors import ServerUnavailable, ServerUnsuitable
from penstock.stores.migrations import require_current
from penstock.stores.policies import Policies
from penstock.stores.postgres import connect


def require_admitted(
    consumer: str,
    stream_name: str,
    settings: Settings,
    connection: psycopg.Connection[Any],
    source: Source | None,
) -> None:
    """Raise StreamRestricted for a consumer that its stream's policy does not name.

    The policy is the producing database's. Another service's that cannot be asked now, or not at
    all, does not hold the consumer up: what it must not read is kept from it over there.
    """
    if source is None:
        require_current(connection, settings.schema)
        Policies(settings.schema).read(connection, stream_name).require_consumer(consumer)
        return
    if source.source_url is None:
        return
    policies = Policies(source.source_schema)
    with (
        suppress(ServerUnavailable, ServerUnsuitable, psycopg.Error),
        connect(source.source_url, f"penstock {consumer}") as producers,
    ):
        policies.read(producers, stream_name).require_consumer(consumer)
