"""The data keys that firing needs, asked for beside it: a slow KMS delays nobody else's timers."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from penstock.core.key_rings import HeldKey
from penstock.core.wrapped_keys import WrappedKey
from penstock.stores.unwrapping import unwrapping

# A KMS that answers at once is waited for; firing goes on without a slower one.
PATIENCE_SECONDS = 0.05
# An answer that nobody came for is not used any more: keys must not outlive their time here.
ANSWER_SECONDS = 60.0


class TimerKeys:
    """Data keys, unwrapped in a thread of their own."""

    def __init__(self) -> None:
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="penstock-timer-keys")
        self._asked: dict[str, tuple[float, Future[HeldKey]]] = {}

    def get(self, wrapped: WrappedKey) -> HeldKey | None:
        """The data key; None: the KMS has not answered yet, ask again in a moment.

        Raises KeyUnavailable, KeyRefused, KeyShredded or ExtraMissing.
        """
        if (fresh := unwrapping().fresh(wrapped)) is not None:
            return fresh
        asked_at, asked = self._asked.pop(wrapped.key_id, (0.0, None))
        now = time.monotonic()
        if asked is None or (asked.done() and now - asked_at > ANSWER_SECONDS):
            asked_at, asked = now, self._asking.submit(unwrapping().key, wrapped)
        try:
            return asked.result(timeout=PATIENCE_SECONDS)
        except NotYet:
            if not asked.done():
                self._asked[wrapped.key_id] = (asked_at, asked)
                return None
            raise

    def close(self) -> None:
        """Ask for nothing more."""
        self._asking.shutdown(wait=False, cancel_futures=True)
