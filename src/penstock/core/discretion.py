"""What may be said about errors of sealed events: their kind and where, never a value.

An error's text quotes what its handler had in hand, and that is the event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from penstock.core.failures import describe, is_raised_by
from penstock.core.forensics import Forensics, forensics_of
from penstock.core.sealing import Box, is_sealed_text
from penstock.core.wire import Entry
from penstock.errors import SealBroken

WITHHELD: Final = "(withheld: the event is confidential)"
ERROR_PURPOSE: Final = "error"


def describe_about(error: BaseException, entries: Iterable[Entry]) -> str:
    """One line about an error that happened with these events in hand."""
    if _is_harmless(error) or not any(entry.fields[2] for entry in entries):
        return describe(error)
    return f"{type(error).__name__}: {WITHHELD}"


def forensics_about(error: BaseException, entry: Entry, box: Box | None) -> Forensics:
    """What to keep of an error on an event; of a sealed one, what it quotes goes into the box."""
    whole = forensics_of(error)
    if not entry.fields[2] or _is_harmless(error):
        return whole
    bare = replace(forensics_of(error, values=False), error_message=WITHHELD)
    if box is None:
        return bare
    # Behind the frames, on a line of its own: `parted` finds it there.
    sealed = box.seal(whole.traceback, ERROR_PURPOSE)
    return replace(bare, traceback=f"{bare.traceback.rstrip()}\n{sealed}\n")


def _is_harmless(error: BaseException) -> bool:
    """Of Penstock's own making it quotes nothing; a handler may raise it too."""
    return type(error) is SealBroken and is_raised_by(error, "penstock")


def parted(traceback: str) -> tuple[str, str | None]:
    """The frames of a kept traceback, and what of it is sealed, if anything."""
    frames, _, last = traceback.rstrip("\n").rpartition("\n")
    return (frames, last) if is_sealed_text(last) else (traceback, None)
