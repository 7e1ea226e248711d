"""`penstock dead-letters` (or `dlq`): see what was given up, and why; give it up for good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock.cli.invocation import invocation_of
from penstock.cli.letter_options import (
    BURIAL_HELP,
    EXIT_INTERRUPTED,
    By,
    Consumer,
    Json,
    References,
    Reveal,
    Why,
    Yes,
    interruptible,
    with_criteria,
)
from penstock.cli.letter_output import group_row, letter_row, print_letter, shown_payload
from penstock.cli.output import (
    LIST_LIMIT_MAX,
    confirm,
    console,
    error_console,
    print_json,
    print_note,
    table,
)
from penstock.errors import OperationRefused, UsageError
from penstock.ops.consumers import Consumers
from penstock.ops.dead_letters import (
    Chosen,
    Discarded,
    Request,
    choose,
    consumers_of,
    discard,
    find,
)
from penstock.ops.revealing import masked_letter, revealed_letter
from penstock.stores.dead_letters import Criteria, DeadLetters, FullLetter, Group, TouchedBy
from penstock.stores.identity import operator_id

LIST_LIMIT = 50

application = typer.Typer(
    no_args_is_help=True, help="Events that were given up: list, show, redrive, discard."
)


# ── list ───────────────────────────────────────────────────────────────────────────────────────


def list_letters(
    context: typer.Context,
    *,
    request: Request,
    limit: Annotated[
        int, typer.Option(min=1, max=LIST_LIMIT_MAX, help="Show so many, the newest.")
    ] = LIST_LIMIT,
    groups: Annotated[
        bool, typer.Option("--groups", help="Put together what died of the same.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Show dead letters, the newest last."""
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("dead-letters") as connection:
        criteria = choose(connection, request, schema).criteria
        letters = DeadLetters(connection, schema)
        show_them = _list_groups if groups else _list_letters
        show_them(letters, criteria, limit, json_output=json_output)


# Nobody gives reasons for a list, so that the word is free here for what it shows.
BurialReason = Annotated[
    str | None,
    typer.Option("--reason", "--burial-reason", metavar="REASON", help=BURIAL_HELP),
]
application.command("list")(with_criteria(list_letters, reason=BurialReason))


def _list_letters(
    letters: DeadLetters, criteria: Criteria, limit: int, *, json_output: bool
) -> None:
    total, found = letters.list(criteria, limit)
    if json_output:
        shown = [letter.as_json() for letter in found]
        print_json({"total": total, "dead_letters": shown})
        return
    headings = (">Id", "Consumer", "Place", "Type", "Key", "Reason", "Error", ">Attempts")
    more = ("State", "Buried", "Group")
    console.print(table("Dead letters", headings + more, map(letter_row, found)))
    _tell_of_more(total, len(found), "letters")


def _list_groups(
    letters: DeadLetters, criteria: Criteria, limit: int, *, json_output: bool
) -> None:
    total, found = letters.groups(criteria, limit)
    if json_output:
        print_json({"total": total, "groups": [group.as_json() for group in found]})
        return
    headings = ("Consumer", "Error", "Group", ">Letters", "First", "Last", "Example", "Ids")
    console.print(table("Dead letters by what they died of", headings, map(group_row, found)))
    _tell_of_more(total, len(found), "groups")


def _tell_of_more(total: int, shown: int, what: str) -> None:
    if total > shown:
        print_note(f"{total - shown:,} older {what} are not shown; raise --limit to see them.")


# ── show ───────────────────────────────────────────────────────────────────────────────────────


@application.command("show")
def show(
    context: typer.Context,
    reference: Annotated[
        str, typer.Argument(metavar="ID|UUID|STREAM/POSITION", help="The letter or its event.")
    ],
    *,
    consumer: Consumer = None,
    reveal: Reveal = False,
    json_output: Json = False,
) -> None:
    """Show everything about one dead letter: error, attempts, event, who touched it."""
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("dead-letters") as connection:
        name = None if consumer is None else Consumers(connection, schema).find(consumer)
        letters = DeadLetters(connection, schema)
        letter = _the_one(letters, reference, name)
        operations = letters.operations(letter.letter.consumer, letter.letter.event_uuid)
        if reveal:
            stream_name = letter.letter.stream_name
            keys = invocation.pipeline.stream_keys(stream_name, lambda: connection)
            letter = revealed_letter(letter, keys)
    letter = masked_letter(letter)
    if json_output:
        print_json(_full_json(letter, list(operations)))
    else:
        print_letter(letter, operations)


def _the_one(letters: DeadLetters, reference: str, consumer: str | None) -> FullLetter:
    places = [
        place
        for place in find(letters, [reference])[reference]
        if consumer in (None, place.consumer)
    ]
    if len(places) > 1:
        listed = ", ".join(f"{place.id} ({place.consumer})" for place in places)
        raise OperationRefused(
            f"{reference} is a dead letter of several consumers: {listed}. Write one of these "
            "numbers, or add --consumer."
        )
    found = letters.read([place.id for place in places])
    if not found:
        raise _absent(reference)
    return found[0]


def _absent(reference: str) -> OperationRefused:
    return OperationRefused(
        f"There is no dead letter {reference}. It was handled or discarded since, or never there."
    )


def _full_json(full: FullLetter, operations: list[TouchedBy]) -> dict[str, Any]:
    return {
        **full.letter.as_json(),
        "traceback": full.traceback,
        "handler": full.handler,
        "host": full.host,
        "attempts": [asdict(attempt) for attempt in full.attempts],
        **shown_payload(full.entry),
        "operations": [asdict(operation) for operation in operations],
    }


# ── discard ────────────────────────────────────────────────────────────────────────────────────


def discard_letters(
    context: typer.Context,
    references: References = None,
    *,
    request: Request,
    discard_all: Annotated[bool, typer.Option("--all", help="Every letter there is.")] = False,
    by: By = None,
    why: Why = "",
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Give letters up for good; what waited behind a held one goes on. Needs --reason."""
    request = replace(request, references=tuple(references or ()))
    if not why.strip():
        raise UsageError("A discard needs --reason: somebody will ask. Nothing was changed.")
    require_criterion(request, everything=discard_all)
    who = by or operator_id()
    done = _discard(context, request, by=who, reason=why, yes=yes)
    if json_output:
        print_json(done.as_json() if done else {"discarded": 0})
    elif done:
        print(f"{done.discarded:,} dead letters are discarded (operation {done.operation_id}).")
    if done and done.ended_as == "interrupted":
        print_note("Interrupted; run the same command again for the rest.")
        raise typer.Exit(EXIT_INTERRUPTED)


application.command("discard")(with_criteria(discard_letters))


def _discard(
    context: typer.Context, request: Request, *, by: str, reason: str, yes: bool
) -> Discarded | None:
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("dead-letters") as connection:
        chosen = choose(connection, request, schema)
        _, groups = DeadLetters(connection, schema).groups(chosen.criteria)
        if not tell_of_choice(chosen, groups, "discard"):
            return None
        total = sum(group.count for group in groups)
        confirm(f"{described(groups)} are given up for good; nobody handles them.", yes=yes)
        columns = (TextColumn("letters discarded"), BarColumn(), MofNCompleteColumn())
        with (
            interruptible() as is_interrupted,
            Progress(*columns, console=error_console, transient=True) as bar,
        ):
            task = bar.add_task("discarding", total=total)
            return discard(
                connection,
                chosen.criteria,
                by=by,
                reason=reason,
                schema=schema,
                is_interrupted=is_interrupted,
                on_progress=lambda discarded: bar.update(task, completed=discarded),
            )


# ── what redriving uses too ────────────────────────────────────────────────────────────────────


def require_criterion(request: Request, *, everything: bool) -> None:
    """Refuse a command that would touch every letter without having said so."""
    if request.is_empty and not everything:
        raise UsageError(
            "Say which letters: by number, by a criterion like --consumer or --group, or --all. "
            "Nothing was changed."
        )


def tell_of_choice(chosen: Chosen, groups: Sequence[Group], verb: str) -> bool:
    """Say what is not there; returns whether anything is. Raises where nothing named is."""
    if chosen.missing and not groups:
        raise _absent(", ".join(chosen.missing))
    for reference in chosen.missing:
        print_note(str(_absent(reference)))
    if not groups:
        print_note(f"There is nothing to {verb}.")
    return bool(groups)


def described(groups: Sequence[Group]) -> str:
    """How many letters, and whose."""
    total = sum(group.count for group in groups)
    return f"{total:,} dead letters of {', '.join(consumers_of(groups))}"
