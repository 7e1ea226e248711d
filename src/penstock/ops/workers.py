"""What an operator, or a supervisor, does for workers that can no longer do it themselves."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.settings import Settings
from penstock.errors import PenstockError, ServerUnavailable
from penstock.stores.leases import LeaseTable
from penstock.stores.postgres import connect, trouble_in_words
from penstock.stores.queries import Queries

_logger = logging.getLogger("penstock")


def release_dead_worker(settings: Settings, worker_id: str) -> bool:
    """Give back at once what a dead process held; returns whether an event killed it.

    Raises ServerUnavailable where that can be done later. Any other failure is logged and harmless:
    the leases then run out by themselves.
    """
    try:
        with connect(settings.database_url, "penstock supervisor") as connection:
            LeaseTable(settings.schema).release_worker(connection, worker_id)
            return _has_suspect(connection, settings.schema, worker_id)
    except ServerUnavailable:
        raise
    except (psycopg.Error, PenstockError) as error:
        if isinstance(trouble := trouble_in_words(error), ServerUnavailable):
            raise trouble from error
        _logger.warning(
            "the leases of dead worker %s run out by themselves, because releasing them failed: %s",
            worker_id,
            error,
        )
        return False


def read_database_clock(connection: psycopg.Connection[Any], schema: str) -> datetime:
    """What time it is where all hosts agree."""
    row = connection.execute(Queries("worker.sql", schema)["read_clock"]).fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


def _has_suspect(connection: psycopg.Connection[Any], schema: str, worker_id: str) -> bool:
    query = Queries("worker.sql", schema)["has_suspect"]
    row = connection.execute(query, {"worker_id": worker_id}).fetchone()
    return row is not None and bool(row[0])
