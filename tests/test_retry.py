"""Retry policies: every delay can be kept, whatever a user's function says."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Pipeline, Retry
from penstock.core.events import StreamEvent
from penstock.core.retry import (
    ATTEMPTS_MAX_LIMIT,
    DEFAULT_RETRY,
    DELAY_SECONDS_LIMIT,
    bounded_seconds,
)
from penstock.errors import RegistrationError

ERROR = ValueError("no")
ALMOST_ONE = 1 - 2**-53

seconds = st.floats(min_value=1e-3, max_value=DELAY_SECONDS_LIMIT)
jitters = st.floats(min_value=0, max_value=1, exclude_max=True)
attempts = st.integers(min_value=1, max_value=10**9)


# ── the three built-in ways ────────────────────────────────────────────────────────────────────


def test_the_exponential_delay_doubles_up_to_its_limit() -> None:
    retry = Retry.exponential(first_seconds=0.5, longest_seconds=300)
    longest = [retry.delay_seconds(attempt, ALMOST_ONE, ERROR) for attempt in range(1, 13)]
    assert longest == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300])


def test_what_nobody_chose_is_exponential_with_eight_attempts() -> None:
    assert Retry.exponential() == DEFAULT_RETRY
    assert (DEFAULT_RETRY.attempts_max, DEFAULT_RETRY.fatal) == (8, ())
    assert (DEFAULT_RETRY.first_seconds, DEFAULT_RETRY.longest_seconds) == (0.5, 300)


@given(attempts, jitters, seconds, seconds)
def test_jitter_takes_at_most_half_of_an_exponential_delay(
    attempt: int, jitter: float, one: float, other: float
) -> None:
    retry = Retry.exponential(first_seconds=min(one, other), longest_seconds=max(one, other))
    delay = retry.delay_seconds(attempt, jitter, ERROR)
    full = retry.delay_seconds(attempt, ALMOST_ONE, ERROR)
    assert delay is not None
    assert full is not None
    assert full * 0.499 <= delay <= full <= retry.longest_seconds
    assert delay >= retry.first_seconds * 0.5


@given(attempts, jitters, seconds)
def test_jitter_takes_at_most_a_tenth_of_a_fixed_delay(
    attempt: int, jitter: float, chosen: float
) -> None:
    delay = Retry.fixed(seconds=chosen).delay_seconds(attempt, jitter, ERROR)
    assert delay is not None
    assert chosen * 0.899 <= delay <= chosen


def test_jitter_spreads_both() -> None:
    for retry in (Retry.exponential(), Retry.fixed(seconds=10)):
        assert retry.delay_seconds(1, 0.0, ERROR) != retry.delay_seconds(1, 0.5, ERROR)


def test_none_means_one_attempt() -> None:
    assert Retry.none().attempts_max == 1
    assert Retry.none(fatal=(KeyError,)).fatal == (KeyError,)


@pytest.mark.parametrize(
    "make",
    [
        Retry.exponential,
        lambda **limits: Retry.fixed(seconds=1, **limits),
        lambda **limits: Retry.by(lambda *_: 1.0, **limits),
    ],
)
def test_every_way_takes_its_limits(make: Callable[..., Retry]) -> None:
    assert make().attempts_max == 8
    retry = make(attempts_max=3, fatal=(KeyError, OSError))
    assert (retry.attempts_max, retry.fatal) == (3, (KeyError, OSError))


def test_a_policy_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Retry.none().attempts_max = 2  # type: ignore[misc]


# ── a function of the user's ───────────────────────────────────────────────────────────────────


def test_a_function_is_told_the_attempt_and_the_error_and_is_taken_at_its_word() -> None:
    told: list[tuple[int, Exception]] = []

    def wait(attempt: int, error: Exception) -> float:
        told.append((attempt, error))
        return attempt * 10

    assert Retry.by(wait).delay_seconds(3, 0.7, ERROR) == 30
    assert told == [(3, ERROR)]


def test_a_function_may_give_up() -> None:
    assert Retry.by(lambda *_: None).delay_seconds(1, 0.5, ERROR) is None


@pytest.mark.parametrize(
    ("answer", "delay"),
    [
        (0, 0.0),
        (0.0, 0.0),
        (1, 1.0),
        (DELAY_SECONDS_LIMIT, DELAY_SECONDS_LIMIT),
        (DELAY_SECONDS_LIMIT + 1, DELAY_SECONDS_LIMIT),
        (math.inf, DELAY_SECONDS_LIMIT),
        (10**400, DELAY_SECONDS_LIMIT),
    ],
)
def test_a_function_s_delay_is_kept_within_the_limit(answer: float, delay: float) -> None:
    given_back = Retry.by(lambda *_: answer).delay_seconds(1, 0.5, ERROR)
    assert given_back == delay
    assert isinstance(given_back, float)


class Unusual(float):
    def __ge__(self, other: object) -> bool:
        raise RuntimeError("I do not compare")


NONSENSE = [-1, -0.001, -math.inf, math.nan, "30", "", b"1", [], {}, object(), True, False]
NONSENSE += [Decimal(3), 1j, Unusual(3.0)]


# Numbered: the text of an object differs between the processes that run the tests.
@pytest.mark.parametrize("answer", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_replaced_by_the_default_delay(answer: Any) -> None:
    retry = Retry.by(lambda *_: answer)
    for attempt in (1, 5, 100):
        expected = DEFAULT_RETRY.delay_seconds(attempt, 0.25, ERROR)
        assert retry.delay_seconds(attempt, 0.25, ERROR) == expected


def fail(attempt: int, error: Exception) -> float:
    raise KeyError(attempt)


def recurse(attempt: int, error: Exception) -> float:
    return recurse(attempt, error)


@pytest.mark.parametrize("function", [fail, recurse])
def test_a_function_that_raises_is_replaced_by_the_default_delay(function: Any) -> None:
    expected = DEFAULT_RETRY.delay_seconds(4, 0.5, ERROR)
    assert Retry.by(function).delay_seconds(4, 0.5, ERROR) == expected


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()), attempts)
def test_no_answer_can_harm_a_worker(answer: Any, attempt: int) -> None:
    delay = Retry.by(lambda *_: answer).delay_seconds(attempt, 0.5, ERROR)
    assert (delay is None) == (answer is None)
    assert type(delay) in (float, type(None))
    assert delay is None or 0 <= delay <= DELAY_SECONDS_LIMIT


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()))
def test_a_bounded_delay_can_be_kept(asked: Any) -> None:
    bounded = bounded_seconds(asked)
    assert bounded is None or 0 <= bounded <= DELAY_SECONDS_LIMIT


# ── what is refused ────────────────────────────────────────────────────────────────────────────


def by(function: Any) -> Callable[[], Retry]:
    """Whatever the type checker would say of it."""
    return lambda: Retry.by(function)


async def asynchronous(attempt: int, error: Exception) -> float:
    return 1.0


def of_one(attempt: int) -> float:
    return 1.0


def of_keywords(*, attempt: int, error: Exception) -> float:
    return 1.0


DELAYS = [0, -1, math.nan, math.inf, DELAY_SECONDS_LIMIT * 1.01, "1", None, True]
COUNTS = [0, -1, ATTEMPTS_MAX_LIMIT + 1, 1.5, "8", None, True, math.inf]
FATALS = [ValueError, [ValueError], (ValueError("an instance"),), ("ValueError",), (int,), None]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *(
            (lambda d=d: Retry.exponential(first_seconds=d), "first_seconds must be a positive")
            for d in DELAYS
        ),
        *(
            (lambda d=d: Retry.exponential(longest_seconds=d), "longest_seconds must be a positive")
            for d in DELAYS
        ),
        *(
            (lambda d=d: Retry.fixed(seconds=d), "Retry: seconds must be a positive")
            for d in DELAYS
        ),
        *(
            (lambda c=c: Retry.exponential(attempts_max=c), "attempts_max must be a whole number")
            for c in COUNTS
        ),
        *((lambda f=f: Retry.none(fatal=f), r"write fatal=\(ValueError,\)") for f in FATALS),
        (
            lambda: Retry.exponential(first_seconds=2, longest_seconds=1),
            "longest_seconds must not be below first_seconds",
        ),
        (lambda: Retry(spread=2), "spread must be between"),
        (by(None), "None is not a function; write def wait"),
        (by(3), "3 is not a function; write def wait"),
        (by(asynchronous), "asynchronous is async, but is not awaited"),
        (by(of_one), r"of_one cannot be called with \(attempt, error\)"),
        (by(of_keywords), "of_keywords cannot be called with"),
        (by(Retry.exponential), "exponential cannot be called with"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_with_a_sentence(
    make: Callable[[], Retry], sentence: str
) -> None:
    with pytest.raises(RegistrationError, match=sentence):
        make()


def test_the_limits_themselves_are_allowed() -> None:
    Retry.exponential(attempts_max=1, first_seconds=1e-9, longest_seconds=DELAY_SECONDS_LIMIT)
    Retry.fixed(seconds=DELAY_SECONDS_LIMIT, attempts_max=ATTEMPTS_MAX_LIMIT)
    Retry.none(fatal=(Exception, KeyboardInterrupt))


def test_a_function_that_does_not_tell_its_parameters_is_taken_on_trust() -> None:
    unreadable: Any = max
    expected = DEFAULT_RETRY.delay_seconds(1, 0.5, ERROR)
    assert Retry.by(unreadable).delay_seconds(1, 0.5, ERROR) == expected


# ── where it is chosen ─────────────────────────────────────────────────────────────────────────


def handler(event: StreamEvent[Any]) -> None: ...


def test_a_consumer_takes_a_policy_a_function_or_nothing() -> None:
    pipeline = Pipeline("shop")
    policy = Retry.fixed(seconds=3)

    def wait(attempt: int, error: Exception) -> float | None:
        return 5.0

    pipeline.consumer("orders", name="policy", retry=policy)(handler)
    pipeline.consumer("orders", name="function", retry=wait)(handler)
    pipeline.consumer("orders", name="nothing")(handler)
    chosen = {name: consumer.options.retry for name, consumer in pipeline.consumers.items()}
    assert chosen == {"policy": policy, "function": Retry.by(wait), "nothing": DEFAULT_RETRY}


def test_anything_else_is_refused_with_what_to_write() -> None:
    wrong: Any = 5
    with pytest.raises(RegistrationError, match=r"write retry=Retry\.exponential\(\)"):
        Pipeline("shop").consumer("orders", name="bill_order", retry=wrong)
