"""Effects outside of PostgreSQL: recorded before and after, so that a retry does not repeat them.

What to do is written once, as steps; `once` and `once_async` carry them out.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from penstock.core.effects import (
    RESULT_BYTES_MAX,
    Interrupted,
    ResultFormat,
    ResultUnkeepable,
    call_plain,
    idempotency_key,
    require_call,
)
from penstock.core.sealing import Box
from penstock.errors import EffectUnknown, FatalError, ServerUnavailable
from penstock.stores.effects import Control, EffectRecord, EffectTable
from penstock.stores.identity import new_token
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

UNSETTLED_MAX: Final = 100
WAIT_SLICE_SECONDS: Final = 0.1

T = TypeVar("T")
_Steps = Generator[Callable[[], Any] | None, Any, T]
"""Yields statements to run, and None where the outside is to be called; gives the result."""


class EffectReached(BaseException):
    """A rehearsal came to a call that is not on record, and nothing was called.

    Not an Exception: a handler's `except Exception` must not take it for a failed call.
    """

    def __init__(self, effect: str) -> None:
        super().__init__(effect)
        self.effect = effect


class OnceCaller(Protocol):
    """What stands behind `Context.once`."""

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
        """Call a plain function unless its result is on record; returns the result.

        In a `box`, if there is one, lies what is recorded.
        """

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


@dataclass(frozen=True, slots=True)
class _Call:
    """One call to the outside, with what this process knows of it and the database may not."""

    event_uuid: str
    effect: str
    call_id: str
    is_over: bool = False
    """It has happened, and `result` waits to be recorded."""
    result: str | None = None
    why_unkept: str = (
        "when it was called, it was no JSON that can be read back, or more than "
        f"{RESULT_BYTES_MAX} bytes of it; the error of that attempt says which."
    )


class Effects:
    """The calls to the outside that one consumer makes in this process, from all its threads."""

    def __init__(self, schema: str, control: Control, consumer: str, host: str) -> None:
        self._consumer = consumer
        self._table = EffectTable(schema, control, consumer, host)
        # A handler may be interrupted at any instruction when its time is up. The statements run
        # on a connection that the leases need too, so they have a thread where nobody does that.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-effects")
        self._unsettled: dict[tuple[str, str], _Call] = {}
        self._lock = threading.Lock()

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
        """Call a plain function unless its result is on record; returns the result.

        Raises EffectUnknown where an earlier call never returned and interrupted="bury";
        EffectReached in a rehearsal; what fn raises, and then a retry calls again.
        """
        require_call(effect, fn, interrupted)
        form = ResultFormat(returns, box, f"effect {self._consumer} {effect}")
        steps = self._steps(event_uuid, effect, interrupted, form, is_dry_run)
        try:
            step = next(steps)
            while True:
                try:
                    if step is None:
                        answer = call_plain(fn, effect)
                    else:
                        answer = _wait_for(self._thread.submit(step))
                except BaseException as error:  # noqa: BLE001 - the steps decide, and raise it
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value

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
        """The same for `async def`; the statements do not hold up the event loop."""
        require_call(effect, fn, interrupted)
        form = ResultFormat(returns, box, f"effect {self._consumer} {effect}")
        steps = self._steps(event_uuid, effect, interrupted, form, is_dry_run)
        try:
            step = next(steps)
            while True:
                try:
                    if step is None:
                        answer = await fn()
                    else:
                        answer = await asyncio.wrap_future(self._thread.submit(step))
                except BaseException as error:  # noqa: BLE001 - the steps decide, and raise it
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value

    # ── the steps ──────────────────────────────────────────────────────────────────────────────

    def _steps(
        self,
        event_uuid: str,
        effect: str,
        interrupted: Interrupted,
        form: ResultFormat,
        is_dry_run: bool,
    ) -> _Steps[Any]:
        call = _Call(event_uuid, effect, new_token())
        if is_dry_run:
            return self._result(call, (yield from self._look(call)), form)
        call = self._take(call)
        if not call.is_over:
            record = yield from self._begin(call, interrupted)
            if record.is_done:
                return self._result(call, record, form)
            call = yield from self._call(call, form)
        return self._result(call, (yield from self._record(call)), form)

    def _result(self, call: _Call, record: EffectRecord, form: ResultFormat) -> Any:
        if record.result is None:
            raise self._unkept(call)
        return form.decode(record.result, self._named(call))

    def _look(self, call: _Call) -> _Steps[EffectRecord]:
        record: EffectRecord | None = yield partial(self._table.look, call.event_uuid, call.effect)
        if record is None or not record.is_done:
            raise EffectReached(call.effect)
        return record

    def _begin(self, call: _Call, interrupted: Interrupted) -> _Steps[EffectRecord]:
        """Afterwards it is done, or it is on record that this call begins."""
        arguments = (call.event_uuid, call.effect, call.call_id)
        try:
            record: EffectRecord = yield partial(self._table.begin, *arguments)
            if record.is_done or record.call_id == call.call_id:
                return record
            emit(signals.EffectInterrupted(*self._names(call), record.calls))
            if interrupted == "retry":
                record = yield partial(self._table.begin_again, *arguments)
                return record
        except BaseException:
            # It may be on record by now, and was not called: a next attempt here need not wonder.
            self._keep(call)
            raise
        raise self._unknown(call, record)

    def _call(self, call: _Call, form: ResultFormat) -> _Steps[_Call]:
        emit(signals.EffectStarted(*self._names(call)))
        try:
            value = yield None
        except EffectUnknown:
            raise
        except Exception as error:
            yield from self._forget(call, error)
            raise
        emit(signals.EffectCalled(*self._names(call)))
        try:
            return replace(call, is_over=True, result=form.encode(value))
        except ResultUnkeepable as error:
            return replace(call, is_over=True, why_unkept=str(error))

    def _forget(self, call: _Call, failure: Exception) -> _Steps[None]:
        try:
            yield partial(self._table.forget, call.event_uuid, call.effect, call.call_id)
        except ServerUnavailable as error:
            self._keep(call)
            failure.add_note(f"Besides: {error}")
        except BaseException:
            self._keep(call)
            raise

    def _record(self, call: _Call) -> _Steps[EffectRecord]:
        try:
            record: EffectRecord = yield partial(
                self._table.record, call.event_uuid, call.effect, call.call_id, call.result
            )
        except BaseException:
            self._keep(call)
            raise
        emit(signals.EffectRecorded(*self._names(call)))
        return record

    # ── what only this process knows ───────────────────────────────────────────────────────────

    def _take(self, call: _Call) -> _Call:
        """The call as an earlier attempt left it; taken, so that no other thread acts on it too."""
        with self._lock:
            return self._unsettled.pop((call.event_uuid, call.effect), call)

    def _keep(self, call: _Call) -> None:
        with self._lock:
            self._unsettled[call.event_uuid, call.effect] = call
            if len(self._unsettled) > UNSETTLED_MAX:
                # Of the oldest nothing is known then, which is always safe to say.
                del self._unsettled[next(iter(self._unsettled))]

    # ── words ──────────────────────────────────────────────────────────────────────────────────

    def _names(self, call: _Call) -> tuple[str, str, str]:
        return self._consumer, call.event_uuid, call.effect

    def _named(self, call: _Call) -> str:
        return f"The effect {call.effect!r} of event {call.event_uuid} by {self._consumer}"

    def _unknown(self, call: _Call, record: EffectRecord) -> EffectUnknown:
        key = idempotency_key(self._consumer, call.event_uuid, call.effect)
        return EffectUnknown(
            f"{self._named(call)} may or may not have happened: the call that {record.host} began "
            f"at {record.started_at:%Y-%m-%d %H:%M:%S%z} has not returned. It was not called "
            f"again. Ask the other side (idempotency key {key}), write down in events.effect what "
            "it says, then redrive the event: docs/EFFECTS.md shows how."
        )

    def _unkept(self, call: _Call) -> FatalError:
        return FatalError(
            f"{self._named(call)} has happened, and its result cannot be kept: {call.why_unkept} "
            "It is not called again. Return JSON values, or name their type with returns=…; to "
            "redrive the event, write its result into events.effect: docs/EFFECTS.md shows how."
        )


def _wait_for(answer: Future[T]) -> T:
    # In slices: a time limit can interrupt this thread only where it comes back to Python.
    while not wait((answer,), WAIT_SLICE_SECONDS).done:
        continue
    return answer.result()
