"""A pipeline with one confidential stream, and real workers on it in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from penstock import Event, Pipeline
from penstock.core.policy import SecurityLevel
from penstock.core.policy_change import PolicyChange
from penstock.ops.policy import set_policy
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.unwrapping import unwrapping
from tests.waiting import wait_until

STREAM = "patients"


class Admitted(Event, type="patients.admitted", version=1, key="patient"):
    patient: str
    diagnosis: str


def new_key_file(folder: Path) -> str:
    """The id of a wrapping key that was made just now."""
    path = folder / "wrapping.key"
    KeyFile(str(path)).create()
    return f"file:{path}"


class Vault:
    """A database and a hot log with a confidential stream."""

    def __init__(
        self, database_url: str, redis_url: str | None, kms_key_id: str, **settings: Any
    ) -> None:
        self.database_url = database_url
        self.redis_url = redis_url
        self.kms_key_id = kms_key_id
        self.settings = {"database_url": database_url, "redis_url": redis_url, **settings}
        self.connection: psycopg.Connection[Any] = psycopg.connect(database_url, autocommit=True)
        self.pipeline = Pipeline("clinic", **self.settings)
        # As in a new process: nothing is known from before.
        unwrapping.cache_clear()

    def close(self) -> None:
        self.connection.close()
        self.pipeline.engine.dispose()

    def make_confidential(
        self, rotation_days: int | None = None, stream_name: str = STREAM
    ) -> None:
        change = PolicyChange(
            stream_name=stream_name,
            security_level=SecurityLevel.CONFIDENTIAL,
            kms_key_id=self.kms_key_id,
            dek_rotation_days=rotation_days,
        )
        set_policy(self.connection, change, by="test")

    def send(self, *diagnoses: str, patient: str = "p1") -> None:
        with psycopg.connect(self.database_url) as connection:
            events = [Admitted(patient=patient, diagnosis=each) for each in diagnoses]
            self.pipeline.send_many(connection, STREAM, events)

    @contextmanager
    def working(
        self,
        handler: Callable[..., Any] | None = None,
        *,
        roles: tuple[str, ...] = ("publisher",),
        source: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[None]:
        """Workers until the block ends; with a handler, a consumer `read` among them.

        With a `source`, the stream is another service's.
        """
        pipeline = Pipeline("clinic", **self.settings)
        if source is not None:
            pipeline.source(STREAM, **source)
        if handler is not None:
            pipeline.consumer(STREAM, name="read", **options)(handler)
            roles = (*roles, "consumer:read")
        stop, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                pipeline.run_worker(roles, stop)
            except BaseException as error:
                errors.append(error)
                raise

        thread = threading.Thread(target=run, name="worker")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            assert not errors

    def row(self, query: str, *parameters: Any) -> Any:
        return self.connection.execute(query.encode(), parameters).fetchone()

    def outcomes(self) -> list[tuple[int, str]]:
        """What became of every position."""
        return self.connection.execute(
            "SELECT position, outcome FROM events.processed_event ORDER BY position"
        ).fetchall()

    def wait_for_outcomes(self, *outcomes: str) -> None:
        expected = list(enumerate(outcomes, 1))
        wait_until(
            lambda: self.outcomes() == expected,
            what=lambda: f"{expected}, not {self.outcomes()}",
        )
