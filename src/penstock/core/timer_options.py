"""What the handler of a topic of Redis timers may choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.core.claims import CONSUMER_LENGTH_MAX
from penstock.core.require import require
from penstock.core.retry import DEFAULT_RETRY, Retry
from penstock.errors import RegistrationError

CONCURRENT_MAX: Final = 1000
LEASE_SECONDS_MIN: Final = 0.1
LEASE_SECONDS_MAX: Final = 24 * 3600.0
POLLING_SECONDS_MAX: Final = 3600.0
ROLE_PREFIX: Final = "timer:"


def timer_role(topic: str) -> str:
    """The role of a process that handles a topic's timers."""
    return f"{ROLE_PREFIX}{topic}"


def handler_name(pipeline_name: str, topic: str) -> str:
    """Who handles a topic's timers, in the inbox, in signals and in quarantine."""
    return f"{pipeline_name}.{timer_role(topic)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerOptions:
    """The options of one topic's handler, checked at registration."""

    topic: str
    max_concurrent: int = 5
    """How many timers one process handles at a time; as many may be repeated after a crash."""
    lease_ttl: float = 30.0
    """Seconds after which others take over what a dead process had in hand."""
    polling_interval: float = 0.05
    max_polling_interval: float = 5.0
    """Between these, a topic is looked at without being woken, the longer the quieter it is."""
    retry: Retry = DEFAULT_RETRY
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        self._require(
            _is_within(self.max_concurrent, 1, CONCURRENT_MAX)
            and self.max_concurrent == int(self.max_concurrent),
            f"max_concurrent must be a whole number between 1 and {CONCURRENT_MAX}",
        )
        self._require(
            _is_within(self.lease_ttl, LEASE_SECONDS_MIN, LEASE_SECONDS_MAX),
            f"lease_ttl must be between {LEASE_SECONDS_MIN:g} and {LEASE_SECONDS_MAX:.0f} seconds",
        )
        self._require(
            _is_within(self.polling_interval, 0.001, POLLING_SECONDS_MAX)
            and _is_within(self.max_polling_interval, self.polling_interval, POLLING_SECONDS_MAX),
            "polling_interval and max_polling_interval must be seconds between 0.001 and "
            f"{POLLING_SECONDS_MAX:.0f}, the first not above the second",
        )
        self._require(
            isinstance(self.retry, Retry),
            "retry must be a policy or a function; write retry=Retry.exponential(), "
            "Retry.fixed(seconds=…), Retry.none() or Retry.by(…)",
        )
        self._require(
            self.timeout_seconds is None or _is_within(self.timeout_seconds, 1e-9, float("inf")),
            "timeout_seconds must be positive, or None for no limit",
        )

    def name(self, pipeline_name: str) -> str:
        """The full name of the handler, which the inbox must be able to hold."""
        name = handler_name(pipeline_name, self.topic)
        self._require(
            len(name) <= CONSUMER_LENGTH_MAX,
            f"with the pipeline's name, its topic comes to {len(name)} characters, and "
            f"{CONSUMER_LENGTH_MAX} are the limit",
        )
        return name

    def _require(self, claim: bool, why: str) -> None:
        require(
            claim,
            f"The handler of timers {self.topic!r} cannot be registered: {why}.",
            RegistrationError,
        )


def _is_within(value: object, least: float, most: float) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return least <= value <= most
