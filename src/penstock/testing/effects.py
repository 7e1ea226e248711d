"""`Context.once` without servers: the same results and refusals, remembered while a test runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.core.effects import (
    Interrupted,
    ResultFormat,
    ResultUnkeepable,
    call_plain,
    require_call,
)
from penstock.core.sealing import Box
from penstock.errors import FatalError
from penstock.pipeline.effects import EffectReached


class RememberedEffects:
    """The calls to the outside of one delivered event; nothing of it outlives the object."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, str], str] = {}

    def once(
        self,
        event_uuid: str,
        effect: str,
        fn: Callable[[], Any],
        *,
        interrupted: Interrupted = "retry",
        returns: Any = None,
        is_dry_run: bool = False,
        box: Box | None = None,
    ) -> Any:
        """Call a plain function unless its result is known; returns the result."""
        require_call(effect, fn, interrupted)
        form = ResultFormat(returns, box)
        if (event_uuid, effect) not in self._results:
            _refuse_in_rehearsal(effect, is_dry_run)
            self._results[event_uuid, effect] = _encode(form, call_plain(fn, effect), effect)
        return form.decode(self._results[event_uuid, effect], effect)

    async def once_async(
        self,
        event_uuid: str,
        effect: str,
        fn: Callable[[], Awaitable[Any]],
        *,
        interrupted: Interrupted = "retry",
        returns: Any = None,
        is_dry_run: bool = False,
        box: Box | None = None,
    ) -> Any:
        """The same for `async def`."""
        require_call(effect, fn, interrupted)
        form = ResultFormat(returns, box)
        if (event_uuid, effect) not in self._results:
            _refuse_in_rehearsal(effect, is_dry_run)
            self._results[event_uuid, effect] = _encode(form, await fn(), effect)
        return form.decode(self._results[event_uuid, effect], effect)


def _refuse_in_rehearsal(effect: str, is_dry_run: bool) -> None:
    if is_dry_run:
        raise EffectReached(effect)


def _encode(form: ResultFormat, value: Any, effect: str) -> str:
    try:
        return form.encode(value)
    except ResultUnkeepable as error:
        raise FatalError(
            f"The effect {effect!r} was called, and its result could not be kept: {error} In "
            "production its event would be a dead letter. Return JSON values, or name their type "
            "with returns=…."
        ) from None
