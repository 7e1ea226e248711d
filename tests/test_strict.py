"""What would lose, repeat or reorder events is refused at import, with what to write instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Context, Event, Guarantee, Pipeline, Retry, StreamEvent
from penstock.core.options import ConsumerOptions
from penstock.errors import RegistrationError

WITHOUT_A_TRANSACTION = [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE]


class Placed(Event, type="strict.placed", version=1, key="order_id"):
    order_id: int


class Counted(Event, type="orders.counted", version=1):
    count: int


def plain(event: Placed) -> None: ...
def keyless(event: Counted) -> None: ...
def either(event: Counted | Placed) -> None: ...
def wrapped(event: StreamEvent[Placed]) -> None: ...
def several(events: list[Placed]) -> None: ...
def untyped(event: StreamEvent[Any]) -> None: ...
def with_context(event: Placed, context: Context) -> None: ...
def with_session(event: Placed, session: Session) -> None: ...
def with_connection(event: Placed, connection: psycopg.Connection[Any]) -> None: ...
def with_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None: ...
async def with_async_session(event: Placed, session: AsyncSession) -> None: ...
async def with_async_connection(event: Placed, c: psycopg.AsyncConnection[Any]) -> None: ...
async def with_async_cursor(event: Placed, cursor: psycopg.AsyncCursor[Any]) -> None: ...


def registered(handler: Any = plain, *, strict: bool = True, **chosen: Any) -> ConsumerOptions:
    pipeline = Pipeline("shop", strict=strict)
    chosen = {"name": "bill_order", **chosen}
    assert pipeline.consumer("orders", **chosen)(handler) is handler
    (consumer,) = pipeline.consumers.values()
    return consumer.options


def refusal(handler: Any = plain, *, strict: bool = True, **chosen: Any) -> str:
    with pytest.raises(RegistrationError) as refused:
        registered(handler, strict=strict, **chosen)
    return str(refused.value)


# ── the name ───────────────────────────────────────────────────────────────────────────────────


def test_strict_mode_demands_a_name() -> None:
    sentence = refusal(name=None)
    assert "A consumer of 'orders' has no name" in sentence
    assert 'write @pipeline.consumer("orders", name="plain")' in sentence


def test_without_strict_mode_the_function_gives_its_name() -> None:
    assert registered(name=None, strict=False).name == "plain"


def test_what_has_no_name_of_its_own_needs_one_in_any_mode() -> None:
    nameless = partial(plain)
    sentence = refusal(nameless, name=None, strict=False)
    assert 'write @pipeline.consumer("orders", name="bill_order")' in sentence


def test_a_lambda_s_name_is_no_identity() -> None:
    assert "its name may hold" in refusal(lambda _: None, name=None, strict=False)


@pytest.mark.parametrize(
    "name", [None, 5, b"shop", "", " shop", "team/shop", "shop@2", "team.shop", "sh\0p", "x" * 101]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_pipeline_s_name_is_a_part_of_an_identity(name: Any, strict: bool) -> None:
    with pytest.raises(RegistrationError, match="may hold letters, digits, '_' and '-'"):
        Pipeline(name, strict=strict)


def test_a_consumer_without_a_stream_says_how_it_is_written() -> None:
    consumer: Any = Pipeline("shop").consumer
    # Nobody could send to the last ones, so their consumer would wait for ever.
    for stream in (plain, None, "", "orders ", "my orders", "x" * 201):
        with pytest.raises(RegistrationError, match=r'Write @pipeline\.consumer\("orders", name='):
            consumer(stream)


# ── the streams ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [None, Placed, "", "orders ", "my orders", "x" * 201])
def test_a_stream_is_declared_with_a_name_that_can_be_sent_to(name: Any) -> None:
    with pytest.raises(RegistrationError, match="cannot name a stream"):
        Pipeline("shop").stream(name)


@pytest.mark.parametrize("event", ["orders.placed", Placed(order_id=1), Event, int, [Placed]])
def test_a_stream_carries_event_classes(event: Any) -> None:
    with pytest.raises(RegistrationError, match="is no event class"):
        Pipeline("shop").stream("orders", event)


@pytest.mark.parametrize("strict", [True, False])
def test_a_second_declaration_does_not_take_the_place_of_the_first(strict: bool) -> None:
    pipeline = Pipeline("shop", strict=strict)
    declared = pipeline.stream("orders", Placed)
    assert pipeline.stream("orders", Placed) == declared
    for other in ((Counted,), (Placed, Counted), ()):
        with pytest.raises(RegistrationError, match="is written twice"):
            pipeline.stream("orders", *other)


@pytest.mark.parametrize("version", ["1", 1.0, True, 0, -1])
def test_a_version_is_a_positive_integer(version: Any) -> None:
    with pytest.raises(RegistrationError, match="must be a positive integer"):

        class Versioned(Event, type="strict.versioned", version=version): ...


# ── the guarantee ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("guarantee", Guarantee)
def test_a_guarantee_may_be_given_as_text(guarantee: Guarantee) -> None:
    for given in (guarantee, guarantee.value, str(guarantee)):
        chosen = registered(guarantee=given, start="latest").guarantee
        assert chosen is guarantee


@pytest.mark.parametrize("wrong", ["exactly", "EXACTLY_ONCE", "", None, 1, [], True])
@pytest.mark.parametrize("strict", [True, False])
def test_an_unknown_guarantee_is_named(wrong: Any, strict: bool) -> None:
    sentence = refusal(guarantee=wrong, strict=strict)
    assert f"guarantee={wrong!r} is unknown; write Guarantee.EXACTLY_ONCE" in sentence
    assert '"exactly_once", "at_least_once" or "at_most_once"' in sentence


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("order", '"key", "stream" or "none"'),
        ("on_exhausted", '"bury" or "hold"'),
        ("on_unknown", '"skip" or "block"'),
        ("on_unknown_version", '"block", "park" or "bury"'),
    ],
)
@pytest.mark.parametrize("wrong", ["never", "", None, 1, ["key"]])
def test_an_unknown_choice_is_named(option: str, allowed: str, wrong: Any) -> None:
    assert f"{option} must be {allowed}, not {wrong!r}." in refusal(**{option: wrong})


def test_permission_to_reorder_is_yes_or_no() -> None:
    assert "allow_reordering must be True or False" in refusal(allow_reordering="perhaps")


# ── at most once ───────────────────────────────────────────────────────────────────────────────

AT_MOST_ONCE: dict[str, Any] = {"guarantee": Guarantee.AT_MOST_ONCE, "start": "latest"}


def test_at_most_once_has_one_attempt_unless_told_otherwise() -> None:
    assert registered(**AT_MOST_ONCE).retry == Retry.none()
    made = ConsumerOptions(stream_name="orders", name="count", guarantee=Guarantee.AT_MOST_ONCE)
    assert made.retry == Retry.none()


@pytest.mark.parametrize(
    "retry",
    [
        Retry.exponential(),
        Retry.fixed(seconds=1, attempts_max=2),
        Retry.by(lambda *_: None),
        lambda *_: 1.0,
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_at_most_once_with_retries_is_refused(retry: Any, strict: bool) -> None:
    sentence = refusal(**AT_MOST_ONCE, retry=retry, strict=strict)
    assert "AT_MOST_ONCE never tries an event again; write retry=Retry.none()" in sentence


def test_at_most_once_takes_any_policy_of_one_attempt() -> None:
    for retry in (Retry.none(fatal=(OSError,)), Retry.fixed(seconds=1, attempts_max=1)):
        assert registered(**AT_MOST_ONCE, retry=retry).retry is retry


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"on_exhausted": "hold"}, 'write on_exhausted="bury"'),
        ({"on_unknown_version": "park"}, 'write on_unknown_version="block" or "bury"'),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_at_most_once_keeps_nothing_back(
    chosen: dict[str, Any], sentence: str, strict: bool
) -> None:
    assert sentence in refusal(**AT_MOST_ONCE, **chosen, strict=strict)
    registered(guarantee=Guarantee.AT_LEAST_ONCE, start="latest", **chosen)


# ── where to begin ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("guarantee", WITHOUT_A_TRANSACTION)
def test_without_exactly_once_strict_mode_demands_a_start(guarantee: Guarantee) -> None:
    sentence = refusal(guarantee=guarantee)
    assert 'Write start="latest" for new events only, or start="earliest"' in sentence
    assert registered(guarantee=guarantee, strict=False).start == "earliest"
    for start in ("earliest", "latest", 17):
        assert registered(guarantee=guarantee, start=start).start == start


def test_exactly_once_begins_at_the_earliest_event() -> None:
    assert registered().start == "earliest"


# ── order ──────────────────────────────────────────────────────────────────────────────────────


def test_the_order_of_a_stream_needs_a_single_lane() -> None:
    sentence = refusal(order="stream", lanes=2)
    assert "write lanes=1" in sentence
    assert 'order="key"' in sentence
    assert registered(order="stream", lanes=1).order == "stream"
    assert registered(order="key", lanes=2).order == "key"


@pytest.mark.parametrize("handler", [plain, either, wrapped, several])
def test_strict_mode_refuses_to_reorder_events_with_a_key(handler: Any) -> None:
    sentence = refusal(handler, order="none")
    assert 'Placed has key="order_id"' in sentence
    assert 'Write order="key", or allow_reordering=True' in sentence
    assert registered(handler, order="none", allow_reordering=True).allow_reordering
    assert registered(handler, order="none", strict=False).order == "none"


@pytest.mark.parametrize("handler", [keyless, untyped])
def test_events_without_a_key_have_no_order_to_lose(handler: Any) -> None:
    assert registered(handler, order="none").order == "none"


def test_an_untyped_handler_has_the_keys_of_its_declared_stream() -> None:
    pipeline = Pipeline("shop")
    pipeline.stream("orders", Counted, Placed)
    pipeline.stream("counts", Counted)
    with pytest.raises(RegistrationError, match='Placed has key="order_id"'):
        pipeline.consumer("orders", name="one", order="none")(untyped)
    pipeline.consumer("orders", name="two", order="none")(keyless)
    pipeline.consumer("counts", name="three", order="none")(untyped)


def test_order_is_kept_unless_told_otherwise() -> None:
    chosen = registered()
    assert (chosen.order, chosen.allow_reordering) == ("key", False)
    assert (chosen.on_exhausted, chosen.on_unknown_version) == ("bury", "block")


# ── what a handler is lent ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("handler", "what", "is_async"),
    [
        (with_session, "a session", False),
        (with_connection, "a connection", False),
        (with_cursor, "a cursor", False),
        (with_async_session, "a session", True),
        (with_async_connection, "a connection", True),
        (with_async_cursor, "a cursor", True),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_without_a_transaction_there_is_nothing_to_lend(
    handler: Any, what: str, is_async: bool, strict: bool
) -> None:
    with_ = "async with" if is_async else "with"
    sentence = refusal(handler, guarantee=Guarantee.AT_LEAST_ONCE, start="latest", strict=strict)
    assert f"its handler asks for {what}, but under AT_LEAST_ONCE it runs outside" in sentence
    assert f" {with_} context.complete() as session:" in sentence
    sentence = refusal(handler, guarantee="at_most_once", start="latest", strict=strict)
    assert f"its handler asks for {what}, but under AT_MOST_ONCE" in sentence
    assert "context.complete" not in sentence
    engine = "AsyncSession(pipeline.async_engine)" if is_async else "Session(pipeline.engine)"
    assert f"{with_} {engine} as session, session.begin():" in sentence
    registered(handler, guarantee=Guarantee.EXACTLY_ONCE, strict=strict)


@pytest.mark.parametrize("guarantee", WITHOUT_A_TRANSACTION)
def test_a_context_is_always_there(guarantee: Guarantee) -> None:
    assert registered(with_context, guarantee=guarantee, start="latest").guarantee is guarantee


def test_a_refused_consumer_is_not_registered() -> None:
    pipeline = Pipeline("shop")
    with pytest.raises(RegistrationError):
        pipeline.consumer("orders", name="bill_order", order="none")(plain)
    assert not pipeline.consumers
    pipeline.consumer("orders", name="bill_order")(plain)
