"""What a consumer may choose."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal

from penstock.core.require import require
from penstock.core.retry import Retry
from penstock.errors import RegistrationError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
LANES_MAX = 1024
Start = Literal["earliest", "latest"] | int | datetime


class Guarantee(StrEnum):
    """How often an event's effects happen."""

    EXACTLY_ONCE = "exactly_once"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """The options of one consumer, checked at registration."""

    stream_name: str
    name: str
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    start: Start = "earliest"
    lanes: int = 1
    batch_size: int = 100
    batch_seconds: float = 1.0
    timeout_seconds: float | None = None
    retry: Retry = field(default_factory=Retry.exponential)
    on_unknown: Literal["skip", "block"] = "skip"

    def __post_init__(self) -> None:
        self._require(
            _NAME.fullmatch(self.name) is not None,
            "its name may hold letters, digits, '_', '.' and '-', at most 100 of them",
        )
        self._require(bool(self.stream_name), "it names no stream")
        self._require(1 <= self.batch_size <= 10_000, "batch_size must be between 1 and 10000")
        self._require(self.batch_seconds > 0, "batch_seconds must be positive")
        self._require(1 <= self.lanes <= LANES_MAX, f"lanes must be between 1 and {LANES_MAX}")
        self._require(
            self.timeout_seconds is None or self.timeout_seconds > 0,
            "timeout_seconds must be positive, or None for no limit",
        )
        self._require(self.on_unknown in ("skip", "block"), 'on_unknown must be "skip" or "block"')
        self._require_start()

    def _require_start(self) -> None:
        start = self.start
        if isinstance(start, datetime):
            self._require(
                start.tzinfo is not None,
                "start is a datetime without a time zone; write e.g. datetime(…, tzinfo=UTC)",
            )
        elif isinstance(start, int) and not isinstance(start, bool):
            self._require(start >= 1, "start is a position, and positions begin at 1")
        else:
            self._require(
                start in ("earliest", "latest"),
                'start must be "earliest", "latest", a position or a datetime',
            )

    def _require(self, claim: bool, why: str) -> None:
        require(claim, f"Consumer {self.name!r} cannot be registered: {why}.", RegistrationError)
