"""The envelope of Redis timers: what faststream-redis-timers writes is read, and the reverse."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from penstock.core.timer_envelope import Envelope, encode_message, pack, unpack
from penstock.core.timer_keys import KeyNames
from penstock.core.timer_messages import Ack, Nack, Reject, TimerMessage, read_message
from penstock.errors import InvalidTimer, MalformedTimer, SettingsError, UsageError

# Written by faststream-redis-timers 0.5.4 with faststream 0.7.8, for {"n": 1} and timer_id "t1".
RECORDED = bytes.fromhex(
    "8942494e0d0a1a0a000100000012000000480002000e636f7272656c6174696f6e5f696400027431"
    "000c636f6e74656e742d7479706500106170706c69636174696f6e2f6a736f6e7b226e223a317d"
)
# The same with the headers {"straße": "weiß", "after": "it"}, which it cannot read itself.
MISCOUNTED = bytes.fromhex(
    "8942494e0d0a1a0a000100000012000000630004000e636f7272656c6174696f6e5f696400027431"
    "000c636f6e74656e742d7479706500106170706c69636174696f6e2f6a736f6e000673747261c39f65"
    "0004776569c39f00056166746572000269747b226e223a317d"
)
DUE_AT = datetime(2026, 1, 1, tzinfo=UTC)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


class Money(BaseModel):
    amount: int = Field(alias="Amount")


def as_the_other_writes_it(body: bytes, headers: dict[str, str]) -> bytes:
    """Its lengths are numbers of characters."""
    pairs = b"".join(
        struct.pack(">H", len(text)) + text.encode() for pair in headers.items() for text in pair
    )
    preface = b"\x89BIN\r\n\x1a\n" + struct.pack(">HII", 1, 18, 20 + len(pairs))
    return preface + struct.pack(">H", len(headers)) + pairs + body


def as_the_other_reads_it(payload: bytes) -> Envelope:
    """Its lengths are numbers of bytes now; what goes beyond the end is cut off."""
    place, headers = 20, []
    for _ in range(2 * struct.unpack_from(">H", payload, 18)[0]):
        (length,) = struct.unpack_from(">H", payload, place)
        headers.append(payload[place + 2 : place + 2 + length].decode())
        place += 2 + length
    (body_start,) = struct.unpack_from(">I", payload, 14)
    return Envelope(payload[body_start:], dict(zip(headers[0::2], headers[1::2], strict=True)))


def message_of(payload: bytes) -> TimerMessage:
    return read_message(payload, topic="mail", timer_id="t1", due_at=DUE_AT, attempt=1)


@given(st.binary(max_size=50), st.dictionaries(texts, texts, max_size=5))
def test_an_envelope_is_read_as_it_was_written(body: bytes, headers: dict[str, str]) -> None:
    packed = pack(body, headers)
    assert unpack(packed) == as_the_other_reads_it(packed) == Envelope(body, headers)


@given(st.binary(max_size=50), st.dictionaries(texts, texts, max_size=5))
def test_plain_headers_have_the_very_bytes_of_the_other_library(
    body: bytes, headers: dict[str, str]
) -> None:
    plain = {name: value for name, value in headers.items() if (name + value).isascii()}
    assert pack(body, plain) == as_the_other_writes_it(body, plain)


@given(st.binary(max_size=200))
def test_no_bytes_stop_a_reader(payload: bytes) -> None:
    for found in (payload, RECORDED[:18] + payload, RECORDED[: len(payload)], b"{" + payload):
        with suppress(MalformedTimer):
            assert isinstance(unpack(found), Envelope)


def test_a_recorded_timer_of_the_other_library_is_read() -> None:
    message = message_of(RECORDED)
    assert message.body == {"n": 1}
    assert message.headers == {"correlation_id": "t1", "content-type": "application/json"}
    assert message.correlation_id == "t1"
    assert pack(b'{"n":1}', message.headers) == RECORDED


def test_headers_that_the_other_library_miscounts_are_read_all_the_same() -> None:
    message = message_of(MISCOUNTED)
    assert message.body == {"n": 1}
    assert message.headers["straße"] == "weiß"
    assert message.headers["after"] == "it"
    headers = {"correlation_id": "t1", "straße": "weiß 💧", "after": "it"}
    assert unpack(as_the_other_writes_it(b"body", headers)) == Envelope(b"body", headers)


@pytest.mark.parametrize(
    ("payload", "body", "headers"),
    [
        (b'{"b": "7b7d", "ct": "application/json"}', {}, {"content-type": "application/json"}),
        (b'{"b": "00ff", "ct": null}', b"\x00\xff", {}),
        (b'{"data": "hello", "headers": {"content-type": "text/plain"}}', "hello", None),
        (b'{"data": "[1]"}', [1], {}),
        (b'{"data": {"not": "text"}}', {"data": {"not": "text"}}, {}),
        (b"\x00raw", b"\x00raw", {}),
        (b"", b"", {}),
        (b"{broken", b"{broken", {}),
    ],
)
def test_older_forms_are_read(payload: bytes, body: Any, headers: dict[str, str] | None) -> None:
    message = message_of(payload)
    assert message.body == body
    assert headers is None or message.headers == headers
    assert message.correlation_id == "t1"


@pytest.mark.parametrize(
    "payload",
    [
        RECORDED[:12],
        RECORDED[:40],
        RECORDED[:9] + b"\x02" + RECORDED[10:],
        RECORDED[:14] + b"\xff\xff\xff\xff" + RECORDED[18:],
        RECORDED[:18] + b"\x00\x03" + RECORDED[20:],
        b'{"b": "not hexadecimal"}',
        b'{"b": 7}',
        pack(b"\xff", {"content-type": "text/plain"}),
        pack(b"{", {"content-type": "application/json"}),
        pack(b"[" * 100_000, {"content-type": "application/json"}),
    ],
)
def test_what_cannot_be_read_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedTimer, match="was not handled") as refused:
        message_of(payload)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("message", "body", "content_type"),
    [
        ({"n": 1}, b'{"n":1}', "application/json"),
        ([1, None], b"[1,null]", "application/json"),
        (7, b"7", "application/json"),
        (Money(Amount=3), b'{"Amount":3}', "application/json"),
        ("hällo", "hällo".encode(), "text/plain"),
        (b"\xff", b"\xff", None),
        (None, b"", None),
    ],
)
def test_a_message_is_written_by_its_kind(
    message: Any, body: bytes, content_type: str | None
) -> None:
    assert encode_message(message) == (body, content_type)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("message", [object(), float("nan"), [float("inf")], "\ud800", nested(300)])
def test_a_message_that_nobody_could_read_is_refused(message: Any) -> None:
    with pytest.raises(InvalidTimer, match="Nothing was published"):
        encode_message(message)


@pytest.mark.parametrize(
    "headers", [{"n": 1}, {1: "n"}, {"long": "x" * 65_536}, {"half": "\ud800"}]
)
def test_headers_that_the_format_cannot_hold_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidTimer, match="Nothing was published"):
        pack(b"", headers)


def test_the_first_word_on_a_timer_counts() -> None:
    assert message_of(RECORDED).decision is None
    message = message_of(RECORDED)
    message.nack(timedelta(seconds=5))
    message.ack()
    assert message.decision == Nack(timedelta(seconds=5))
    other = message_of(RECORDED)
    other.reject()
    assert other.decision == Reject()
    last = message_of(RECORDED)
    last.ack()
    assert last.decision == Ack()
    with pytest.raises(UsageError, match="timedelta"):
        last.nack(5)  # type: ignore[arg-type]


def test_keys_are_those_of_the_other_library() -> None:
    keys = KeyNames(prefix="eu.").of("mail")
    assert keys.timeline == "timers_timeline:eu.mail"
    assert keys.payloads == "timers_payloads:eu.mail"
    tagged = KeyNames(timeline_key="mine", hash_tags=True).of("mail")
    assert tagged.timeline == "mine:{mail}"
    assert tagged.state == "mine_state:{mail}"


def test_names_that_would_be_misunderstood_are_refused() -> None:
    with pytest.raises(SettingsError, match="must differ"):
        KeyNames(timeline_key="a", payloads_key="a")
    with pytest.raises(SettingsError, match="braces"):
        KeyNames(prefix="{x}", hash_tags=True)
    with pytest.raises(InvalidTimer, match="braces"):
        KeyNames(hash_tags=True).of("a}b")
    for topic in ("", "x" * 2000, None):
        with pytest.raises(InvalidTimer, match="A topic is"):
            KeyNames().of(topic)


def test_the_older_json_form_is_told_from_a_body_that_looks_like_it() -> None:
    body = json.dumps({"bread": 1}).encode()
    assert unpack(body) == Envelope(body, {})
