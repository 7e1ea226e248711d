"""Finds the modules that register consumers, so that nobody has to list them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from penstock.errors import RegistrationError

PATTERN = "events_consumers"


def autodiscover(package: str, pattern: str = PATTERN) -> list[str]:
    """Import every module called `pattern` below a package; returns their names, sorted.

    Raises RegistrationError where the package is not found or a module cannot be imported.
    """
    try:
        root = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise _broken(package, error) from error
        raise RegistrationError(
            f"autodiscover({package!r}): there is no package {error.name!r}. Nothing was "
            "registered; check the name, and that Python starts where it can be imported."
        ) from None
    except Exception as error:
        raise _broken(package, error) from error
    if not hasattr(root, "__path__"):
        raise RegistrationError(
            f"autodiscover({package!r}): that is a module, not a package. Import it instead."
        )
    return [_imported(name).__name__ for name in sorted(_found(root, pattern))]


def _found(package: ModuleType, pattern: str) -> Iterator[str]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name.rpartition(".")[2] == pattern:
            yield module.name
        elif module.ispkg:
            # A package is imported on the way to its modules in any case.
            yield from _found(_imported(module.name), pattern)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> RegistrationError:
    return RegistrationError(
        f"autodiscover: importing {name} failed: {type(error).__name__}: {error}. Its consumers "
        "are not registered; the cause is above."
    )
