"""What a function's parameters are annotated with."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """By parameter. Raises NameError for a name that neither module nor function knows."""
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return typing.get_type_hints(function, localns=dict(closure))
