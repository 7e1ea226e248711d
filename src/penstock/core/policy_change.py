"""What an operator asks of a policy, and what becomes of it; carried out elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.outgoing import is_stream_name
from penstock.core.policy import (
    ENCRYPTION_ALG,
    ROTATION_DAYS,
    Member,
    MemberKind,
    SecurityLevel,
    StreamPolicy,
)
from penstock.core.require import require
from penstock.errors import OperationRefused, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """What is asked for; what is None stays as it is."""

    stream_name: str
    security_level: SecurityLevel
    producers: tuple[Member, ...] | None = None
    consumers: tuple[Member, ...] | None = None
    is_for_anyone: bool = False
    """Names nobody any more: confidential, and otherwise open."""
    kms_key_id: str | None = None
    dek_rotation_days: int | None = None
    is_forced: bool = False


def parse_member(kind: MemberKind, text: str) -> Member:
    """`NAME` or `NAME=ROLE`, as it is written on the command line. Raises UsageError."""
    name, equals, role_name = text.partition("=")
    form = "PIPELINE=ROLE" if kind is MemberKind.PRODUCER else "PIPELINE.CONSUMER=ROLE"
    require(
        bool(name) and bool(role_name) == bool(equals) and "@" not in name,
        f"--{kind} {text!r} names nobody. Write {form}, or leave =ROLE out.",
        UsageError,
    )
    require(
        (kind is MemberKind.PRODUCER) or "." in name,
        f"--{kind} {text!r} is no full name. Write {form}: the pipeline's name, a dot, and the "
        "consumer's.",
        UsageError,
    )
    return Member(kind, name, role_name or None)


def changed(present: StreamPolicy, change: PolicyChange) -> StreamPolicy:
    """The policy after a change. Raises UsageError or OperationRefused, saying what to write."""
    _require_sense(change)
    _require_going_back_is_meant(present, change)
    producers, consumers = _members(present, change)
    policy = replace(
        present,
        security_level=change.security_level,
        producers=producers,
        consumers=consumers,
    )
    if policy.is_confidential:
        policy = replace(
            policy,
            encryption_alg=ENCRYPTION_ALG,
            kms_key_id=_kms_key(present, change),
            dek_rotation_days=(
                change.dek_rotation_days or present.dek_rotation_days or ROTATION_DAYS
            ),
        )
    if policy.is_limited and not policy.producers:
        raise UsageError(
            f"Nobody could send to {policy.stream_name!r}. Nothing was changed; name who may, with "
            "--producer PIPELINE=ROLE, and who may read with --consumer PIPELINE.CONSUMER=ROLE."
        )
    return policy


def _members(
    present: StreamPolicy, change: PolicyChange
) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    if change.security_level is SecurityLevel.OPEN or change.is_for_anyone:
        return (), ()
    return (
        present.producers if change.producers is None else change.producers,
        present.consumers if change.consumers is None else change.consumers,
    )


def _kms_key(present: StreamPolicy, change: PolicyChange) -> str:
    chosen, known = change.kms_key_id, present.kms_key_id
    if present.active_key_version is not None and chosen not in (None, known):
        raise OperationRefused(
            f"The data keys of {present.stream_name} are wrapped with {known}. Nothing was "
            f"changed; wrap them anew with `penstock policy rewrap {present.stream_name} "
            f"--kms {chosen}`."
        )
    wrapping = chosen or known
    if wrapping is None:
        raise UsageError(
            "A confidential stream needs a key to wrap its data keys with. Nothing was changed; "
            "write --kms arn:aws:kms:… or --kms alias/…, or for development --kms file:/path."
        )
    return wrapping


def _require_sense(change: PolicyChange) -> None:
    require(
        is_stream_name(change.stream_name),
        f"{change.stream_name!r} cannot name a stream. Nothing was changed.",
        UsageError,
    )
    names_somebody = bool(change.producers or change.consumers)
    require(
        not names_somebody
        or (change.security_level is not SecurityLevel.OPEN and not change.is_for_anyone),
        "An open stream is for everybody; --producer and --consumer name somebody. Nothing was "
        "changed; write restricted or confidential, or leave the names out.",
        UsageError,
    )
    require(
        not change.is_for_anyone or change.security_level is SecurityLevel.CONFIDENTIAL,
        "--anyone is for confidential streams. Nothing was changed; a stream for everybody that "
        "is not encrypted is an open one.",
        UsageError,
    )
    is_about_keys = change.kms_key_id is not None or change.dek_rotation_days is not None
    require(
        not is_about_keys or change.security_level is SecurityLevel.CONFIDENTIAL,
        "--kms and --rotate-days are for confidential streams. Nothing was changed; write "
        "confidential, or leave them out.",
        UsageError,
    )
    require(
        change.dek_rotation_days is None or change.dek_rotation_days > 0,
        f"--rotate-days {change.dek_rotation_days} is no number of days. Write 1 or more.",
        UsageError,
    )


def _require_going_back_is_meant(present: StreamPolicy, change: PolicyChange) -> None:
    is_going_back = (
        present.is_confidential and change.security_level is not SecurityLevel.CONFIDENTIAL
    )
    if is_going_back and not change.is_forced:
        raise OperationRefused(
            f"{present.stream_name} is confidential. Nothing was changed; with --force new events "
            "are stored in plain text from now on. What is encrypted stays encrypted, and readers "
            "need its keys for as long as it is there."
        )
