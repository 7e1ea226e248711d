"""How long to wait before an event is tried again."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from penstock.core.require import require
from penstock.errors import RegistrationError

ATTEMPTS_MAX_LIMIT: Final = 1000
DELAY_SECONDS_LIMIT: Final = 7 * 24 * 3600.0
FIRST_SECONDS: Final = 0.5
LONGEST_SECONDS: Final = 300.0
ATTEMPTS_MAX: Final = 8
EXPONENTIAL_SPREAD: Final = 0.5
FIXED_SPREAD: Final = 0.1
# Beyond this the longest delay has long been reached, and the float must not overflow.
_DOUBLINGS_MAX: Final = 60

RetryFunction = Callable[[int, Exception], float | None]
"""(attempt, error) -> seconds to wait; None: give up now."""
Fatal = tuple[type[BaseException], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """A policy. `Retry.exponential()` is the default."""

    first_seconds: float = FIRST_SECONDS
    longest_seconds: float = LONGEST_SECONDS
    attempts_max: int = ATTEMPTS_MAX
    fatal: Fatal = ()
    """Errors that no further attempt can cure."""
    spread: float = EXPONENTIAL_SPREAD
    """The share of a delay that jitter may take away, so that failures do not come back at once."""
    function: RetryFunction | None = None

    def __post_init__(self) -> None:
        _require_delay("first_seconds", self.first_seconds)
        _require_delay("longest_seconds", self.longest_seconds)
        _require(
            self.longest_seconds >= self.first_seconds,
            "longest_seconds must not be below first_seconds",
        )
        _require(
            _is_whole(self.attempts_max) and 1 <= self.attempts_max <= ATTEMPTS_MAX_LIMIT,
            f"attempts_max must be a whole number between 1 and {ATTEMPTS_MAX_LIMIT}",
        )
        _require(
            _are_exception_classes(self.fatal),
            "fatal must be a tuple of exception classes; write fatal=(ValueError,)",
        )
        _require(
            _is_number(self.spread) and 0 <= self.spread <= 1, "spread must be between 0 and 1"
        )
        if self.function is not None:
            _require_function(self.function)

    @classmethod
    def exponential(
        cls,
        *,
        first_seconds: float = FIRST_SECONDS,
        longest_seconds: float = LONGEST_SECONDS,
        attempts_max: int = ATTEMPTS_MAX,
        fatal: Fatal = (),
    ) -> Retry:
        """Twice as long after every attempt, up to a limit, with jitter."""
        return cls(
            first_seconds=first_seconds,
            longest_seconds=longest_seconds,
            attempts_max=attempts_max,
            fatal=fatal,
        )

    @classmethod
    def fixed(cls, *, seconds: float, attempts_max: int = ATTEMPTS_MAX, fatal: Fatal = ()) -> Retry:
        """Always the same pause, shortened by a tenth at most."""
        _require_delay("seconds", seconds)
        return cls(
            first_seconds=seconds,
            longest_seconds=seconds,
            attempts_max=attempts_max,
            fatal=fatal,
            spread=FIXED_SPREAD,
        )

    @classmethod
    def none(cls, *, fatal: Fatal = ()) -> Retry:
        """One attempt and no other."""
        return cls(attempts_max=1, fatal=fatal)

    @classmethod
    def by(
        cls, function: RetryFunction, *, attempts_max: int = ATTEMPTS_MAX, fatal: Fatal = ()
    ) -> Retry:
        """As function(attempt, error) says: seconds to wait, or None to give up now.

        Where it fails or gives no usable number, the default delay stands in.
        """
        # Here too: None would otherwise pass as "no function".
        _require_function(function)
        return cls(attempts_max=attempts_max, fatal=fatal, function=function)

    def delay_seconds(self, attempt: int, jitter: float, error: Exception) -> float | None:
        """The pause after the given failed attempt; None: give up. `jitter` is in [0, 1)."""
        if self.function is not None:
            try:
                asked: Any = self.function(attempt, error)
                if asked is None:
                    return None
                delay = bounded_seconds(asked)
                if delay is not None and asked >= 0:
                    return delay
            except Exception:  # noqa: BLE001, S110 - it is the user's, and must not end a worker
                pass
        return self.computed_seconds(attempt, jitter)

    def computed_seconds(self, attempt: int, jitter: float) -> float:
        """The pause by the numbers alone, whatever a function would say."""
        doublings = min(max(attempt - 1, 0), _DOUBLINGS_MAX)
        full = min(self.first_seconds * 2.0**doublings, self.longest_seconds)
        return full * (1 - self.spread + self.spread * jitter)


def bounded_seconds(asked: object) -> float | None:
    """A delay that users' code asked for, within what can be kept; None: it is not a number."""
    if not _is_number(asked) or (isinstance(asked, float) and math.isnan(asked)):
        return None
    return float(min(max(asked, 0.0), DELAY_SECONDS_LIMIT))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_exception_classes(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(member, type) and issubclass(member, BaseException) for member in value
    )


def _require_delay(name: str, value: object) -> None:
    # NaN is in no range, so it is refused here too.
    _require(
        _is_number(value) and 0 < value <= DELAY_SECONDS_LIMIT,
        f"{name} must be a positive number of seconds, at most {DELAY_SECONDS_LIMIT:.0f} (7 days)",
    )


def _require_function(function: Any) -> None:
    name = getattr(function, "__name__", repr(function))
    example = "write def wait(attempt: int, error: Exception) -> float | None"
    _require(callable(function), f"{name} is not a function; {example}")
    _require(
        not inspect.iscoroutinefunction(function), f"{name} is async, but is not awaited; {example}"
    )
    try:
        inspect.signature(function).bind(1, Exception())
    except ValueError:
        # Some callables written in C do not tell. A wrong one gets the default delay.
        return
    except TypeError:
        _require(False, f"{name} cannot be called with (attempt, error); {example}")


def _require(claim: bool, why: str) -> None:
    require(claim, f"Retry: {why}.", RegistrationError)


DEFAULT_RETRY: Final = Retry.exponential()
