"""Every error that Penstock raises: what happened, what is safe, what to do."""

from __future__ import annotations


class PenstockError(Exception):
    """The root of the tree: catch it to catch everything of Penstock's own."""


# ── what the application got wrong, found before anything was written ──────────────────────────


class UsageError(PenstockError):
    """The program asks for something that cannot work; nothing was written."""


class SettingsError(UsageError):
    """A setting is missing, malformed, or contradicts another."""


class RegistrationError(UsageError):
    """A consumer, stream or event class cannot be registered as written."""


class InvalidEvent(UsageError):
    """An event cannot be stored faithfully, so it was not sent."""


class InvalidTimer(UsageError):
    """A timer cannot work as it was asked for; nothing was scheduled."""


class TimerExists(UsageError):
    """There is a timer of that id already, and its caller did not want to replace it."""


class UnsafeTransaction(UsageError):
    """What is done through this session or connection would not be atomic with its data."""


class EventIdentityConflict(UsageError):
    """An event_uuid is already taken by a different event; this transaction cannot commit."""


class StreamRestricted(UsageError):
    """A stream admits only those whom its policy names; nothing was sent or handled."""


# ── what a handler did ─────────────────────────────────────────────────────────────────────────


class HandlerError(PenstockError):
    """A handler broke the rules of the transaction it was lent."""


class CommitInTransactionError(HandlerError):
    """A handler tried to commit; the worker commits, once, with the checkpoint."""


class RollbackInTransactionError(HandlerError):
    """A handler tried to roll back or close; only the worker ends the transaction."""


class HandlerTimeout(HandlerError):
    """A handler exceeded its timeout_seconds; nothing of its transaction happened."""


class HandlerQuit(HandlerError):
    """A handler tried to end its worker, by SystemExit and the like; only its event failed."""


class ConnectionBroken(HandlerError):
    """The worker's connection broke at this event, alone and again and again."""


class RetryableError(PenstockError):
    """Raised by handlers: try this event again, after `after_seconds` if given."""

    def __init__(self, message: str = "", after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class FatalError(PenstockError):
    """Raised by handlers: trying this event again is pointless."""


class EffectUnknown(FatalError):
    """A call to the outside was interrupted: nobody knows whether it happened, so ask first."""


class ContractError(PenstockError):
    """An event does not fit the contract that the consumer was written against."""


class ContractMissing(ContractError):
    """The consumer has no contract for an event's version, or (not is_version) for its type."""

    def __init__(self, message: str, *, is_version: bool = True) -> None:
        super().__init__(message)
        self.is_version = is_version


# ── what the inbox knows of an event ───────────────────────────────────────────────────────────


class ClaimRefused(PenstockError):
    """An event of another bus is not this transaction's to handle; nothing was written."""


class AlreadyHandled(ClaimRefused):
    """The event is done, or was claimed by this very transaction before: say yes, do nothing."""


class LockContention(ClaimRefused):
    """Another transaction may be handling the event: not yet, never done. Ask for it again."""


# ── what an operator asked ─────────────────────────────────────────────────────────────────────


class OperationRefused(PenstockError):
    """The books do not allow what an operator asked; nothing was changed."""


class ConsumerAtWork(OperationRefused):
    """Somebody works for the consumer, or was killed so lately that it seems so."""


class ConsumerUnknown(OperationRefused):
    """The database knows no consumer of that name, or several."""


# ── what the surroundings did ──────────────────────────────────────────────────────────────────


class OutcomeUnknown(PenstockError):
    """The connection broke during COMMIT: the transaction may or may not have happened."""


class ServerUnavailable(PenstockError):
    """PostgreSQL or Redis cannot be reached now; waiting and trying again is safe."""

    server: str | None = None
    """Which one, where it is not the one that whoever waits would think of."""


class ResourceUnavailable(ServerUnavailable):
    """A resource of the application cannot be opened now; who asks for it waits."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"The resource {name!r} cannot be opened: {reason}. The handlers that ask for it wait, "
            "and nothing is lost; it is tried again."
        )
        self.server = f"the resource {name}"


class ServerReadOnly(ServerUnavailable):
    """PostgreSQL answers, but takes no writes now: a standby, or one that was told to."""


class ServerUnsuitable(PenstockError):
    """PostgreSQL or Redis answers, but cannot be used as it is."""


class SchemaMismatch(ServerUnsuitable):
    """The database's schema is missing, older, newer, or not Penstock's."""


class LeaseLost(PenstockError):
    """Another worker holds the lease now; this one has committed nothing since."""


class StreamForeign(ServerUnsuitable):
    """The hot log of a stream is written by another database."""


class TimelineChanged(PenstockError):
    """A standby took over: positions may be in use that it does not know, so none is given out."""


class PositionMissing(PenstockError):
    """A position is in none of the tiers; the consumer waits instead of skipping it."""


class ArchiveDamaged(PenstockError):
    """An archived object is not what was archived: nothing of it is given out."""


class ArchiveConflict(PenstockError):
    """The store holds another object under the name of a range; neither was touched."""


class MalformedEntry(PenstockError):
    """Bytes from a log are not an entry of this format; the reader asks the next tier."""


class EntryForged(MalformedEntry):
    """An entry was not signed for its place: somebody else wrote, altered or moved it."""


class MacKeyUnknown(MalformedEntry):
    """An entry is signed with a key that the reader does not have, or not yet."""


class MalformedTimer(PenstockError):
    """The payload of a timer in Redis cannot be read, now or ever; no handler gets to see it."""


class EmbeddedServersUnavailable(PenstockError):
    """There are no embedded servers for this installation or platform."""


class ServerFailedToStart(PenstockError):
    """An embedded server did not come up; its log's tail is in the message."""


# ── what is confidential ───────────────────────────────────────────────────────────────────────


class ExtraMissing(UsageError):
    """An optional package is needed here and not installed; its message says which."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed. Nothing was done; "
            f'install it with: pip install "penstock[{extra}]"'
        )


class StreamConfidential(PenstockError):
    """A stream has become confidential, or its key was changed, since the sender looked."""


class KeyUnavailable(ServerUnavailable):
    """A data key cannot be had now, since its KMS does not answer; waiting is safe."""


class KeyRefused(PenstockError):
    """The KMS refuses to unwrap a data key; no waiting helps, and nothing is used instead."""


class KeyShredded(PenstockError):
    """A data key was destroyed on purpose: what it has sealed can never be read again."""


class SealBroken(PenstockError):
    """A sealed event was altered, or moved to where it was not sent; nobody gets to see it."""
