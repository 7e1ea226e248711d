"""`penstock streams`: see them, share them with other services, rotate the keys that sign them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import confirm, console, print_json, print_note, table
from penstock.ops.streams import SharedStream, StreamReader, read_streams, rotate_key
from penstock.ops.streams import share as prepare_share

application = typer.Typer(no_args_is_help=True, help="See and share streams, rotate their keys.")


@application.command("list")
def list_streams(
    context: typer.Context,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every stream and its consumers, of this service and of others."""
    invocation = invocation_of(context)
    with invocation.connect("streams") as connection:
        found = read_streams(connection, invocation.settings.schema)
    if json_output:
        print_json([asdict(stream) for stream in found])
        return
    headings = ("Stream", "Of", "Origin", ">Head", ">Published", ">Consumers")
    console.print(table("Streams", headings, [_stream_row(stream) for stream in found]))
    readers = [_reader_row(stream, reader) for stream in found for reader in stream.consumers]
    headings = ("Consumer", "Stream", "Of", ">Checkpoint", ">Lag, events", "Last report")
    console.print(table("Consumers", headings, readers))


def _stream_row(stream: SharedStream) -> tuple[object, ...]:
    owner = "another service" if stream.is_source else "this service"
    consumers = len(stream.consumers)
    return stream.name, owner, stream.origin, stream.head, stream.published, consumers


def _reader_row(stream: SharedStream, reader: StreamReader) -> tuple[object, ...]:
    owner = "another service" if reader.is_remote else "this service"
    seen = None if reader.seen_at is None else f"{reader.seen_at:%Y-%m-%d %H:%M:%S %Z}"
    return reader.name, stream.name, owner, reader.checkpoint, reader.lag_events, seen


@application.command("share")
def share(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="A stream of this database.")],
    *,
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="The role that the other service connects with.")
    ],
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Print the keys that sign entries.")
    ] = False,
) -> None:
    """Print what another service needs to read a stream. Executes nothing."""
    invocation = invocation_of(context)
    with invocation.connect("streams") as connection:
        shared = prepare_share(
            connection, invocation.settings, stream, role, show_secrets=show_secrets
        )
    print("-- In this database, for a role that exists:")
    print("\n".join(shared.grants))
    if shared.redis_acl is not None:
        print("\n# In Redis; put a password behind the >:")
        print(shared.redis_acl)
    print("\n# In the other service:")
    print(shared.call)
    print_note(
        "The role reads all streams of this database, and the keys that sign entries: whoever has "
        "these can forge entries where he may write into Redis, so give him a user that may not. "
        "With source_url, keys are found by themselves; mac_key lets the other service start while "
        "this database is away, and is all that it needs to live on the hot log alone."
    )


@application.command("rotate-key")
def rotate(
    context: typer.Context,
    *,
    retire_old: Annotated[
        bool, typer.Option("--retire-old", help="Accept no key but the new one.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Sign entries of the hot log with a new key."""
    if retire_old:
        confirm(
            "What older keys have signed is trusted no longer: until the hot log has dropped it, "
            "it is read from PostgreSQL, and other services without a source_url stop there.",
            yes=yes,
        )
    invocation = invocation_of(context)
    with invocation.connect("streams") as connection:
        key_id, retired = rotate_key(connection, invocation.settings, retire_old=retire_old)
    print(f"Publishers sign with the key {key_id} within a second.")
    if retired:
        print(f"Retired: {', '.join(retired)}. Entries that they signed are read from PostgreSQL.")
    else:
        print("Entries of older keys stay valid until these are retired (--retire-old).")
    print_note(
        "Consumers of this service, and those elsewhere with a source_url, find the new key by "
        "themselves. Give the others the new value: "
        "`penstock streams share STREAM --role ROLE --show-secrets` prints it."
    )
