"""What an operator, or a supervisor, does for workers that can no longer do it themselves."""

from __future__ import annotations

import logging

import psycopg

from penstock.core.settings import Settings
from penstock.errors import PenstockError
from penstock.stores.leases import LeaseTable
from penstock.stores.postgres import connect

_logger = logging.getLogger("penstock")


def release_dead_worker(settings: Settings, worker_id: str) -> list[tuple[str, str]]:
    """Give back at once what a dead process held; returns (stream, role) of each lease.

    A failure is logged and harmless: the leases then run out by themselves.
    """
    try:
        with connect(settings.database_url, "penstock supervisor") as connection:
            return LeaseTable(settings.schema).release_worker(connection, worker_id)
    except (psycopg.Error, PenstockError) as error:
        _logger.warning(
            "the leases of dead worker %s run out by themselves, because releasing them failed: %s",
            worker_id,
            error,
        )
        return []
