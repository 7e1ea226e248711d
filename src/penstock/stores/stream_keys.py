"""The wrapped keys of one stream as its consumers know them: a few seconds old at most.

They are read again without a KMS, so that a key that was shredded is dropped at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from typing import Final

from penstock.core.key_rings import HeldKey
from penstock.core.wrapped_keys import WrappedKey
from penstock.errors import KeyUnavailable, ServerUnavailable
from penstock.stores.unwrapping import Unwrapping, unwrapping

KEY_CHECK_SECONDS: Final = 5.0


class StreamKeys:
    """One stream's keys, for all threads of a process.

    `read` is told which are wanted, gives all that it finds, and raises ServerUnavailable.
    `is_complete`: it reads the database that the events come from, so that a key which it does not
    know is none. A copy may be late.
    """

    def __init__(
        self,
        stream_name: str,
        read: Callable[[Set[str]], list[WrappedKey]],
        *,
        is_complete: bool,
        unwrapping: Callable[[], Unwrapping] = unwrapping,
    ) -> None:
        self._stream_name = stream_name
        self._read = read
        self._is_complete = is_complete
        self._unwrapping = unwrapping
        self._known: dict[str, WrappedKey] = {}
        self._read_at: float | None = None
        self._lock = threading.Lock()

    def find(self, key_ids: Set[str]) -> dict[str, WrappedKey]:
        """Those of these keys that exist, shredded or not.

        Raises KeyUnavailable where one may exist, and nobody here can tell yet.
        """
        with self._lock:
            is_lacking = not key_ids <= self._known.keys()
            if is_lacking or self._is_old():
                self._look(key_ids, may_fail=not is_lacking)
            found = {key_id: self._known[key_id] for key_id in key_ids if key_id in self._known}
        missing = sorted(key_ids - found.keys())
        if missing and not self._is_complete:
            raise KeyUnavailable(
                f"The copy of the data keys of {self._stream_name!r} does not have {missing[0]} "
                "yet. Nothing was skipped; its publisher brings it within seconds, once it runs."
            )
        return found

    def unwrapped(self, wrapped: WrappedKey) -> HeldKey:
        """The data key itself. Raises KeyUnavailable, KeyRefused or KeyShredded."""
        return self._unwrapping().key(wrapped)

    def _is_old(self) -> bool:
        return self._read_at is None or time.monotonic() - self._read_at >= KEY_CHECK_SECONDS

    def _look(self, key_ids: Set[str], *, may_fail: bool) -> None:
        try:
            keys, self._read_at = self._read(key_ids), time.monotonic()
        except ServerUnavailable:
            # What is known goes on: a key's age is limited all the same.
            if may_fail:
                # Nor is every batch held up by a server that does not answer.
                self._read_at = time.monotonic()
                return
            raise
        self._known = {key.key_id: key for key in keys}
        for key in keys:
            if key.is_shredded:
                self._unwrapping().forget(key.key_id)
