"""What a failed attempt at a Redis timer deserves: another one later, or a grave."""

from __future__ import annotations

import hashlib
import json
from typing import Final

from penstock.core.claims import EVENT_ID_LENGTH_MAX
from penstock.core.encoding import is_unstorable_text
from penstock.core.failures import asked_delay_seconds, sole_error
from penstock.core.retry import Fatal, Retry
from penstock.core.verdict import Bury, RetryAfter
from penstock.errors import ContractError, FatalError

STARTS_MAX: Final = 3
"""So many attempts may end without a word, whatever the policy says: processes do get killed."""


def judge_timer(
    error: Exception, *, attempt: int, retry: Retry, jitter: float, asked_seconds: float | None
) -> RetryAfter | Bury:
    """Decide what a failed attempt deserves; the first is 1, `jitter` is in [0, 1).

    `asked_seconds` is the delay that the handler asked for by `nack`.
    """
    cause = sole_error(error)
    if isinstance(cause, ContractError):
        return Bury("contract")
    fatal: Fatal = (FatalError, *retry.fatal)
    if isinstance(cause, fatal) or isinstance(error, fatal):
        return Bury("fatal")
    if attempt >= retry.attempts_max:
        return Bury("exhausted")
    # The policy is asked in any case: a handler chooses when, not whether.
    delay = retry.delay_seconds(attempt, jitter, error)
    if delay is None:
        return Bury("exhausted")
    asked = asked_delay_seconds(cause) if asked_seconds is None else asked_seconds
    return RetryAfter(delay if asked is None else asked)


def is_worn_out(attempt: int, retry: Retry) -> bool:
    """Whether an attempt must not begin, since too many before it have ended without a word.

    A failure that is told is judged, so only a process that died or hung leads here.
    """
    return attempt > max(retry.attempts_max, STARTS_MAX)


def inbox_id(timer_id: str, correlation_id: str | None, due_score: float) -> str:
    """What the inbox calls one arming of a timer, the same at each of its deliveries.

    A correlation id that is missing, or is the timer's own id (the default of another library),
    does not tell two armings apart; the time at which the arming was due then does.
    """
    parts = [timer_id, correlation_id or ""]
    if not correlation_id or correlation_id == timer_id:
        parts.append(repr(due_score))
    text = json.dumps(parts, ensure_ascii=False)
    # Counted in bytes: what a row of the inbox's index can hold is limited in those.
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) <= EVENT_ID_LENGTH_MAX and not is_unstorable_text(text):
        return text
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"
