"""What operators see of sealed events: nothing, or all of it where the KMS lets them."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.discretion import ERROR_PURPOSE, parted
from penstock.core.sealing import DataKey, open_text, opened_entry
from penstock.core.wire import Entry, body_of
from penstock.errors import SealBroken
from penstock.stores.dead_letters import FullLetter
from penstock.stores.parked_keys import FullParkedEvent
from penstock.stores.stream_keys import StreamKeys


def masked_letter(full: FullLetter) -> FullLetter:
    """The letter without what is sealed of its traceback, which would only be noise."""
    return full if full.traceback is None else replace(full, traceback=parted(full.traceback)[0])


def revealed_letter(full: FullLetter, keys: StreamKeys) -> FullLetter:
    """The letter as if nothing of it had been sealed; a plain one as it is.

    Raises KeyUnavailable, KeyRefused, KeyShredded or SealBroken.
    """
    entry = full.entry()
    if not entry.key_id:
        return full
    key = _key_of(entry, keys)
    opened = _plain(opened_entry(entry, key))
    _, sealed = parted(full.traceback or "")
    whole = full.traceback if sealed is None else open_text(sealed, entry, ERROR_PURPOSE, key)
    letter = replace(full.letter, key=opened.key)
    return replace(full, letter=letter, traceback=whole, body=body_of(opened).decode())


def revealed_parked(parked: FullParkedEvent, keys: StreamKeys) -> FullParkedEvent:
    """The parked event as if it had not been sealed. Raises like `revealed_letter`."""
    entry = parked.entry()
    if not entry.key_id:
        return parked
    opened = _plain(opened_entry(entry, _key_of(entry, keys)))
    event = replace(parked.event, key=opened.key)
    return replace(parked, event=event, body=body_of(opened).decode())


def _key_of(entry: Entry, keys: StreamKeys) -> DataKey:
    wrapped = keys.find({entry.key_id}).get(entry.key_id)
    if wrapped is None:
        raise SealBroken(f"The stream {entry.stream_name!r} has no data key {entry.key_id}.")
    return keys.unwrapped(wrapped).key


def _plain(opened: Entry) -> Entry:
    term, outbox_id, _key_id, *rest = opened.fields
    return opened._replace(fields=(term, outbox_id, b"", *rest))
