"""`penstock policy rotate|rewrap|shred`: the data keys of confidential streams."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import print_error, print_note
from penstock.errors import OperationRefused, UsageError
from penstock.ops import policy_keys
from penstock.ops.policy_keys import Copy
from penstock.stores.identity import operator_id
from penstock.stores.policies import POLICY_SECONDS

EXIT_NO = 1
Stream = Annotated[str, typer.Argument(metavar="STREAM", help="A confidential stream.")]


def rotate(context: typer.Context, stream: Stream) -> None:
    """Seal new events with a new data key. What older keys have sealed stays readable."""
    invocation = invocation_of(context)
    with invocation.connect("policy") as connection:
        version, copies = policy_keys.rotate(
            connection, invocation.settings, stream, by=operator_id()
        )
    print(
        f"{stream} is sealed with version {version}; senders that run take it within "
        f"{POLICY_SECONDS:.0f} s."
    )
    _tell(copies)


def rewrap(
    context: typer.Context,
    stream: Stream,
    *,
    kms: Annotated[
        str | None, typer.Option(metavar="KEY", help="Another key; left out: the same one anew.")
    ] = None,
) -> None:
    """Have the KMS wrap all data keys anew. The data keys themselves stay, and so do events."""
    invocation = invocation_of(context)
    with invocation.connect("policy") as connection:
        done, copies = policy_keys.rewrap(
            connection, invocation.settings, stream, kms, by=operator_id()
        )
    print(f"{done} keys of {stream} were wrapped anew.")
    _tell(copies)


def shred(
    context: typer.Context,
    stream: Stream,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="See `policy show STREAM`.")],
    *,
    yes: Annotated[
        str | None, typer.Option(metavar="STREAM", help="Do not ask; repeat the stream's name.")
    ] = None,
) -> None:
    """Destroy a data key for ever: nobody can read again what it has sealed.

    Positions and books stay as they are; consumers pass its events by. Exit code 1: a copy of the
    wrapped key could not be removed; say it again.
    """
    _require_meant(stream, version, yes)
    invocation = invocation_of(context)
    with invocation.connect("policy") as connection:
        done = policy_keys.shred(connection, invocation.settings, stream, version, by=operator_id())
    print(
        f"Version {version} of {stream} {'is' if done.was_there else 'was already'} shredded: what "
        "it has sealed stays where it is, and nobody can read it again."
    )
    _tell(done.copies)
    print_note(
        "Still there, until they go by themselves: backups taken earlier, archived WAL, "
        "copies that others took of Redis or the archive, and for seconds the memory of processes "
        "that run. Whoever has one of these and rights on the KMS key can read the events; to rule "
        "that out, destroy the KMS key too, after `policy rewrap` of what is to live."
    )
    if not done.is_complete:
        print_error("A copy of the wrapped key may be left. Say it again when its place is back.")
        raise typer.Exit(EXIT_NO)


def _require_meant(stream: str, version: int, yes: str | None) -> None:
    what = (
        f"Shredding version {version} of {stream} cannot be undone: whatever it has sealed is lost "
        "to everybody."
    )
    if yes is None and not sys.stdin.isatty():
        raise UsageError(f"{what} Nothing was changed yet; if you mean it, add --yes={stream}.")
    if yes is None:
        print_note(what)
        yes = str(typer.prompt("Type the stream's name to go on", err=True))
    if yes != stream:
        raise OperationRefused(f"{yes!r} is not {stream!r}. Nothing was changed.")


def _tell(copies: Iterable[Copy]) -> None:
    for copy in copies:
        if copy.problem is None:
            print(f"Up to date: {copy.place}.")
        else:
            print_error(f"Not up to date: {copy.place}. {copy.problem}")
