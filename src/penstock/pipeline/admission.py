"""Whether a consumer may read its stream, asked before it is entered into any books."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg

from penstock.core.policy import StreamPolicy
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
) -> StreamPolicy | None:
    """The policy of a consumer's stream, which names it. Raises StreamRestricted otherwise.

    The policy is the producing database's. None: another service's, which cannot be asked now, or
    not at all. That holds no consumer up: what it must not read is kept from it over there.
    """
    if source is None:
        require_current(connection, settings.schema)
        policy = Policies(settings.schema).read(connection, stream_name)
        policy.require_consumer(consumer)
        return policy
    if source.source_url is None:
        return None
    policies = Policies(source.source_schema)
    with (
        suppress(ServerUnavailable, ServerUnsuitable, psycopg.Error),
        connect(source.source_url, f"penstock {consumer}") as producers,
    ):
        policy = policies.read(producers, stream_name)
        policy.require_consumer(consumer)
        return policy
    return None
