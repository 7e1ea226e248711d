"""Decides on events that failed, and has it carried out and told."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any, assert_never

from penstock.core.discretion import describe_about, forensics_about
from penstock.core.failures import attribute_of, describe, sole_error
from penstock.core.forensics import Forensics
from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.options import ConsumerOptions
from penstock.core.retry import DEFAULT_RETRY
from penstock.core.verdict import (
    Block,
    Bury,
    Hold,
    RetryAfter,
    Verdict,
    Wait,
    give_up,
    hopeless,
    judge,
)
from penstock.core.wire import Entry
from penstock.errors import ContractMissing, SealBroken
from penstock.pipeline.calling import HandlerFailed
from penstock.pipeline.parking import Parking
from penstock.pipeline.setting_aside import SettingAside
from penstock.pipeline.unsealing import Unsealing
from penstock.stores.parked import Letter, Setback
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

PROCESS_DIED = "ProcessDied"


class Blocked(Exception):
    """The lane cannot go on without help; nothing was skipped."""

    position = 0
    """Of the event whose dead letter could not be written, if it is for that."""


class Judgement:
    """What becomes of a consumer's failed events, one at a time."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        handler: str,
        *,
        aside: SettingAside,
        parking: Parking,
        unsealing: Unsealing,
        letters: deque[tuple[Entry, Letter]],
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._handler = handler
        self._aside = aside
        self._parking = parking
        self._unsealing = unsealing
        self._letters = letters
        self._unknown_at: int | None = None

    def carry_out(self, batch: Batch, lease: Lease, failed: Exception | list[Any]) -> None:
        """Settle a failed event, or one that ended its processes. Raises Blocked, LeaseLost."""
        if isinstance(failed, Exception):
            verdict = self._judge(batch, failed)
            letter = self._letter(batch.entries[0], failed)
        else:
            reason = f"{len(failed)} attempts ended their worker process"
            verdict = give_up("crash", self._options)
            letter = Letter(
                forensics=Forensics(PROCESS_DIED, reason, "", ""),
                error=reason,
                handler=self._handler,
                starts=failed,
            )
        try:
            self._act(batch, lease, verdict, letter)
        except HandlerFailed as failure:
            raise _blocked(letter, failure) from failure.error

    def after_the_fact(self, entry: Entry, error: Exception) -> None:
        """Have an event buried whose only attempt failed after it was settled."""
        self._tell_failure(Batch((entry,), entry.position), error)
        reason = hopeless(error, self._options) or "exhausted"
        self._letters.append((entry, replace(self._letter(entry, error), reason=reason)))

    def write_letters(self) -> None:
        """Bury those. Raises Blocked or ServerUnavailable, and what is left is yet to be buried."""
        while (unwritten := self._next_letter()) is not None:
            entry, letter = unwritten
            try:
                is_buried = self._aside.bury_settled(entry, letter)
            except BaseException as error:
                self._letters.appendleft(unwritten)
                if not isinstance(error, HandlerFailed):
                    raise
                blocked = _blocked(letter, error)
                blocked.position = entry.position
                raise blocked from error.error
            if is_buried:
                event = (self._consumer, entry.position, entry.event_uuid)
                emit(signals.EventBuried(*event, letter.error))

    def _next_letter(self) -> tuple[Entry, Letter] | None:
        # Taken out while it is written: other lanes write what is left.
        with suppress(IndexError):
            return self._letters.popleft()
        return None

    def _judge(self, batch: Batch, error: Exception) -> Verdict:
        verdict = judge(
            error,
            attempt=batch.attempt,
            options=self._options,
            is_redriven=batch.is_redriven,
            jitter=_jitter(),
        )
        self._tell_unknown(batch.entries[0], error)
        if isinstance(verdict, Block) and batch.is_parked:
            # The lane need not wait for what is out of its way already.
            return Wait()
        if isinstance(verdict, Block):
            raise Blocked(verdict.why)
        self._tell_failure(batch, error)
        return verdict

    def _act(self, batch: Batch, lease: Lease, verdict: Verdict, letter: Letter) -> None:
        entry = batch.entries[0]
        event = (self._consumer, entry.position, entry.event_uuid)
        match verdict:
            case RetryAfter(delay_seconds):
                self._park(batch, lease, Setback(batch.attempt, letter.error, delay_seconds))
            case Wait():
                # It has all its attempts when what it waits for is there.
                delay_seconds = DEFAULT_RETRY.computed_seconds(batch.setbacks + 1, _jitter())
                self._park(batch, lease, Setback(batch.attempt - 1, letter.error, delay_seconds))
            case Hold(reason):
                setback = Setback(batch.attempt, letter.error, None)
                self._aside.hold(batch, lease, setback, replace(letter, reason=reason))
                self._parking.note(entry, None)
                emit(signals.KeyHeld(*event, letter.error))
            case Bury(reason):
                self._aside.bury(batch, lease, replace(letter, reason=reason))
                emit(signals.EventBuried(*event, letter.error))
            case Block(why):
                raise Blocked(why)
            case unreachable:
                assert_never(unreachable)

    def _park(self, batch: Batch, lease: Lease, setback: Setback) -> None:
        entry, delay_seconds = batch.entries[0], setback.delay_seconds
        assert delay_seconds is not None
        self._aside.park(batch, lease, setback)
        self._parking.note(entry, delay_seconds)
        event = (self._consumer, entry.position, entry.event_uuid)
        emit(signals.EventParked(*event, batch.attempt, delay_seconds))

    def _tell_unknown(self, entry: Entry, error: Exception) -> None:
        """Once for each event, however often it is tried or waited at."""
        if isinstance(sole_error(error), ContractMissing) and self._unknown_at != entry.position:
            self._unknown_at = entry.position
            emit(signals.EventsUnknown(self._consumer, 1, entry.event_type))

    def _tell_failure(self, batch: Batch, error: Exception) -> None:
        entry = batch.entries[0]
        event = (self._consumer, entry.position, entry.event_uuid)
        told = describe_about(error, batch.entries)
        if isinstance(error, SealBroken):
            emit(signals.TamperingFound(*event, entry.key_id, told))
        emit(signals.EventFailed(*event, batch.attempt, told))

    def _letter(self, entry: Entry, error: Exception) -> Letter:
        return Letter(
            forensics=forensics_about(error, entry, self._unsealing.box(entry)),
            error=describe_about(error, [entry]),
            handler=self._handler,
        )


def _jitter() -> float:
    # It only spreads load; nothing secret hangs on it.
    return random.random()  # noqa: S311


def _blocked(letter: Letter, failure: HandlerFailed) -> Blocked:
    return Blocked(
        f"the event failed ({letter.forensics.error_type}) and could not be set aside: "
        f"{_without_values(failure.error)}"
    )


def _without_values(error: Exception) -> str:
    """What PostgreSQL says first; its details quote the row that it refuses, and so the event."""
    diagnostic = attribute_of(error, "diag")
    primary = attribute_of(diagnostic, "message_primary")
    return f"{type(error).__name__}: {primary}" if primary else describe(error)
