"""How dead letters and parked events look: rows for lists, all that is known for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from penstock.cli.output import console, plain, table
from penstock.core.encoding import DEPTH_MAX, is_too_deep
from penstock.core.wire import Entry
from penstock.errors import ContractError, MalformedEntry
from penstock.stores.dead_letters import Attempt, FullLetter, Group, Letter, TouchedBy

ERROR_WIDTH = 80


def one_line(text: str | None) -> str | None:
    """The beginning of a text, on one line."""
    if text is None:
        return None
    line = " ".join(plain(text).split())
    return line if len(line) <= ERROR_WIDTH else f"{line[: ERROR_WIDTH - 1]}…"


def moment(at: datetime) -> str:
    """A time for people."""
    return f"{at:%Y-%m-%d %H:%M:%S%z}"


def letter_row(letter: Letter) -> tuple[object, ...]:
    """A letter in a list."""
    return (
        letter.id,
        letter.consumer,
        f"{letter.stream_name}/{letter.position}",
        f"{letter.event_type} v{letter.version}",
        one_line(letter.key),
        letter.reason,
        _error(letter.error_type, letter.error_message),
        letter.attempts,
        letter.state.value,
        moment(letter.buried_at),
        letter.fingerprint,
    )


def group_row(group: Group) -> tuple[object, ...]:
    """A group in a list."""
    more = " …" if group.count > len(group.ids) else ""
    return (
        group.consumer,
        one_line(group.error_type),
        group.fingerprint,
        group.count,
        moment(group.first_buried_at),
        moment(group.last_buried_at),
        one_line(group.example),
        " ".join(map(str, group.ids)) + more,
    )


def _error(error_type: str | None, message: str | None) -> str | None:
    return one_line(": ".join(part for part in (error_type, message) if part)) or None


def print_letter(full: FullLetter, operations: Sequence[TouchedBy]) -> None:
    """Everything about a letter, for people."""
    letter = full.letter
    _print_facts(
        {
            "dead letter": f"{letter.id} ({letter.state.value})",
            "consumer": letter.consumer,
            "event": f"{letter.event_type} v{letter.version}, {letter.event_uuid}",
            "place": f"{letter.stream_name}/{letter.position}",
            "key": letter.key,
            "buried": f"{moment(letter.buried_at)}, {letter.reason}",
            "handler": full.handler,
            "host": full.host,
            "group": letter.fingerprint,
            "redrives": letter.redrives,
            "error": _whole_error(letter),
        }
    )
    if full.traceback:
        console.print(f"\n{plain(full.traceback).rstrip()}")
    print_attempts("Attempts", full.attempts)
    print_event(full.entry)
    if operations:
        rows = [
            (o.id, o.kind, o.requested_by, moment(o.started_at), o.ended_as or "-", o.reason)
            for o in operations
        ]
        headings = (">Id", "What", "By", "When", "Ended", "Why")
        console.print(table("Operations", headings, rows))


def print_facts(facts: dict[str, object]) -> None:
    """One line for each fact that there is."""
    _print_facts(facts)


def _print_facts(facts: dict[str, object]) -> None:
    for name, value in facts.items():
        if value is not None:
            console.print(f"{name:<12} {plain(str(value))}")


def _whole_error(letter: Letter) -> str | None:
    return ": ".join(part for part in (letter.error_type, letter.error_message) if part) or None


def print_attempts(title: str, attempts: Sequence[Attempt]) -> None:
    """When, where and with what result an event was tried."""
    rows = [
        (number, attempt.at, attempt.host, one_line(attempt.error))
        for number, attempt in enumerate(attempts, 1)
    ]
    console.print(table(title, (">", "When", "Host", "Error"), rows))


def print_event(entry: Callable[[], Entry]) -> None:
    """Payload and metadata, unless they are not for these eyes."""
    shown = shown_payload(entry)
    if "note" in shown:
        console.print(shown["note"])
    for part in ("metadata", "payload"):
        if shown[part] is not None:
            text = json.dumps(shown[part], indent=2, ensure_ascii=False)
            console.print(f"{part} {plain(text)}")


def shown_payload(entry: Callable[[], Entry]) -> dict[str, Any]:
    """Payload and metadata of an event, or a note that says why not."""
    nothing = {"payload": None, "metadata": None}
    try:
        event = entry()
        if event.fields[2]:
            note = f"The event is encrypted with key {event.fields[2].decode()}; --reveal shows it."
            return {**nothing, "note": note}
        if is_too_deep(event.payload) or is_too_deep(event.fields[5]):
            # Sent in SQL. Python reads deeper than it prints.
            return {**nothing, "note": f"The event is nested deeper than {DEPTH_MAX} levels."}
        return {"payload": event.plain_payload(), "metadata": event.metadata()}
    except (MalformedEntry, ContractError, ValueError) as error:
        return {**nothing, "note": f"The event cannot be shown: {error}"}
