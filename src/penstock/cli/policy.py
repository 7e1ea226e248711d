"""`penstock policy`: who may use a stream, in PostgreSQL and in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli import policy_keys
from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.letter_output import moment
from penstock.cli.output import console, print_json, print_note, table
from penstock.core.policy import Member, MemberKind, SecurityLevel
from penstock.core.policy_change import PolicyChange, parse_member
from penstock.core.redis_acl import WORKER
from penstock.ops.policy import (
    Plaintext,
    PolicyDetails,
    PolicySet,
    described,
    purge_hot_log,
    read_details,
    set_policy,
)
from penstock.ops.policy_access import grants_for, read_passing, redis_users
from penstock.stores.identity import operator_id
from penstock.stores.policies import POLICY_SECONDS, Policies

application = typer.Typer(no_args_is_help=True, help="Restrict and encrypt streams.")
application.command("rotate")(policy_keys.rotate)
application.command("rewrap")(policy_keys.rewrap)
application.command("shred")(policy_keys.shred)

Worker = Annotated[str, typer.Option(metavar="ROLE", help="What workers connect with.")]


@application.command("set")
def set_(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM")],
    level: Annotated[SecurityLevel, typer.Argument(metavar="open|restricted|confidential")],
    *,
    producer: Annotated[
        list[str] | None,
        typer.Option(metavar="PIPELINE[=ROLE]", help="Who may send; again for each."),
    ] = None,
    consumer: Annotated[
        list[str] | None,
        typer.Option(metavar="PIPELINE.CONSUMER[=ROLE]", help="Who may read; again for each."),
    ] = None,
    anyone: Annotated[
        bool, typer.Option("--anyone", help="Confidential, for everybody with KMS rights.")
    ] = False,
    kms: Annotated[
        str | None, typer.Option(metavar="KEY", help="arn:aws:kms:…, alias/… or file:/path.")
    ] = None,
    rotate_days: Annotated[
        int | None, typer.Option(metavar="N", help="For how long a data key seals new events.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Store a confidential stream in plain text again.")
    ] = False,
    purge: Annotated[
        bool, typer.Option("--purge-hot-log", help="Remove what Redis holds of the stream.")
    ] = False,
) -> None:
    """Say who may use a stream, and whether it is encrypted. What is left out stays as it is."""
    change = PolicyChange(
        stream_name=stream,
        security_level=level,
        producers=_members(MemberKind.PRODUCER, producer),
        consumers=_members(MemberKind.CONSUMER, consumer),
        is_for_anyone=anyone,
        kms_key_id=kms,
        dek_rotation_days=rotate_days,
        is_forced=force,
    )
    invocation = invocation_of(context)
    with invocation.connect("policy") as connection:
        done = set_policy(connection, change, by=operator_id(), schema=invocation.settings.schema)
    _tell(done)
    if purge:
        removed = purge_hot_log(invocation.settings, stream)
        print(f"{removed} entries of {stream} were removed from Redis.")
    _warn(done, is_purged=purge)


def _members(kind: MemberKind, written: Sequence[str] | None) -> tuple[Member, ...] | None:
    # An option that was not written comes as None or, with some versions, as an empty list.
    return tuple(parse_member(kind, text) for text in written) if written else None


def _tell(done: PolicySet) -> None:
    print(f"{done.policy.stream_name} is {described(done.policy)}.")
    print(
        "PostgreSQL enforces it now; senders that run know of it within "
        f"{POLICY_SECONDS:.0f} s, and consumers at their next start."
    )


def _warn(done: PolicySet, *, is_purged: bool) -> None:
    for kind, name in done.strangers:
        print_note(f"Not named: the {kind} {name}, which has used the stream. It is refused now.")
    roleless = [member.name for member in done.policy.members if member.role_name is None]
    if roleless:
        print_note(
            f"Without a role: {', '.join(roleless)}. The library lets them in; PostgreSQL lets "
            "in the owner and workers alone. Write NAME=ROLE for any other role."
        )
    if done.plaintext is not None and done.plaintext.is_any:
        print_note(_told(done.plaintext, is_purged=is_purged))


def _told(left: Plaintext, *, is_purged: bool) -> str:
    purged = "" if is_purged else " --purge-hot-log removes what Redis holds of it."
    return (
        "From before, in plain text and readable as ever: "
        f"{left.outbox} events in the outbox, {left.timers} timers, {left.parked} parked events, "
        f"{left.dead_letters} dead letters, {left.archived} archived events, and in backups. "
        "The outbox is pruned behind its slowest reader; redrive or discard the dead letters; "
        f"delete the objects, if they must go, at the price of that history.{purged}"
    )


# ── showing ────────────────────────────────────────────────────────────────────────────────────


@application.command("show")
def show(
    context: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="[STREAM]")] = None,
    *,
    grants: Annotated[
        bool, typer.Option("--grants", help="Print what to grant to whom, instead.")
    ] = False,
    worker: Worker = WORKER,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the policies, or everything about one; with --grants, the statements behind them."""
    invocation = invocation_of(context)
    if grants:
        _show_grants(invocation, stream, worker, json_output=json_output)
    elif stream is None:
        _show_all(invocation, json_output=json_output)
    else:
        with invocation.connect("policy") as connection:
            details = read_details(connection, stream, invocation.settings.schema)
        if json_output:
            print_json(asdict(details))
        else:
            _show_details(details)


def _show_all(invocation: Invocation, *, json_output: bool) -> None:
    schema = invocation.settings.schema
    with invocation.connect("policy") as connection:
        policies = Policies(schema).read_all(connection)
        passing = read_passing(connection, schema)
    if json_output:
        print_json({"policies": [asdict(one) for one in policies], "passing": asdict(passing)})
        return
    rows = [
        (
            one.stream_name,
            one.security_level,
            ", ".join(member.name for member in one.producers) or "anybody",
            ", ".join(member.name for member in one.consumers) or "anybody",
            one.kms_key_id,
            one.active_key_version,
        )
        for one in policies
    ]
    headings = ("Stream", "Level", "Producers", "Consumers", "KMS key", ">Key version")
    console.print(table("Policies", headings, rows))
    print(f"Roles that get at every stream: {', '.join(passing.workers) or 'superusers alone'}.")
    if passing.administrators:
        print(f"Roles that may change policies: {', '.join(passing.administrators)}.")


def _show_details(details: PolicyDetails) -> None:
    policy = details.policy
    print(f"{policy.stream_name} is {described(policy)}.")
    members = [(one.kind, one.name, one.role_name) for one in policy.members]
    if members:
        console.print(table("Members", ("May", "Name", "Role"), members))
    if details.keys:
        keys = [
            (
                one.version,
                "hashes keys" if one.version == 0 else _use_of(details, one.version),
                one.key_id,
                one.kms_key_id,
                moment(one.created_at),
                None if one.shredded_at is None else moment(one.shredded_at),
            )
            for one in details.keys
        ]
        headings = (">Version", "Use", "Key id", "Wrapped by", "Made", "Shredded")
        console.print(table("Data keys", headings, keys))
    changes = [
        (moment(one.changed_at), one.changed_by, one.role_name, one.change)
        for one in details.changes
    ]
    console.print(table("Changes", ("When", "By", "Role", "What"), changes))
    if details.plaintext is not None and details.plaintext.is_any:
        print_note(_told(details.plaintext, is_purged=False))


def _use_of(details: PolicyDetails, version: int) -> str:
    is_active = details.policy.is_confidential and details.policy.active_key_version == version
    return "seals" if is_active else "opens"


def _show_grants(
    invocation: Invocation, stream: str | None, worker: str, *, json_output: bool
) -> None:
    schema = invocation.settings.schema
    with invocation.connect("policy") as connection:
        found = Policies(schema).read_all(connection)
        chosen = [one for one in found if stream in (None, one.stream_name)]
        roles = grants_for(connection, chosen, worker=worker, schema=schema)
    if json_output:
        print_json([asdict(role) for role in roles])
        return
    for role in roles:
        print(f"-- {role.role_name}, for {role.what_for}:")
        print("\n".join(role.statements))
    print_note("Nothing was executed. Roles with more rights than these may pass the policies.")


@application.command("acl")
def acl(
    context: typer.Context,
    stream: Annotated[str | None, typer.Argument(metavar="[STREAM]")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Of all streams.")] = False,
    worker: Worker = WORKER,
) -> None:
    """Print the users that Redis needs so that a policy holds there too. Executes nothing."""
    if (stream is None) != every:
        raise typer.BadParameter("Write a STREAM, or --all.")
    invocation = invocation_of(context)
    with invocation.connect("policy") as connection:
        users = redis_users(connection, invocation.settings, stream, worker=worker)
    for user in users:
        print(f"# {user.name}, for {user.what_for}; put a password behind the >:")
        print(user.line)
    print_note(
        "Give workers and readers these users in redis_url, then switch the default user off: "
        "ACL SETUSER default off. ACL SAVE, or the configuration file, keeps them over a restart. "
        "A reader of streams for everybody gets a user from `penstock streams share`."
    )
