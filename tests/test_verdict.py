"""Every failed attempt has one verdict, and it follows from the options alone."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any, get_args

import psycopg
import pytest
import sqlalchemy.exc
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    ContractError,
    EffectUnknown,
    Event,
    FatalError,
    Guarantee,
    Retry,
    RetryableError,
)
from penstock.core.failures import describe, is_nobodys_fault, sole_error
from penstock.core.options import ConsumerOptions, OnExhausted, OnUnknownVersion, Order
from penstock.core.retry import DEFAULT_RETRY, DELAY_SECONDS_LIMIT
from penstock.core.verdict import Block, Bury, Hold, RetryAfter, Verdict, Wait, give_up, judge
from penstock.errors import (
    ContractMissing,
    ExtraMissing,
    HandlerTimeout,
    KeyRefused,
    KeyUnavailable,
    PenstockError,
    RegistrationError,
)
from penstock.testing import deliver

VERSION = ContractMissing("orders.placed has version 9", is_version=True)
TYPE = ContractMissing("orders.lost is not known", is_version=False)


class Broken(FatalError):
    """A user's own."""


class Refused(Exception):
    """A user's own, named in fatal=."""


def options(**chosen: Any) -> ConsumerOptions:
    fitting = {"retry": Retry.fixed(seconds=10, attempts_max=3, fatal=(Refused,))}
    if chosen.get("guarantee") is Guarantee.AT_MOST_ONCE:
        fitting = {"retry": Retry.none(fatal=(Refused,))}
    return ConsumerOptions(stream_name="orders", name="bill", **{**fitting, **chosen})


def verdict(
    error: Exception,
    attempt: int = 1,
    *,
    is_redriven: bool = False,
    jitter: float = 0.0,
    **chosen: Any,
) -> Verdict:
    return judge(
        error,
        attempt=attempt,
        options=options(**chosen),
        is_redriven=is_redriven,
        jitter=jitter,
    )


@pytest.mark.parametrize(
    "error",
    [
        KeyUnavailable("the KMS is away"),
        KeyRefused("not for you"),
        ExtraMissing("Encryption", "cryptography", "crypto"),
    ],
)
def test_what_this_process_lacks_is_not_the_events_fault(error: Exception) -> None:
    assert isinstance(verdict(error, attempt=3), Block)
    assert isinstance(verdict(error, is_redriven=True), Block)


# ── retry or give up ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "attempt", "expected"),
    [
        (ValueError(), 1, RetryAfter(9.0)),
        (ValueError(), 2, RetryAfter(9.0)),
        (ValueError(), 3, Bury("exhausted")),
        (ValueError(), 4, Bury("exhausted")),
        (HandlerTimeout(), 1, RetryAfter(9.0)),
        (HandlerTimeout(), 3, Bury("exhausted")),
        (RetryableError(), 1, RetryAfter(9.0)),
        (RetryableError("soon", after_seconds=60), 1, RetryAfter(60.0)),
        (RetryableError("soon", after_seconds=60), 2, RetryAfter(60.0)),
        (RetryableError("soon", after_seconds=60), 3, Bury("exhausted")),
        (FatalError(), 1, Bury("fatal")),
        (FatalError(), 3, Bury("fatal")),
        (Broken(), 1, Bury("fatal")),
        (Refused(), 1, Bury("fatal")),
        (Refused(), 3, Bury("fatal")),
        (EffectUnknown("card 1"), 1, Bury("interrupted")),
        (EffectUnknown("card 1"), 3, Bury("interrupted")),
        (ContractError("cents"), 1, Bury("contract")),
        (ContractError("cents"), 3, Bury("contract")),
        (VERSION, 1, Block("orders.placed has version 9")),
        (VERSION, 3, Block("orders.placed has version 9")),
        (TYPE, 1, Block("orders.lost is not known")),
    ],
)
def test_an_error_says_what_becomes_of_its_event(
    error: Exception, attempt: int, expected: Verdict
) -> None:
    assert verdict(error, attempt) == expected


def test_a_cause_is_not_the_error() -> None:
    error = ValueError("wrapped")
    error.__cause__ = FatalError()
    assert verdict(error) == RetryAfter(9.0)


def test_the_first_of_one_attempt_is_the_last() -> None:
    assert verdict(ValueError(), retry=Retry.none()) == Bury("exhausted")
    assert verdict(RetryableError(after_seconds=1), retry=Retry.none()) == Bury("exhausted")


@pytest.mark.parametrize(
    ("asked", "delay"),
    [
        (0, 0.0),
        (-5, 0.0),
        (-math.inf, 0.0),
        (0.25, 0.25),
        (DELAY_SECONDS_LIMIT * 2, DELAY_SECONDS_LIMIT),
        (math.inf, DELAY_SECONDS_LIMIT),
        (10**400, DELAY_SECONDS_LIMIT),
        (math.nan, 9.0),
        ("30", 9.0),
        (True, 9.0),
        ([], 9.0),
        (None, 9.0),
    ],
)
def test_the_delay_that_a_handler_asks_for_is_kept_within_reason(asked: Any, delay: float) -> None:
    assert verdict(RetryableError("later", after_seconds=asked)) == RetryAfter(delay)


def test_a_function_may_give_up_early_whatever_the_handler_asks_for() -> None:
    retry = Retry.by(lambda attempt, _: None if attempt == 2 else 5, attempts_max=9)
    assert verdict(ValueError(), 1, retry=retry) == RetryAfter(5.0)
    assert verdict(ValueError(), 2, retry=retry) == Bury("exhausted")
    assert verdict(RetryableError(after_seconds=60), 2, retry=retry) == Bury("exhausted")
    assert verdict(RetryableError(after_seconds=60), 3, retry=retry) == RetryAfter(60.0)


def test_a_function_sees_the_error_as_it_was_raised() -> None:
    seen: list[Exception] = []

    def wait(attempt: int, error: Exception) -> float:
        seen.append(error)
        return 1

    group = ExceptionGroup("tasks", [ValueError()])
    verdict(group, retry=Retry.by(wait))
    assert seen == [group]


def test_a_function_is_not_asked_about_what_is_decided() -> None:
    retry = Retry.by(lambda *_: pytest.fail("asked"), attempts_max=2)
    for error in (FatalError(), ContractError(), EffectUnknown(), VERSION, TYPE):
        verdict(error, retry=retry)
    verdict(ValueError(), 2, retry=retry)


def test_a_broken_function_costs_nothing_but_its_choice() -> None:
    retry = Retry.by(lambda *_: 1 / 0)
    assert verdict(ValueError(), 3, retry=retry) == RetryAfter(
        DEFAULT_RETRY.computed_seconds(3, 0.0)
    )


# ── missing contracts ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("attempt", [1, 3, 8, 5000])
def test_an_event_parked_for_its_version_waits_whatever_its_attempts(attempt: int) -> None:
    for retry in (Retry.none(), Retry.fixed(seconds=7000, attempts_max=2)):
        assert verdict(VERSION, attempt, on_unknown_version="park", retry=retry) == Wait()


def test_a_version_may_be_buried_or_held() -> None:
    assert verdict(VERSION, on_unknown_version="bury") == Bury("contract")
    assert verdict(VERSION, on_unknown_version="bury", on_exhausted="hold") == Hold("contract")


@pytest.mark.parametrize("choice", get_args(OnUnknownVersion))
def test_an_unknown_type_blocks_whatever_versions_do(choice: OnUnknownVersion) -> None:
    assert verdict(TYPE, on_unknown_version=choice) == Block("orders.lost is not known")


@pytest.mark.parametrize("fatal", [(ContractError,), (PenstockError,), (Exception,)])
def test_a_missing_contract_is_never_fatal(fatal: tuple[type[BaseException], ...]) -> None:
    retry = Retry.exponential(fatal=fatal)
    assert isinstance(verdict(VERSION, retry=retry), Block)
    assert verdict(VERSION, retry=retry, on_unknown_version="park") == Wait()


def test_the_most_telling_reason_is_given() -> None:
    retry = Retry.exponential(fatal=(Exception,))
    assert verdict(ContractError(), retry=retry) == Bury("contract")
    assert verdict(EffectUnknown(), retry=retry) == Bury("interrupted")
    assert verdict(RetryableError(after_seconds=1), retry=retry) == Bury("fatal")


class Placed(Event, type="verdict.placed", version=1):
    order_id: int


class PlacedLater(Event, type="verdict.placed", version=9):
    order_id: int


def bill(event: Placed) -> None: ...


def test_a_handler_without_the_version_is_missing_a_contract() -> None:
    with pytest.raises(ContractMissing, match="has version 9; this consumer") as caught:
        deliver(bill, PlacedLater(order_id=1))
    assert caught.value.is_version
    assert isinstance(verdict(caught.value), Block)
    assert verdict(caught.value, on_unknown_version="park") == Wait()


# ── redriven, held, at most once ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError(), "exhausted"),
        (RetryableError(after_seconds=1), "exhausted"),
        (FatalError(), "fatal"),
        (Refused(), "fatal"),
        (EffectUnknown(), "interrupted"),
        (ContractError(), "contract"),
        (VERSION, "contract"),
        (TYPE, "contract"),
    ],
)
@pytest.mark.parametrize("on_unknown_version", get_args(OnUnknownVersion))
def test_a_redriven_event_has_one_attempt(
    error: Exception, reason: Any, on_unknown_version: OnUnknownVersion
) -> None:
    chosen: dict[str, Any] = {"on_unknown_version": on_unknown_version}
    assert verdict(error, is_redriven=True, **chosen) == Bury(reason)
    assert verdict(error, is_redriven=True, on_exhausted="hold", **chosen) == Hold(reason)


def test_the_crash_of_a_process_is_given_up_in_the_same_way() -> None:
    assert give_up("crash", options()) == Bury("crash")
    assert give_up("crash", options(on_exhausted="hold")) == Hold("crash")


ERRORS = [
    ValueError(),
    RetryableError(),
    RetryableError(after_seconds=3),
    FatalError(),
    Refused(),
    EffectUnknown(),
    ContractError(),
    VERSION,
    TYPE,
    ExceptionGroup("tasks", [ValueError(), FatalError()]),
]


def every_option() -> list[ConsumerOptions]:
    found = []
    for guarantee, on_exhausted, on_unknown_version, order in itertools.product(
        Guarantee, get_args(OnExhausted), get_args(OnUnknownVersion), get_args(Order)
    ):
        try:
            found.append(
                options(
                    guarantee=guarantee,
                    on_exhausted=on_exhausted,
                    on_unknown_version=on_unknown_version,
                    order=order,
                )
            )
        except RegistrationError:
            assert guarantee is Guarantee.AT_MOST_ONCE
    return found


EVERY_OPTION = every_option()


@given(
    st.sampled_from(ERRORS),
    st.integers(1, 2000),
    st.sampled_from(EVERY_OPTION),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
)
def test_the_rules_hold_for_all_options(
    error: Exception, attempt: int, chosen: ConsumerOptions, is_redriven: bool, jitter: float
) -> None:
    found = judge(error, attempt=attempt, options=chosen, is_redriven=is_redriven, jitter=jitter)
    again = judge(error, attempt=attempt, options=chosen, is_redriven=is_redriven, jitter=jitter)
    assert found == again
    if chosen.guarantee is Guarantee.AT_MOST_ONCE:
        assert isinstance(found, Bury | Block)
    if is_redriven:
        assert isinstance(found, Bury | Hold)
    if chosen.on_exhausted == "hold":
        assert not isinstance(found, Bury)
    else:
        assert not isinstance(found, Hold)
    if isinstance(found, RetryAfter):
        assert 0 <= found.delay_seconds <= DELAY_SECONDS_LIMIT
        assert attempt < chosen.retry.attempts_max
    if isinstance(found, Block | Wait):
        assert isinstance(error, ContractMissing)


def test_there_are_options_of_every_kind() -> None:
    assert len(EVERY_OPTION) == 2 * (2 * 3 * 3) + 1 * (1 * 2 * 3)


# ── groups, as tasks raise them ────────────────────────────────────────────────────────────────


async def fail_in_a_task(error: Exception) -> None:
    async def task() -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        group.create_task(task())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FatalError(), Bury("fatal")),
        (Refused(), Bury("fatal")),
        (EffectUnknown(), Bury("interrupted")),
        (ContractError(), Bury("contract")),
        (RetryableError(after_seconds=60), RetryAfter(60.0)),
        (ValueError(), RetryAfter(9.0)),
    ],
)
def test_the_error_of_a_single_task_counts_as_itself(error: Exception, expected: Verdict) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fail_in_a_task(error))
    assert verdict(caught.value) == expected


def test_several_errors_at_once_are_retried() -> None:
    assert verdict(ExceptionGroup("tasks", [ValueError(), FatalError()])) == RetryAfter(9.0)


def test_a_group_may_be_named_as_fatal_itself() -> None:
    retry = Retry.exponential(fatal=(ExceptionGroup,))
    assert verdict(ExceptionGroup("tasks", [ValueError()]), retry=retry) == Bury("fatal")


def test_groups_in_groups_are_opened_while_there_is_one_error() -> None:
    error = KeyError("x")
    assert sole_error(error) is error
    assert sole_error(ExceptionGroup("a", [ExceptionGroup("b", [error])])) is error
    several = ExceptionGroup("a", [error, error])
    assert sole_error(ExceptionGroup("b", [several])) is several


# ── what is nobody's fault ─────────────────────────────────────────────────────────────────────

DEADLOCK = psycopg.errors.DeadlockDetected("deadlock detected")


def by_sqlalchemy(error: Exception) -> Exception:
    return sqlalchemy.exc.OperationalError("UPDATE stock", {}, error)


def of_another_driver(**attributes: Any) -> Exception:
    error = Exception("could not serialize access")
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


class Nasty(Exception):
    @property
    def sqlstate(self) -> str:
        raise RuntimeError("I do not tell")

    @property
    def orig(self) -> str:
        raise RuntimeError("I do not tell")


@pytest.mark.parametrize(
    "error",
    [
        DEADLOCK,
        psycopg.errors.SerializationFailure(),
        psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"),
        by_sqlalchemy(DEADLOCK),
        of_another_driver(sqlstate="40001"),
        of_another_driver(pgcode="40P01"),
        by_sqlalchemy(of_another_driver(pgcode="55P03")),
        ExceptionGroup("tasks", [DEADLOCK]),
        ExceptionGroup("tasks", [DEADLOCK, by_sqlalchemy(DEADLOCK)]),
        ExceptionGroup("tasks", [ExceptionGroup("more", [DEADLOCK])]),
    ],
)
def test_deadlocks_serialisation_failures_and_lock_timeouts_say_nothing_about_the_event(
    error: Exception,
) -> None:
    assert is_nobodys_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        psycopg.errors.UniqueViolation(),
        psycopg.errors.QueryCanceled("statement timeout"),
        by_sqlalchemy(psycopg.errors.UniqueViolation()),
        of_another_driver(sqlstate=None, pgcode=None),
        of_another_driver(sqlstate=[], orig={}),
        ExceptionGroup("tasks", [DEADLOCK, ValueError()]),
        Nasty(),
    ],
)
def test_everything_else_counts(error: Exception) -> None:
    assert not is_nobodys_fault(error)


def test_a_fatal_error_that_a_deadlock_caused_is_the_handlers_decision() -> None:
    error = FatalError("I know what I do")
    error.__cause__ = DEADLOCK
    assert not is_nobodys_fault(error)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n lines", "ValueError: two lines"),
        ("nul \x00 half \ud800", "ValueError: nul \ufffd half \ufffd"),
        ("x" * 10_000, "ValueError: " + "x" * 488),
    ],
)
def test_a_description_is_one_storable_line(text: str, shown: str) -> None:
    assert describe(ValueError(text)) == shown
