"""JSON for the outbox: what is written can be stored and read back, or it is refused here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from enum import Enum
from typing import Any, Final, NoReturn
from uuid import UUID

import orjson
import pydantic_core
from pydantic import Secret, SecretBytes, SecretStr, TypeAdapter

from penstock.core.events import Event
from penstock.errors import InvalidEvent

# pydantic's parser reads no deeper, so a deeper payload could be sent but never handled.
DEPTH_MAX: Final = 200
PATH_LENGTH_MAX: Final = 200

_WITHOUT_FLOATS = frozenset({str, int, bool, type(None), datetime, date, UUID})
# A \u0000 whose backslash is not itself escaped.
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")

_MASK = b"**********"
_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


def encode_typed(event: Event, event_type: str) -> bytes:
    """The payload of a typed event."""
    what = f"the payload of {event_type}"
    try:
        # By alias, because that is how the class reads it back.
        encoded = event.model_dump_json(by_alias=True, warnings="error").encode()
    except (ValueError, TypeError, RecursionError) as error:
        _refuse_unserialisable(what, _field_that_fails(event), error)
    # A model inside the event may have its own configuration and print NaN as null.
    if b"null" in encoded:
        _require_numbers(_plain(event), what, "payload")
    _require_readable(encoded, what, "payload", lambda: _plain(event))
    require_unmasked(encoded, event, what, "payload")
    return encoded


def _plain(event: Event) -> Any:
    return event.model_dump(mode="json", by_alias=True, warnings=False)


def encode_plain(value: Any, what: str, root: str) -> bytes:
    """Plain Python values; `what` and `root` name them in errors."""
    try:
        encoded = orjson.dumps(value)
    except (TypeError, RecursionError) as error:
        _refuse_unserialisable(what, _first_path(value, root, _is_unserialisable), error)
    # orjson prints NaN and the infinities as null.
    if b"null" in encoded:
        _require_numbers(value, what, root)
    _require_readable(encoded, what, root, lambda: value)
    return encoded


def _require_readable(encoded: bytes, what: str, root: str, value: Callable[[], Any]) -> None:
    if b"\\u0000" in encoded and _ESCAPED_NUL.search(encoded):
        raise InvalidEvent(
            f"{what} holds a NUL character{_at(_first_path(value(), root, is_unstorable_text))}, "
            "which PostgreSQL cannot store. Nothing was sent; remove or encode it."
        )
    if b"NaN" in encoded or b"Infinity" in encoded:
        _require_numbers(value(), what, root)
    if is_too_deep(encoded):
        raise InvalidEvent(
            f"{what} is nested deeper than {DEPTH_MAX} levels, which no reader would accept. "
            "Nothing was sent; flatten it."
        )


def is_too_deep(encoded: bytes) -> bool:
    """Whether some JSON is nested deeper than DEPTH_MAX, or else cannot be read."""
    if encoded.count(b"[") + encoded.count(b"{") <= DEPTH_MAX:
        return False
    try:
        pydantic_core.from_json(encoded)
    except ValueError:
        return True
    return False


def require_unmasked(encoded: bytes, value: Any, what: str, root: str) -> None:
    """Raise InvalidEvent for a secret of pydantic's that has become asterisks in JSON."""
    if _MASK not in encoded:
        return
    path = _first_path(_ANYTHING.dump_python(value), root, _is_secret)
    if path is not None:
        raise InvalidEvent(
            f"{what} holds a secret at {path}, of which pydantic writes asterisks only. Nothing "
            "was sent; declare it as what it is in a confidential stream (docs/POLICY.md), or "
            "write a field_serializer for it."
        )


def _require_numbers(value: Any, what: str, root: str) -> None:
    if not _may_hold_not_a_number(value):
        return
    path = _first_path(value, root, _is_not_a_number)
    if path is not None:
        raise InvalidEvent(
            f"{what} holds NaN or an infinity at {path}, which JSON cannot express. "
            "Nothing was sent; use None or a string."
        )


def require_size(encoded: bytes, size_bytes_max: int, what: str, root: str) -> None:
    """Raise InvalidEvent for a text that is larger than the limit."""
    if len(encoded) > size_bytes_max:
        raise InvalidEvent(
            f"{what} has {len(encoded)} bytes, the limit is {size_bytes_max}. Nothing was sent; "
            f"send a reference to the large part, or raise {root}_bytes_max."
        )


def _refuse_unserialisable(what: str, path: str | None, error: Exception) -> NoReturn:
    # Without the cause: its text may quote the value.
    raise InvalidEvent(
        f"{what} cannot be written as JSON{_at(path)} ({type(error).__name__}). Nothing was sent; "
        "use text without half surrogate pairs, numbers of 64 bits, bool, None, lists, dicts with "
        "text keys, dates or UUIDs."
    ) from None


# ── where it is ────────────────────────────────────────────────────────────────────────────────


def _at(path: str | None) -> str:
    return "" if path is None else f" at {path}"


def _first_path(value: Any, root: str, is_bad: Callable[[Any], bool]) -> str | None:
    """The path of the first bad value or dictionary key, looking no deeper than DEPTH_MAX."""
    waiting: list[tuple[str, Any, int]] = [(root, value, 0)]
    while waiting:
        path, found, depth = waiting.pop()
        children = list(_children(found)) if depth <= DEPTH_MAX else []
        if not children and is_bad(found):
            return path[:PATH_LENGTH_MAX]
        for step, name, child in reversed(children):
            if name is not None and is_bad(name):
                return path[:PATH_LENGTH_MAX]
            waiting.append((path + step, child, depth + 1))
    return None


def _children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """What lies below a value: the step there, the dictionary key if any, the child."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield (f".{name}" if isinstance(name, str) else "[…]"), name, child
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield f"[{index}]", None, child
    elif isinstance(value, Enum):
        yield "", None, value.value
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield f".{part.name}", None, getattr(value, part.name)


def _field_that_fails(event: Event) -> str | None:
    for name in type(event).model_fields:
        try:
            event.model_dump_json(include={name}, warnings="error")
        except (ValueError, TypeError, RecursionError):
            return f"payload.{name}"
    return None


def _is_secret(value: Any) -> bool:
    return isinstance(value, SecretStr | SecretBytes | Secret)


def _is_not_a_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _may_hold_not_a_number(value: Any) -> bool:
    """A quick look; it need not know every type, since the slow one decides."""
    kind = type(value)
    if kind in _WITHOUT_FLOATS:
        return False
    if kind is dict:
        return any(map(_may_hold_not_a_number, value.values()))
    if kind is list:
        return any(map(_may_hold_not_a_number, value))
    return kind is not float or not math.isfinite(value)


def _is_unserialisable(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except (TypeError, RecursionError):
        return True
    return False


def is_unstorable_text(value: Any) -> bool:
    """Whether PostgreSQL cannot store this text: it has a NUL or half a surrogate pair."""
    if not isinstance(value, str):
        return False
    return "\x00" in value or (not value.isascii() and _has_half_surrogate(value))


def _has_half_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
