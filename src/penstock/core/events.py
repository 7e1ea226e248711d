"""What applications send and handlers receive: typed, raw, and as read from a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Generic
from uuid import UUID

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import ComputedFieldInfo
from typing_extensions import TypeVar  # pydantic brings it

from penstock.core import contracts
from penstock.core.require import require
from penstock.errors import RegistrationError

# So that strict type checkers take StreamEvent alone, too.
Payload = TypeVar("Payload", default=Any)


class Event(BaseModel):
    """A typed event. Building one refuses unknown fields; reading one keeps them."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    __event_type__: ClassVar[str]
    __event_version__: ClassVar[int | None]
    __event_key__: ClassVar[str | None]
    __event_without_computed__: ClassVar[Any]

    def __init_subclass__(
        cls,
        *,
        type: str | None = None,  # noqa: A002 - the public spelling is `type="orders.placed"`
        version: int | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the class's keywords; pydantic hands them on once its fields are known."""
        super().__init_subclass__(**kwargs)
        if any(isinstance(_decoration(member), ComputedFieldInfo) for member in vars(cls).values()):
            # Only here: every event that is read would pay for a validator of this class.
            cls.__event_without_computed__ = model_validator(mode="after")(_without_computed)

    @classmethod
    def __pydantic_init_subclass__(
        cls,
        *,
        type: str | None = None,  # noqa: A002 - as above
        version: int | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.__event_type__ = type or cls.__name__
        cls.__event_version__ = version
        cls.__event_key__ = key
        require(
            version is None or _is_version(version),
            f"{cls.__name__}: version={version!r} must be a positive integer",
            RegistrationError,
        )
        require(
            key is None or key in cls.model_fields,
            f"{cls.__name__}: key={key!r} names no field; it has {', '.join(cls.model_fields)}",
            RegistrationError,
        )
        contracts.register(cls)

    @classmethod
    def upcast(
        cls, *, from_version: int, to_version: int | None = None
    ) -> Callable[[contracts.UpcasterT], contracts.UpcasterT]:
        """Register a function that turns a payload of an older version into the next one's.

        It is given the payload as a dictionary, or as the model that its parameter is annotated
        with, and returns a dictionary or a model. Steps are chained: an event of version 1 passes
        through `from_version=1` and `from_version=2` to be read as version 3. `to_version` is the
        next one unless it is given.
        """

        def register(function: contracts.UpcasterT) -> contracts.UpcasterT:
            contracts.add_upcaster(cls, function, from_version, to_version)
            return function

        return register


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _decoration(member: object) -> object:
    return getattr(member, "decorator_info", None)


def _without_computed(event: Event) -> Event:
    """The event without what its reader computes itself: it is written, and no unknown field."""
    unknown = event.__pydantic_extra__ or {}
    for name, info in type(event).model_computed_fields.items():
        unknown.pop(info.alias or name, None)
        event.__pydantic_fields_set__.discard(info.alias or name)
    return event


@dataclass(frozen=True, slots=True)
class RawEvent:
    """An untyped event: a type, a JSON payload and a version."""

    event_type: str
    payload: Any
    version: int = 1
    key: str | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent(Generic[Payload]):
    """One event as it stands in its stream."""

    stream_name: str
    position: int
    event_type: str
    version: int
    outbox_id: int
    event_uuid: UUID
    key: str | None
    payload: Payload
    metadata: dict[str, Any] = field(hash=False)
    created_at: datetime

    @property
    def redis_id(self) -> str:
        """The id of the entry in the hot log."""
        return f"{self.position}-0"
