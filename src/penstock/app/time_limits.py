"""Puts a handler's time limit around what calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from penstock.runtime.time_limit import TimeLimit

Caller: TypeAlias = Callable[[Callable[..., Any], list[Any]], Any]


def limited(
    call: Caller,
    on_overdue: Callable[[], object],
    *,
    name: str,
    seconds: float | None,
    is_async: bool,
) -> Caller:
    """What calls a handler: directly, or within its limit; `on_overdue` when it is over."""
    if seconds is None:
        return call
    limit = TimeLimit(seconds, consumer=name, on_overdue=on_overdue)
    if not is_async:
        return lambda function, arguments: limit.call(call, function, arguments)
    return lambda function, arguments: call(limit.awaited(function), arguments)
