"""`penstock archive`: see what is archived, prove that it is whole, read from it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.looking import steps_shown
from penstock.cli.output import (
    confirm,
    console,
    print_error,
    print_json,
    table,
)
from penstock.errors import ServerUnavailable, UsageError
from penstock.ops.archive import (
    ArchiveProof,
    StreamArchiveState,
    forget_archiver,
    read_archives,
    read_lines,
    verify_archive,
)
from penstock.runtime.posts import EXIT_SURROUNDINGS
from penstock.stores.postgres import NO_ANSWER, trouble_in_words

EXIT_NO = 1
_PLACE = re.compile(r"(?P<stream>.+)/(?P<position>\d+)")

Stream = Annotated[
    str | None, typer.Option("--stream", metavar="STREAM", help="Only this stream; else all.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

application = typer.Typer(no_args_is_help=True, help="See, prove and read what is archived.")


@application.command("list")
def list_objects(context: typer.Context, stream: Stream = None, json_output: Json = False) -> None:
    """Show every archived object, and how far the archiver of each stream is."""
    invocation = invocation_of(context)
    with invocation.connect("archive") as connection:
        found = read_archives(connection, invocation.settings, stream)
    if json_output:
        print_json([_as_json(archive) for archive in found])
        return
    headings = ("Stream", ">Archived to", ">Waiting", ">Objects", ">Events", ">Bytes")
    console.print(table("Archive", headings, [_summary(archive) for archive in found]))
    headings = ("Object", ">First", ">Last", ">Events", ">Bytes", ">Raw bytes")
    rows = [
        (each.name, each.first, each.last, each.events, each.stored_bytes, each.raw_bytes)
        for archive in found
        for each in archive.objects
    ]
    console.print(table("Objects", headings, rows))


@application.command("verify")
def verify(context: typer.Context, stream: Stream = None, json_output: Json = False) -> None:
    """Read every object: contiguous, right checksums, as the books say. Exit 1: it is not.

    It only reads, and the archiver goes on meanwhile.
    """
    invocation = invocation_of(context)
    settings = invocation.settings
    try:
        with invocation.connect("archive") as connection, steps_shown() as show:
            archives = read_archives(connection, settings, stream)
            if not archives and settings.archive_url is None:
                raise UsageError(
                    "There is no archive to prove: nothing is archived, and archive_url is not set."
                )
            proofs = [verify_archive(connection, settings, each, show) for each in archives]
    except (ServerUnavailable, *NO_ANSWER) as error:
        # Not the answer no: there is none, and a probe must be able to tell.
        print_error(
            f"{trouble_in_words(error) or error} The archive is neither proved nor refuted."
        )
        raise typer.Exit(EXIT_SURROUNDINGS) from None
    if json_output:
        print_json([asdict(proof) for proof in proofs])
    else:
        _tell(proofs)
    if any(proof.findings for proof in proofs):
        raise typer.Exit(EXIT_NO)


@application.command("get")
def get(
    context: typer.Context,
    place: Annotated[
        str, typer.Argument(metavar="STREAM/POSITION | STREAM", help="An event, or a stream …")
    ],
    first: Annotated[int | None, typer.Argument(help="… and the first position …")] = None,
    last: Annotated[int | None, typer.Argument(help="… and the last one.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON array instead of a line each.")
    ] = False,
) -> None:
    """Print archived events as they are stored: one JSON object a line."""
    stream, first, last = _range(place, first, last)
    invocation = invocation_of(context)
    with invocation.connect("archive") as connection:
        lines = read_lines(connection, invocation.settings, stream, first, last)
        if json_output:
            print_json([json.loads(line) for line in lines])
            return
        for line in lines:
            print(line)


@application.command("forget")
def forget(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="A stream of this database.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Stop keeping events for an archiver that does not run any more."""
    confirm(
        f"Events of {stream} that are not archived will be pruned without it, when they are old "
        "enough. Archiving it again later leaves these out.",
        yes=yes,
    )
    invocation = invocation_of(context)
    with invocation.connect("archive") as connection:
        checkpoint = forget_archiver(connection, invocation.settings, stream)
    print(f"{stream} is archived up to {checkpoint:,}; pruning waits for no more.")


def _range(place: str, first: int | None, last: int | None) -> tuple[str, int, int]:
    if first is None:
        found = _PLACE.fullmatch(place)
        if found is None:
            raise UsageError("Write STREAM/POSITION, or STREAM FIRST LAST.")
        return found["stream"], int(found["position"]), int(found["position"])
    last = first if last is None else last
    if not 1 <= first <= last:
        raise UsageError("Positions begin at 1, and the first is not behind the last.")
    return place, first, last


def _tell(proofs: list[ArchiveProof]) -> None:
    if not proofs:
        print("Nothing is archived yet.")
    for proof in proofs:
        for finding in proof.findings:
            print(finding)
        if not proof.findings:
            extent = "nothing yet" if proof.first is None else f"{proof.first:,}..{proof.last:,}"
            print(
                f"{proof.stream_name}: {extent}, {proof.events:,} events in {proof.objects:,} "
                "objects: contiguous, checksums right, no overlap."
            )


def _summary(archive: StreamArchiveState) -> tuple[object, ...]:
    return (
        *(archive.stream_name, archive.checkpoint, archive.waiting, len(archive.objects)),
        sum(each.events for each in archive.objects),
        sum(each.stored_bytes for each in archive.objects),
    )


def _as_json(archive: StreamArchiveState) -> dict[str, object]:
    return {
        "stream": archive.stream_name,
        "checkpoint": archive.checkpoint,
        "head": archive.head,
        "waiting": archive.waiting,
        "objects": [asdict(each) | {"name": each.name} for each in archive.objects],
    }
