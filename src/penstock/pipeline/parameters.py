"""A handler's parameters: each plain and annotated, and those that resources fill set aside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from penstock.core.annotations import annotations_of
from penstock.core.handlers import why_no_handler
from penstock.errors import RegistrationError
from penstock.pipeline.resources import Resource, find

Refuse = Callable[[str, str], RegistrationError]
"""Makes the error out of what is wrong and what to write instead."""


def read_parameters(
    function: Callable[..., Any], resources: Sequence[Resource], refuse: Refuse, example: str
) -> tuple[dict[str, Any], dict[int, Resource]]:
    """The annotations by parameter, in order; and resources by their place among all parameters."""
    if (why := why_no_handler(function)) is not None:
        raise refuse(why, example)
    annotations = _annotations(function, refuse, example)
    wanted: dict[str, Any] = {}
    places: dict[int, Resource] = {}
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise refuse(f"{parameter} is not a plain parameter", example)
        if parameter.name not in annotations:
            raise refuse(f"{parameter.name!r} has no annotation", example)
        annotation = annotations[parameter.name]
        resource = find(resources, annotation)
        if resource is None:
            wanted[parameter.name] = annotation
            continue
        if resource.is_async and not inspect.iscoroutinefunction(function):
            why = f"is made by the async generator {resource.name!r}, which takes an event loop"
            raise refuse(f"{parameter.name!r} {why}", f"async {example}")
        places[place] = resource
    return wanted, places


def _annotations(function: Callable[..., Any], refuse: Refuse, example: str) -> dict[str, Any]:
    try:
        return annotations_of(function)
    except NameError as error:
        raise refuse(
            f"its annotations name {error.name!r}, which is not defined at module level",
            "the class outside the function that registers the handler",
        ) from None
    except TypeError:
        raise refuse(f"{function!r} is not a function", example) from None
