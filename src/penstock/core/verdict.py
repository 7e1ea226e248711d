"""What a failed attempt deserves: another one later, a wait, a grave, a hold, or a halt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.core.failures import asked_delay_seconds, is_raised_by, sole_error
from penstock.core.options import ConsumerOptions
from penstock.core.retry import Fatal
from penstock.errors import (
    ContractError,
    ContractMissing,
    EffectUnknown,
    ExtraMissing,
    FatalError,
    KeyRefused,
    KeyUnavailable,
    SealBroken,
)

Reason = Literal["exhausted", "fatal", "contract", "crash", "interrupted", "tampered"]
"""Why an event was given up."""


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Park it and try again after a while."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody's attempt: park it until its contract or its key is there."""


@dataclass(frozen=True, slots=True)
class Bury:
    """A dead letter; its key goes on."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Hold:
    """A dead letter whose key waits until somebody redrives or discards it."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Block:
    """Nobody's attempt: the consumer stays where it is until its contract or its key is there."""

    why: str


Verdict = RetryAfter | Wait | Bury | Hold | Block


def judge(
    error: Exception,
    *,
    attempt: int,
    options: ConsumerOptions,
    is_redriven: bool,
    jitter: float,
) -> Verdict:
    """Decide what a failed attempt deserves; the first attempt is 1, `jitter` is in [0, 1)."""
    cause = sole_error(error)
    if isinstance(cause, KeyUnavailable | KeyRefused | ExtraMissing):
        return Block(_told(cause))
    if isinstance(cause, ContractMissing) and not is_redriven:
        return _judge_missing(cause, options)
    # What AT_MOST_ONCE must not do, its options cannot say: it has one attempt and holds nothing.
    if (reason := hopeless(error, options)) is not None:
        return give_up(reason, options)
    if is_redriven or attempt >= options.retry.attempts_max:
        return give_up("exhausted", options)
    # The policy is asked in any case: a handler chooses when, not whether.
    delay = options.retry.delay_seconds(attempt, jitter, error)
    if delay is None:
        return give_up("exhausted", options)
    asked = asked_delay_seconds(cause)
    return RetryAfter(delay if asked is None else asked)


def give_up(reason: Reason, options: ConsumerOptions) -> Bury | Hold:
    """The end of an event that is not tried again, as its consumer wants it."""
    return Hold(reason) if options.on_exhausted == "hold" else Bury(reason)


def _judge_missing(error: ContractMissing, options: ConsumerOptions) -> Verdict:
    """The event may be fine: it is this program that is too old for it.

    Not for a redriven one: it has one attempt, and an old letter must not halt today's events.
    """
    if not error.is_version or options.on_unknown_version == "block":
        return Block(_told(error))
    if options.on_unknown_version == "park":
        return Wait()
    return give_up("contract", options)


def _told(error: BaseException) -> str:
    """What an error of ours says; a handler that raises it may quote its event."""
    is_ours = is_raised_by(error, "penstock")
    return str(error) if is_ours else f"the handler raised {type(error).__name__}"


def hopeless(error: Exception, options: ConsumerOptions) -> Reason | None:
    """Why no further attempt can help, the most telling reason first."""
    cause = sole_error(error)
    if isinstance(cause, EffectUnknown):
        return "interrupted"
    if isinstance(cause, SealBroken):
        return "tampered"
    if isinstance(cause, ContractError):
        return "contract"
    fatal: Fatal = (FatalError, *options.retry.fatal)
    return "fatal" if isinstance(cause, fatal) or isinstance(error, fatal) else None
