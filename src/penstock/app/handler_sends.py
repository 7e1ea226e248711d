"""What is sent in a worker's transaction: by handlers, and about events that need a person."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from penstock.core.outgoing import Limits, OutgoingEvent, encode_event
from penstock.core.settings import Settings
from penstock.core.trouble import Trouble
from penstock.pipeline.sending import take_pending
from penstock.stores.identity import new_event_uuid
from penstock.stores.outbox_writer import errors_translated, preparing
from penstock.stores.queries import Queries
from penstock.stores.questions import ask, place_of
from penstock.stores.worker_connection import WorkerConnection


class HandlerSends:
    """Inserts events in the transaction that settles those they come of."""

    def __init__(self, settings: Settings, control: Callable[[], psycopg.Connection[Any]]) -> None:
        self._settings = settings
        self._control = control

    def insert(self, worker: WorkerConnection, session: Any) -> None:
        """What handlers remembered is inserted last, before the fence."""
        for schema, events in take_pending(session).items():
            self._send(worker, schema, events)

    def tell(self, worker: WorkerConnection, trouble: Trouble) -> None:
        """Send an event about it, if there is a stream for that; not about that stream's own."""
        stream_name = self._settings.dead_letter_stream
        if stream_name is None or trouble.stream_name == stream_name:
            return
        limits = Limits(self._settings.payload_bytes_max, self._settings.metadata_bytes_max)
        event = encode_event(
            stream_name,
            trouble.as_event(),
            event_uuid=new_event_uuid(),
            limits=limits,
            producer=trouble.consumer.partition(".")[0],
        )
        self._send(worker, self._settings.schema, [event])

    def _send(self, worker: WorkerConnection, schema: str, events: list[OutgoingEvent]) -> None:
        control = self._control()
        with errors_translated(schema):
            # Asked on the shared connection: the worker's may be sending ahead of its results.
            batch = ask(control, preparing(place_of(control), schema, events))
            worker.execute(Queries("outbox.sql", schema)["send_many"], {"batch": batch})
