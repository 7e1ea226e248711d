"""What a reader cannot read, who meets it, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from penstock.core.schema.rendering import ANYTHING


class Rule(StrEnum):
    """Who has to be able to read whom."""

    BACKWARD = "backward"
    """New code reads what old code wrote."""
    FORWARD = "forward"
    """Old code reads what new code writes."""
    FULL = "full"
    """Both."""


class Cause(StrEnum):
    """Why something written is refused, as a change from what is written to what is read."""

    REQUIRED_ADDED = "required-added"
    REQUIRED_REMOVED = "required-removed"
    OPTIONAL_TO_REQUIRED = "optional-to-required"
    REQUIRED_TO_OPTIONAL = "required-to-optional"
    TYPE_CHANGED = "type-changed"
    TYPE_NARROWED = "type-narrowed"
    TYPE_WIDENED = "type-widened"
    ENUM_NARROWED = "enum-narrowed"
    ENUM_WIDENED = "enum-widened"
    UNION_NARROWED = "union-narrowed"
    UNION_WIDENED = "union-widened"
    MINIMUM_RAISED = "minimum-raised"
    MINIMUM_LOWERED = "minimum-lowered"
    MAXIMUM_LOWERED = "maximum-lowered"
    MAXIMUM_RAISED = "maximum-raised"
    MULTIPLE_NARROWED = "multiple-of-narrowed"
    MULTIPLE_WIDENED = "multiple-of-widened"
    MIN_LENGTH_RAISED = "min-length-raised"
    MIN_LENGTH_LOWERED = "min-length-lowered"
    MAX_LENGTH_LOWERED = "max-length-lowered"
    MAX_LENGTH_RAISED = "max-length-raised"
    PATTERN_TIGHTENED = "pattern-tightened"
    PATTERN_LOOSENED = "pattern-loosened"
    FORMAT_TIGHTENED = "format-tightened"
    FORMAT_LOOSENED = "format-loosened"
    MIN_ITEMS_RAISED = "min-items-raised"
    MIN_ITEMS_LOWERED = "min-items-lowered"
    MAX_ITEMS_LOWERED = "max-items-lowered"
    MAX_ITEMS_RAISED = "max-items-raised"
    UNIQUE_ADDED = "unique-items-added"
    UNIQUE_REMOVED = "unique-items-removed"
    MIN_FIELDS_RAISED = "min-properties-raised"
    MIN_FIELDS_LOWERED = "min-properties-lowered"
    MAX_FIELDS_LOWERED = "max-properties-lowered"
    MAX_FIELDS_RAISED = "max-properties-raised"
    NAMES_NARROWED = "property-names-narrowed"
    NAMES_WIDENED = "property-names-widened"
    TYPED_IN_OPEN = "field-typed-in-open-object"
    UNTYPED_IN_OPEN = "field-untyped-in-open-object"
    FORBIDDEN = "forbidden"
    PERMITTED = "permitted"
    NOT_PROVABLE = "not-provable"


@dataclass(frozen=True, slots=True)
class Break:
    """One thing that a writer may write and a reader refuses, or may refuse."""

    path: str
    """Where in the event: `order.lines[].amount`; empty: the event itself."""
    rule: str
    before: str
    after: str
    reason: str
    who: str = ""
    fix: str = ""

    @property
    def place(self) -> str:
        """The path, in words where it is empty."""
        return self.path or "the event"


READERS_ON_NEW_CODE: Final = "consumers on the new code, reading events that are already written"
READERS_ON_OLD_CODE: Final = "consumers still on the old code, reading new events"

_MIRRORED: Final[dict[Cause, Cause]] = {
    Cause.REQUIRED_ADDED: Cause.REQUIRED_REMOVED,
    Cause.OPTIONAL_TO_REQUIRED: Cause.REQUIRED_TO_OPTIONAL,
    Cause.TYPE_NARROWED: Cause.TYPE_WIDENED,
    Cause.ENUM_NARROWED: Cause.ENUM_WIDENED,
    Cause.UNION_NARROWED: Cause.UNION_WIDENED,
    Cause.MINIMUM_RAISED: Cause.MINIMUM_LOWERED,
    Cause.MAXIMUM_LOWERED: Cause.MAXIMUM_RAISED,
    Cause.MULTIPLE_NARROWED: Cause.MULTIPLE_WIDENED,
    Cause.MIN_LENGTH_RAISED: Cause.MIN_LENGTH_LOWERED,
    Cause.MAX_LENGTH_LOWERED: Cause.MAX_LENGTH_RAISED,
    Cause.PATTERN_TIGHTENED: Cause.PATTERN_LOOSENED,
    Cause.FORMAT_TIGHTENED: Cause.FORMAT_LOOSENED,
    Cause.MIN_ITEMS_RAISED: Cause.MIN_ITEMS_LOWERED,
    Cause.MAX_ITEMS_LOWERED: Cause.MAX_ITEMS_RAISED,
    Cause.UNIQUE_ADDED: Cause.UNIQUE_REMOVED,
    Cause.MIN_FIELDS_RAISED: Cause.MIN_FIELDS_LOWERED,
    Cause.MAX_FIELDS_LOWERED: Cause.MAX_FIELDS_RAISED,
    Cause.NAMES_NARROWED: Cause.NAMES_WIDENED,
    Cause.TYPED_IN_OPEN: Cause.UNTYPED_IN_OPEN,
    Cause.FORBIDDEN: Cause.PERMITTED,
}

_NEXT_VERSION: Final = "raise the version and write an upcaster"
_LATER: Final = "make the change in a new version, once no consumer is left on the old code"
_LIMITS: Final = "take the old limit back, or " + _NEXT_VERSION
_WIDENED_LIMITS: Final = (
    "first widen it on the consumers' side only and deploy them, or raise the version"
)
_FIXES: Final[dict[Cause, str]] = {
    Cause.REQUIRED_ADDED: f"give it a default, or {_NEXT_VERSION}",
    Cause.OPTIONAL_TO_REQUIRED: f"keep its default, or {_NEXT_VERSION}",
    Cause.REQUIRED_REMOVED: (
        "keep writing the field until no consumer is left on the old code, or raise the version"
    ),
    Cause.REQUIRED_TO_OPTIONAL: (
        "keep it required until no consumer is left on the old code, or raise the version"
    ),
    Cause.TYPE_CHANGED: (
        f"add a field of the new type beside it and keep the old one, or {_NEXT_VERSION}"
    ),
    Cause.TYPE_NARROWED: f"keep the wider type, or {_NEXT_VERSION}",
    Cause.TYPE_WIDENED: f"write the new kind of value in a field of its own, or {_LATER}",
    Cause.ENUM_NARROWED: f"keep the values that are already written, or {_NEXT_VERSION}",
    Cause.ENUM_WIDENED: f"do not write the new values yet, or {_LATER}",
    Cause.UNION_NARROWED: f"keep the variants that are already written, or {_NEXT_VERSION}",
    Cause.UNION_WIDENED: f"write the new variant as an event type of its own, or {_LATER}",
    Cause.PATTERN_TIGHTENED: f"keep the old pattern, or {_NEXT_VERSION}",
    Cause.FORMAT_TIGHTENED: f"keep the old format, or {_NEXT_VERSION}",
    Cause.TYPED_IN_OPEN: (
        "events may already carry anything under that name: choose a name nobody can have "
        f"used, or {_NEXT_VERSION}"
    ),
    Cause.UNTYPED_IN_OPEN: "keep the field declared, or forbid unknown fields in this model",
    Cause.FORBIDDEN: f"keep accepting it, or {_NEXT_VERSION}",
    Cause.PERMITTED: f"do not write it yet, or {_LATER}",
    Cause.NOT_PROVABLE: (
        "say it in simpler words that can be compared, or, since it may well break, "
        + _NEXT_VERSION
    ),
}


def as_backward(found: Break) -> Break:
    """The break for those who read old events with new code."""
    return replace(
        found, who=READERS_ON_NEW_CODE, fix=_sentence(_FIXES.get(Cause(found.rule), _LIMITS))
    )


def as_forward(found: Break) -> Break:
    """The break for those who read new events with old code: what is written is what is new."""
    cause = Cause(found.rule)
    mirrored = _MIRRORED.get(cause, cause)
    return replace(
        found,
        rule=str(mirrored),
        before=found.after,
        after=found.before,
        who=READERS_ON_OLD_CODE,
        fix=_sentence(_FIXES.get(mirrored, _WIDENED_LIMITS)),
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def not_provable(path: str, keyword: str, before: str = ANYTHING, after: str = ANYTHING) -> Break:
    """The break where the comparison cannot tell, and says which keyword stopped it."""
    return Break(
        path,
        Cause.NOT_PROVABLE.value,
        before,
        after,
        f"it cannot be proved that everything written passes the reader's `{keyword}`",
    )
