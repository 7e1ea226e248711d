"""The right to work on a stream in one role for a while."""

from __future__ import annotations

from dataclasses import dataclass, replace

PUBLISHER = "publisher"
EPOCHS_BACK = 8
JANITOR = "janitor"
ARCHIVER = "archiver"
TIMERS = "timers"


def consumer_role(consumer: str, epoch: int = 1, lane: int = 0, lanes: int = 1) -> str:
    """The role of one lane of a consumer. The epoch keeps old and new lane counts apart."""
    if lanes == 1 and epoch == 1:
        return f"consumer:{consumer}"
    return f"consumer:{consumer}/{epoch}/{lane}"


def epoch_group(consumer: str, epoch: int) -> str:
    """What all lanes of one consumer and epoch have in common."""
    return f"consumer:{consumer}/{epoch}"


def former_groups(consumer: str, epoch: int) -> list[str]:
    """The groups whose workers may still have a transaction open when an epoch begins."""
    return [epoch_group(consumer, former) for former in range(max(1, epoch - EPOCHS_BACK), epoch)]


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its holder knows it; every write of the holder compares owner and term."""

    stream_name: str
    role: str
    owner_id: str
    term: int
    checkpoint: int
    was_clean: bool = True
    """Whether the holder before gave it back; otherwise it died or hung."""
    epoch: int = 1
    settled_to: int = 0
    """Up to here, beyond the checkpoint, lanes of earlier epochs may have settled events."""

    @property
    def epoch_group(self) -> str:
        """What all lanes of one consumer and epoch have in common."""
        return f"{self.role.partition('/')[0]}/{self.epoch}"

    def at(self, checkpoint: int) -> Lease:
        """The same lease after its checkpoint has moved."""
        return replace(self, checkpoint=checkpoint)
