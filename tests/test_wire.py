"""The bytes of an entry: what is not one is recognised, whatever it is."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.mac import MacKeys
from penstock.core.wire import Entry, decode_body, decode_entry, encode_entry
from penstock.errors import ContractError, MalformedEntry

KEYS = MacKeys.parse("first:" + "00" * 32)

BODY = "\n".join(
    [
        "event",
        "0cad6cb1-3b3e-4026-9267-af9b06ad2fb8",
        "3",
        "41",
        "01a1de94-ace6-77df-9c92-ee6cc16573e2",
        "orders.placed",
        "2",
        "",
        "1794735647975097",
        '"a\\nkey"',
        '{"trace": "x"}',
        '{"note": "two\\nlines"}',
    ]
)


def test_an_entry_comes_back_as_it_was_written() -> None:
    entry = decode_entry("orders", 7, encode_entry("orders", 7, BODY, KEYS), KEYS)
    assert isinstance(entry, Entry)
    event = entry.as_stream_event(entry.plain_payload())
    assert event.stream_name == "orders"
    assert event.position == 7
    assert event.redis_id == "7-0"
    assert event.event_type == "orders.placed"
    assert event.version == 2
    assert event.outbox_id == 41
    assert event.event_uuid == UUID("01a1de94-ace6-77df-9c92-ee6cc16573e2")
    assert event.key == "a\nkey"
    assert event.metadata == {"trace": "x"}
    assert event.payload == {"note": "two\nlines"}
    assert event.created_at == datetime(2026, 11, 15, 9, 40, 47, 975097, tzinfo=UTC)
    assert entry.created_at_ms == 1794735647975
    assert entry == decode_body("orders", 7, BODY.encode())


def test_an_entry_is_signed_for_its_place_as_it_always_was() -> None:
    keys = MacKeys.parse("first:" + "00" * 32)
    for position in (7, 8):
        text = f"penstock 1\norders\n{position}\n{BODY}".encode()
        mac = hmac.digest(b"\0" * 32, text, "sha256")[:16].hex()
        assert encode_entry("orders", position, BODY, keys) == f"1 first {mac}\n{BODY}".encode()


@pytest.mark.parametrize("number", [2**64 + 1, -(2**63) - 1, 10**100])
def test_numbers_of_more_than_64_bits_come_back_exactly(number: int) -> None:
    body = BODY.replace('"two\\nlines"', str(number))
    assert decode_body("orders", 7, body.encode()).plain_payload() == {"note": number}


@given(st.binary())
def test_any_other_bytes_are_refused_as_malformed(raw: bytes) -> None:
    whole = encode_entry("orders", 1, BODY, KEYS)
    for damaged in (raw, b"1 - -\n" + raw, b"2" + whole[1:], whole + raw + b" "):
        with pytest.raises(MalformedEntry):
            decode_entry("orders", 1, damaged, KEYS)


@given(st.integers(min_value=0, max_value=11), st.binary(max_size=20))
def test_damage_in_any_field_ends_as_an_error_of_ours_or_as_another_value(
    field: int, replacement: bytes
) -> None:
    fields = BODY.encode().split(b"\n")
    fields[field] = replacement
    try:
        entry = decode_body("orders", 1, b"\n".join(fields))
        entry.plain_payload()
    except (MalformedEntry, ContractError):
        return
    assert entry.position == 1
