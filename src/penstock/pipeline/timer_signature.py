"""Reads from a timer handler's signature what it wants; a wrong one fails at registration."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import psycopg
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.core.failures import as_contract_error
from penstock.core.timer_envelope import CONTENT_TYPE, JSON_TYPE, TEXT_TYPE
from penstock.core.timer_messages import TimerMessage
from penstock.errors import ContractError, RegistrationError
from penstock.pipeline.parameters import read_parameters
from penstock.pipeline.resources import Resource, bound

EXAMPLE = "def remind(body: dict, session: Session) -> None"


class Part(Enum):
    """What a timer's handler may take."""

    BODY = auto()
    MESSAGE = auto()
    SESSION = auto()
    CONNECTION = auto()
    CURSOR = auto()


LENT = frozenset({Part.SESSION, Part.CONNECTION, Part.CURSOR})
"""With one of these a handler runs in the worker's transaction, and is exactly once."""
_SYNC: dict[type, Part] = {
    Session: Part.SESSION,
    psycopg.Connection: Part.CONNECTION,
    psycopg.Cursor: Part.CURSOR,
}
_ASYNC: dict[type, Part] = {
    AsyncSession: Part.SESSION,
    psycopg.AsyncConnection: Part.CONNECTION,
    psycopg.AsyncCursor: Part.CURSOR,
}


@dataclass(frozen=True, slots=True)
class TimerPlan:
    """How to call a timer's handler: what it takes, in which order, and how bodies are read."""

    function: Callable[..., Any]
    is_async: bool
    parameters: tuple[Part, ...]
    read: Callable[[TimerMessage], Any]
    """Makes the argument of a message. Raises ContractError where it does not fit."""
    resources: tuple[Resource, ...] = ()
    """What the function is given besides, by itself, once they are open."""

    @property
    def is_exactly_once(self) -> bool:
        """Whether the handler runs inside of a transaction, and once."""
        return not LENT.isdisjoint(self.parameters)

    def arguments(self, message: TimerMessage, lent: dict[Part, Any]) -> list[Any]:
        """The handler's arguments. Raises ContractError where the body does not fit."""
        return [
            self.read(message)
            if part is Part.BODY
            else message
            if part is Part.MESSAGE
            else lent[part]
            for part in self.parameters
        ]


def read_timer_signature(
    function: Callable[..., Any], topic: str, resources: Sequence[Resource] = ()
) -> TimerPlan:
    """The plan for a handler. Raises RegistrationError with a sentence that says what to write."""
    wanted, places = read_parameters(function, resources, partial(_refusal, topic), EXAMPLE)
    is_async = inspect.iscoroutinefunction(function)
    parts: list[Part] = []
    body: Any = None
    for name, annotation in wanted.items():
        part = _part(annotation, is_async, name, topic)
        if part in parts:
            raise _refusal(topic, f"it takes the {part.name.lower()} twice", EXAMPLE)
        if part is Part.BODY:
            body = annotation
        parts.append(part)
    read = _reader(body, topic) if Part.BODY in parts else _nothing
    return TimerPlan(bound(function, places), is_async, tuple(parts), read, tuple(places.values()))


def is_known_to_timers(annotation: Any) -> bool:
    """Whether a parameter with this annotation means something to timers: bodies are data."""
    plain = typing.get_origin(annotation) or annotation
    return plain in (dict, str, bytes, int, float, bool) or (
        isinstance(plain, type) and issubclass(plain, TimerMessage)
    )


def _part(annotation: Any, is_async: bool, name: str, topic: str) -> Part:
    plain = typing.get_origin(annotation) or annotation
    if not isinstance(plain, type):
        return Part.BODY
    if issubclass(plain, TimerMessage):
        return Part.MESSAGE
    wanted, other = (_ASYNC, _SYNC) if is_async else (_SYNC, _ASYNC)
    for lent, part in wanted.items():
        if issubclass(plain, lent):
            return part
    for lent, part in other.items():
        if issubclass(plain, lent):
            fitting = next(kind.__name__ for kind, its_part in wanted.items() if its_part is part)
            kind = "an async def" if is_async else "a plain"
            raise _refusal(
                topic,
                f"{name!r} is a {plain.__name__}, which does not fit {kind} handler",
                f"{name}: {fitting}",
            )
    return Part.BODY


def _reader(annotation: Any, topic: str) -> Callable[[TimerMessage], Any]:
    if annotation is bytes:
        return lambda message: message.raw_body
    if annotation is str:
        return _text
    if annotation is Any:
        return lambda message: message.body
    try:
        adapter = TypeAdapter(annotation)
    except PydanticUserError:
        shown = getattr(annotation, "__name__", str(annotation))
        raise _refusal(
            topic,
            f"{shown} is neither a body nor something known",
            "the body as dict, str, bytes, Any, a pydantic model or an Event class; besides it "
            "TimerMessage, Session and psycopg.Connection are known",
        ) from None
    return lambda message: _validated(adapter, message)


def _validated(adapter: TypeAdapter[Any], message: TimerMessage) -> Any:
    try:
        if message.headers.get(CONTENT_TYPE) == TEXT_TYPE:
            try:
                return adapter.validate_python(message.body)
            except ValidationError:
                # JSON that was published as a text; what does not fit is told of that reading.
                pass
        return adapter.validate_json(message.raw_body)
    except ValidationError as error:
        raise as_contract_error(error, f"timer {message.timer_id!r}") from None


def _text(message: TimerMessage) -> str:
    body = message.body
    # A text that was published as JSON has quotes around it; anything else is taken as it is.
    is_json = message.headers.get(CONTENT_TYPE, "").startswith(JSON_TYPE)
    if is_json and isinstance(body, str):
        return body
    try:
        return message.raw_body.decode()
    except UnicodeDecodeError:
        raise ContractError(f"The body of timer {message.timer_id!r} is no UTF-8 text.") from None


def _nothing(_message: TimerMessage) -> None:
    raise AssertionError


def _refusal(topic: str, why: str, write: str) -> RegistrationError:
    return RegistrationError(
        f"The handler of timers {topic!r} cannot be registered: {why}. Write {write}."
    )
