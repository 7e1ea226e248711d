"""What every command knows: which application it is for, and that application's settings."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psycopg
import typer

from penstock.core.settings import Settings
from penstock.errors import ServerUnavailable, UsageError
from penstock.stores.configuration import DEV_ENV, ResolvedSettings, resolve
from penstock.stores.migrations import require_current
from penstock.stores.postgres import connect

if TYPE_CHECKING:
    from penstock.app import Pipeline

ADVICE = "Write --app module:attribute (or PENSTOCK_APP), for example --app shop:pipeline."


class Invocation:
    """One run of the command line."""

    def __init__(self, app: str | None) -> None:
        self.app = app

    @cached_property
    def pipeline(self) -> Pipeline:
        """The application's pipeline or, without an application, one that has only settings."""
        if self.app is not None:
            return load_pipeline(self.app)
        from penstock.app import Pipeline  # noqa: PLC0415 - most of what there is to import

        return Pipeline("cli")

    @cached_property
    def resolved(self) -> ResolvedSettings:
        """The application's settings or, without one, those of this folder."""
        return resolve({}) if self.app is None else self.pipeline.resolved

    @property
    def settings(self) -> Settings:
        """The settings without their origins."""
        return self.resolved.settings

    def connect(self, command: str) -> psycopg.Connection[Any]:
        """A connection to a database whose schema this release can use."""
        try:
            connection = connect(self.settings.database_url, f"penstock {command}")
        except ServerUnavailable as error:
            if self.resolved.origins["database_url"] != str(DEV_ENV):
                raise
            raise ServerUnavailable(
                f"{error} The address is that of a `penstock dev`, from {DEV_ENV}, which was "
                "perhaps killed: start it again in this folder."
            ) from error
        try:
            require_current(connection, self.settings.schema)
        except BaseException:
            connection.close()
            raise
        return connection


def invocation_of(context: typer.Context) -> Invocation:
    """What the options before the command said."""
    invocation = context.obj
    assert isinstance(invocation, Invocation)
    return invocation


def load_pipeline(name: str, *, folder: str | None = None, option: str = "--app") -> Pipeline:
    """Import `module:attribute` as Python would from this folder. Raises UsageError."""
    from penstock.app import Pipeline  # noqa: PLC0415 - most of what there is to import

    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{option} {name!r} names no pipeline. {ADVICE}")
    module = _import_module(module_name, folder or os.getcwd(), option)  # noqa: PTH109 - sys.path has text
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Pipeline):
        return found
    candidates = [key for key, value in vars(module).items() if isinstance(value, Pipeline)]
    advice = f"It has: {', '.join(f'{module_name}:{key}' for key in candidates)}."
    problem = (
        f"module {module_name!r} has no {attribute!r}"
        if found is None
        else f"it is a {type(found).__name__}, not a Pipeline"
    )
    raise UsageError(f"{option} {name}: {problem}. {advice if candidates else ADVICE}")


def _import_module(name: str, folder: str, option: str) -> Any:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise UsageError(
                f"{option} names the module {name!r}, which Python does not find from {folder}. "
                "Start in the folder that holds it, or install it."
            ) from None
        raise UsageError(
            f"{option} {name} imports {missing!r}, which is not installed in {sys.prefix}."
        ) from error
    except (ValueError, TypeError):
        # A relative or otherwise impossible name; anything that the module raises has a traceback.
        if name.startswith("."):
            raise UsageError(f"{option} {name!r} is no module name. {ADVICE}") from None
        raise
    except SystemExit as ended:
        if ended.code:
            # It says by itself that it failed, or a signal ends the command.
            raise
        # Exit 0 and not a word: a gate or a probe would take that for a yes.
        raise UsageError(
            f"{option} {name} ended the program while it was imported, by exit(). Nothing was "
            'done; put what it does as a program under `if __name__ == "__main__":`.'
        ) from None
