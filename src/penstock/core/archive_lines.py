"""The lines of an archived object: JSON for anybody, and byte for byte what every tier holds.

A line is put together from text, never from decoded values: a number that passed through a float
would come back as another one. PostgreSQL prints a space behind every comma and colon of a jsonb,
and a quote inside a string always follows a backslash, so none of the three names that the body's
last fields are found by can stand anywhere before its place.
"""

from __future__ import annotations

from typing import Any

import orjson

from penstock.core.wire import is_hole
from penstock.errors import ArchiveDamaged

KEY = ',"key":'
METADATA = ',"metadata":'
PAYLOAD = ',"payload":'
START = b'{"position":'
_BODY_FIELDS = 12


def line_of(position: int, body: str) -> str:
    """What stands at a position, as a line without its end; a hole stands at its last one."""
    if is_hole(body):
        _, origin, first, last = body.split("\n")
        return f'{{"position":{position},"origin":"{origin}","hole":[{first},{last}]}}'
    (_, origin, term, outbox_id, event_uuid, event_type, version, key_id, created_us) = (
        parts := body.split("\n", _BODY_FIELDS - 1)
    )[:9]
    key, metadata, payload = parts[9:]
    return (
        f'{{"position":{position},"origin":"{origin}","term":{term},"outbox_id":{outbox_id},'
        f'"event_uuid":"{event_uuid}","event_type":{orjson.dumps(event_type).decode()},'
        f'"version":{version},"key_id":"{_escaped(key_id)}","created_us":{created_us}'
        f"{KEY}{key}{METADATA}{metadata}{PAYLOAD}{payload}}}"
    )


def position_of(line: bytes) -> int:
    """Where a line stands. Raises ArchiveDamaged."""
    number, comma, _ = line.removeprefix(START).partition(b",")
    if not (line.startswith(START) and comma and number.isdigit()):
        raise ArchiveDamaged("a line of it does not begin with a position")
    return int(number)


def body_of_line(line: str) -> str:
    """The body that a line was made from, byte for byte. Raises ArchiveDamaged."""
    try:
        return _body_of(line)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ArchiveDamaged(f"a line of it is neither an event nor a hole: {error}") from None


def _body_of(line: str) -> str:
    head, is_event, rest = line.partition(KEY)
    if not is_event:
        hole: dict[str, Any] = orjson.loads(line)
        first, last = hole["hole"]
        return f"hole\n{hole['origin']}\n{first:d}\n{last:d}"
    key, _, rest = rest.partition(METADATA)
    metadata, _, payload = rest.partition(PAYLOAD)
    if not payload.endswith("}"):
        raise ValueError("it has no end")
    fields: dict[str, Any] = orjson.loads(f"{head}}}")
    return "\n".join(
        (
            *("event", fields["origin"], str(fields["term"]), str(fields["outbox_id"])),
            *(fields["event_uuid"], fields["event_type"], str(fields["version"])),
            *(fields["key_id"], str(fields["created_us"]), key, metadata, payload[:-1]),
        )
    )


def _escaped(key_id: str) -> str:
    return key_id.replace("\\", "\\\\").replace('"', '\\"')
