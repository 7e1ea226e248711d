"""Reads from a handler's signature what it wants; a wrong one fails at registration."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.core.contracts import Step, path, upcast
from penstock.core.events import Event, StreamEvent
from penstock.core.wire import Entry
from penstock.errors import ContractMissing, RegistrationError
from penstock.pipeline.context import Context
from penstock.pipeline.parameters import read_parameters
from penstock.pipeline.resources import Resource, bound

Reading: TypeAlias = tuple[Callable[..., Any], tuple[Step, ...]]
"""What validates a payload, and the steps before it."""
EXAMPLE = "def handler(event: OrderPlaced, session: Session) -> None"


class View(Enum):
    """What a handler may be lent besides its event."""

    SESSION = auto()
    CONNECTION = auto()
    CURSOR = auto()
    CONTEXT = auto()


_SYNC_VIEWS: dict[type, View] = {
    Session: View.SESSION,
    psycopg.Connection: View.CONNECTION,
    psycopg.Cursor: View.CURSOR,
}
_ASYNC_VIEWS: dict[type, View] = {
    AsyncSession: View.SESSION,
    psycopg.AsyncConnection: View.CONNECTION,
    psycopg.AsyncCursor: View.CURSOR,
}


@dataclass(frozen=True, slots=True)
class HandlerPlan:
    """How to call a handler: what it takes, in which order, and how events become arguments."""

    function: Callable[..., Any]
    is_async: bool
    is_batch: bool
    wraps: bool
    contracts: Mapping[str, tuple[type[Event], ...]] | None
    """Event classes by type; None: the handler takes every event as it is."""
    parameters: tuple[View | None, ...]
    """In order; None marks the event."""
    resources: tuple[Resource, ...] = ()
    """What the function is given besides, by itself, once they are open."""
    _readings: dict[tuple[str, int], Reading] = field(default_factory=dict, repr=False)
    """Found at the first event of each type and version: upcasters may be written last."""

    @property
    def can_pipeline(self) -> bool:
        """Whether statements may be sent ahead of their results."""
        views = set(self.parameters)
        return (not self.is_async and not self.is_batch and View.SESSION not in views) and bool(
            views & {View.CONNECTION, View.CURSOR}
        )

    def names(self, entry: Entry) -> bool:
        """Whether the handler names this event's type."""
        return self.contracts is None or entry.event_type in self.contracts

    def decode(self, entry: Entry) -> Any:
        """The handler's argument for an entry. Raises ContractError where it does not fit."""
        if self.contracts is None:
            return entry.as_stream_event(entry.plain_payload())
        read, steps = self._reading_of(entry)
        payload = read(upcast(entry.payload, steps) if steps else entry.payload, extra="allow")
        return entry.as_stream_event(payload) if self.wraps else payload

    def require_contract(self, entry: Entry) -> None:
        """Raise ContractMissing for a version that leads to none that the handler names."""
        if self.contracts is not None:
            self._reading_of(entry)

    def _reading_of(self, entry: Entry) -> Reading:
        identity = (entry.event_type, entry.version)
        reading = self._readings.get(identity)
        if reading is None:
            reading = self._readings[identity] = self._find_reading(entry)
        return reading

    def _find_reading(self, entry: Entry) -> Reading:
        """How this type and version is read: as it is, or as the greatest version it leads to."""
        assert self.contracts is not None
        candidates = self.contracts[entry.event_type]
        for contract in candidates:
            if contract.__event_version__ in (None, entry.version):
                return _validator_of(contract), ()
        later = [contract for contract in candidates if _version_of(contract) > entry.version]
        if not later:
            known = ", ".join(str(contract.__event_version__) for contract in candidates)
            raise ContractMissing(
                f"{entry.event_type} at {entry.stream_name}/{entry.position} has version "
                f"{entry.version}; this consumer understands version {known}. Nothing is lost; "
                "deploy a handler for that version."
            )
        later.sort(key=_version_of)
        for contract in later[:0:-1]:
            with suppress(ContractMissing):
                return _validator_of(contract), _path_to(contract, entry)
        return _validator_of(later[0]), _path_to(later[0], entry)


def _path_to(contract: type[Event], entry: Entry) -> tuple[Step, ...]:
    return path(entry.event_type, entry.version, _version_of(contract))


def _version_of(contract: type[Event]) -> int:
    return contract.__event_version__ or 1


def _validator_of(contract: type[Event]) -> Callable[..., Any]:
    # What model_validate_json does, without its checks of the arguments for every event.
    return contract.__pydantic_validator__.validate_json


def read_signature(
    function: Callable[..., Any], consumer: str, resources: Sequence[Resource] = ()
) -> HandlerPlan:
    """The plan for a handler. Raises RegistrationError with a sentence that says what to write."""
    refuse = partial(_refusal, consumer)
    wanted, places = read_parameters(function, resources, refuse, EXAMPLE)
    is_async = inspect.iscoroutinefunction(function)
    plan: list[View | None] = []
    event_name: str | None = None
    event_annotation: Any = None
    for name, annotation in wanted.items():
        view = _view(annotation, is_async, name, consumer)
        if view is None and event_name is not None:
            # Whichever stands first, the event is not the one to complain about.
            other = name if _is_event(event_annotation) else event_name
            raise refuse(
                f"{other!r} is neither an event nor something known; a resource is known below its "
                "@pipeline.resource, and to deliver() by its resources={…}",
                EXAMPLE,
            )
        if view is None:
            event_name, event_annotation = name, annotation
        plan.append(view)
    if event_name is None:
        why = "no parameter takes the event" if wanted else "it takes no event"
        raise refuse(why, EXAMPLE)
    is_batch, wraps, contracts = _event_shape(event_annotation, consumer)
    return HandlerPlan(
        bound(function, places),
        is_async,
        is_batch,
        wraps,
        contracts,
        tuple(plan),
        tuple(places.values()),
    )


def is_known(annotation: Any) -> bool:
    """Whether a parameter with this annotation means something to consumers."""
    return _is_event(annotation) or _is_one_of(
        annotation, (Context, list, *_SYNC_VIEWS, *_ASYNC_VIEWS)
    )


def _is_event(annotation: Any) -> bool:
    return any(_is_one_of(member, (Event, StreamEvent)) for member in _members(annotation))


def _is_one_of(annotation: Any, known: tuple[type, ...]) -> bool:
    plain = typing.get_origin(annotation) or annotation
    return isinstance(plain, type) and issubclass(plain, known)


def _view(annotation: Any, is_async: bool, name: str, consumer: str) -> View | None:
    plain = typing.get_origin(annotation) or annotation
    if not isinstance(plain, type):
        return None
    if issubclass(plain, Context):
        return View.CONTEXT
    wanted, other = (_ASYNC_VIEWS, _SYNC_VIEWS) if is_async else (_SYNC_VIEWS, _ASYNC_VIEWS)
    for lent, view in wanted.items():
        if issubclass(plain, lent):
            return view
    for lent, view in other.items():
        if issubclass(plain, lent):
            fitting = next(t.__name__ for t, v in wanted.items() if v is view)
            kind = "an async def" if is_async else "a plain"
            raise _refusal(
                consumer,
                f"{name!r} is a {plain.__name__}, which does not fit {kind} handler",
                f"{name}: {fitting}",
            )
    return None


def _event_shape(
    annotation: Any, consumer: str
) -> tuple[bool, bool, dict[str, tuple[type[Event], ...]] | None]:
    """(is a list, is wrapped in StreamEvent, contracts)."""
    is_batch = typing.get_origin(annotation) is list
    if is_batch:
        (annotation,) = typing.get_args(annotation)
    if annotation is StreamEvent:
        return is_batch, True, None
    wraps = typing.get_origin(annotation) is StreamEvent
    if wraps:
        (annotation,) = typing.get_args(annotation)
        if annotation is Any:
            return is_batch, True, None
    contracts: dict[str, tuple[type[Event], ...]] = {}
    for member in _members(annotation):
        if not (isinstance(member, type) and issubclass(member, Event)) or member is Event:
            shown = getattr(member, "__name__", str(member))
            raise _refusal(
                consumer,
                f"{shown} is neither an Event class nor StreamEvent",
                "event: OrderPlaced, event: OrderPlaced | OrderCancelled, event: StreamEvent, "
                "or events: list[…] of any of them",
            )
        contracts[member.__event_type__] = (*contracts.get(member.__event_type__, ()), member)
    return is_batch, wraps, contracts


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _refusal(consumer: str, why: str, write: str) -> RegistrationError:
    return RegistrationError(f"Consumer {consumer!r} cannot be registered: {why}. Write {write}.")
