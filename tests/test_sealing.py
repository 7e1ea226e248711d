"""Sealing: what was sealed opens as it was, in its place, and nothing else opens."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from uuid import uuid4

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.events import RawEvent
from penstock.core.key_rings import KEY_SECONDS, KEY_STALE_SECONDS, HeldKey, KeyRing
from penstock.core.mac import MacKeys
from penstock.core.outgoing import Limits, OutgoingEvent, encode_event
from penstock.core.sealing import (
    DataKey,
    is_sealed_text,
    open_text,
    opened_entry,
    seal_text,
    sealed_event,
)
from penstock.core.wire import Entry, decode_body
from penstock.core.wrapped_keys import WrappedKey, decode_keys, encode_keys
from penstock.errors import EntryForged, MalformedEntry, SealBroken

SECRET, HASHING, NONCE = os.urandom(32), os.urandom(32), os.urandom(12)
KEY = DataKey("v1-a", SECRET)
LIMITS = Limits(1_000_000, 100_000)


def event_of(payload: object, key: str | None = "Ada", **metadata: object) -> OutgoingEvent:
    event = RawEvent("admitted", payload)
    return encode_event(
        "patients", event, event_uuid=uuid4(), limits=LIMITS, key=key, metadata=metadata
    )


def entry_of(event: OutgoingEvent, position: int = 7) -> Entry:
    """The event as every tier has it."""
    body = "\n".join(
        (
            *("event", "origin", "1", "2", str(event.event_uuid), event.event_type),
            *(str(event.version), event.key_id or "", "1700000000123456"),
            *(orjson.dumps(event.key).decode(), '{"__creation_timestamp_ms__": 1700000000123}'),
            event.payload,
        )
    )
    return decode_body(event.stream_name, position, body.encode())


def sealed(event: OutgoingEvent, key: DataKey = KEY) -> Entry:
    return entry_of(sealed_event(event, key, HASHING, os.urandom(12)))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(payload=values.filter(lambda value: "\\u0000" not in orjson.dumps(value).decode()))
def test_what_was_sealed_comes_back_byte_for_byte(payload: object) -> None:
    event = event_of(payload, ward="north\n☃")
    opened = opened_entry(sealed(event), KEY)
    assert opened.payload == event.payload.encode()
    assert opened.key == event.key
    assert opened.metadata() == {"ward": "north\n☃", "__creation_timestamp_ms__": 1700000000123}


def test_equal_keys_stay_equal_and_equal_events_do_not() -> None:
    event = event_of({"n": 1})
    first, second = sealed(event), sealed(event, DataKey("v2-b", os.urandom(32)))
    assert first.key == second.key != "Ada"
    assert first.payload != second.payload
    assert sealed(event_of(1, key=None)).key is None


def test_whatever_is_altered_or_taken_elsewhere_does_not_open() -> None:
    event, other = sealed(event_of({"n": 1})), sealed(event_of({"n": 2}))
    raw = bytearray(base64.b64decode(orjson.loads(event.payload)))
    altered: list[Entry] = []
    for place in (0, 12, len(raw) - 1):
        flipped = raw.copy()
        flipped[place] ^= 1
        altered.append(event._replace(payload=orjson.dumps(base64.b64encode(flipped).decode())))
    altered += [
        event._replace(payload=other.payload),
        event._replace(event_uuid=other.event_uuid),
        event._replace(stream_name="doctors"),
        event._replace(event_type="released"),
        event._replace(version=2),
        event._replace(fields=(*event.fields[:4], b'"somebody"', event.fields[5])),
        event._replace(payload=b'{"n": 1}'),
        event._replace(payload=b'"short"'),
        event._replace(payload=b"not json"),
    ]
    for entry in altered:
        with pytest.raises(SealBroken):
            opened_entry(entry, KEY)
    older = DataKey("v0-older", os.urandom(32))
    relabelled = event._replace(fields=(*event.fields[:2], b"v0-older", *event.fields[3:]))
    for key in (older, DataKey("v0-older", SECRET)):
        with pytest.raises(SealBroken):
            opened_entry(relabelled, key)


def test_a_text_opens_for_its_event_and_purpose_only() -> None:
    entry, other = sealed(event_of(1)), sealed(event_of(1))
    text = seal_text("she has ☃", entry, "error", KEY, NONCE)
    assert is_sealed_text(text)
    assert open_text(text, entry, "error", KEY) == "she has ☃"
    for wrong in ((entry, "effect"), (other, "error")):
        with pytest.raises(SealBroken):
            open_text(text, *wrong, KEY)


def test_no_key_is_printed() -> None:
    held = HeldKey(KEY, SECRET, 0.0)
    for printed in (repr(KEY), repr(held), str([held])):
        assert "v1-a" in printed
        assert repr(SECRET)[2:10] not in printed


def test_a_ring_keeps_few_keys_and_none_for_long() -> None:
    ring = KeyRing(keys_max=2)
    for name in "abc":
        ring.put(HeldKey(DataKey(name, SECRET), SECRET, 100.0))
    assert len(ring) == 2
    assert ring.get("a", 100.0) is None
    held = ring.get("b", 100.0 + KEY_SECONDS)
    assert held is not None
    assert not held.is_fresh(100.0 + KEY_SECONDS)
    assert held.is_fresh(99.0 + KEY_SECONDS)
    assert ring.get("b", 100.0 + KEY_STALE_SECONDS) is None
    assert len(ring) == 0


def test_a_copy_of_the_keys_is_the_publishers_or_none() -> None:
    keys = [
        WrappedKey("patients", 0, "v0-h", b"hashing", "file:/k"),
        WrappedKey("patients", 1, "v1-a", None, "file:/k"),
        WrappedKey("patients", 2, "v2-b", b"\x00\xff", "arn:aws:kms:…"),
    ]
    mac_keys = MacKeys(b"m", {b"m": b"s" * 16})
    copy = encode_keys("patients", keys, mac_keys)
    # What keys are hashed with is for senders alone.
    assert decode_keys("patients", copy, mac_keys) == keys[1:]
    forged = copy.replace(b"v2-b", b"v9-b")
    with pytest.raises(EntryForged):
        decode_keys("patients", forged, mac_keys)
    with pytest.raises(EntryForged):
        decode_keys("doctors", copy, mac_keys)
    for broken in (b"", b"[]", b'{"signature": 1}'):
        with pytest.raises(MalformedEntry):
            decode_keys("patients", broken, mac_keys)


def test_a_sealed_event_is_an_event_like_any_other() -> None:
    event = event_of({"n": 1})
    stored = sealed_event(event, KEY, HASHING, NONCE)
    assert replace(stored, key=event.key, payload=event.payload, metadata=event.metadata) == (
        replace(event, key_id="v1-a")
    )
