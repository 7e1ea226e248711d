"""Data keys in a process's memory: few, for a while, and gone when they are not to be there."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from penstock.core.sealing import DataKey

KEYS_MAX: Final = 256
KEY_SECONDS: Final = 300.0
"""For how long a key is used before the KMS is asked again."""
KEY_STALE_SECONDS: Final = 3600.0
"""For how long a key is used at most, while the KMS does not answer."""


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key and when the KMS gave it, by the caller's clock."""

    key: DataKey
    secret: bytes
    unwrapped_at: float

    def __repr__(self) -> str:
        return f"HeldKey({self.key.key_id!r})"

    def is_fresh(self, now: float) -> bool:
        """Whether it may be used without asking anybody."""
        return now - self.unwrapped_at < KEY_SECONDS

    def is_usable(self, now: float) -> bool:
        """Whether it may be used while the KMS does not answer."""
        return now - self.unwrapped_at < KEY_STALE_SECONDS


class KeyRing:
    """At most so many keys, none older than KEY_STALE_SECONDS; the one used longest ago goes."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._held: OrderedDict[str, HeldKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key_id: str, now: float) -> HeldKey | None:
        """The key, if it may still be used by anybody."""
        self._forget_old(now)
        held = self._held.get(key_id)
        if held is not None:
            self._held.move_to_end(key_id)
        return held

    def put(self, held: HeldKey) -> None:
        """Keep a key that the KMS has just given."""
        self._held[held.key.key_id] = held
        self._held.move_to_end(held.key.key_id)
        while len(self._held) > self._keys_max:
            self._held.popitem(last=False)

    def drop(self, key_id: str) -> None:
        """Forget a key at once."""
        self._held.pop(key_id, None)

    def _forget_old(self, now: float) -> None:
        old = [key_id for key_id, held in self._held.items() if not held.is_usable(now)]
        for key_id in old:
            del self._held[key_id]
