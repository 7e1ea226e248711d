"""How handlers of Redis timers are registered and called, and what becomes of their failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Event, Pipeline, Retry
from penstock.core.claims import parse_claim
from penstock.core.timer_messages import TimerMessage, read_message
from penstock.core.timer_options import TimerOptions
from penstock.core.timer_verdict import inbox_id, is_worn_out, judge_timer
from penstock.core.verdict import Bury, RetryAfter
from penstock.errors import ContractError, FatalError, RegistrationError, RetryableError
from penstock.pipeline.timer_signature import Part, read_timer_signature
from tests.timers_at_work import envelope

DUE = datetime(2026, 11, 1, tzinfo=UTC)


class Reminder(BaseModel):
    order_id: int


class OrderForgotten(Event, type="order.forgotten", version=1):
    order_id: int


@dataclass
class Plain:
    order_id: int


def message_of(message: Any, **headers: str) -> TimerMessage:
    payload = envelope(message, **headers)
    return read_message(payload, topic="t", timer_id="a", due_at=DUE, attempt=1)


def raw_message(body: bytes) -> TimerMessage:
    return read_message(body, topic="t", timer_id="a", due_at=DUE, attempt=1)


def of_dict(body: dict[str, Any]) -> None: ...
def of_text(body: str) -> None: ...
def of_bytes(body: bytes) -> None: ...
def of_any(body: Any) -> None: ...
def of_model(body: Reminder) -> None: ...
def of_event(event: OrderForgotten) -> None: ...
def of_dataclass(body: Plain) -> None: ...
def of_number(body: int) -> None: ...


# ── bodies ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("function", "message", "argument"),
    [
        (of_dict, {"order_id": 1}, {"order_id": 1}),
        (of_text, "Grüße", "Grüße"),
        (of_text, {"a": 1}, '{"a":1}'),
        (of_bytes, b"\x00\xff", b"\x00\xff"),
        (of_bytes, {"a": 1}, b'{"a":1}'),
        (of_any, {"a": [1]}, {"a": [1]}),
        (of_any, "text", "text"),
        (of_any, b"\xff", b"\xff"),
        (of_model, {"order_id": 1}, Reminder(order_id=1)),
        (of_model, '{"order_id": 1}', Reminder(order_id=1)),
        (of_event, {"order_id": 1}, OrderForgotten(order_id=1)),
        (of_dataclass, {"order_id": 1}, Plain(1)),
        (of_number, 7, 7),
        (of_number, "7", 7),
    ],
)
def test_a_body_comes_as_its_annotation_says(
    function: Callable[..., Any], message: Any, argument: Any
) -> None:
    plan = read_timer_signature(function, "t")
    assert plan.arguments(message_of(message), {}) == [argument]


def test_a_body_without_a_content_type_may_be_json_all_the_same() -> None:
    plan = read_timer_signature(of_model, "t")
    assert plan.arguments(raw_message(b'{"order_id": 3}'), {}) == [Reminder(order_id=3)]


@pytest.mark.parametrize(
    ("function", "message"),
    [(of_model, {"order_id": "secret"}), (of_dict, "secret"), (of_number, b"secret")],
)
def test_a_body_that_does_not_fit_is_named_without_its_values(
    function: Callable[..., Any], message: Any
) -> None:
    with pytest.raises(ContractError) as raised:
        read_timer_signature(function, "t").arguments(message_of(message), {})
    assert "secret" not in str(raised.value)


def test_a_handler_gets_what_it_asks_for_in_its_order() -> None:
    def handle(session: Session, message: TimerMessage, body: dict[str, Any]) -> None: ...

    plan = read_timer_signature(handle, "t")
    message = message_of({"a": 1})
    assert plan.arguments(message, {Part.SESSION: "s"}) == ["s", message, {"a": 1}]
    assert plan.is_exactly_once


def test_a_handler_may_want_nothing_at_all() -> None:
    def tick() -> None: ...

    plan = read_timer_signature(tick, "t")
    assert plan.arguments(message_of(None), {}) == []
    assert not plan.is_exactly_once


# ── signatures and options that cannot work ────────────────────────────────────────────────────


def unannotated(body) -> None: ...  # type: ignore[no-untyped-def]
def with_keywords(body: dict[str, Any], *, more: int = 1) -> None: ...
def two_bodies(one: dict[str, Any], two: str) -> None: ...
def of_unknown(body: dict[str, Any], lock: object, pipeline: Pipeline) -> None: ...
def of_pipeline(pipeline: Pipeline) -> None: ...
def async_session(body: dict[str, Any], session: AsyncSession) -> None: ...
async def plain_session(body: dict[str, Any], session: Session) -> None: ...
async def plain_connection(connection: psycopg.Connection[Any]) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (unannotated, "'body' has no annotation"),
        (with_keywords, "is not a plain parameter"),
        (two_bodies, "takes the body twice"),
        (of_unknown, "takes the body twice"),
        (of_pipeline, "Pipeline is neither a body nor something known"),
        (async_session, "does not fit a plain handler. Write session: Session"),
        (plain_session, "does not fit an async def handler. Write session: AsyncSession"),
        (plain_connection, "Write connection: AsyncConnection"),
        ("reminders", "is not a function"),
    ],
)
def test_a_wrong_signature_fails_at_registration(function: Any, told: str) -> None:
    pipeline = Pipeline("shop")
    with pytest.raises(RegistrationError, match="'reminders' cannot be registered") as raised:
        pipeline.timer("reminders")(function)
    assert told in str(raised.value)
    assert not pipeline.timer_handlers


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent": 0},
        {"max_concurrent": 1.5},
        {"max_concurrent": True},
        {"max_concurrent": 1001},
        {"lease_ttl": 0},
        {"lease_ttl": float("nan")},
        {"lease_ttl": 90_000},
        {"polling_interval": 0},
        {"polling_interval": 2, "max_polling_interval": 1},
        {"max_polling_interval": "5"},
        {"timeout_seconds": 0},
        {"retry": 3},
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RegistrationError, match="'reminders' cannot be registered"):
        Pipeline("shop").timer("reminders", **wrong)


def test_a_topic_has_one_handler_and_a_name() -> None:
    pipeline = Pipeline("shop")
    assert pipeline.timer("reminders")(of_dict) is of_dict
    assert pipeline.timer_handlers["reminders"].name == "shop.timer:reminders"
    with pytest.raises(RegistrationError, match="two handlers"):
        pipeline.timer("reminders")(of_text)
    with pytest.raises(RegistrationError, match="names its topic"):
        pipeline.timer(of_dict)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="200 are the limit"):
        pipeline.timer("x" * 200)(of_dict)


def test_a_function_may_say_how_long_to_wait() -> None:
    pipeline = Pipeline("shop")
    pipeline.timer("reminders", retry=lambda attempt, _error: attempt * 2.0)(of_dict)
    retry = pipeline.timer_handlers["reminders"].options.retry
    assert retry.delay_seconds(3, 0.0, ValueError()) == 6.0


# ── verdicts ───────────────────────────────────────────────────────────────────────────────────

TWICE = Retry.fixed(seconds=4.0, attempts_max=2, fatal=(KeyError,))


@pytest.mark.parametrize(
    ("error", "attempt", "asked", "verdict"),
    [
        (ValueError(), 1, None, RetryAfter(3.6)),
        (ValueError(), 2, None, Bury("exhausted")),
        (ValueError(), 1, 60.0, RetryAfter(60.0)),
        (ValueError(), 2, 60.0, Bury("exhausted")),
        (RetryableError(after_seconds=7.0), 1, None, RetryAfter(7.0)),
        (FatalError(), 1, None, Bury("fatal")),
        (KeyError(), 1, None, Bury("fatal")),
        (ContractError(), 1, None, Bury("contract")),
        (ExceptionGroup("", [ContractError()]), 1, None, Bury("contract")),
    ],
)
def test_a_failed_attempt_gets_what_it_deserves(
    error: Exception, attempt: int, asked: float | None, verdict: RetryAfter | Bury
) -> None:
    judged = judge_timer(error, attempt=attempt, retry=TWICE, jitter=0.0, asked_seconds=asked)
    assert judged == verdict


def test_attempts_that_end_without_a_word_are_not_endless() -> None:
    once = Retry.none()
    assert [is_worn_out(attempt, once) for attempt in (1, 2, 3, 4)] == [False, False, False, True]
    assert not is_worn_out(8, TimerOptions(topic="t").retry)
    assert is_worn_out(9, TimerOptions(topic="t").retry)


def test_an_arming_keeps_its_name_in_the_inbox_and_another_has_another() -> None:
    assert inbox_id("a", "c", 1.5) == inbox_id("a", "c", 2.5)
    assert inbox_id("a", "c", 1.5) != inbox_id("a", "d", 1.5)
    # What the other library writes by default says nothing about which arming it is.
    assert inbox_id("a", "a", 1.5) != inbox_id("a", "a", 2.5)
    assert inbox_id("a", "", 1.5) != inbox_id("a", None, 2.5)
    assert inbox_id("a", "b/c", 0.0) != inbox_id("a/b", "c", 0.0)
    for awkward in ("x" * 1000, "ü" * 400, "\x00", "\ud800"):
        parse_claim("x" * 200, inbox_id(awkward, "c", 0.0))
        assert inbox_id(awkward, "c", 0.0) != inbox_id(awkward, "d", 0.0)
