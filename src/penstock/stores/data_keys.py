"""Data keys, wrapped, in PostgreSQL: made, rotated, wrapped anew and shredded.

Version 0 is the secret that keys are hashed with, from 1 on they seal events; the policy says
which one does. Only `penstock policy` and the janitor come here; everybody else only reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import psycopg

from penstock.core.wrapped_keys import HASHING_VERSION, WrappedKey, key_id_of
from penstock.errors import KeyRefused, KeyShredded, KeyUnavailable, OperationRefused
from penstock.stores.kms import kms_for, wrapping_context
from penstock.stores.kms.protocol import NewKey
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]
EVENTS_PER_KEY_MAX: Final = 2**30


class DataKeys:
    """The table `data_key`; callers bring connections, and transactions if they like.

    Whatever asks a KMS raises KeyUnavailable or KeyRefused, and has changed nothing then.
    """

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("data_key.sql", schema)

    def read(self, connection: Connection, stream_name: str) -> list[WrappedKey]:
        """All versions of a stream's keys, the shredded ones too."""
        rows = connection.execute(self._sql["read"], {"stream_name": stream_name}).fetchall()
        return wrapped_keys(stream_name, rows)

    def read_all(self, connection: Connection) -> dict[str, list[WrappedKey]]:
        """The same of every stream that has keys."""
        found: dict[str, list[WrappedKey]] = {}
        for stream_name, *row in connection.execute(self._sql["read_all"]):
            found.setdefault(stream_name, []).extend(wrapped_keys(stream_name, [row]))
        return found

    def prepare(self, connection: Connection, stream_name: str, kms_key_id: str) -> int:
        """See to it that a stream can be sealed; returns the version that does so from now on.

        In the transaction that makes it confidential, after its policy was written.
        """
        known = {key.version for key in self.read(connection, stream_name)}
        if HASHING_VERSION not in known:
            self.make(connection, stream_name, HASHING_VERSION, kms_key_id)
        sealing = [version for version in known if version != HASHING_VERSION]
        version = max(sealing, default=1)
        if not sealing:
            self.make(connection, stream_name, version, kms_key_id)
        self._activate(connection, stream_name, version)
        return version

    def make(self, connection: Connection, stream_name: str, version: int, kms_key_id: str) -> None:
        """Make one version, unless it is there. Nobody uses it before it is the active one."""
        new = kms_for(kms_key_id).generate(wrapping_context(stream_name, version))
        self._insert(connection, stream_name, version, new)

    def rotate(self, connection: Connection, stream_name: str) -> int:
        """Seal with a new key from now on; returns its version. Older ones still open."""
        with connection.transaction():
            locked = connection.execute(
                self._sql["lock_policy"], {"stream_name": stream_name}
            ).fetchone()
            if locked is None or locked[0] is None:
                raise OperationRefused(
                    f"{stream_name!r} is not confidential, so it has no data key to rotate. "
                    "Nothing was changed."
                )
            kms_key_id, _active = locked
            known = [key.version for key in self.read(connection, stream_name)]
            version = max(known, default=HASHING_VERSION) + 1
            self.make(connection, stream_name, version, kms_key_id)
            self._activate(connection, stream_name, version)
        return version

    def wrapped_anew(
        self,
        connection: Connection,
        stream_name: str,
        kms_key_id: str,
        but: Collection[int] = (),
    ) -> list[tuple[WrappedKey, NewKey]]:
        """Every key, but for these versions, as it is and wrapped by this KMS key; changes nothing.

        The keys themselves stay, and with them whatever they have sealed.
        """
        return [
            (key, _wrapped_anew(key, kms_key_id))
            for key in self.read(connection, stream_name)
            if key.wrapped is not None and key.version not in but
        ]

    def replace(
        self, connection: Connection, rewrapped: Iterable[tuple[WrappedKey, NewKey]]
    ) -> set[int]:
        """Keep keys as they were wrapped anew. Returns which: not what was changed meanwhile."""
        replaced = set()
        for key, new in rewrapped:
            parameters = {
                "key_id": key.key_id,
                "wrapped": new.wrapped,
                "kms_key_id": new.kms_key_id,
                "former": key.wrapped,
            }
            if connection.execute(self._sql["rewrap"], parameters).rowcount:
                replaced.add(key.version)
        return replaced

    def shred(self, connection: Connection, stream_name: str, version: int) -> bool:
        """Destroy a version's key here; False: it was shredded before.

        What it has sealed stays where it is and is never read again. Copies elsewhere are the
        caller's business.
        """
        with connection.transaction():
            active = self._active(connection, stream_name)
            keys = {key.version: key for key in self.read(connection, stream_name)}
            key = keys.get(version)
            if key is None or version == HASHING_VERSION:
                known = ", ".join(str(known) for known in keys if known != HASHING_VERSION)
                raise OperationRefused(
                    f"{stream_name!r} has no data key of version {version}; it has "
                    f"{known or 'none'}. Nothing was shredded."
                )
            if version == active:
                raise OperationRefused(
                    f"Version {version} seals the events of {stream_name!r} now. Nothing was "
                    f"shredded; write `penstock policy rotate {stream_name}` first."
                )
            connection.execute(self._sql["await_senders"], {"key_id": key.key_id})
            parameters = {"stream_name": stream_name, "version": version}
            return connection.execute(self._sql["shred"], parameters).rowcount > 0

    def due_for_rotation(self, connection: Connection) -> list[str]:
        """Streams whose key has been in use for long enough, by time or by events."""
        rows = connection.execute(self._sql["due_for_rotation"], {"events_max": EVENTS_PER_KEY_MAX})
        return [stream_name for (stream_name,) in rows]

    def _active(self, connection: Connection, stream_name: str) -> int | None:
        row = connection.execute(self._sql["lock_policy"], {"stream_name": stream_name}).fetchone()
        return None if row is None else row[1]

    def _insert(self, connection: Connection, stream_name: str, version: int, new: NewKey) -> None:
        connection.execute(
            self._sql["insert"],
            {
                "key_id": key_id_of(version, new.secret),
                "stream_name": stream_name,
                "version": version,
                "wrapped": new.wrapped,
                "kms_key_id": new.kms_key_id,
            },
        )

    def _activate(self, connection: Connection, stream_name: str, version: int) -> None:
        parameters = {"stream_name": stream_name, "version": version}
        connection.execute(self._sql["activate"], parameters)


def wrapped_keys(stream_name: str, rows: Iterable[Sequence[Any]]) -> list[WrappedKey]:
    """The keys in rows of `data_key.sql`, whatever driver has read them."""
    return [
        WrappedKey(
            stream_name,
            version,
            key_id,
            None if digits is None else bytes.fromhex(digits),
            kms_key_id,
        )
        for version, key_id, digits, kms_key_id in rows
    ]


def unwrapped(key: WrappedKey) -> bytes:
    """The data key, from its KMS. Raises KeyUnavailable, also for an answer that is another key.

    What is sealed with another one under this one's id, nobody else could ever open.
    """
    assert key.wrapped is not None
    context = wrapping_context(key.stream_name, key.version)
    secret = kms_for(key.kms_key_id).unwrap(key.wrapped, context)
    if not key.may_be(secret):
        raise KeyUnavailable(
            f"{key.kms_key_id} gave another key than version {key.version} of the data keys of "
            f"{key.stream_name!r}. Nothing was sealed or opened with it; ask whoever runs that KMS."
        )
    return secret


def _wrapped_anew(key: WrappedKey, kms_key_id: str) -> NewKey:
    context = wrapping_context(key.stream_name, key.version)
    secret = unwrapped(key)
    new = kms_for(kms_key_id).wrap(secret, context)
    # Whoever is done with the former KMS key destroys it: this is the last moment to find out.
    if kms_for(new.kms_key_id).unwrap(new.wrapped, context) != secret:
        raise KeyRefused(
            f"{kms_key_id} does not give back what it has wrapped: version {key.version} of the "
            f"data keys of {key.stream_name!r} came back as another one. It was left as it is. "
            "Keep the former KMS key, and ask whoever runs this one."
        )
    return new


def shredded(key: WrappedKey) -> KeyShredded:
    """What to say where a shredded key is asked for."""
    return KeyShredded(
        f"Version {key.version} of the data keys of {key.stream_name!r} ({key.key_id}) was "
        "shredded: what it has sealed can never be read again."
    )
