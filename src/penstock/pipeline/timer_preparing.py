"""Makes events of timers that take more than SQL: those that recur, and confidential ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson
import psycopg

from penstock.core.failures import storable
from penstock.core.key_rings import HeldKey
from penstock.core.outgoing import OutgoingEvent
from penstock.core.policy import StreamPolicy
from penstock.core.recurrence import Recurrence, due_runs
from penstock.core.sealing import NONCE_BYTES, opened_event, sealed_event
from penstock.core.wrapped_keys import HASHING_VERSION, WrappedKey
from penstock.errors import (
    ExtraMissing,
    InvalidTimer,
    KeyRefused,
    KeyShredded,
    KeyUnavailable,
    SealBroken,
)
from penstock.pipeline.timer_keys import TimerKeys
from penstock.pipeline.timer_refusals import REASON_LENGTH_MAX
from penstock.stores.data_keys import DataKeys
from penstock.stores.identity import new_event_uuid
from penstock.stores.policies import Policies
from penstock.stores.timekeeping import DueTimer, PreparedTimer

Connection = psycopg.Connection[Any]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Unfit:
    """No waiting helps: the timer cannot be fired as it is."""

    timer: DueTimer
    reason: str


@dataclass(frozen=True, slots=True)
class KeyMissing:
    """The timer, and its stream's others, have to wait for a data key."""

    stream_name: str
    reason: str | None
    """None: it was asked for a moment ago."""


@dataclass(frozen=True, slots=True)
class _StreamKeys:
    """A stream's policy and keys, as the database has them now."""

    policy: StreamPolicy
    by_id: dict[str, WrappedKey]

    @property
    def hashing(self) -> WrappedKey | None:
        return self._of(HASHING_VERSION)

    @property
    def active(self) -> WrappedKey | None:
        version = self.policy.active_key_version
        return None if version is None else self._of(version)

    def _of(self, version: int) -> WrappedKey | None:
        return next((key for key in self.by_id.values() if key.version == version), None)


class Preparing:
    """Prepares the timers of one batch; policies and keys are read once for each of its streams."""

    def __init__(self, schema: str, connection: Connection, keys: TimerKeys) -> None:
        self._connection = connection
        self._policies = Policies(schema)
        self._data_keys = DataKeys(schema)
        self._keys = keys
        self._streams: dict[str, _StreamKeys] = {}

    def prepare(self, timer: DueTimer) -> PreparedTimer | Unfit | KeyMissing:
        """What becomes of a timer that is due: its events, and when it is due again."""
        stream_name, key_id = timer.event.stream_name, timer.event.key_id
        try:
            runs, next_due_at = _runs(timer)
            seal = self._sealer(timer.event) if runs else None
        except KeyShredded:
            return PreparedTimer(timer, (), None, shredded_key_id=key_id)
        except (InvalidTimer, SealBroken) as error:
            return Unfit(timer, storable(str(error), REASON_LENGTH_MAX))
        except (KeyUnavailable, KeyRefused, ExtraMissing) as error:
            return KeyMissing(stream_name, str(error))
        if runs and seal is None:
            return KeyMissing(stream_name, None)
        events = [seal(_told_of(timer.timer_id, run)) for run in runs] if seal else []
        return PreparedTimer(timer, events, next_due_at)

    def _sealer(self, event: OutgoingEvent) -> Callable[[str], OutgoingEvent] | None:
        """Makes an event of what waits, given what to add to its metadata; None: not yet."""
        stream = self._stream(event)
        plain = event
        if event.key_id is not None:
            own = stream.by_id.get(event.key_id)
            if own is None:
                raise SealBroken(f"Its stream has no data key {event.key_id}.")
            held = self._keys.get(own)
            if held is None:
                return None
            plain = _opened(event, held)
        if stream.policy.is_confidential:
            sealing = stream.active
        else:
            # What was confidential when it was scheduled stays so, under the key that it has.
            sealing = None if event.key_id is None else stream.by_id[event.key_id]
            if sealing is None:
                return lambda told: _fresh(plain, told)
        return self._sealing_with(plain, sealing, stream.hashing)

    def _sealing_with(
        self, plain: OutgoingEvent, sealing: WrappedKey | None, hashing: WrappedKey | None
    ) -> Callable[[str], OutgoingEvent] | None:
        if sealing is None or hashing is None:
            raise KeyUnavailable(f"{plain.stream_name!r} is confidential and has no data key.")
        seal_key, hash_key = self._keys.get(sealing), self._keys.get(hashing)
        if seal_key is None or hash_key is None:
            return None
        return lambda told: sealed_event(
            _fresh(plain, told), seal_key.key, hash_key.secret, os.urandom(NONCE_BYTES)
        )

    def _stream(self, event: OutgoingEvent) -> _StreamKeys:
        found = self._streams.get(event.stream_name)
        if found is None:
            found = _StreamKeys(self._policies.read(self._connection, event.stream_name), {})
        is_sealed = found.policy.is_confidential or event.key_id is not None
        if is_sealed and not found.by_id:
            keys = self._data_keys.read(self._connection, event.stream_name)
            found = _StreamKeys(found.policy, {key.key_id: key for key in keys})
        self._streams[event.stream_name] = found
        return found


def _runs(timer: DueTimer) -> tuple[tuple[datetime, ...], datetime | None]:
    if timer.schedule is None:
        return (timer.due_at,), None
    runs = due_runs(Recurrence.from_text(timer.schedule), timer.due_at, timer.moment)
    return runs.fire, runs.next_due_at


def _opened(event: OutgoingEvent, held: HeldKey) -> OutgoingEvent:
    try:
        return opened_event(event, held.key)
    except SealBroken as broken:
        raise SealBroken(
            f"It is not what was scheduled: {broken}. Find out who can write to the timers."
        ) from None


def _told_of(timer_id: str, due_at: datetime) -> str:
    """What an event says of the timer that it comes from, as events.timer_metadata writes it."""
    since_epoch = due_at - _EPOCH
    due_ms = (since_epoch.days * 86_400 + since_epoch.seconds) * 1000
    due_ms += since_epoch.microseconds // 1000
    return orjson.dumps({"__timer_id__": timer_id, "__timer_due_ms__": due_ms}).decode()[1:]


def _fresh(plain: OutgoingEvent, told: str) -> OutgoingEvent:
    """A new event, with an identity of its own."""
    # Spliced, because decoding would lose what only PostgreSQL's numbers can hold.
    separator = "" if plain.metadata == "{}" else ","
    metadata = f"{plain.metadata[:-1]}{separator}{told}"
    return replace(plain, event_uuid=new_event_uuid(), metadata=metadata, key_id=None)
