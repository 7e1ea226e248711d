"""How a timer lies in Redis: the binary envelope that faststream-redis-timers reads and writes.

A magic word, the format's version, where headers and body begin, the headers as pairs of texts
with their lengths, then the body. All numbers are big-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic_core

from penstock.core.encoding import DEPTH_MAX
from penstock.core.require import require
from penstock.errors import InvalidTimer, MalformedTimer

MAGIC = b"\x89BIN\r\n\x1a\n"
VERSION = 1
TEXT_BYTES_MAX = 0xFFFF
"""The longest header that the format can express."""
HEADERS_MAX = 0xFFFF
CONTENT_TYPE = "content-type"
CORRELATION_ID = "correlation_id"
REPLY_TO = "reply_to"
JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"

_PREFACE = struct.Struct(">8sHII")
_SHORT = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class Envelope:
    """A timer's body as bytes, and its headers."""

    body: bytes
    headers: Mapping[str, str]

    @property
    def value(self) -> Any:
        """The body as its content type says. Raises MalformedTimer where it is not that.

        Without one: what the JSON in it says or, if there is none, the bytes themselves.
        """
        content_type = self.headers.get(CONTENT_TYPE, "")
        try:
            if content_type == TEXT_TYPE:
                return self.body.decode()
            if content_type.startswith(JSON_TYPE):
                return pydantic_core.from_json(self.body)
        except ValueError:
            # Without the cause: its text may quote the body.
            raise MalformedTimer(
                f"The body of a timer is not the {content_type} that its header announces. It was "
                "not handled; whoever published it has to publish it anew."
            ) from None
        if content_type:
            return self.body
        try:
            return pydantic_core.from_json(self.body)
        except ValueError:
            return self.body


# ── writing ────────────────────────────────────────────────────────────────────────────────────


def pack(body: bytes, headers: Mapping[str, str]) -> bytes:
    """The bytes of an envelope. Raises InvalidTimer for headers that the format cannot hold."""
    require(
        len(headers) <= HEADERS_MAX,
        f"A timer has at most {HEADERS_MAX} headers. Nothing was published.",
        InvalidTimer,
    )
    texts = b"".join(_packed(text) for pair in headers.items() for text in pair)
    headers_start = _PREFACE.size
    data_start = headers_start + _SHORT.size + len(texts)
    preface = _PREFACE.pack(MAGIC, VERSION, headers_start, data_start)
    return b"".join((preface, _SHORT.pack(len(headers)), texts, body))


def encode_message(message: Any) -> tuple[bytes, str | None]:
    """A message's bytes and content type: bytes as they are, text, or whatever JSON can express."""
    match message:
        case None:
            return b"", None
        case bytes():
            return message, None
        case str():
            return _utf8(message, "The message"), TEXT_TYPE
    try:
        encoded = pydantic_core.to_json(message, by_alias=True, inf_nan_mode="constants")
    except (ValueError, TypeError, RecursionError) as error:
        # Without the cause: its text may quote the value.
        raise InvalidTimer(
            f"The message cannot be written as JSON ({type(error).__name__}). Nothing was "
            "published; use text, bytes, a pydantic model, or what JSON knows."
        ) from None
    _require_readable(encoded)
    return encoded, JSON_TYPE


def _require_readable(encoded: bytes) -> None:
    """Refuse what a strict or a careful reader would not accept."""
    is_deep = encoded.count(b"[") + encoded.count(b"{") > DEPTH_MAX
    if not is_deep and b"NaN" not in encoded and b"Infinity" not in encoded:
        return
    try:
        pydantic_core.from_json(encoded, allow_inf_nan=False)
    except ValueError:
        raise InvalidTimer(
            f"The message holds NaN or an infinity, or is nested deeper than {DEPTH_MAX} levels. "
            "Nothing was published; use None or a text, or flatten it."
        ) from None


def _packed(text: Any) -> bytes:
    require(
        isinstance(text, str),
        f"Headers are texts, by name and value, not {type(text).__name__}. Nothing was published.",
        InvalidTimer,
    )
    encoded = _utf8(text, "A header")
    require(
        len(encoded) <= TEXT_BYTES_MAX,
        f"A header has {len(encoded)} bytes, the format holds {TEXT_BYTES_MAX}. Nothing was "
        "published; put it into the message.",
        InvalidTimer,
    )
    # In bytes. The other library counts characters when it writes and bytes when it reads, so
    # that this is what it can read, whatever the text.
    return _SHORT.pack(len(encoded)) + encoded


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidTimer(
            f"{what} holds half a surrogate pair, which is no text. Nothing was published."
        ) from None


# ── reading ────────────────────────────────────────────────────────────────────────────────────


def unpack(payload: bytes) -> Envelope:
    """What lies in Redis, in today's form or an older one. Raises MalformedTimer.

    Bytes that are no envelope at all are a body without headers.
    """
    if payload.startswith(MAGIC):
        return _unpacked(payload)
    if payload.startswith(b"{"):
        return _from_json(payload) or Envelope(payload, {})
    return Envelope(payload, {})


def _unpacked(payload: bytes) -> Envelope:
    try:
        _, version, headers_start, data_start = _PREFACE.unpack_from(payload)
        (count,) = _SHORT.unpack_from(payload, headers_start)
    except struct.error:
        raise _malformed("is cut off") from None
    if version != VERSION:
        raise _malformed(f"has version {version} of the format, which is not known here")
    first = headers_start + _SHORT.size
    if not _PREFACE.size <= headers_start < first <= data_start <= len(payload):
        raise _malformed("says that its parts lie where they cannot")
    texts = payload[first:data_start]
    # The other library writes the number of characters. Read as bytes, headers with others than
    # ASCII ones then end where the body does not begin.
    headers = _headers(texts, count, _by_bytes) or _headers(texts, count, _by_characters)
    if headers is None:
        raise _malformed("has headers that do not end where its body begins")
    return Envelope(payload[data_start:], headers)


_Step = Callable[[bytes, int, int], tuple[str, int]]


def _headers(texts: bytes, count: int, step: _Step) -> dict[str, str] | None:
    """The headers, if they take up exactly this place; otherwise None."""
    found: list[str] = []
    place = 0
    try:
        for _ in range(count * 2):
            (length,) = _SHORT.unpack_from(texts, place)
            text, place = step(texts, place + _SHORT.size, length)
            found.append(text)
    except (struct.error, UnicodeDecodeError):
        return None
    if place != len(texts):
        return None
    return dict(zip(found[0::2], found[1::2], strict=True))


def _by_bytes(texts: bytes, start: int, length: int) -> tuple[str, int]:
    return texts[start : start + length].decode(), start + length


def _by_characters(texts: bytes, start: int, length: int) -> tuple[str, int]:
    end = start
    for _ in range(length):
        end += 1
        # Whatever follows a character's first byte begins with the bits 10.
        while end < len(texts) and texts[end] & 0xC0 == 0x80:
            end += 1
    return texts[start:end].decode(), end


def _from_json(payload: bytes) -> Envelope | None:
    """The two older forms; None where it is neither."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"b": body}:
            content_type = found.get("ct")
            return Envelope(
                _from_hex(body), {CONTENT_TYPE: str(content_type)} if content_type else {}
            )
        case {"data": str(body)}:
            headers = found.get("headers") or {}
            is_readable = isinstance(headers, dict)
            return Envelope(
                body.encode(errors="surrogatepass"),
                {name: str(value) for name, value in headers.items()} if is_readable else {},
            )
    return None


def _from_hex(body: Any) -> bytes:
    try:
        return bytes.fromhex(body)
    except (TypeError, ValueError):
        raise _malformed("is in the older form, but its body is not hexadecimal") from None


def _malformed(what: str) -> MalformedTimer:
    return MalformedTimer(
        f"The payload of a timer {what}. It was not handled; whoever published it has to publish "
        "it anew."
    )
