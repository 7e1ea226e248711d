"""The hot log: recent entries of every stream, under their positions, rebuildable at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import LeaseLost, PenstockError, ServerUnsuitable
from penstock.stores.announcements import Announcements


class HotLogClosed(PenstockError):
    """The log must be opened for this term, again if it was: its key or its record is gone."""


class HotLogGap(PenstockError):
    """A batch does not follow the log's last position; nothing was appended."""

    def __init__(self, stream_name: str, last: int) -> None:
        super().__init__(f"The hot log of {stream_name} ends at {last}; nothing was appended.")
        self.last = last


class HotLogTermOver(LeaseLost):
    """The log was opened for a later term; nothing was done to it."""

    def __init__(self, stream_name: str, term: int) -> None:
        super().__init__(
            f"{stream_name} is published in term {term} by another worker. Nothing was lost or "
            "repeated; this worker lets go of the stream."
        )
        self.term = term


class HotLogUnusable(ServerUnsuitable):
    """One stream's log cannot be kept on this server; other streams are not affected."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Who writes a log: nobody of another database, of a former timeline or of a former term."""

    origin: str
    incarnation: str
    """Cluster, database and timeline: terms are counted within one timeline only."""
    term: int


class HotLog(Protocol):
    """Where consumers read. PostgreSQL has everything that is in it.

    Every method may raise ServerUnavailable (waiting helps) or ServerUnsuitable (it does not).
    An instance belongs to one stage; after `close` the next call connects again.
    """

    @property
    def keeps_entries(self) -> bool:
        """False: there is no hot log, and readers go to the outbox at once."""

    def check(self) -> None:
        """Raise ServerUnsuitable if the server cannot be used at all."""

    def open(self, stream_name: str, fence: Fence, *, base: int) -> int | None:
        """Begin a term. Returns the last position; None: empty, to be filled from base + 1.

        Raises StreamForeign for another database's log, or for that of a copy of this one, and
        HotLogTermOver for a term that is over.
        """

    def restart(self, stream_name: str, fence: Fence, *, base: int) -> None:
        """Throw all entries away; the log is filled again from base + 1. Raises like append."""

    def append(
        self,
        stream_name: str,
        fence: Fence,
        *,
        first: int,
        entries: Sequence[bytes],
        hole_last: int | None = None,
    ) -> int:
        """Append what is not there yet. Returns the last position that the log has now.

        With `hole_last` the one entry stands for all positions from `first` to there. Raises
        StreamForeign, HotLogTermOver, HotLogClosed or HotLogGap without appending anything.
        """

    def read(
        self,
        stream_name: str,
        *,
        after: int,
        count: int,
        wait_seconds: float,
        unless: int | None = None,
    ) -> list[tuple[int, bytes]]:
        """Positions and raw entries behind `after`, waiting for the first one if need be.

        It stops waiting when the descriptor `unless` becomes readable. What is not an entry of
        Penstock's comes as b"".
        """

    def last(self, stream_name: str, fence: Fence | None = None) -> int | None:
        """The last position; None where the log is empty.

        A publisher shows that it is there, and learns where an empty log of its term begins.
        """

    def incarnation(self, stream_name: str) -> str | None:
        """Which database writes the log, as its record has it; None where nobody does."""

    def trim(self, stream_name: str, *, through: int) -> int:
        """Remove entries up to a position, never the last one. Returns how many."""

    def close(self) -> None:
        """Give connections back; must not raise."""


class NoHotLog:
    """PostgreSQL alone: keeps nothing, and wakes readers when the outbox has something new."""

    def __init__(self, announcements: Announcements) -> None:
        self._announcements = announcements
        self._heard = 0
        self._last: dict[str, int] = {}

    @property
    def keeps_entries(self) -> bool:
        """Never."""
        return False

    def check(self) -> None:
        """Nothing can be wrong with what is not there."""

    def open(
        self,
        stream_name: str,
        fence: Fence,  # noqa: ARG002 - the protocol's
        *,
        base: int,  # noqa: ARG002
    ) -> int | None:
        """What was appended through this object, or None."""
        return self.last(stream_name)

    def restart(self, stream_name: str, fence: Fence, *, base: int) -> None:  # noqa: ARG002
        """Nothing to throw away."""
        self._last.pop(stream_name, None)

    def append(
        self,
        stream_name: str,
        fence: Fence,  # noqa: ARG002 - the protocol's
        *,
        first: int,
        entries: Sequence[bytes],
        hole_last: int | None = None,
    ) -> int:
        """Only remembers how far it went."""
        final = hole_last or first + len(entries) - 1
        self._last[stream_name] = max(self._last.get(stream_name, 0), final)
        return self._last[stream_name]

    def read(
        self,
        stream_name: str,  # noqa: ARG002 - one channel serves all streams
        *,
        after: int,  # noqa: ARG002
        count: int,  # noqa: ARG002
        wait_seconds: float,
        unless: int | None = None,  # noqa: ARG002
    ) -> list[tuple[int, bytes]]:
        """Nothing, as soon as any stream has new positions or the time is over."""
        self._heard = self._announcements.wait(self._heard, wait_seconds)
        return []

    def last(self, stream_name: str, fence: Fence | None = None) -> int | None:  # noqa: ARG002
        """What was appended through this object, or None."""
        return self._last.get(stream_name)

    def incarnation(self, stream_name: str) -> str | None:  # noqa: ARG002
        """Nobody."""
        return None

    def trim(self, stream_name: str, *, through: int) -> int:  # noqa: ARG002
        """Nothing to remove."""
        return 0

    def close(self) -> None:
        """The announcements are shared; whoever made them ends them."""
