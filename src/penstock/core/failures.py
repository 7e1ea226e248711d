"""What an error says about the event that it happened on."""

from __future__ import annotations

import re
from typing import Any, Final

from pydantic import ValidationError

from penstock.core.retry import bounded_seconds
from penstock.errors import ContractError, RetryableError, ServerUnavailable

# Lock timeouts, serialisation failures and deadlocks say nothing about the event.
NOBODYS_FAULT: Final = ("40001", "40P01", "55P03")
DESCRIPTION_LENGTH_MAX: Final = 500
NO_TEXT: Final = "(its text cannot be shown)"

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
# psycopg and asyncpg say sqlstate, psycopg2 says pgcode.
_STATE_NAMES: Final = ("sqlstate", "pgcode")


def is_nobodys_fault(error: BaseException) -> bool:
    """Whether trying again costs the event no attempt."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_nobodys_fault, error.exceptions))
    if isinstance(error, ServerUnavailable):
        return True
    # SQLAlchemy keeps the driver's error in `orig`.
    return any(
        attribute_of(raised, name) in NOBODYS_FAULT
        for raised in (error, attribute_of(error, "orig"))
        for name in _STATE_NAMES
    )


def sole_error(error: BaseException) -> BaseException:
    """The one error of a group of one, as a task group makes it; any other error itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def asked_delay_seconds(error: BaseException) -> float | None:
    """The pause that a handler asked for, within what can be kept; None: it asked for none."""
    return bounded_seconds(error.after_seconds) if isinstance(error, RetryableError) else None


def as_contract_error(error: ValidationError, where: str) -> ContractError:
    """Which fields do not fit."""
    return ContractError(f"The payload of {where} does not fit {error.title}: {misfits(error)}")


def misfits(error: ValidationError) -> str:
    """Which fields do not fit, without their values: those may be confidential."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'payload'}: {problem['msg']}"
        for problem in error.errors(include_input=False, include_context=False, include_url=False)
    )


def describe(error: BaseException) -> str:
    """One line for people, which PostgreSQL can store. Works for errors whose own text fails."""
    # Cut first, generously: splitting a text of many megabytes takes its time.
    text = " ".join(text_of(error, DESCRIPTION_LENGTH_MAX * 4).split())
    return f"{type(error).__name__}: {text}"[:DESCRIPTION_LENGTH_MAX]


def is_raised_by(error: BaseException, *packages: str) -> bool:
    """Whether code of these packages has raised an error, so that its text is of their making.

    One that nobody has raised is no handler's.
    """
    traceback = error.__traceback__
    if traceback is None:
        return True
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in packages


def text_of(error: BaseException, length_max: int) -> str:
    """An error's own text, storable and not longer than that; never raises."""
    try:
        return storable(str(error), length_max)
    except BaseException:  # noqa: BLE001 - a user's class may raise anything here
        return NO_TEXT


def storable(text: str, length_max: int) -> str:
    """A text that PostgreSQL can store: without NUL and half surrogates, cut at its end."""
    if len(text) > length_max:
        text = f"{text[: length_max - 1]}…"
    return _UNSTORABLE.sub("\ufffd", text)


def attribute_of(error: Any, name: str) -> Any:
    """An attribute of an error; None where there is none, or where asking for it fails."""
    try:
        return getattr(error, name, None)
    except Exception:  # noqa: BLE001 - a user's class may raise anything here
        return None
