"""Unwraps data keys, and keeps them for a while: longer while their KMS is away, never after a no.

One for all threads of a process. A key that is fresh costs a look into a dictionary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

from penstock.core.key_rings import HeldKey, KeyRing
from penstock.core.sealing import DataKey
from penstock.core.wrapped_keys import WrappedKey
from penstock.errors import KeyRefused, KeyUnavailable
from penstock.stores.data_keys import shredded, unwrapped
from penstock.stores.outage import Outage
from penstock.telemetry import signals
from penstock.telemetry.bus import emit


class Unwrapping:
    """The data keys that a process may use now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ring = KeyRing()
        self._outages: dict[str, Outage] = {}
        self._outlived: set[str] = set()
        self._lock = threading.Lock()
        # The KMS is asked outside of the lock above: whoever has a fresh key does not wait for it.
        self._asking = threading.Lock()

    def key(self, wrapped: WrappedKey) -> HeldKey:
        """The data key, unwrapped. Raises KeyUnavailable, KeyRefused or KeyShredded.

        The KMS is asked where this process has no key, or has had it for KEY_SECONDS. While it
        does not answer, a key that is here goes on up to KEY_STALE_SECONDS.
        """
        if wrapped.is_shredded:
            self.forget(wrapped.key_id)
            raise shredded(wrapped)
        if (fresh := self.fresh(wrapped)) is not None:
            return fresh
        with self._asking:
            # Another thread may have asked meanwhile.
            return self.fresh(wrapped) or self._renewed(wrapped)

    def fresh(self, wrapped: WrappedKey) -> HeldKey | None:
        """The data key, if nobody need be asked for it."""
        held = None if wrapped.is_shredded else self._held(wrapped.key_id)
        return held if held is not None and held.is_fresh(self._clock()) else None

    def forget(self, key_id: str) -> None:
        """Drop a key at once."""
        with self._lock:
            self._ring.drop(key_id)

    def _held(self, key_id: str) -> HeldKey | None:
        with self._lock:
            return self._ring.get(key_id, self._clock())

    def _renewed(self, wrapped: WrappedKey) -> HeldKey:
        held = self._held(wrapped.key_id)
        outage = self._outages.setdefault(
            wrapped.kms_key_id, Outage("data keys", f"the KMS of {wrapped.kms_key_id}")
        )
        if not outage.is_worth_trying:
            return self._outlived_key(wrapped, held, KeyUnavailable(outage.reason))
        try:
            renewed = self._asked(wrapped)
        except KeyUnavailable as error:
            outage.begin(error)
            return self._outlived_key(wrapped, held, error)
        except KeyRefused as error:
            outage.end()
            self.forget(wrapped.key_id)
            emit(signals.KeyWithdrawn(wrapped.stream_name, wrapped.key_id, str(error)))
            raise
        outage.end()
        self._outlived.discard(wrapped.key_id)
        with self._lock:
            self._ring.put(renewed)
        emit(signals.KeyUnwrapped(wrapped.stream_name, wrapped.key_id))
        return renewed

    def _asked(self, wrapped: WrappedKey) -> HeldKey:
        # Taken before the answer: whatever is revoked after that counts against the key's age.
        asked_at = self._clock()
        secret = unwrapped(wrapped)
        return HeldKey(DataKey(wrapped.key_id, secret), secret, asked_at)

    def _outlived_key(
        self, wrapped: WrappedKey, held: HeldKey | None, error: KeyUnavailable
    ) -> HeldKey:
        if held is None:
            raise KeyUnavailable(
                f"The data key {wrapped.key_id} of {wrapped.stream_name!r} cannot be unwrapped: "
                f"{error}"
            ) from error
        if wrapped.key_id not in self._outlived:
            self._outlived.add(wrapped.key_id)
            age_seconds = round(self._clock() - held.unwrapped_at)
            emit(signals.KeyOutlived(wrapped.stream_name, wrapped.key_id, age_seconds))
        return held


@cache
def unwrapping() -> Unwrapping:
    """The one of this process."""
    return Unwrapping()
