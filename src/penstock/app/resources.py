"""The part of a pipeline that registers what handlers share."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from functools import cached_property
from typing import Any, Final, TypeVar

from penstock.core.annotations import annotations_of
from penstock.errors import RegistrationError
from penstock.pipeline.resources import Resource, find
from penstock.pipeline.signature import is_known
from penstock.pipeline.timer_signature import is_known_to_timers

Maker = TypeVar("Maker", bound=Callable[[], Any])
_ITERATORS: Final = (Iterator, Generator, AsyncIterator, AsyncGenerator)
_EXAMPLE: Final = (
    "def http() -> Iterator[httpx.Client]: with a yield in it, between what opens and what closes"
)


class Resources:
    """Registers generators that make what handlers are given besides events and sessions."""

    @cached_property
    def _resources(self) -> list[Resource]:
        return []

    def resource(self, function: Maker) -> Maker:
        """Register a generator that makes something for handlers; it stays as it is.

        Handlers that are registered below it get what it yields, by the annotation of its return:
        one in each worker process, which all threads share. What follows the yield is done when
        the worker ends. While it fails, the handlers that ask for it wait. An async generator's
        lives on the event loop of `async def` handlers.
        """
        name = getattr(function, "__name__", str(function))
        resource = Resource(name, _annotation(function, name), function)
        known = find(self._resources, resource.annotation)
        if known is not None:
            raise _refusal(name, f"{known.name!r} makes the same, so handlers could not say which")
        self._resources.append(resource)
        return function


def _annotation(function: Any, name: str) -> Any:
    """What it yields, by the annotation of its return."""
    if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        raise _refusal(name, "it is not a function with a yield")
    if inspect.signature(function).parameters:
        raise _refusal(name, "it takes parameters, and nobody would give it any")
    try:
        returned = annotations_of(function).get("return")
    except NameError as error:
        raise _refusal(name, f"its annotation names {error.name!r}, which is unknown") from None
    if typing.get_origin(returned) not in _ITERATORS:
        raise _refusal(name, "the annotation of its return does not tell what it yields")
    annotation = typing.get_args(returned)[0]
    if annotation is Any or is_known(annotation) or is_known_to_timers(annotation):
        shown = getattr(annotation, "__name__", str(annotation))
        raise _refusal(name, f"a parameter with the annotation {shown} means something else")
    return annotation


def _refusal(name: str, why: str) -> RegistrationError:
    return RegistrationError(
        f"Resource {name!r} cannot be registered: {why}. Write {_EXAMPLE}; and in the handler, "
        "below it, client: httpx.Client."
    )
