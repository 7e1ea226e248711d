"""A pipeline's own engines: their connections speak as Penstock's do, and no fork shares them."""

from __future__ import annotations

import asyncio
import os
from typing import Any
from weakref import WeakSet

from sqlalchemy import AdaptedConnection, Engine, event

from penstock.stores.postgres import accustom

_engines: WeakSet[Engine] = WeakSet()


def adopt(engine: Engine) -> None:
    """Look after the connections of this engine, before it has any."""
    event.listen(engine, "connect", _accustom)
    _engines.add(engine)


def _accustom(connection: Any, record: Any) -> None:
    if isinstance(connection, AdaptedConnection):
        # It asks the server, which may keep silent: the application's event loop goes on meanwhile.
        connection.run_async(lambda driver: asyncio.to_thread(accustom, driver))
    else:
        accustom(record.driver_connection)


def _leave_to_parent() -> None:
    """In a child: two processes on one connection would commit each other's work.

    The parent's connections are not closed: its sessions go on with them.
    """
    for engine in _engines:
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_leave_to_parent)
