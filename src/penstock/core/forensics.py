"""What is kept of an error: enough to find its cause later, and nothing that cannot be stored."""

from __future__ import annotations

import hashlib
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from penstock.core.failures import attribute_of, storable, text_of

ERROR_TYPE_LENGTH_MAX: Final = 200
MESSAGE_LENGTH_MAX: Final = 2_000
TRACEBACK_LENGTH_MAX: Final = 16_000
FRAMES_MAX: Final = 100
CHAIN_LENGTH_MAX: Final = 10
GROUP_WIDTH_MAX: Final = 10
GROUP_DEPTH_MAX: Final = 5
GROUP_MEMBERS_MAX: Final = 100
NOTES_MAX: Final = 10
FINGERPRINT_DIGITS: Final = 16

_PACKAGE: Final = __name__.partition(".")[0]
_BEGINNING_LEFT_OUT: Final = "… (the beginning is left out)\n"
_CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


@dataclass(frozen=True, slots=True)
class Forensics:
    """An error as a dead letter keeps it; every text can be stored in PostgreSQL."""

    error_type: str
    """The class with its module; builtins without."""
    error_message: str
    traceback: str
    """With its causes; file names by their last two parts, so that no machine's paths are kept."""
    fingerprint: str
    """Equal for errors of one type that took the same way through the application's code."""


def forensics_of(error: BaseException, *, values: bool = True) -> Forensics:
    """What to keep of an error. Never raises, whatever the error's own methods do.

    Without `values`, a traceback has only types and places: no text that the error brought along.
    """
    return Forensics(
        error_type=_type_of(error),
        error_message=text_of(error, MESSAGE_LENGTH_MAX),
        traceback=_traceback_of(error, values),
        fingerprint=_fingerprint_of(error),
    )


def _type_of(error: BaseException) -> str:
    kind = type(error)
    module = kind.__module__
    # A class may set its __module__ to anything.
    is_plain = module == "builtins" or not isinstance(module, str)
    name = kind.__qualname__ if is_plain else f"{module}.{kind.__qualname__}"
    return storable(name, ERROR_TYPE_LENGTH_MAX)


# ── the fingerprint ────────────────────────────────────────────────────────────────────────────


def _fingerprint_of(error: BaseException) -> str:
    members = {_way(member) for member in _members(error)}
    # Sorted, since the tasks of a group fail in any order.
    text = "\n".join([_way(error), *sorted(members)])
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


def _members(error: BaseException) -> list[BaseException]:
    """The errors of a group and of the groups in it, up to a limit; of any other error none."""
    members: list[BaseException] = []
    groups = [error]
    while groups and len(members) < GROUP_MEMBERS_MAX:
        group = groups.pop()
        if isinstance(group, BaseExceptionGroup):
            members += group.exceptions
            groups += group.exceptions
    return members[:GROUP_MEMBERS_MAX]


def _way(error: BaseException) -> str:
    # Each place once: how deep a recursion went says nothing about what failed.
    return "\n".join([_type_of(error), *dict.fromkeys(_places(error.__traceback__))])


def _places(frames: TracebackType | None) -> Iterator[str]:
    while frames is not None:
        frame = frames.tb_frame
        module = frame.f_globals.get("__name__")
        if not (isinstance(module, str) and module.partition(".")[0] == _PACKAGE):
            yield f"{_last_parts(frame.f_code.co_filename, 1)}:{frame.f_code.co_qualname}"
        frames = frames.tb_next


def _last_parts(filename: str, count: int) -> str:
    return "/".join(filename.replace("\\", "/").split("/")[-count:])


# ── the traceback ──────────────────────────────────────────────────────────────────────────────


def _traceback_of(error: BaseException, values: bool) -> str:
    try:
        text = _chain_text(error, TRACEBACK_LENGTH_MAX, GROUP_DEPTH_MAX, values)
    except Exception:  # noqa: BLE001 - a module's own loader, asked for a line, may raise anything
        text = _last_line(error, values)
    if len(text) > TRACEBACK_LENGTH_MAX:
        # The end is where it failed.
        kept = TRACEBACK_LENGTH_MAX - len(_BEGINNING_LEFT_OUT)
        text = _BEGINNING_LEFT_OUT + text[-kept:]
    return storable(text, TRACEBACK_LENGTH_MAX)


def _chain_text(error: BaseException, room: int, depth: int, values: bool) -> str:
    """The error and what led to it, the oldest first, in Python's own layout."""
    texts: list[str] = []
    for link, word in _chain(error):
        texts.append(word + _one_text(link, room, depth, values))
        room -= len(texts[-1])
    return "".join(reversed(texts))


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The error, its cause, the cause's cause …, each with the words that join it to the next."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None:
        seen.add(id(current))
        earlier, word = current.__cause__, _CAUSE
        if earlier is None and not current.__suppress_context__:
            earlier, word = current.__context__, _CONTEXT
        # Errors can be chained in a circle.
        if earlier is not None and id(earlier) in seen:
            earlier = None
        is_last = len(seen) == CHAIN_LENGTH_MAX
        if is_last and earlier is not None:
            word = f"… (earlier causes are left out)\n{word}"
        yield current, word if earlier is not None else ""
        current = None if is_last else earlier


def _one_text(error: BaseException, room: int, depth: int, values: bool) -> str:
    texts = []
    if error.__traceback__ is not None:
        texts += ["Traceback (most recent call last):\n", *_frames_text(error.__traceback__)]
    texts.append(_last_line(error, values))
    if values:
        texts += [f"{note}\n" for note in _notes(error)]
    text = "".join(texts)
    if isinstance(error, BaseExceptionGroup):
        text += _members_text(error, room - len(text), depth, values)
    return text


def _last_line(error: BaseException, values: bool) -> str:
    message = text_of(error, MESSAGE_LENGTH_MAX) if values else ""
    return f"{_type_of(error)}: {message}\n" if message else f"{_type_of(error)}\n"


def _frames_text(frames: TracebackType) -> list[str]:
    summaries = [
        traceback.FrameSummary(
            _last_parts(frame.filename, 2), frame.lineno, frame.name, line=frame.line or ""
        )
        for frame in traceback.extract_tb(frames, limit=-FRAMES_MAX)
    ]
    return traceback.StackSummary.from_list(summaries).format()


def _notes(error: BaseException) -> list[str]:
    notes = attribute_of(error, "__notes__")
    if not isinstance(notes, list):
        return []
    return [
        storable(note, MESSAGE_LENGTH_MAX) for note in notes[:NOTES_MAX] if isinstance(note, str)
    ]


def _members_text(
    group: BaseExceptionGroup[BaseException], room: int, depth: int, values: bool
) -> str:
    if depth == 0:
        return "  … (deeper groups are left out)\n"
    texts: list[str] = []
    count = len(group.exceptions)
    if count > GROUP_WIDTH_MAX:
        texts.append(f"  … ({count - GROUP_WIDTH_MAX} more are left out)\n")
    for number in range(min(count, GROUP_WIDTH_MAX), 0, -1):
        # From the end, while there is room: groups in groups have no other bound to their number.
        if room <= 0:
            break
        text = _chain_text(group.exceptions[number - 1], room, depth - 1, values)
        texts.append(f"  ---- {number} of {count} ----\n{textwrap.indent(text, '  ')}")
        room -= len(texts[-1])
    return "".join(reversed(texts))
