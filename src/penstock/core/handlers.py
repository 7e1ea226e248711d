"""What may be a handler, and what it must not return: work that nobody would do."""

from __future__ import annotations

import inspect
from typing import Any

from penstock.errors import UsageError


def why_no_handler(function: Any) -> str | None:
    """Why calling this would not handle anything; None where it would."""
    if not callable(function):
        return f"{function!r} is not a function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "it has a yield, so that a call would run nothing of it"
    return None


def require_done(value: Any) -> None:
    """Raise UsageError where a handler returned a coroutine or a generator instead of working."""
    if value is None:
        return
    if inspect.iscoroutine(value):
        value.close()
    elif not (
        inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)
    ):
        return
    raise UsageError(
        f"The handler returned a {type(value).__name__}, which nobody runs: what it was to do has "
        "not happened. Write `async def` for a handler that awaits, also for what is wrapped "
        "around one, and no yield."
    )
