"""A handler says by annotation what it wants; a wrong one is refused where it is written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Context, Event, Pipeline, RawEvent, StreamEvent
from penstock.errors import RegistrationError, UsageError
from penstock.pipeline.signature import View, read_signature


class Placed(Event, type="signature.placed", version=1, key="order_id"):
    order_id: int


class PlacedAgain(Event, type="signature.placed", version=2):
    order_id: int


class Cancelled(Event, type="orders.cancelled", version=1):
    order_id: int


class Unversioned(Event):
    order_id: int


def typed(event: Placed, session: Session) -> None: ...
def raw(event: StreamEvent[Any]) -> None: ...
def bare(event: StreamEvent) -> None: ...
def union(context: Context, event: Placed | Cancelled, cursor: psycopg.Cursor[Any]) -> None: ...
def versions(event: StreamEvent[Placed | PlacedAgain]) -> None: ...
def several(events: list[Placed], connection: psycopg.Connection[Any]) -> None: ...
async def asynchronous(event: Placed, session: AsyncSession) -> None: ...


def test_what_a_handler_wants_is_read_from_its_annotations() -> None:
    assert read_signature(typed, "c").parameters == (None, View.SESSION)
    assert read_signature(raw, "c").contracts is None
    assert read_signature(bare, "c").contracts is None
    assert read_signature(union, "c").parameters == (View.CONTEXT, None, View.CURSOR)
    assert read_signature(union, "c").contracts == {
        "signature.placed": (Placed,),
        "orders.cancelled": (Cancelled,),
    }
    assert read_signature(versions, "c").contracts == {"signature.placed": (Placed, PlacedAgain)}
    assert read_signature(several, "c").is_batch
    assert read_signature(asynchronous, "c").is_async


def without_parameters() -> None: ...
def without_event(session: Session) -> None: ...
def without_annotation(event, session: Session) -> None: ...  # type: ignore[no-untyped-def]
def of_a_dictionary(event: dict[str, Any]) -> None: ...
def of_any_event(event: Event) -> None: ...
def of_two_events(event: Placed, other: Cancelled) -> None: ...
def of_an_async_session(event: Placed, session: AsyncSession) -> None: ...
def of_keywords(*, event: Placed) -> None: ...
def of_everything(event: Placed, *rest: Any) -> None: ...
async def of_a_plain_session(event: Placed, session: Session) -> None: ...


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (without_parameters, "it takes no event. Write def handler"),
        (without_event, "no parameter takes the event"),
        (without_annotation, "'event' has no annotation"),
        (of_a_dictionary, "is neither an Event class nor StreamEvent. Write event: OrderPlaced"),
        (of_any_event, "Event is neither an Event class nor StreamEvent"),
        (of_two_events, "'other' is neither an event nor something known"),
        (of_an_async_session, "does not fit a plain handler. Write session: Session"),
        (of_a_plain_session, "does not fit an async def handler. Write session: AsyncSession"),
        (of_keywords, "is not a plain parameter"),
        (of_everything, "is not a plain parameter"),
    ],
)
def test_a_wrong_signature_fails_with_what_to_write(handler: Any, sentence: str) -> None:
    with pytest.raises(RegistrationError) as refusal:
        read_signature(handler, "bill_order")
    assert "Consumer 'bill_order' cannot be registered" in str(refusal.value)
    assert sentence in str(refusal.value)


def test_a_class_that_only_a_function_knows_is_named() -> None:
    def handler(event: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(RegistrationError, match="'Missing', which is not defined"):
        read_signature(handler, "bill_order")


# ── the pipeline's registry ────────────────────────────────────────────────────────────────────


def test_registering_leaves_the_function_as_it_is() -> None:
    pipeline = Pipeline("shop")
    assert pipeline.consumer("orders", name="bill_order")(typed) is typed
    assert pipeline.consumers["bill_order"].name == "shop.bill_order"


def test_a_name_is_taken_once() -> None:
    pipeline = Pipeline("shop")
    pipeline.consumer("orders", name="bill_order")(typed)
    with pytest.raises(RegistrationError, match="registered twice"):
        pipeline.consumer("invoices", name="bill_order")(typed)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": ""}, "its name may hold"),
        ({"name": "a b"}, "its name may hold"),
        ({"batch_size": 0}, "batch_size must be between"),
        ({"batch_seconds": 0}, "batch_seconds must be positive"),
        ({"start": "soon"}, "start must be"),
        ({"start": 0}, "positions begin at 1"),
        ({"start": 10**30}, "positions begin at 1 and end at"),
        ({"lanes": 1.5}, "lanes must be a whole number, not 1.5"),
        ({"lanes": "8"}, "lanes must be a whole number, not '8'"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"timeout_seconds": timedelta(seconds=1)}, "timeout_seconds must be a number"),
        ({"on_unknown": "explode"}, "on_unknown must be"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RegistrationError, match=sentence):
        Pipeline("shop").consumer("orders", **{"name": "bill_order", **options})


def test_strict_mode_demands_a_version() -> None:
    def handler(event: Unversioned) -> None: ...

    with pytest.raises(RegistrationError, match=r"Unversioned has no version\. Write class"):
        Pipeline("shop").consumer("orders", name="bill_order")(handler)
    Pipeline("shop", strict=False).consumer("orders", name="bill_order")(handler)


def test_once_a_stream_is_declared_others_are_refused_with_a_suggestion() -> None:
    pipeline = Pipeline("shop", database_url="postgresql://nowhere/none")
    pipeline.stream("orders", Placed)
    with pytest.raises(RegistrationError, match=r"did you mean 'orders'\?"):
        pipeline.consumer("order", name="bill_order")(typed)
    with pytest.raises(RegistrationError, match=r"did you mean 'orders'\?"):
        pipeline.send(Session(), "oders", Placed(order_id=1))
    with pytest.raises(UsageError, match=r"does not carry 'orders\.cancelled'"):
        pipeline.send(Session(), "orders", Cancelled(order_id=1))
    with pytest.raises(UsageError, match=r"did you mean 'signature\.placed'\?"):
        pipeline.send(Session(), "orders", RawEvent("signature.place", {}))


def test_a_key_must_be_a_field() -> None:
    with pytest.raises(RegistrationError, match="key='nope' names no field; it has order_id"):

        class Wrong(Event, type="w", version=1, key="nope"):
            order_id: int
