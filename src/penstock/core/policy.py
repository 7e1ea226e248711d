"""Who may send to a stream and read it, and whether it is encrypted before it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import StreamRestricted

ENCRYPTION_ALG = "AES-256-GCM"
ROTATION_DAYS = 90
"""How long a data key is used for new events, unless the policy says otherwise."""


class SecurityLevel(StrEnum):
    """What a stream demands of those who use it."""

    OPEN = "open"
    RESTRICTED = "restricted"
    """Only those who are named may send and read."""
    CONFIDENTIAL = "confidential"
    """Encrypted before it is stored; if anybody is named, restricted as well."""


class MemberKind(StrEnum):
    """What a name in a policy may do."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class Member:
    """One name in a policy."""

    kind: MemberKind
    name: str
    """A pipeline's name, or a consumer's full name, `{pipeline}.{name}`."""
    role_name: str | None = None
    """The database role that PostgreSQL lets in for it; None: the owner and workers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPolicy:
    """The policy of one stream, as the database has it; without a row there, an open one."""

    stream_name: str
    security_level: SecurityLevel = SecurityLevel.OPEN
    encryption_alg: str | None = None
    kms_key_id: str | None = None
    dek_rotation_days: int | None = None
    active_key_version: int | None = None
    producers: tuple[Member, ...] = ()
    consumers: tuple[Member, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether everybody may read it, so that logs may quote it."""
        return self.security_level is SecurityLevel.OPEN

    @property
    def is_confidential(self) -> bool:
        """Whether every event is sealed before it is stored."""
        return self.security_level is SecurityLevel.CONFIDENTIAL

    @property
    def is_limited(self) -> bool:
        """Whether only those who are named may send and read."""
        match self.security_level:
            case SecurityLevel.OPEN:
                return False
            case SecurityLevel.RESTRICTED:
                return True
            case SecurityLevel.CONFIDENTIAL:
                return bool(self.producers or self.consumers)

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who is named."""
        return (*self.producers, *self.consumers)

    def require_producer(self, name: str | None) -> None:
        """Raise StreamRestricted unless the pipeline of that name may send here."""
        if self.is_limited and name not in {member.name for member in self.producers}:
            who = "A program that names no pipeline" if name is None else f"Pipeline {name!r}"
            raise StreamRestricted(
                f"{who} may not send to {self.stream_name!r}: the stream is restricted to "
                f"{_listed(self.producers)}. Nothing was sent. If it should, add it with `penstock "
                f"policy set {self.stream_name} {self.security_level} --producer …`."
            )

    def require_consumer(self, full_name: str) -> None:
        """Raise StreamRestricted unless the consumer may read here; a replay is its original."""
        name = full_name.partition("@")[0]
        if self.is_limited and name not in {member.name for member in self.consumers}:
            raise StreamRestricted(
                f"Consumer {name!r} may not read {self.stream_name!r}: the stream is restricted to "
                f"{_listed(self.consumers)}. Nothing was handled. If it should, add it with "
                f"`penstock policy set {self.stream_name} {self.security_level} --consumer …`."
            )


def _listed(members: tuple[Member, ...]) -> str:
    return ", ".join(member.name for member in members) or "nobody"
