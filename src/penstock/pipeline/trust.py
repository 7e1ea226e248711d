"""What a reader may believe of a hot log: which keys sign it, and that no copy writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from penstock.core.mac import MacKeys
from penstock.errors import MalformedEntry, ServerUnavailable, ServerUnsuitable
from penstock.stores.hot_log import HotLog
from penstock.stores.warm_tier import WarmTier

# How often to look whether a key was added that entries are signed with already.
KEYS_CHECK_SECONDS = 1.0
# For how long an answer counts. A reader at rest looks twice as often, so that on a quiet line no
# event has to wait for these questions.
TRUSTED_SECONDS = 2.0


class Trust:
    """Keys that were retired, and a log that a copy of the database writes, are not trusted.

    Whoever has a retired key could forge what comes next. A copy signs as we do, and goes on from
    where we went apart.
    """

    def __init__(
        self,
        stream_name: str,
        hot_log: HotLog,
        warm_tier: WarmTier,
        incarnation: Callable[[], str] | None,
    ) -> None:
        self._stream_name = stream_name
        self._hot_log = hot_log
        self._warm_tier = warm_tier
        self._incarnation = incarnation
        """Which database this is, where a copy of it might write the log."""
        self._own: str | None = None
        self._is_of_copy = False
        self._keys: MacKeys | None = None
        self._asked_at = 0.0
        self._looked_at = 0.0

    def keys(self) -> MacKeys:
        """The keys that sign entries. Raises MalformedEntry for the log of a copy."""
        if self._keys is None:
            self._keys = self._ask()
            self._look()
        elif time.monotonic() - self._looked_at >= TRUSTED_SECONDS:
            self.look_again()
        if self._is_of_copy:
            raise MalformedEntry("the hot log is written by another copy of this database")
        return self._keys

    def newer_keys(self) -> MacKeys | None:
        """The keys as they are now, if they were not asked for just before."""
        if time.monotonic() - self._asked_at < KEYS_CHECK_SECONDS:
            return None
        self._keys = self._ask()
        return self._keys

    def look_again(self) -> None:
        """Find out what has changed. For a reader that has nothing else to do."""
        if self._keys is not None:
            self._keys = self._warm_tier.keys_seen()
            self._look()

    def _ask(self) -> MacKeys:
        self._asked_at = time.monotonic()
        return self._warm_tier.keys()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        # Whoever did not answer a moment ago is away, or will be noticed by the next read.
        with suppress(ServerUnavailable, ServerUnsuitable):
            self._is_of_copy = self._is_written_by_copy()

    def _is_written_by_copy(self) -> bool:
        if self._incarnation is None:
            return False
        if self._own is None:
            self._own = self._incarnation()
        writer = self._hot_log.incarnation(self._stream_name)
        return writer is not None and _differ(_place(writer), _place(self._own))


def _place(incarnation: str) -> tuple[str, str]:
    """Cluster and database. Not the timeline: a standby that took over is no copy."""
    cluster, _, rest = incarnation.partition("/")
    return cluster, rest.partition("/")[0]


def _differ(one: tuple[str, str], other: tuple[str, str]) -> bool:
    # Not every role may ask for the cluster.
    knows_clusters = bool(one[0] and other[0])
    return one[1] != other[1] or (knows_clusters and one[0] != other[0])
