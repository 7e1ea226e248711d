"""One attempt at a Redis timer: called, judged, and settled in Redis."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never
from uuid import UUID, uuid5

from penstock.core.failures import DESCRIPTION_LENGTH_MAX, describe, is_nobodys_fault, text_of
from penstock.core.retry import bounded_seconds
from penstock.core.timer_envelope import CONTENT_TYPE, CORRELATION_ID, encode_message, pack
from penstock.core.timer_messages import Ack, Nack, Reject, TimerMessage, read_message
from penstock.core.timer_options import TimerOptions
from penstock.core.timer_verdict import is_worn_out, judge_timer
from penstock.core.verdict import Bury, Reason, RetryAfter
from penstock.errors import (
    AlreadyHandled,
    LockContention,
    MalformedTimer,
    SchemaMismatch,
    ServerUnavailable,
)
from penstock.pipeline.losses import LOSSES_MAX, broken
from penstock.pipeline.timer_calling import BrokenOff, Calls, Nacked
from penstock.pipeline.timer_hands import Held
from penstock.stores.outage import Outage
from penstock.stores.timer_queue import ClaimedTimer, Outcome, RedisTimers
from penstock.telemetry import signals, tracing
from penstock.telemetry.bus import emit, is_wanted

CONTENTION_SECONDS = 0.25
"""How soon a timer is tried again that another transaction has in hand."""
NOBODYS_FAULT_SECONDS = 0.25
"""The same after a deadlock, or while a server is away."""
_REPLIES = UUID("6d0c4d1c-3a02-4a5e-9d5e-0f6d5d1f7a11")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a handler answers, to be published as a timer that is due at once."""

    topic: str
    timer_id: str
    payload: bytes


class TimerHand:
    """Handles timers of one topic, one at a time."""

    def __init__(
        self,
        consumer: str,
        options: TimerOptions,
        *,
        calls: Calls,
        store: RedisTimers,
        is_exactly_once: bool,
        postgres: Outage,
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._calls = calls
        self._store = store
        self._is_exactly_once = is_exactly_once
        self._postgres = postgres
        self._broken_off: dict[str, int] = {}
        """How often in a row the connection broke in the middle of a timer."""

    def interrupt(self) -> None:
        """Cut the transaction that the handler works in, if any, from another thread."""
        self._calls.interrupt()

    def close(self) -> None:
        """Give up connections."""
        self._calls.close()

    def handle(self, held: Held) -> None:
        """Call the handler and settle the timer. Raises only what no waiting can cure."""
        timer = held.timer
        if is_worn_out(timer.attempt, self._options.retry):
            starts = timer.attempt - 1
            self._bury(held, "crash", "ProcessDied", f"{starts} attempts ended without a word")
            return
        try:
            message = read_message(
                timer.payload,
                topic=timer.topic,
                timer_id=timer.timer_id,
                due_at=timer.due_at,
                attempt=timer.attempt,
            )
        except MalformedTimer as error:
            self._fail(held, error, Bury("contract"))
            return
        self._call(held, message)

    def _call(self, held: Held, message: TimerMessage) -> None:
        try:
            with self._span(message):
                reply = self._calls.run(message, held.timer.due_score, partial(_reply, message))
        except AlreadyHandled:
            if self._settle(held, self._store.commit):
                emit(signals.TimerRepeated(*self._named(held), held.timer.attempt))
        except LockContention:
            self._defer(held, CONTENTION_SECONDS, "another transaction has it in hand")
        except SchemaMismatch:
            self._settle(held, lambda timer: self._back(timer, 0.0))
            raise
        except BrokenOff as error:
            self._after_break(held, message, error)
        except ServerUnavailable as error:
            if self._is_exactly_once:
                self._postgres.begin(error)
            self._defer(held, NOBODYS_FAULT_SECONDS, "a server did not answer")
        except Exception as error:  # noqa: BLE001 - whatever a handler raises, the worker goes on
            self._judge(held, message, error)
        else:
            self._finish(held, message, reply)

    def _after_break(self, held: Held, message: TimerMessage, error: BrokenOff) -> None:
        """Once is chance; again and again is the timer's own doing."""
        timer_id = held.timer.timer_id
        self._broken_off[timer_id] = self._broken_off.get(timer_id, 0) + 1
        if self._broken_off[timer_id] < LOSSES_MAX:
            self._postgres.begin(error)
            self._defer(held, NOBODYS_FAULT_SECONDS, "its connection broke")
        else:
            self._judge(held, message, broken("timer", error))

    def _span(self, message: TimerMessage) -> AbstractContextManager[Any]:
        tracer = tracing.active()
        if tracer is None:
            return tracing.NOTHING
        return tracer.timer(self._consumer, message.topic, message.headers, message.attempt)

    def _finish(self, held: Held, message: TimerMessage, reply: Reply | None) -> None:
        self._broken_off.pop(held.timer.timer_id, None)
        if self._is_exactly_once:
            self._postgres.end()
            emit(signals.TimerWritten(*self._named(held), held.timer.attempt))
        if reply is not None:
            # Before the timer is removed: whoever waits for the answer gets it at least once.
            held.answer(lambda: self._publish(reply))
        if not self._settle(held, self._store.commit):
            return
        if isinstance(message.decision, Reject):
            emit(signals.TimerRejected(*self._named(held), held.timer.attempt))
        elif is_wanted(signals.TimerHandled):
            emit(signals.TimerHandled(*self._named(held), held.timer.attempt))

    def _judge(self, held: Held, message: TimerMessage, error: Exception) -> None:
        """Decide on a failed attempt, unless the handler had said before what it deserves."""
        if isinstance(message.decision, Ack | Reject) and not self._is_exactly_once:
            emit(signals.TimerFailed(*self._named(held), held.timer.attempt, describe(error)))
            self._finish(held, message, None)
            return
        if is_nobodys_fault(error):
            self._defer(held, NOBODYS_FAULT_SECONDS, describe(error))
            return
        asked: float | None = None
        if isinstance(message.decision, Nack) and message.decision.delay is not None:
            asked = bounded_seconds(message.decision.delay.total_seconds())
        verdict = judge_timer(
            error,
            attempt=held.timer.attempt,
            retry=self._options.retry,
            # Jitter only spreads load; nothing secret hangs on it.
            jitter=random.random(),  # noqa: S311
            asked_seconds=asked,
        )
        self._fail(held, error, verdict)

    def _fail(self, held: Held, error: Exception, verdict: RetryAfter | Bury) -> None:
        attempt = held.timer.attempt
        told = "the handler has nacked it" if isinstance(error, Nacked) else describe(error)
        emit(signals.TimerFailed(*self._named(held), attempt, told))
        match verdict:
            case RetryAfter(delay_seconds):
                if self._settle(
                    held, lambda timer: self._store.retry(timer, delay_seconds=delay_seconds)
                ):
                    emit(signals.TimerRetried(*self._named(held), attempt, delay_seconds))
            case Bury(reason):
                text = told if isinstance(error, Nacked) else text_of(error, DESCRIPTION_LENGTH_MAX)
                self._bury(held, reason, type(error).__name__, text)
            case unreachable:
                assert_never(unreachable)

    def _bury(self, held: Held, reason: Reason, error_type: str, message: str) -> None:
        def bury(timer: ClaimedTimer) -> Outcome:
            return self._store.bury(timer, error_type=error_type, error_message=message)

        if self._settle(held, bury):
            emit(signals.TimerBuried(*self._named(held), held.timer.attempt, reason))

    def _defer(self, held: Held, seconds: float, why: str) -> None:
        if self._settle(held, lambda timer: self._back(timer, seconds)):
            emit(signals.TimerDeferred(*self._named(held), seconds, why))

    def _back(self, timer: ClaimedTimer, seconds: float) -> Outcome:
        return self._store.retry(timer, delay_seconds=seconds, is_counted=False)

    def _settle(self, held: Held, act: Callable[[ClaimedTimer], Outcome]) -> bool:
        """Whether it was still ours; otherwise somebody is told why it was not."""
        was_known = held.outcome is not None
        outcome = held.settle(act)
        if outcome is not Outcome.DONE and not was_known:
            tell_loss(self._consumer, held.timer, outcome)
        return outcome is Outcome.DONE

    def _publish(self, reply: Reply) -> None:
        self._store.publish(reply.topic, reply.timer_id, reply.payload, delay_seconds=0.0)

    def _named(self, held: Held) -> tuple[str, str]:
        return self._consumer, held.timer.timer_id


def tell_loss(consumer: str, timer: ClaimedTimer, outcome: Outcome | None) -> None:
    """Say that a timer was not a worker's any more when it wanted to settle or keep it."""
    if outcome in (Outcome.REARMED, Outcome.GONE):
        emit(signals.TimerReplaced(consumer, timer.timer_id))
    else:
        emit(signals.TimerOvertaken(consumer, timer.timer_id, timer.attempt))


def _reply(message: TimerMessage, value: object) -> Reply | None:
    """What is published to `reply_to`: under the same name each time, so that it is there once."""
    if not message.reply_to or value is None or message.decision is not None:
        return None
    body, content_type = encode_message(value)
    headers = {CORRELATION_ID: message.correlation_id}
    if content_type is not None:
        headers[CONTENT_TYPE] = content_type
    parts = [message.topic, message.timer_id, message.correlation_id, message.due_at.isoformat()]
    timer_id = str(uuid5(_REPLIES, json.dumps(parts)))
    return Reply(message.reply_to, timer_id, pack(body, headers))
