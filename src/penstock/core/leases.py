"""The right to work on a stream in one role for a while."""

from __future__ import annotations

from dataclasses import dataclass, replace

PUBLISHER = "publisher"


def consumer_role(consumer: str, epoch: int = 1, lane: int = 0, lanes: int = 1) -> str:
    """The role of one lane of a consumer. The epoch keeps old and new lane counts apart."""
    if lanes == 1 and epoch == 1:
        return f"consumer:{consumer}"
    return f"consumer:{consumer}/{epoch}/{lane}"


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its holder knows it; every write of the holder compares owner and term."""

    stream_name: str
    role: str
    owner_id: str
    term: int
    checkpoint: int
    was_clean: bool = True

    def at(self, checkpoint: int) -> Lease:
        """The same lease after its checkpoint has moved."""
        return replace(self, checkpoint=checkpoint)
