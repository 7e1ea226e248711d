"""What a function's parameters are annotated with."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """By parameter. Raises NameError for a name that neither module nor function knows."""
    return typing.get_type_hints(function, localns=_names_around(function))


def _names_around(function: Callable[..., Any]) -> dict[str, Any]:
    """What the functions around it know so far; the rest may be defined further down."""
    if not inspect.isfunction(function):
        return {}
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found
