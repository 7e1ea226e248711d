"""What PostgreSQL says when it refuses to fire: whose fault it is, and what may be told of it."""

from __future__ import annotations

import psycopg

from penstock.core.failures import storable

REASON_LENGTH_MAX = 500
# Data, constraints, exceptions of triggers and limits: the next try would meet the same.
_UNFIT_CLASSES = ("22", "23", "54", "P0")
_UNFIT_STATES = ("PS010",)
_SEQUENCE_EXHAUSTED = "2200H"


def is_unfit(error: psycopg.Error) -> bool:
    """Whether it is a timer's own fault, so that no waiting helps."""
    state = error.sqlstate or ""
    is_unfit = state.startswith(_UNFIT_CLASSES) or state in _UNFIT_STATES
    return is_unfit and state != _SEQUENCE_EXHAUSTED


def reason_of(error: psycopg.Error) -> str:
    """What PostgreSQL says, without the row that it says it of."""
    said = error.diag.message_primary or type(error).__name__
    # Messages about data quote it.
    told = type(error).__name__ if (error.sqlstate or "").startswith("22") else said
    return storable(f"PostgreSQL refuses the event ({error.sqlstate}): {told}", REASON_LENGTH_MAX)
