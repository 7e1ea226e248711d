"""Finds a command when it is called: whoever asks for one need not load all the others."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

HIDDEN: Final = frozenset({"dlq", "work"})
COMMANDS: Final[dict[str, str]] = {
    "demo": "demonstration:demo",
    "bench": "benching:bench",
    "dev": "developing:dev",
    "run": "running:run",
    "work": "running:work",
    "migrate": "migrating:migrate",
    "send": "sending:send",
    "status": "status:status",
    "top": "top:top",
    "verify": "verify:verify",
    "doctor": "doctor:doctor",
    "journey": "journey:journey",
    "archive": "archive:application",
    "consumers": "consumers:application",
    "dead-letters": "redriving:application",
    "dlq": "redriving:application",
    "parked": "parked:application",
    "policy": "policy:application",
    "quarantine": "quarantine:application",
    "replay": "replay:application",
    "schema": "schema:application",
    "streams": "streams:application",
    "timers": "timers:application",
    "config": "settings:config",
}
"""Each with its module and what it is called there: a function, or a group of commands."""


class Commands(TyperGroup):
    """All commands, in the order of COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as the base class calls it
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command of this name; None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(f"penstock.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            # Unlike get_command, it adds no options that would complete a program of this name.
            command: Any = get_group(found)
        else:
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(cmd_name)(found)
            command = get_command(alone)
        command.name, command.hidden = cmd_name, cmd_name in HIDDEN
        return command
