"""How long to wait before an event is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.require import require
from penstock.errors import RegistrationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """A policy. `Retry.exponential()` is the default."""

    first_seconds: float
    longest_seconds: float
    attempts_max: int
    fatal: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        require(self.first_seconds > 0, "Retry: first_seconds must be positive", RegistrationError)
        require(
            self.longest_seconds >= self.first_seconds,
            "Retry: longest_seconds must not be below first_seconds",
            RegistrationError,
        )
        require(self.attempts_max >= 1, "Retry: attempts_max must be 1 or more", RegistrationError)

    @classmethod
    def exponential(
        cls,
        *,
        first_seconds: float = 0.5,
        longest_seconds: float = 300.0,
        attempts_max: int = 8,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> Retry:
        """Twice as long after every attempt, up to a limit, with jitter."""
        return cls(
            first_seconds=first_seconds,
            longest_seconds=longest_seconds,
            attempts_max=attempts_max,
            fatal=fatal,
        )

    def delay_seconds(self, attempt: int, jitter: float) -> float:
        """The pause after the given failed attempt; `jitter` in [0, 1) spreads it by a half."""
        exponent = min(attempt - 1, 60)
        full = min(self.first_seconds * 2.0**exponent, self.longest_seconds)
        return full * (0.5 + 0.5 * jitter)
