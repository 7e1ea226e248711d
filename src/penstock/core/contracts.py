"""Event classes by type and version, and the upcasters that lead from old versions to new ones.

What is known here is known to the whole process, because that is how classes are: whoever imports
the module of an event class has its contract and its upcasters.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from penstock.core.annotations import annotations_of
from penstock.core.failures import describe, misfits
from penstock.core.require import require
from penstock.errors import ContractError, ContractMissing, RegistrationError

if TYPE_CHECKING:
    from penstock.core.events import Event

Upcaster: TypeAlias = Callable[[Any], Any]
UpcasterT = TypeVar("UpcasterT", bound=Upcaster)

_classes: dict[tuple[str, int], type[Event]] = {}
_steps: dict[tuple[str, int], Step] = {}


@dataclass(frozen=True, slots=True)
class Promise:
    """Events of a class go to a stream, says a producer: whoever reads it can rely on that."""

    stream_name: str
    event_class: type[Event]
    producer: str


@dataclass(frozen=True, slots=True)
class Step:
    """One upcaster: a payload of one version becomes a payload of a later one."""

    event_type: str
    from_version: int
    to_version: int
    function: Upcaster
    takes: type[BaseModel] | None
    """The model that the function wants to be given; None: the payload as a dictionary."""
    event_class: type[Event]
    """The class that the function was written for."""

    def apply(self, payload: Any) -> Any:
        """The payload one step further. Raises ContractError where the function fails."""
        try:
            given = payload if self.takes is None else _read_as(self.takes, payload)
            result = self.function(given)
            if isinstance(result, BaseModel):
                return result.model_dump(mode="json", by_alias=True)
        except ValidationError as error:
            raise self.failure(f"{error.title}: {misfits(error)}") from None
        except Exception as error:
            raise self.failure(describe(error)) from error
        if not isinstance(result, Mapping):
            raise self.failure(f"it returned a {type(result).__name__} and no payload")
        return result

    def failure(self, why: str) -> ContractError:
        """What to tell of a step that cannot be taken."""
        return ContractError(
            f"The upcaster of {self.event_type} from version {self.from_version} to "
            f"{self.to_version} failed: {why}"
        )


# ── classes ────────────────────────────────────────────────────────────────────────────────────


def register(event_class: type[Event]) -> None:
    """Remember a class that has a version. Raises RegistrationError where another one has it."""
    version = event_class.__event_version__
    if version is None:
        return
    identity = (event_class.__event_type__, version)
    known = _classes.setdefault(identity, event_class)
    require(
        _place_of(known) == _place_of(event_class) or _is_gone(known),
        f"{_name_of(event_class)} and {_name_of(known)} are both version {version} of "
        f"{event_class.__event_type__!r}. A type and version is one contract: import the class "
        "instead of writing it again, or raise the version of one.",
        RegistrationError,
    )
    # A module that is imported again, or under two names, writes its classes once more.
    _classes[identity] = event_class


def known_classes() -> list[type[Event]]:
    """Every event class of this process that has a version, by type and version."""
    return [_classes[identity] for identity in sorted(_classes)]


def known_types() -> frozenset[str]:
    """The types of all those classes."""
    return frozenset(event_type for event_type, _ in _classes)


def _place_of(event_class: type) -> tuple[str, str]:
    module = sys.modules.get(event_class.__module__)
    file = getattr(module, "__file__", None) or event_class.__module__
    return file, event_class.__qualname__


def _is_gone(event_class: type) -> bool:
    """Whether its module was thrown away, or replaced by another of that name."""
    if "<locals>" in event_class.__qualname__:
        return False
    found: Any = sys.modules.get(event_class.__module__)
    for name in event_class.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not event_class


def _name_of(event_class: type) -> str:
    return f"{event_class.__module__}.{event_class.__qualname__}"


# ── upcasters ──────────────────────────────────────────────────────────────────────────────────


def add_upcaster(
    event_class: type[Event], function: Upcaster, from_version: int, to_version: int | None
) -> None:
    """Remember a step of this class's type. Raises RegistrationError with what to change."""
    event_type, current = event_class.__event_type__, event_class.__event_version__
    last = from_version + 1 if to_version is None else to_version
    what = f"The upcaster of {event_type} from version {from_version} to {last}"
    require(
        current is not None,
        f"{what} needs an event class with a version. Write class {event_class.__name__}"
        f'(Event, type="{event_type}", version={last}).',
        RegistrationError,
    )
    require(
        0 < from_version < last <= (current or 0),
        f"{what} leads nowhere: {event_class.__name__} has version {current}, and a step goes "
        "from a smaller version to a greater one, not beyond the class's own.",
        RegistrationError,
    )
    require(
        not inspect.iscoroutinefunction(function),
        f"{what} is an async function, which nobody would await. Write it with a plain def: it is "
        "given everything that it may use.",
        RegistrationError,
    )
    known = _steps.get((event_type, from_version))
    require(
        known is None or _is_again(known, event_class, function),
        f"{what} is written twice. From each version there is one step; keep one of the two.",
        RegistrationError,
    )
    _steps[event_type, from_version] = Step(
        event_type, from_version, last, function, _model_taken_by(function), event_class
    )


def path(event_type: str, from_version: int, to_version: int) -> tuple[Step, ...]:
    """The steps between two versions. Raises ContractMissing with the one that is missing."""
    steps: list[Step] = []
    reached = from_version
    while reached < to_version:
        step = _steps.get((event_type, reached))
        if step is None or step.to_version > to_version:
            raise ContractMissing(
                f"{event_type} of version {from_version} cannot be read as version {to_version}: "
                f"there is no upcaster from version {reached} to {reached + 1}. Write one with "
                f"@….upcast(from_version={reached})."
            )
        steps.append(step)
        reached = step.to_version
    if reached > to_version:
        raise ContractMissing(
            f"{event_type} of version {from_version} cannot be read as version {to_version}: "
            "upcasters lead to later versions only."
        )
    return tuple(steps)


def upcast(payload: bytes, steps: tuple[Step, ...]) -> bytes:
    """The JSON of a payload after these steps. Raises ContractError where one of them fails."""
    try:
        plain = from_json(payload)
    except ValueError as error:
        raise steps[0].failure(describe(error)) from None
    for step in steps:
        plain = step.apply(plain)
    try:
        return to_json(plain)
    except ValueError as error:
        raise steps[-1].failure(describe(error)) from None


def readable_versions(event_class: type[Event]) -> list[int]:
    """The older versions that have a path to this class's own."""
    current = event_class.__event_version__
    readable = []
    for version in range(1, current or 1):
        try:
            path(event_class.__event_type__, version, current or 1)
        except ContractMissing:
            continue
        readable.append(version)
    return readable


def _model_taken_by(function: Upcaster) -> type[BaseModel] | None:
    try:
        hints = annotations_of(function)
    except NameError as error:
        raise RegistrationError(
            f"The upcaster {function.__qualname__} names {error.name!r}, which is not defined at "
            "module level. Define the class before it, or take a dict."
        ) from None
    parameters = list(inspect.signature(function).parameters)
    wanted = hints.get(parameters[0]) if parameters else None
    is_model = isinstance(wanted, type) and issubclass(wanted, BaseModel)
    return wanted if is_model else None


def _read_as(model: type[BaseModel], payload: Any) -> BaseModel:
    return model.model_validate_json(to_json(payload), extra="allow")


def _is_again(known: Step, event_class: type[Event], function: Upcaster) -> bool:
    """Whether a known step comes from the same lines, in a module that is imported again."""
    # A class that was made anew comes with its upcasters, which may have moved in their file.
    is_new_class = known.event_class is not event_class
    return _place_of_function(known.function) == _place_of_function(function) and (
        is_new_class or _line_of(known.function) == _line_of(function)
    )


def _line_of(function: Upcaster) -> int:
    code = getattr(function, "__code__", None)
    return getattr(code, "co_firstlineno", 0)


def _place_of_function(function: Upcaster) -> tuple[str, str]:
    code = getattr(function, "__code__", None)
    return (
        getattr(code, "co_filename", "") or getattr(function, "__module__", ""),
        getattr(function, "__qualname__", repr(function)),
    )
