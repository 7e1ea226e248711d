"""Opens sealed events right before their handler, and nowhere else.

Keys are asked for before a batch begins: a KMS is waited for outside of any transaction, and an
event whose key cannot be had now is not an attempt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.core.isolation import Batch
from penstock.core.sealing import (
    NONCE_BYTES,
    Box,
    DataKey,
    open_text,
    opened_entry,
    seal_text,
)
from penstock.core.wire import Entry
from penstock.errors import ExtraMissing, KeyRefused, KeyShredded, KeyUnavailable, SealBroken
from penstock.stores.stream_keys import StreamKeys


class Openable(NamedTuple):
    """What of a batch can be handled now."""

    batch: Batch | None
    """Up to the first event whose key cannot be had; None: that is the first one."""
    rest: Batch | None = None
    reason: str = ""
    """Why there is a rest."""


class Unsealing:
    """The keys that one lane has in hand for the batch that it works on."""

    def __init__(self, consumer: str, keys: StreamKeys | None) -> None:
        self._consumer = consumer
        self._keys = keys
        self._in_hand: dict[str, DataKey | None] = {}
        """None: shredded."""

    @contextmanager
    def openable(self, batch: Batch) -> Iterator[Openable]:
        """Have the keys of a batch, for as long as the block lasts."""
        if not any(entry.fields[2] for entry in batch.entries):
            yield Openable(batch)
            return
        try:
            yield self._take(batch)
        finally:
            self._in_hand = {}

    def is_shredded(self, entry: Entry) -> bool:
        """Whether the event can never be read again, as things stood when the batch began."""
        return bool(entry.fields[2]) and self._in_hand.get(entry.key_id, ...) is None

    def open(self, entry: Entry) -> Entry:
        """The entry as it was sent. Raises SealBroken where it is not what was sent."""
        if not entry.fields[2]:
            return entry
        try:
            return opened_entry(entry, self._key(entry))
        except SealBroken as broken:
            raise SealBroken(
                f"{entry.stream_name}/{entry.position} is not what was sent: {broken}. No handler "
                "has seen it. Find out who can write where it was read from."
            ) from None

    def box(self, entry: Entry) -> Box | None:
        """Where to keep texts about an event; None: it is plain, or its key is not at hand."""
        key = self._in_hand.get(entry.key_id) if entry.fields[2] else None
        return None if key is None else EventBox(entry, key)

    def _key(self, entry: Entry) -> DataKey:
        key = self._in_hand.get(entry.key_id)
        if key is None:
            raise SealBroken(f"its stream has no data key {entry.key_id}")
        return key

    def _take(self, batch: Batch) -> Openable:
        before: int | None = None
        for entry in batch.entries:
            if entry.fields[2] and entry.key_id not in self._in_hand:
                try:
                    self._in_hand |= self._asked(entry.key_id)
                except (KeyUnavailable, KeyRefused, ExtraMissing) as error:
                    if before is None:
                        return Openable(None, batch, str(error))
                    return Openable(batch.until(before), batch.after(before), str(error))
            before = entry.position
        return Openable(batch)

    def _asked(self, key_id: str) -> dict[str, DataKey | None]:
        if self._keys is None:
            raise KeyRefused(
                f"{self._consumer} has no way to the data keys of its stream here, so the event "
                "was not opened."
            )
        wrapped = self._keys.find({key_id}).get(key_id)
        if wrapped is None:
            return {}
        try:
            return {key_id: self._keys.unwrapped(wrapped).key}
        except KeyShredded:
            return {key_id: None}


class EventBox:
    """Texts about one event, sealed with its key."""

    def __init__(self, entry: Entry, key: DataKey) -> None:
        self._entry = entry
        self._key = key

    def seal(self, text: str, purpose: str) -> str:
        """The text for nobody without the key; it opens for the same purpose only."""
        return seal_text(text, self._entry, purpose, self._key, os.urandom(NONCE_BYTES))

    def open(self, sealed: str, purpose: str) -> str:
        """The text again. Raises SealBroken."""
        return open_text(sealed, self._entry, purpose, self._key)
