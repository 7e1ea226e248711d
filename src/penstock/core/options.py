"""What a consumer may choose."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import NoneType
from typing import Any, Literal

from penstock.core.require import require
from penstock.core.retry import DEFAULT_RETRY, Retry
from penstock.errors import RegistrationError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# Without dots: pipeline a with consumer b.c, and pipeline a.b with consumer c, would be one.
_PIPELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
LANES_MAX = 1024
POSITION_MAX = 2**63 - 1
Start = Literal["earliest", "latest"] | int | datetime
Order = Literal["key", "stream", "none"]
"""What waits behind a failing event: its key, the whole stream, or nothing."""
OnExhausted = Literal["bury", "hold"]
OnUnknown = Literal["skip", "block"]
OnUnknownVersion = Literal["block", "park", "bury"]


class Guarantee(StrEnum):
    """How often an event's effects happen."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """The options of one consumer, checked at registration."""

    stream_name: str
    name: str
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    start: Start = "earliest"
    order: Order = "key"
    lanes: int = 1
    batch_size: int = 100
    batch_seconds: float = 1.0
    timeout_seconds: float | None = None
    retry: Retry = DEFAULT_RETRY
    """Not given, an at-most-once consumer has Retry.none()."""
    on_exhausted: OnExhausted = "bury"
    on_unknown: OnUnknown = "skip"
    on_unknown_version: OnUnknownVersion = "block"
    allow_reordering: bool = False
    """Says that order="none" is meant although the events have keys."""

    def __post_init__(self) -> None:
        self._require(
            _is_name(self.name),
            "its name may hold letters, digits, '_', '.' and '-', at most 100 of them",
        )
        self._require(bool(self.stream_name), "it names no stream")
        self._require_numbers()
        self._require(1 <= self.batch_size <= 10_000, "batch_size must be between 1 and 10000")
        self._require(self.batch_seconds > 0, "batch_seconds must be positive")
        self._require(1 <= self.lanes <= LANES_MAX, f"lanes must be between 1 and {LANES_MAX}")
        self._require(
            self.timeout_seconds is None or self.timeout_seconds > 0,
            "timeout_seconds must be positive, or None for no limit",
        )
        self._require_choices()
        self._require_start()
        self._settle_guarantee()
        self._require_agreement()

    def _require_numbers(self) -> None:
        for name, kinds in (
            ("batch_size", (int,)),
            ("lanes", (int,)),
            ("batch_seconds", (int, float)),
            ("timeout_seconds", (int, float, NoneType)),
        ):
            given = getattr(self, name)
            self._require(
                isinstance(given, kinds) and not isinstance(given, bool),
                f"{name} must be a {'number' if float in kinds else 'whole number'}, not {given!r}",
            )

    def _require_choices(self) -> None:
        for name, choices in (
            ("order", Order),
            ("on_exhausted", OnExhausted),
            ("on_unknown", OnUnknown),
            ("on_unknown_version", OnUnknownVersion),
        ):
            allowed = typing.get_args(choices)
            given = getattr(self, name)
            self._require(given in allowed, f"{name} must be {_either(allowed)}, not {given!r}")
        self._require(
            isinstance(self.allow_reordering, bool), "allow_reordering must be True or False"
        )
        self._require(
            isinstance(self.retry, Retry),
            "retry must be a policy or a function; write retry=Retry.exponential(), "
            "Retry.fixed(seconds=…), Retry.none() or Retry.by(…)",
        )

    def _require_start(self) -> None:
        start = self.start
        if isinstance(start, datetime):
            self._require(
                start.tzinfo is not None,
                "start is a datetime without a time zone; write e.g. datetime(…, tzinfo=UTC)",
            )
        elif isinstance(start, int) and not isinstance(start, bool):
            self._require(
                1 <= start <= POSITION_MAX,
                f"start is a position, and positions begin at 1 and end at {POSITION_MAX}",
            )
        else:
            self._require(
                start in ("earliest", "latest"),
                'start must be "earliest", "latest", a position or a datetime',
            )

    def _settle_guarantee(self) -> None:
        """Takes a guarantee's plain text too, and gives it the retries that fit it."""
        known = [str(guarantee) for guarantee in Guarantee]
        self._require(
            self.guarantee in known,
            f"guarantee={self.guarantee!r} is unknown; write Guarantee.EXACTLY_ONCE, "
            f"AT_LEAST_ONCE or AT_MOST_ONCE, or one of {_either(known)}",
        )
        guarantee = Guarantee(self.guarantee)
        object.__setattr__(self, "guarantee", guarantee)
        # By identity: a policy that was written out, even an equal one, is refused instead.
        if guarantee is Guarantee.AT_MOST_ONCE and self.retry is DEFAULT_RETRY:
            object.__setattr__(self, "retry", Retry.none())

    def _require_agreement(self) -> None:
        self._require(
            self.order != "stream" or self.lanes == 1,
            'order="stream" needs every event in one lane; write lanes=1, or order="key" to keep '
            "the order of each key over several lanes",
        )
        if self.guarantee is not Guarantee.AT_MOST_ONCE:
            return
        self._require(
            self.retry.attempts_max == 1,
            "AT_MOST_ONCE never tries an event again; write retry=Retry.none(), or choose "
            "Guarantee.AT_LEAST_ONCE",
        )
        self._require(
            self.on_exhausted == "bury",
            "AT_MOST_ONCE has passed an event before it is handled, so nothing can be held behind "
            'it; write on_exhausted="bury", or choose Guarantee.AT_LEAST_ONCE',
        )
        self._require(
            self.on_unknown_version != "park",
            "AT_MOST_ONCE never tries an event again, so it parks none; write "
            'on_unknown_version="block" or "bury", or choose Guarantee.AT_LEAST_ONCE',
        )

    def _require(self, claim: bool, why: str) -> None:
        require(claim, f"Consumer {self.name!r} cannot be registered: {why}.", RegistrationError)


def require_pipeline_name(name: object) -> None:
    """Refuse what could not begin the names of consumers, from which roles and replays are made."""
    require(
        isinstance(name, str) and _PIPELINE_NAME.fullmatch(name) is not None,
        f"Pipeline({name!r}) cannot be used: its name is a part of its consumers' identity for "
        "ever, and may hold letters, digits, '_' and '-', at most 100 of them. Write "
        'Pipeline("shop").',
        RegistrationError,
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _either(choices: Any) -> str:
    *most, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(most)} or {last}"
